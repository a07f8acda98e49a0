"""python launch/plan.py conf=<name> [gpus=8] [device=h100|h200|mi300x|cpu]: parameters, memory, disk and time, and whether it all fits,
without GPU or weights. device: what is here, or with gpus=<n> on a machine without GPUs an H100."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.commands import command
from train import devices, inputs, plan_table
from train.config import RunConfig, main
from train.words import number, take

own = take("gpus", "device")


def show(cfg: RunConfig) -> None:
    gpus = number(own.get("gpus", "1"), "gpus", "GPUs", 1)
    plan_table.show(plan_table.made(cfg, gpus, devices.choose(own.get("device"), "gpus" in own)))
    for line in [*(inputs.next_commands(cfg) if inputs.missing_inputs(cfg) else []), command("train")]:
        print(f"next: {line}")


if __name__ == "__main__":
    main(show)
