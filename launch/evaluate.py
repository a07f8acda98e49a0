"""Acceptance, speed and losslessness of a run's export in vLLM: python launch/evaluate.py conf=<name>. Writes <run_dir>/eval."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.prompts import read_prompts, select
from data.selfprompt import split_sources
from data.target import resolve
from eval.run import evaluate
from train.checkpoint import load_head
from train.config import ROOT, RunConfig, main


def run(cfg: RunConfig) -> None:
    given, _ = split_sources(cfg.data.prompts)  # what the target wrote is for training
    prompts = select(read_prompts(given, ROOT, cfg.data.prompt_chars), "heldout", cfg.eval.limit)
    evaluate(cfg, resolve(cfg.target, ROOT), prompts, load_head)


if __name__ == "__main__":
    main(run, "target", "head", "data", "eval", "export")
