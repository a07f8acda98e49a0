"""Our contender in the training-step benchmark takes its steps: a conf that changes under it would stop it, unseen until it is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch
from conftest import ROOT

from data.target import resolve
from train.config import load

WORKER = ROOT / "docs" / "benchmarks" / "training_step" / "worker.py"
ROWS, TAPS, D, U = 64, 3, 576, 256


def test_our_contender_takes_steps(tmp_path):
    target = resolve(load(["conf=smollm_eagle3"]).target, ROOT)
    data = {"token_ids": torch.randint(0, 1000, (ROWS,)), "taps": torch.randn(ROWS, TAPS, D), "last": torch.randn(ROWS, D)}
    data |= {"norm": torch.ones(D), "draft_ids": torch.arange(U), "target": str(target)}
    torch.save(data, tmp_path / "states.pt")
    settings = {
        "sequences": 1,
        "length": ROWS,
        "depths": 2,
        "draft_vocab": U,
        "supervised": 1.0,
        "dtype": "float32",
        "warm": 1,
        "compile": False,
    }
    settings |= {"name": "draftsmith", "threads": 1, "data": str(tmp_path / "states.pt")}
    done = subprocess.run(
        [sys.executable, WORKER, json.dumps(settings)],
        input="step\npeak\n",
        capture_output=True,
        text=True,
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},  # as any process that trained leaves them to its own
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ready, step, peak = map(json.loads, done.stdout.splitlines())
    assert ready == {"ready": True} and step["wall"] > 0 and peak["peak_gb"] > peak["idle_gb"]
