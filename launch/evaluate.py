"""Acceptance, speed and losslessness of a run's export in vLLM: python launch/evaluate.py conf=<name>. Writes <run_dir>/eval, and
adds it to the W&B run of the training, where that has one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.prompts import read_prompts, select
from data.selfprompt import split_sources
from data.target import resolve
from eval.flat import points, tables
from eval.run import evaluate
from train.checkpoint import load_head
from train.config import ROOT, RunConfig, main
from train.log import send_report


def run(cfg: RunConfig) -> None:
    given, _ = split_sources(cfg.data.prompts)  # what the target wrote is for training
    prompts = select(read_prompts(given, ROOT, cfg.data.prompt_chars), "heldout", cfg.eval.limit)
    report, name = evaluate(cfg, resolve(cfg.target, ROOT), prompts, load_head), cfg.eval_folder
    send_report(cfg, points(report, name), tables(report, name), Path(cfg.run_dir) / name / "report.html")


if __name__ == "__main__":
    main(run, "target", "head", "data", "eval", "export", "log")
