"""python launch/plan.py conf=<name> [gpus=8]: parameters, memory per GPU, disk, steps and hours, without GPU or weights."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.target import spec_from_config
from train import inputs, plan, plan_table
from train.config import RunConfig, main
from train.words import number, take

own = take("gpus")


def show(cfg: RunConfig) -> None:
    plan_table.show(plan.plan(cfg, spec_from_config(cfg.target), number(own.get("gpus", "1"), "gpus", "GPUs", 1)))
    for command in inputs.next_commands(cfg) if inputs.missing_inputs(cfg) else []:
        print(f"next: {command}")


if __name__ == "__main__":
    main(show)
