"""Hidden states -> a trained head: `torchrun [--nproc_per_node <n>] launch/train.py conf=<name> [plan=false]`. Goes on from the latest
checkpoint of runs/<name>. Prints the plan first, but for plan=false."""

import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.lock import alone
from data.target import resolve
from eval.chain import while_training
from train import dist, inputs, plan_table, setup
from train.config import ROOT, RunConfig, main
from train.engine import Engine
from train.loop import fit
from train.words import take

shown = take("plan").get("plan") != "false"


def run(cfg: RunConfig) -> None:
    found = plan_table.made(cfg, dist.world()) if dist.rank() == 0 and shown else []
    if cfg.dry_run:
        return plan_table.show(found)
    inputs.require_inputs(cfg)
    dist.start(cfg.train.threads)
    target_dir = dist.rank0_first(lambda: resolve(cfg.target, ROOT))
    head = setup.first_head(cfg, target_dir)
    store, heldout = setup.open_states(cfg, head, target_dir)
    setup.equip(cfg, head, target_dir, store)
    plan_table.show(found)  # only now: above a refusal it would hide it
    with alone(Path(cfg.run_dir), "name or run_dir") if dist.rank() == 0 else nullcontext():
        walk = while_training(cfg, head, heldout, dist.rank(), dist.world())
        fit(cfg, Engine(head, cfg), setup.open_batches(cfg, head, store), setup.open_batches(cfg, head, heldout), walk)
    dist.stop()


if __name__ == "__main__":
    main(run)
