"""Prompts -> the target's own answers: `python launch/respond.py conf=<name>`. Resumable: the same command goes on.
Several engines share the work under torchrun, in a Slurm array, or with part=0/4 .. part=3/4."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.ask import ask
from data.chat import load_tokenizer
from data.part import Part
from data.selfprompt import read_with_own
from data.target import resolve
from train.config import ROOT, RunConfig, main
from train.words import take

word = take("part").get("part")


def run(cfg: RunConfig) -> None:
    part, target_dir, left_out = Part.of_process(os.environ, word), resolve(cfg.target, ROOT), []
    tokenizer = load_tokenizer(target_dir, cfg.target.trust_remote_code)
    ask(cfg, target_dir, tokenizer, read_with_own(cfg, target_dir, tokenizer, ROOT, left_out, part), left_out, part)


if __name__ == "__main__":
    main(run, "target", "data")
