"""Hidden states -> a trained head: `torchrun launch/train.py conf=<name>`. Goes on from the latest checkpoint of runs/<name>."""

import sys
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from data.lock import alone
from data.target import resolve, spec
from heads import build
from train import dist, inputs, plan_table, setup
from train.config import RunConfig, main
from train.engine import Engine
from train.loop import fit


def run(cfg: RunConfig) -> None:
    if dist.rank() == 0:
        plan_table.show(plan_table.made(cfg, dist.world()))
    if cfg.dry_run:
        return
    inputs.require_inputs(cfg)
    dist.start(cfg.train.threads)
    target_dir = dist.rank0_first(lambda: resolve(cfg.target, ROOT))
    torch.manual_seed(cfg.train.seed)
    head = build(cfg.head, spec(target_dir))
    store, heldout = setup.open_states(cfg, head, target_dir)
    setup.equip(cfg, head, target_dir, store)
    with alone(Path(cfg.run_dir), "name or run_dir") if dist.rank() == 0 else nullcontext():
        fit(cfg, Engine(head, cfg), setup.open_batches(cfg, head, store), setup.open_batches(cfg, head, heldout))
    dist.stop()


if __name__ == "__main__":
    main(run)
