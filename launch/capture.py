"""The target's answers -> its hidden states: `python launch/capture.py conf=<name>`. Says the bytes first; resumable.
check=true: captures nothing, and holds what is there against its checksums, masks and transformers' own states. Status 1: a fault."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.check import check_splits, show_faults
from data.engine import capture, engine_identity
from data.identity import check_responses, identity
from data.lock import alone
from data.target import resolve, spec
from train.config import ROOT, RunConfig, main
from train.plan import SPLITS, build_on_meta

if check := "check=true" in sys.argv:
    sys.argv.remove("check=true")


def run(cfg: RunConfig) -> None:
    if cfg.data.states == "online":
        print("capture: nothing to do, for data.states=online: the training works the states out itself")
        return
    target_dir, store, responses = resolve(cfg.target, ROOT), Path(cfg.data.store), Path(cfg.data.responses)
    if check:
        sys.exit(show_faults(check_splits(store, responses, target_dir, 4), "the store holds what it says"))
    target, maker = spec(target_dir), identity(target_dir, cfg.target)
    head = build_on_meta(cfg, target)
    taps, last = tuple(sorted(set(head.taps))), head.needs_last
    manifest = {**maker, "taps": list(taps), "hidden_size": target.hidden_size, "last": last, "dtype": cfg.data.states_dtype}
    for split in SPLITS:
        check_responses(responses / f"{split}.jsonl", maker)
    settings = {"target_dir": target_dir, "target_cfg": cfg.target, "taps": taps, "last": last, "max_length": cfg.data.max_length}
    settings |= {"cap_gb": cfg.data.max_store_gb, "manifest": manifest | {"engine": engine_identity()}}
    with alone(store, "data.store"):
        for split in SPLITS:
            capture(responses=responses / f"{split}.jsonl", store_dir=store / split, **settings)


if __name__ == "__main__":
    main(run)
