"""python launch/trees.py conf=<name>: the acceptance length of the newest checkpoint's chains, static and dynamic trees, of early exit and,
with eval.draft_model, of a language model, decoded offline in transformers with eval.k drafts a pass. Writes <run_dir>/eval/trees.json."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from data.prompts import select
from data.selfprompt import read_given
from data.target import resolve
from eval.compare import SHAPED_ON, compare, show
from eval.export import check_fingerprint, trained_head
from train.checkpoint import load_head, trained
from train.config import ROOT, RunConfig, main


def run(cfg: RunConfig) -> None:
    run_dir, target_dir = Path(cfg.run_dir), resolve(cfg.target, ROOT)
    step, provenance = trained(run_dir, cfg.head)
    check_fingerprint(provenance["target"]["fingerprint"], target_dir)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = trained_head(cfg.head, target_dir, load_head(step), torch.float32, device)
    prompts = read_given(cfg, ROOT)
    heldout, training = select(prompts, "heldout", cfg.eval.limit), select(prompts, "train", SHAPED_ON)
    show(compare(cfg, head, target_dir, heldout, training, device) | {"checkpoint": step.name}, run_dir)


if __name__ == "__main__":
    main(run)
