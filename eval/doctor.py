"""Why acceptance is what it is: all measurements of the same head side by side, and every known way of going wrong looked for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from safetensors import safe_open

from data.check import Fault, check_splits, show_faults
from data.commands import command
from data.errors import UserError
from data.online import Answers
from data.progress import table_console
from data.sequences import Sequences
from data.store import Store
from data.vocab import count_supervised, coverage
from eval import chain
from eval.accept import figures
from eval.advice import find
from eval.export import again, engine_files, read_export, validate_export
from eval.report import history
from heads.base import DraftHead

if TYPE_CHECKING:
    from train.config import RunConfig

COVERED = 0.98  # share of held-out labels that a draft vocabulary should hold
APART = 0.02  # relative gap of two acceptance lengths that wants a reason
NEARLY_NOTHING = 0.1  # share of first drafts accepted; a head that knows only which tokens are frequent reaches some of it
LEARNS = 0.05  # relative fall of the training loss below which nothing was learnt
CAUSES = {  # keys of an export's config.json whose difference has a name of its own
    "rope": {"rope_theta", "rope_scaling", "rope_parameters"},
    "norm": {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"},
    "slot": {"sample_from_anchor", "block_size"},
}
FORCED, WALKED, OFFLINE, ENGINE = "teacher-forced", "chain, held-out store", "offline chain", "engine"
SEQUENCES = 20  # of the held-out store that the chain walks

Measured = dict[str, dict[str, Any]]


def walked(head: DraftHead, heldout: Store, k: int, max_length: int) -> Measured:
    """What the chain accepts along the stored answers. Teacher-forced acceptance is of all tokens alike; a chain stops more often where
    drafts are wrong, so that only chains can be compared with chains."""
    chosen, drafts = chain.spread(heldout, SEQUENCES), chain.most_drafts(head, k)
    counts = chain.along_stored(head, heldout, chosen, drafts, max_length, torch.device("cpu"), torch.float32)
    return {WALKED: _counted(figures(counts), "float32")}


def measurements(run_dir: Path) -> Measured:
    """By name: acceptance length and, where known, acceptance at each position. Missing ones are left out."""
    found: Measured = {}
    if held_out := [line for line in history(run_dir) if line["kind"] == "val"]:
        found[FORCED] = {"length": held_out[-1]["acceptance_length"], "positions": held_out[-1]["accept_k"]}
    path = run_dir / "eval" / "report.json"
    if path.is_file():
        report = json.loads(path.read_text(encoding="utf-8"))
        if offline := report.get("offline"):
            found[OFFLINE] = _counted(offline, offline["dtype"])
        if head := find(report, "head"):
            found[ENGINE] = _counted(head, report["target"]["dtype"]) | report.get("quantization", {})
    return found


def _counted(figures: dict[str, Any], dtype: str) -> dict[str, Any]:
    positions = [n / max(1, figures["drafts"]) for n in figures["accepted_per_position"]]
    return {"length": figures["acceptance_length"], "positions": positions, "dtype": dtype}


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
        text = f"{folder}/config.json: {key} is {stored.get(key)}, the head has {should.get(key)}: {again()}"
        faults.append(Fault(next((cause for cause, keys in CAUSES.items() if key in keys), "export"), text))
    with safe_open(folder / "model.safetensors", "pt") as f:
        held = set(f.keys())
        for name, tensor in tensors.items():
            # as bytes, for torch cannot compare 8-bit floats
            same = name in held and torch.equal(f.get_tensor(name).view(torch.uint8), tensor.view(torch.uint8))
            if not same:
                faults.append(Fault("weights", f"{name} of the export is not the checkpoint's: {again()}"))
    return faults


def untrained_faults(found: Measured, curve: list[dict[str, Any]]) -> list[Fault]:
    """A head that accepts next to nothing however it is measured has not learnt; the curve of its training says why. curve: the lines of
    metrics.jsonl."""
    firsts = [row["positions"][0] for row in found.values() if row["positions"] and row["positions"][0] is not None]
    if not firsts or max(firsts) >= NEARLY_NOTHING:
        return []
    text = f"the head accepts nearly nothing ({max(firsts):.1%} of first drafts), although all that was looked at is in order: "
    train = [line for line in curve if line["kind"] == "train"]
    if not train:
        return [Fault("untrained", f"{text}there is no curve of its training in metrics.jsonl; train it with `{command('train')}`")]
    tenth = max(1, len(train) // 10)
    first, last = (fmean(line["loss"] for line in part) for part in (train[:tenth], train[-tenth:]))
    rates, anew = f"learning rates up to {max(line['lr'] for line in train):.1e}", "Begin anew under another name with"
    usual = "usual are 1e-3 with AdamW, 0.02 with optim=muon"
    if not last < first * (1 + LEARNS):  # NaN too
        why = f"its loss rose from {first:.3f} to {last:.3f} with {rates}. {anew} a smaller optim.lr ({usual})"
    elif not math.isfinite(first) or last > first * (1 - LEARNS):
        why = f"its loss has not fallen in {train[-1]['step']} steps ({first:.3f} to {last:.3f}) with {rates}. {anew} another optim.lr "
        why += f"({usual}), or more train.steps if these were a handful"
    else:
        why = f"its loss fell from {first:.3f} to {last:.3f} in {train[-1]['step']} steps, which is too little training. Go on: "
        why += f"`{command('train', 'train.steps={}'.format(2 * train[-1]['step']))}`; and see that data.limit is no handful"
    return [Fault("untrained", text + why)]


def gap_faults(found: Measured, others: list[Fault]) -> list[Fault]:
    """What is left when nothing else explains a gap between the measurements."""
    offline, engine, stored = (found.get(name) for name in (OFFLINE, ENGINE, WALKED))
    faults = []
    if offline and engine and abs(offline["length"] / engine["length"] - 1) > APART and not others:
        text = f"offline {offline['length']:.3f} and engine {engine['length']:.3f} differ"
        if "scheme" in engine:
            none = command("export", "export.quantization=null")
            faults.append(
                Fault("quantization", f"{text}: the export has {engine['scheme']} weights; without them: `{none}`, then evaluate")
            )
        elif engine["dtype"] != "float32":
            faults.append(
                Fault("dtype", f"{text}: measure with `{command('evaluate', 'eval.dtype=float32')}`; if they meet there, it is rounding")
            )
        else:
            faults.append(Fault("numerics", f"{text} in float32 too: the engine's layer computes something else than the head's"))
    if stored and offline and stored["length"] - offline["length"] > 0.1 * stored["length"]:
        text = f"the chain has {stored['length']:.3f} along the stored answers, {offline['length']:.3f} along the greedy ones of evaluation"
        faults.append(Fault("text", f"{text}: the head learnt another text than is served; sample the answers as they will be"))
    return faults


def diagnose(cfg: RunConfig, head: DraftHead, target_dir: Path, count: int) -> tuple[Measured, list[Fault], list[str]]:
    """(measurements, faults, what was looked at). head: of the run's checkpoint, with its frozen parts, float32. count: sequences of each
    store to run again."""
    run_dir = Path(cfg.run_dir)
    faults, looked = [], ["vocabulary"]
    if cfg.data.states == "online":  # transformers' own states: there is nothing to hold them against
        heldout = Answers(Path(cfg.data.responses) / "heldout.jsonl", cfg.data.max_length, None, "none", {})
    else:
        faults += check_splits(Path(cfg.data.store), Path(cfg.data.responses), target_dir, count, cfg.data.whole_splits)
        heldout, looked = Store(Path(cfg.data.store) / "heldout"), ["states", "masks", *looked]
    faults += vocabulary_faults(head, heldout)
    folder = run_dir / "export" / "vllm"
    if folder.is_dir():
        read_export(folder)
        faults += export_faults(head, folder)
        looked.append("export")
    found = measurements(run_dir)
    if isinstance(heldout, Store) and not faults:
        found |= walked(head, heldout, max(cfg.eval.ks), cfg.data.max_length)
    if not faults:
        faults += untrained_faults(found, history(run_dir))
    return found, faults + gap_faults(found, faults), looked


def show(found: Measured, faults: list[Fault], looked: list[str]) -> int:
    """Prints all of it. Returns the exit status."""
    table = Table(title="the same head, measured one way after the other")
    for column in ("measured", "acceptance length", "at each position", "dtype"):
        table.add_column(column)
    missing = {FORCED: "no held-out line in metrics.jsonl", WALKED: "walked only where all else is in order, and states are stored"}
    missing |= dict.fromkeys((OFFLINE, ENGINE), "evaluate has not run with the head")
    for name, why in missing.items():
        if row := found.get(name):
            positions = " ".join("-" if p is None else f"{p:.3f}" for p in row["positions"])
            table.add_row(name, f"{row['length']:.3f}", positions, row.get("dtype", ""))
        else:
            table.add_row(name, "-", why, "")
    table_console().print(table)
    sound = f"nothing wrong was found; looked at: {', '.join(looked)}"
    unknown = "" if ENGINE in found else f". What an engine accepts is not known yet: `{command('evaluate')}`"
    return show_faults(faults, sound + unknown)
