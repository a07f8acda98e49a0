"""The target's answers -> its hidden states: `python launch/capture.py conf=<name>`. Says the bytes first; resumable."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data.engine import capture, engine_identity
from data.identity import check_responses, identity
from data.lock import alone
from data.target import resolve, spec
from train.config import RunConfig, main
from train.plan import build_on_meta


def run(cfg: RunConfig) -> None:
    target_dir = resolve(cfg.target, ROOT)
    target, maker = spec(target_dir), identity(target_dir, cfg.target)
    head = build_on_meta(cfg, target)
    taps, last = tuple(sorted(set(head.taps))), head.needs_last
    manifest = {**maker, "taps": list(taps), "hidden_size": target.hidden_size, "last": last}
    manifest |= {"dtype": cfg.data.states_dtype, "engine": engine_identity()}
    answers = {split: Path(cfg.data.responses) / f"{split}.jsonl" for split in ("train", "heldout")}
    for path in answers.values():
        check_responses(path, maker)
    for split, path in answers.items():
        settings = {"target_dir": target_dir, "target_cfg": cfg.target, "taps": taps, "last": last, "manifest": manifest}
        settings |= {"max_length": cfg.data.max_length, "cap_gb": cfg.data.max_store_gb}
        with alone(Path(cfg.data.store), "data.store"):
            capture(responses=path, store_dir=Path(cfg.data.store) / split, **settings)


if __name__ == "__main__":
    main(run)
