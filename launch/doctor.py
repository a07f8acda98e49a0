"""python launch/doctor.py conf=<name> [sample=4]: why acceptance is what it is. Checks stores, masks, vocabulary and export against the
target, `sample` sequences with transformers, and puts teacher-forced, offline and engine figures side by side. Status 1: a fault."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from data.commands import command
from data.errors import UserError
from data.target import resolve
from eval.doctor import diagnose, show
from eval.export import trained_head
from train.checkpoint import latest, load_head
from train.config import RunConfig, main
from train.words import number, take

own = take("sample")


def run(cfg: RunConfig) -> None:
    count = number(own.get("sample", "4"), "sample", "sequences", 1)
    step, target_dir = latest(Path(cfg.run_dir)), resolve(cfg.target, ROOT)
    if step is None:
        raise UserError(f"{cfg.run_dir}: no checkpoint yet; train with `{command('train')}`")
    head = trained_head(cfg.head, target_dir, load_head(step), torch.float32, "cpu")
    sys.exit(show(*diagnose(cfg, head, target_dir, count)))


if __name__ == "__main__":
    main(run)
