"""Acceptance, speed and losslessness of a run's export in vLLM: python launch/evaluate.py conf=<name>. Writes <run_dir>/eval, and
adds it to the W&B run of the training, where that has one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.prompts import select
from data.selfprompt import read_given
from data.target import resolve
from eval.flat import points, tables
from eval.run import evaluate
from train.checkpoint import load_head
from train.config import ROOT, RunConfig, main
from train.log import send_report


def run(cfg: RunConfig) -> None:
    prompts = select(read_given(cfg, ROOT), "heldout", cfg.eval.limit)
    report, name = evaluate(cfg, resolve(cfg.target, ROOT), prompts, load_head), cfg.eval_folder
    send_report(cfg, points(report, name), tables(report, name), Path(cfg.run_dir) / name / "report.html")


if __name__ == "__main__":
    main(run, "target", "head", "data", "eval", "export", "log")
