"""python launch/masks.py conf=<name> [show=3]: what a head will learn from. Supervised shares by slice, then `show` answers with
their supervised tokens in colour. Reads the answers in data.responses; runs no model."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data.chat import load_tokenizer
from data.masks import show
from data.target import resolve
from train.config import RunConfig, main
from train.words import number, take

own = take("show")


def run(cfg: RunConfig) -> None:
    count = number(own.get("show", "3"), "show", "answers", 0)
    tokenizer = load_tokenizer(resolve(cfg.target, ROOT), cfg.target.trust_remote_code)
    show(Path(cfg.data.responses) / "train.jsonl", tokenizer, cfg.data.max_length, count)


if __name__ == "__main__":
    main(run, "target", "data")
