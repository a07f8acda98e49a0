"""python launch/plan.py conf=<name> [gpus=8]: parameters, memory per GPU, disk, steps and hours, without GPU or weights."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.target import spec_from_config
from train import plan
from train.config import RunConfig, main

words = [word for word in sys.argv[1:] if word.startswith("gpus=")]
sys.argv = [word for word in sys.argv if word not in words]


def show(cfg: RunConfig) -> None:
    gpus = words[-1].removeprefix("gpus=") if words else "1"
    if not gpus.isdigit() or gpus == "0":
        raise plan.UserError(f"gpus={gpus}: must be a number of GPUs, 1 or more")
    plan.show(plan.plan(cfg, spec_from_config(cfg.target), int(gpus)))
    for command in plan.next_commands(cfg) if plan.missing_inputs(cfg) else []:
        print(f"next: {command}")


if __name__ == "__main__":
    main(show)
