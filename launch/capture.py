"""The target's answers -> its hidden states: `python launch/capture.py conf=<name>`. Says the bytes first; resumable. Several engines share
the work under torchrun, in a Slurm array, or with part=0/4 .. part=3/4.
check=true: captures nothing, and holds what is there against its checksums, masks and transformers' own states. Status 1: a fault."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.capture import capture_run
from data.check import check_splits, show_faults
from data.part import Part
from data.target import resolve, spec
from train.config import ROOT, RunConfig, main
from train.plan import build_on_meta, window_sizes
from train.words import take

word = take("part").get("part")
if check := "check=true" in sys.argv:
    sys.argv.remove("check=true")


def run(cfg: RunConfig) -> None:
    if cfg.data.states == "online":
        print("capture: nothing to do, for data.states=online: the training works the states out itself")
        return
    target_dir = resolve(cfg.target, ROOT)
    if check:
        faults = check_splits(Path(cfg.data.store), Path(cfg.data.responses), target_dir, 4, cfg.data.whole_splits)
        sys.exit(show_faults(faults, "the store holds what it says"))
    head = build_on_meta(cfg, spec(target_dir))
    capture_run(cfg, head, target_dir, window_sizes(cfg, head), Part.of_process(os.environ, word))


if __name__ == "__main__":
    main(run, "target", "head", "data", "train")
