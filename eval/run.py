"""One evaluation of a run: the engine's figures, the offline chain beside them, and the report. Done once per export and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data.commands import command
from data.errors import UserError
from data.identity import prompts_hash
from data.lock import alone
from data.record import ChatRecord
from data.target import fingerprint
from eval.chain import offline_report
from eval.export import read_export, trained_head
from eval.methods import stamps
from eval.report import REPORT_VERSION, draw, finished, read_report, show, write
from eval.serve import evaluate as evaluate_engine

if TYPE_CHECKING:
    from train.config import RunConfig

LoadHead = Callable[[Path], dict[str, torch.Tensor]]  # the state_dict of a checkpoint folder


def evaluate(cfg: RunConfig, target_dir: Path, prompts: list[ChatRecord], load_head: LoadHead) -> dict[str, Any]:
    """Measures the export of cfg.run_dir on the held-out prompts, or shows the report that is there with the same settings. Returns it."""
    settings, folder = {"report": REPORT_VERSION, **checked(cfg, target_dir, prompts)}, Path(cfg.run_dir) / cfg.eval_folder
    if earlier := finished(folder / "report.json", settings):
        if not (folder / "report.html").is_file():
            draw(folder)
        show(earlier, folder)
        return earlier
    if (other := read_report(folder / "report.json")) and other.get("settings", {}).get("prompts") != settings["prompts"]:
        print(f"evaluate: {folder / 'report.json'} is of other prompts and will be replaced; copy it now if it is wanted", flush=True)
    with alone(folder, "run_dir"):
        report = _measure(cfg, target_dir, prompts, load_head)
        write(report | {"settings": settings}, folder)
    return report


def export_of(cfg: RunConfig) -> Path:
    return Path(cfg.run_dir) / "export" / "vllm"


def checked(cfg: RunConfig, target_dir: Path, prompts: list[ChatRecord]) -> dict[str, Any]:
    """All that a measurement depends on: one with the same need not be made again. UserError: no prompt, or an export of another conf."""
    export_dir = export_of(cfg)
    export = read_export(export_dir) if "head" in cfg.eval.methods else None
    if export and export["head"] != cfg.head:
        raise UserError(f"{export_dir}: exported from head {export['head']}, the conf says {cfg.head}; use the conf it was trained with")
    scheme = export.get("quantization", {}).get("scheme") if export else None
    if export and scheme != cfg.export.quantization:
        there, said = scheme or "null", cfg.export.quantization or "null"
        raise UserError(
            f"{export_dir}: exported with export.quantization={there}, the conf says {said}: measure what is there with "
            f"`{command('evaluate', 'export.quantization=' + there)}`, or export anew with `{command('export')}`"
        )
    if not prompts:
        raise UserError("data.prompts: no prompt for the split 'heldout', which is what is measured; add some, or give some meta.split")
    settings = {"eval": asdict(cfg.eval), "target": asdict(cfg.target), "loop_ngram": cfg.data.loop_ngram}
    settings |= {"fingerprint": fingerprint(target_dir), "prompts": prompts_hash(prompts), "export": export}
    return settings | {"folders": stamps(cfg.eval.methods, cfg.eval.draft_model)}


def _measure(cfg: RunConfig, target_dir: Path, prompts: list[ChatRecord], load_head: LoadHead) -> dict[str, Any]:
    run_dir, export_dir = Path(cfg.run_dir), export_of(cfg)
    answers = run_dir / cfg.eval_folder / "plain.jsonl"
    report = evaluate_engine(cfg, target_dir, export_dir, prompts, answers)
    greedy = cfg.eval.draft_sample_method == "greedy"  # what the offline chain does
    if "head" in cfg.eval.methods and greedy:
        dtype = getattr(torch, cfg.eval.dtype or cfg.target.dtype)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        export = read_export(export_dir)
        step = run_dir / export["provenance"]["checkpoint"]
        head = trained_head(cfg.head, target_dir, load_head(step), dtype, device)
        report["offline"] = offline_report(cfg, head, target_dir, answers)
        report |= {key: export[key] for key in ("quantization",) if key in export}
    return report
