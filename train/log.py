"""What a run tells: metrics.jsonl, the console of rank 0, a progress bar on a terminal, and W&B (this file alone imports it).

Shape suffixes: K depths.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from data.errors import UserError
from data.manifest import replace_text
from heads.base import LossOut
from train import dist
from train.config import RunConfig

ID_FILE = "wandb_id.txt"  # in the run folder: names its W&B run

Means = dict[str, list[float | None]]


class Meter:
    """Sums and counts of a window, kept on the device until `means` is called."""

    def __init__(self) -> None:
        self.pairs: dict[str, Tensor] = {}

    def add(self, out: LossOut) -> None:
        for name, (sum_K, count_K) in {"loss": (out.loss_K, out.count_K), **out.metrics}.items():
            pair_2K = torch.stack([sum_K.detach().double(), count_K.double()])
            self.pairs[name] = self.pairs[name] + pair_2K if name in self.pairs else pair_2K

    def means(self, like: LossOut | None = None) -> Means:
        """Mean per name and depth, pooled over the window and all ranks, None where nothing was counted. Empties the window.

        The one place where training waits for the device. `like`: names and depths, for a rank whose window may be empty.
        """
        pairs, self.pairs = self.pairs, {}
        if not pairs and like is not None:
            self.add(like)
            pairs, self.pairs = {name: torch.zeros_like(pair) for name, pair in self.pairs.items()}, {}
        names = sorted(pairs)
        flat = dist.all_sum(torch.cat([pairs[name] for name in names], dim=1).cpu())
        parts = flat.split([pairs[name].shape[1] for name in names], dim=1)
        rows = {name: zip(*part.tolist(), strict=True) for name, part in zip(names, parts, strict=True)}
        return {name: [total / count if count else None for total, count in row] for name, row in rows.items()}


def summary(means: Means, weights: tuple[float, ...]) -> dict[str, Any]:
    """A record of one window: the weighted loss, every mean per depth as <name>_k, and from `accept` the acceptance length.

    accept_k is the share of anchors whose first k+1 drafts are all right, so 1 + sum_k accept_k tokens come out of a pass.
    """
    record: dict[str, Any] = {"loss": sum(w * (mean or 0.0) for w, mean in zip(weights, means["loss"], strict=True))}
    record |= {f"{name}_k": values for name, values in means.items()}
    if "accept" in means:
        record["acceptance_length"] = 1 + sum(mean or 0.0 for mean in means["accept"])
    return record


def chain_summary(counts: Tensor) -> dict[str, Any]:
    """counts [1 + k]: passes that drafted, and those in which draft i was accepted. Empty where there was no pass."""
    passes, *accepted = counts.tolist()
    if not passes:
        return {}
    rates = {"chain_acceptance_length": 1 + sum(accepted) / passes, "chain_acceptance_per_position": [a / passes for a in accepted]}
    return rates | {"chain_passes": int(passes)}


class Clock:
    """Speed since the last reading: tokens are counted per rank and pooled."""

    def __init__(self, first_step: int, steps: int) -> None:
        self.first_step, self.steps = first_step, steps
        self.start = self.mark = time.perf_counter()
        self.tokens, self.waited = 0.0, 0.0

    def read(self, step: int, waited: float) -> dict[str, float]:
        """waited: seconds this rank has waited for data since the start of the run."""
        now = time.perf_counter()
        seconds, share = now - self.mark, (waited - self.waited) / (now - self.mark)
        tokens = dist.all_sum(torch.tensor([float(self.tokens)])).item()
        self.mark, self.tokens, self.waited = now, 0.0, waited
        left = (self.steps - step) * (now - self.start) / (step - self.first_step)
        return {"tokens_per_second": tokens / seconds, "data_wait": share, "seconds_left": left, "peak_memory_gb": peak_memory_gb()}


def peak_memory_gb() -> float:
    """Of this rank, so far: device memory held by tensors, or the resident set on the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class Log:
    """Writes on rank 0; elsewhere every call does nothing. A context manager, so that the bar and W&B end with the run."""

    def __init__(self, cfg: RunConfig, first_step: int) -> None:
        self.on = dist.rank() == 0
        if not self.on:
            return
        run_dir = Path(cfg.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        cut_metrics(path, first_step)
        self.file = path.open("a", encoding="utf-8")
        self.wandb = _wandb(cfg, run_dir, asdict(cfg)) if cfg.log.wandb else None
        self.every, self.lines, self.steps = cfg.log.every_console, 0, cfg.train.steps
        self.console = Console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task(cfg.name, total=cfg.train.steps, completed=first_step)
        self.bar.start()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.on:
            return
        self.bar.stop()
        self.file.close()
        if self.wandb:
            self.wandb.finish()

    def step(self, done: int) -> None:
        if self.on:
            self.bar.update(self.task, completed=done)

    def say(self, text: str) -> None:
        if self.on:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def write(self, kind: str, step: int, record: dict[str, Any]) -> None:
        """One line of metrics.jsonl, one point in W&B, one line on the console. kind: train or val."""
        if not self.on:
            return
        self.file.write(json.dumps({"kind": kind, "step": step, **record}) + "\n")
        self.file.flush()
        if self.wandb:
            self.wandb.log(flat(kind, record), step=step)
        self.lines += kind == "train"
        if kind == "val" or self.lines % self.every == 0 or step == self.steps:
            self.say(console_line(kind, step, self.steps, record))


def flat(kind: str, record: dict[str, Any]) -> dict[str, float]:
    """One number per name, as W&B plots them: train/loss, train/loss_0, ..."""
    points = {}
    for name, value in record.items():
        if isinstance(value, list):
            points |= {f"{kind}/{name.removesuffix('_k')}_{k}": mean for k, mean in enumerate(value) if mean is not None}
        else:
            points[f"{kind}/{name}"] = value
    return points


def console_line(kind: str, step: int, steps: int, record: dict[str, Any]) -> str:
    parts = [f"{'held out' if kind == 'val' else 'step'} {step}/{steps}", f"loss {record['loss']:.4f}"]
    for name in ("hit_k", "accept_k"):
        if name in record:
            parts.append(f"{name[:-2]} " + " ".join("-" if mean is None else f"{mean:.3f}" for mean in record[name]))
    if "acceptance_length" in record:
        parts.append(f"acceptance length {record['acceptance_length']:.3f}")
    if "chain_acceptance_length" in record:
        rates = " ".join(f"{rate:.3f}" for rate in record["chain_acceptance_per_position"])
        parts.append(f"chain {record['chain_acceptance_length']:.3f} ({rates})")
    if kind == "train":
        minutes, seconds = divmod(round(record["seconds_left"]), 60)
        parts += [f"lr {record['lr']:.2e}", f"grad {record['grad_norm']:.3g}", f"{record['tokens_per_second']:,.0f} tok/s"]
        parts += [f"data wait {record['data_wait']:.0%}", f"peak {record['peak_memory_gb']:.2f} GB", f"left {minutes}:{seconds:02d}"]
    return "  ".join(parts)


def cut_metrics(path: Path, step: int) -> None:
    """Drops the lines after `step`, and an unfinished last one: the steps they speak of are taken again."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step and step > 0:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            break
    replace_text(path, "".join(kept))


def send_report(cfg: RunConfig, points: dict[str, float], tables: dict[str, tuple[list[Any], list[Any]]], page: Path) -> bool:
    """Adds an evaluation to the W&B run of the training: numbers to its summary, tables (columns, rows) and the page beside its curves.
    Once for each writing of `page`. False: not asked for, the training had no W&B, or all of it is there. UserError: W&B refuses."""
    run_dir, sent = Path(cfg.run_dir), page.with_name("wandb_sent.txt")
    if not (cfg.log.wandb and (run_dir / ID_FILE).is_file()):
        return False
    if sent.is_file() and sent.stat().st_mtime_ns >= page.stat().st_mtime_ns:
        return False
    import wandb

    run = _wandb(cfg, run_dir)
    drawn = {name: wandb.Table(columns=[*columns], data=[*rows]) for name, (columns, rows) in tables.items()}
    shown = {**points, **drawn, f"{page.parent.name}/report": wandb.Html(page, inject=False)}
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    trained = json.loads(lines[-1])["step"] if lines else 0
    run.log(shown, step=max(run.step, trained))  # W&B drops what is said of a step that is past: no further, or a resume loses its curve
    run.summary.update(points)
    where = Path(run.dir).parent if run.offline else run.url
    run.finish()
    replace_text(sent, f"{where}\n")
    print(f"W&B: {where} has the figures, the tables and {page.name}", flush=True)
    return True


def _wandb(cfg: RunConfig, run_dir: Path, config: dict[str, Any] | None = None) -> Any:
    """The run's W&B run, the same one after a resume. Without WANDB_API_KEY it is kept in run_dir/wandb for `wandb sync`.
    config: what it is to say of itself."""
    import wandb

    id_file = run_dir / ID_FILE
    if not id_file.is_file():
        replace_text(id_file, secrets.token_hex(4) + "\n")
    online = "WANDB_API_KEY" in os.environ
    try:
        return wandb.init(
            project=cfg.log.project,
            name=cfg.name,
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow" if online else None,
            mode="online" if online else "offline",
            dir=str(run_dir),
            config=config,
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:  # a wrong key, or no network
        raise UserError(
            f"W&B: {' '.join(str(error).split())}; unset WANDB_API_KEY to keep the run in {run_dir}, or set log=console"
        ) from error
