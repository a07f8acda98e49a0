"""python launch/run.py conf=<name> [plan=false]: every stage of a run in order. Each skips what it has done, so a second call goes on."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from train import inputs, plan_table
from train.config import ROOT, RunConfig, main
from train.words import take


def run(cfg: RunConfig) -> None:
    gpus = max(torch.cuda.device_count(), 1)
    plan_table.show([part for part in plan_table.made(cfg, gpus) if shown])  # made also unseen: it refuses a head that does not fit
    whole = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_ARRAY_")}  # its tasks may run a conf each
    for stage in inputs.stages(cfg):  # each its own process, so that its memory is given back
        starter = f"-m torch.distributed.run --standalone --nproc_per_node={gpus}".split() if stage == "train" and gpus > 1 else []
        words = [*starter, os.path.relpath(ROOT / "launch" / f"{stage}.py"), *sys.argv[1:], *["plan=false"] * (stage == "train")]
        print(f"\n== {stage}: python {shlex.join(words)}", flush=True)
        began, child = time.monotonic(), subprocess.Popen([sys.executable, *words], env=whole)
        for sign in (signal.SIGINT, signal.SIGTERM):  # the stage ends in its own way, then we do
            signal.signal(sign, lambda number, _, child=child: child.send_signal(number))
        code = child.wait()
        print(f"== {stage}: {f'exit status {code}' if code else 'done'}, {time.monotonic() - began:.0f} s", flush=True)
        if code:
            sys.exit(code if code > 0 else 128 - code)  # 128 + n: ended by signal n


if __name__ == "__main__":
    shown = take("plan").get("plan") != "false"
    main(run)
