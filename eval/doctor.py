"""Why acceptance is what it is: three measurements of the same head side by side, and every known way of going wrong looked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from data.check import Fault, check_splits, show_faults
from data.errors import UserError
from data.online import Answers
from data.sequences import Sequences
from data.store import Store
from data.vocab import count_supervised, coverage
from eval.advice import find
from eval.export import engine_files, read_export, validate_export
from heads.base import DraftHead

if TYPE_CHECKING:
    from train.config import RunConfig

COVERED = 0.98  # share of held-out labels that a draft vocabulary should hold
APART = 0.02  # relative gap of two acceptance lengths that wants a reason
ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}


def measurements(run_dir: Path) -> dict[str, dict[str, Any]]:
    """By name: acceptance length and, where known, acceptance at each position. Missing ones are left out."""
    found: dict[str, dict[str, Any]] = {}
    metrics = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.is_file() else []
    if held_out := [line for line in lines if line["kind"] == "val"]:
        found["teacher-forced"] = {"length": held_out[-1]["acceptance_length"], "positions": held_out[-1]["accept_k"]}
    path = run_dir / "eval" / "report.json"
    if path.is_file():
        report = json.loads(path.read_text(encoding="utf-8"))
        if offline := report.get("offline"):
            positions = [n / max(1, offline["drafts"]) for n in offline["accepted_per_position"]]
            found["offline chain"] = {"length": offline["acceptance_length"], "positions": positions, "dtype": offline["dtype"]}
        if head := find(report, "head"):
            positions = [n / max(1, head["drafts"]) for n in head["accepted_per_position"]]
            found["engine"] = {"length": head["acceptance_length"], "positions": positions, "dtype": report["target"]["dtype"]}
            found["engine"] |= report.get("quantization", {})
    return found


def vocabulary_faults(head: DraftHead, heldout: Sequences) -> list[Fault]:
    if head.draft_vocab_size is None:
        return []
    share = coverage(count_supervised(heldout, head.target.vocab_size), head.get_buffer("draft_ids_U"))
    if share >= COVERED:
        return []
    text = f"the draft vocabulary holds {share:.1%} of the held-out labels, which no acceptance can exceed; raise head.draft_vocab_size"
    return [Fault("vocabulary", f"{text}, or train on text like the one that is asked for")]


def export_faults(head: DraftHead, folder: Path) -> list[Fault]:
    """The export against the head it was made from: config key by key, tensor by tensor."""
    try:
        validate_export(folder, head.target)
    except UserError as error:
        return [Fault("export", str(error))]
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    scheme = read_export(folder).get("quantization", {}).get("scheme")
    tensors, should, _ = engine_files(head, getattr(torch, stored["dtype"]), scheme)
    differ = sorted(key for key in stored.keys() | should.keys() if stored.get(key) != should.get(key))
    faults = []
    for key in differ:
        text = f"{folder}/config.json: {key} is {stored.get(key)}, the head has {should.get(key)}: export again"
        faults.append(Fault("rope" if key in ROPE else "export", text))
    with safe_open(folder / "model.safetensors", "pt") as f:
        held = set(f.keys())
        for name, tensor in tensors.items():
            # as bytes, for torch cannot compare 8-bit floats
            same = name in held and torch.equal(f.get_tensor(name).view(torch.uint8), tensor.view(torch.uint8))
            if not same:
                faults.append(Fault("weights", f"{name} of the export is not the checkpoint's: export again"))
    return faults


def gap_faults(found: dict[str, dict[str, Any]], others: list[Fault]) -> list[Fault]:
    """What is left when nothing else explains a gap between the measurements."""
    offline, engine, forced = (found.get(name) for name in ("offline chain", "engine", "teacher-forced"))
    faults = []
    if offline and engine and abs(offline["length"] / engine["length"] - 1) > APART and not others:
        text = f"offline {offline['length']:.3f} and engine {engine['length']:.3f} differ"
        if "scheme" in engine:
            faults.append(Fault("quantization", f"{text}: the export has {engine['scheme']} weights; another scheme, or none, costs less"))
        elif engine["dtype"] != "float32":
            faults.append(Fault("dtype", f"{text}: measure with eval.dtype=float32; if they meet there, it is rounding"))
        else:
            faults.append(Fault("numerics", f"{text} in float32 too: the engine's layer computes something else than the head's"))
    if forced and offline and forced["length"] - offline["length"] > 0.1 * forced["length"]:
        text = f"teacher-forced {forced['length']:.3f} on sampled answers, {offline['length']:.3f} along greedy ones"
        faults.append(Fault("text", f"{text}: the head learnt another text than is served; sample the answers as they will be"))
    return faults


def diagnose(cfg: RunConfig, head: DraftHead, target_dir: Path, count: int) -> tuple[dict[str, dict[str, Any]], list[Fault]]:
    """head: of the run's checkpoint, with its frozen parts, float32. count: sequences of each store to run again."""
    run_dir = Path(cfg.run_dir)
    faults: list[Fault] = []
    if cfg.data.states == "online":  # transformers' own states: there is nothing to hold them against
        heldout = Answers(Path(cfg.data.responses) / "heldout.jsonl", cfg.data.max_length, None, "none", {})
    else:
        faults += check_splits(Path(cfg.data.store), Path(cfg.data.responses), target_dir, count, cfg.data.whole_splits)
        heldout = Store(Path(cfg.data.store) / "heldout")
    faults += vocabulary_faults(head, heldout)
    folder = run_dir / "export" / "vllm"
    if folder.is_dir():
        read_export(folder)
        faults += export_faults(head, folder)
    found = measurements(run_dir)
    return found, faults + gap_faults(found, faults)


def show(found: dict[str, dict[str, Any]], faults: list[Fault]) -> int:
    """Prints both. Returns the exit status."""
    table = Table(title="the same head, three ways")
    for column in ("measured", "acceptance length", "at each position", "dtype"):
        table.add_column(column)
    for name, row in found.items():
        table.add_row(name, f"{row['length']:.3f}", " ".join(f"{p:.3f}" for p in row["positions"]), row.get("dtype", ""))
    Console(highlight=False).print(table)
    return show_faults(faults, "nothing wrong was found: states, masks, vocabulary and export are what they say")
