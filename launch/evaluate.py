"""Acceptance, speed and losslessness of a run's export in vLLM: python launch/evaluate.py conf=<name>. Writes <run_dir>/eval."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from data.errors import UserError  # noqa: E402
from data.identity import prompts_hash  # noqa: E402
from data.lock import alone  # noqa: E402
from data.prompts import ChatRecord, read_prompts, select  # noqa: E402
from data.target import fingerprint, resolve  # noqa: E402
from eval.chain import offline_report  # noqa: E402
from eval.export import read_export, trained_head  # noqa: E402
from eval.report import finished, show, write  # noqa: E402
from eval.serve import evaluate as evaluate_engine  # noqa: E402
from train.checkpoint import load_head  # noqa: E402
from train.config import RunConfig, main  # noqa: E402


def evaluate(cfg: RunConfig) -> None:
    run_dir, target_dir = Path(cfg.run_dir), resolve(cfg.target, ROOT)
    export_dir = run_dir / "export" / "vllm"
    export = read_export(export_dir)
    if export["head"] != cfg.head:
        raise UserError(f"{export_dir}: exported from head {export['head']}, the conf says {cfg.head}; use the conf it was trained with")
    prompts = select(read_prompts(cfg.data.prompts, None, ROOT), "heldout", cfg.eval.limit)
    if not prompts:
        raise UserError("data.prompts: no prompt for the split 'heldout', which is what is measured; add some, or give some meta.split")
    settings = {"eval": asdict(cfg.eval), "target": asdict(cfg.target), "loop_ngram": cfg.data.loop_ngram}
    settings |= {"fingerprint": fingerprint(target_dir), "prompts": prompts_hash(prompts), "export": export}
    if earlier := finished(run_dir, settings):
        return show(earlier, run_dir)
    with alone(run_dir / "eval", "run_dir"):
        measure(cfg, target_dir, export_dir, prompts, settings)


def measure(cfg: RunConfig, target_dir: Path, export_dir: Path, prompts: list[ChatRecord], settings: dict[str, Any]) -> None:
    run_dir, answers = Path(cfg.run_dir), Path(cfg.run_dir) / "eval" / "plain.jsonl"
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
