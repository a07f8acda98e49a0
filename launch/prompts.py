"""python launch/prompts.py conf=<name> count=<n> out=<file.jsonl>: the target writes n prompts of its own, as a source for data.prompts.
Resumable. Then: data.prompts=[<yours>,<file.jsonl>]."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.chat import load_tokenizer
from data.errors import UserError
from data.lock import alone
from data.selfprompt import invent
from data.target import resolve
from train.config import ROOT, RunConfig, main
from train.words import take

own = take("count", "out")


def run(cfg: RunConfig) -> None:
    count, out = own.get("count", ""), ROOT / Path(own.get("out", "")).expanduser()
    if not count.isdigit() or count == "0" or out.suffix != ".jsonl":
        raise UserError("say how many prompts and where to: count=<n> out=<file.jsonl>")
    target_dir = resolve(cfg.target, ROOT)
    with alone(out.parent, "out"):
        invent(cfg, target_dir, load_tokenizer(target_dir, cfg.target.trust_remote_code), int(count), out)


if __name__ == "__main__":
    main(run)
