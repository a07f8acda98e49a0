"""Acceptance, speed and losslessness of a run's export in vLLM: python launch/evaluate.py conf=<name>. Writes <run_dir>/eval."""

import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from data.prompts import read_prompts, select  # noqa: E402
from data.target import resolve  # noqa: E402
from eval.chain import offline_report  # noqa: E402
from eval.export import read_export, trained_head  # noqa: E402
from eval.report import finished, show, write  # noqa: E402
from eval.serve import evaluate as evaluate_engine  # noqa: E402
from train.checkpoint import load_head  # noqa: E402
from train.config import RunConfig, main  # noqa: E402


def evaluate(cfg: RunConfig) -> None:
    run_dir, target_dir = Path(cfg.run_dir), resolve(cfg.target, ROOT)
    export_dir, answers = run_dir / "export" / "vllm", run_dir / "eval" / "plain.jsonl"
    settings = {"eval": asdict(cfg.eval), "prompts": cfg.data.prompts, "export": read_export(export_dir)}
    if earlier := finished(run_dir, settings):
        return show(earlier, run_dir)
    prompts = select(read_prompts(cfg.data.prompts, None, ROOT), "heldout", cfg.eval.limit)
    report = evaluate_engine(cfg, target_dir, export_dir, prompts, answers)
    if "head" in cfg.eval.methods:
        dtype = getattr(torch, cfg.eval.dtype or cfg.target.dtype)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        step = run_dir / read_export(export_dir)["provenance"]["checkpoint"]
        head = trained_head(cfg.head, target_dir, load_head(step), dtype, device)
        report["offline"] = offline_report(cfg, head, target_dir, answers)
    write(report | {"settings": settings}, run_dir)


if __name__ == "__main__":
    main(evaluate)
