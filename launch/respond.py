"""Prompts -> the target's own answers: `python launch/respond.py conf=<name>`. Resumable: the same command goes on."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.ask import ask
from data.chat import load_tokenizer
from data.prompts import read_prompts
from data.selfprompt import with_own
from data.target import resolve
from train.config import ROOT, RunConfig, main


def run(cfg: RunConfig) -> None:
    target_dir, left_out = resolve(cfg.target, ROOT), []
    tokenizer = load_tokenizer(target_dir, cfg.target.trust_remote_code)
    prompts = read_prompts(with_own(cfg, target_dir, tokenizer, ROOT), ROOT, cfg.data.prompt_chars, left_out)
    ask(cfg, target_dir, tokenizer, prompts, left_out)


if __name__ == "__main__":
    main(run, "target", "data")
