"""Whether a store holds what it says: checksums, and a sample of it against transformers' own forward pass.

Shape suffixes: T tokens of one sequence, L taps, D hidden, V vocab.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.answers import read_answers
from data.commands import command
from data.files import bytes_text
from data.forward import Forward
from data.identity import read_meta, template_hash, tokenizer_hash
from data.manifest import anew, other_maker
from data.progress import table_console
from data.states import label_rows
from data.store import Store
from data.target import fingerprint, frozen, spec
from data.teacher import tail_mass
from heads.kernels import softcapped

CLOSE = 0.1  # relative error to transformers' float32 states (a bfloat16 engine's: below 0.02, fp8 taps below 0.03), or total variation
BEFORE_NORM, EARLY, LATE = "before the norm", "one token early", "one token late"  # states that last may be instead of its own
OFF_POLICY = 0.3  # nats per token by which a text may surprise the target more than its own samples would


@dataclass
class Fault:
    """cause: one word by which programs know it; text: what is wrong and how to mend it."""

    cause: str
    text: str


def _error(stored: Tensor, true: Tensor) -> Tensor:
    """|stored - true| / |true| over the last dimension, averaged over rows: [rows, ..., D] -> [...]."""
    return ((stored - true).norm(dim=-1) / true.norm(dim=-1)).mean(0)


class Reference:
    """The target, or another language model, in transformers, float32: the residual stream after each of its layers, and the state after
    the final norm. Loaded once for all stores."""

    def __init__(self, folder: Path, device: torch.device | str = "cpu") -> None:
        self.folder, self.lm_head_VD = folder, frozen(folder, torch.float32, device).lm_head_VD
        self.softcap = spec(folder).logit_softcap
        self.forward = Forward(folder, range(spec(folder).num_layers + 1), torch.float32, device)
        # (residual streams [T, layers + 1, D], last [T, D]) of token ids [T]
        self.states = self.forward.states


def mask_faults(store: Store, answers_path: Path) -> list[Fault]:
    """Supervision must begin where generation began, in every sequence whose answer is at hand."""
    if not answers_path.is_file():
        return []
    starts = {answer["id"]: len(answer["prompt_ids"]) for answer in read_answers(answers_path)[0]}
    wrong: dict[int, list[str]] = {}
    for i, name in enumerate(store.ids):
        if name in starts and (shift := int(store.first_labels[i]) - starts[name]):
            wrong.setdefault(shift, []).append(name)
    text = "in {} sequences supervision begins {:+d} tokens from where the answer does (first: {}). {}"
    return [Fault("mask", text.format(len(names), shift, names[0], anew())) for shift, names in wrong.items()]


def state_faults(store: Store, reference: Reference, count: int) -> tuple[list[Fault], dict[str, float]]:
    """`count` sequences against transformers. Also returns figures: error of each tap and of the teacher, argmax agreement, surprise
    (nats per supervised token above what the target's own samples would have)."""
    taps = tuple(store.manifest["taps"])
    sums: dict[str, list[float]] = {}
    meant: dict[int, list[str]] = {}
    for i in torch.linspace(0, len(store) - 1, min(count, len(store))).long().unique().tolist():
        item = store.get(i, taps)
        streams_TLD, last_TD = reference.states(item["token_ids"])
        for j, tap in enumerate(taps):
            stored_TD = item["taps"][:, j].float()
            sums.setdefault(f"tap {tap}", []).append(float(_error(stored_TD, streams_TLD[:, tap])))
            meant.setdefault(tap, []).append(_nearest(stored_TD, streams_TLD, tap))
        if store.manifest["last"] != "none":
            for name, value in _teacher_figures(item, streams_TLD[:, -1], last_TD, reference.lm_head_VD, reference.softcap).items():
                sums.setdefault(name, []).append(value)
    figures = {name: sum(values) / len(values) for name, values in sums.items()}
    return _judge(figures, {tap: max(set(found), key=found.count) for tap, found in meant.items()}), figures


def _nearest(stored_TD: Tensor, streams_TLD: Tensor, tap: int) -> str:
    """What these states are instead: another layer's, those of a neighbouring token, or nothing that is known (empty)."""
    errors = {f"layer {layer}'s": _error(stored_TD, streams_TLD[:, layer]) for layer in range(streams_TLD.shape[1]) if layer != tap}
    if len(stored_TD) > 1:
        errors[EARLY] = _error(stored_TD[1:], streams_TLD[:-1, tap])
        errors[LATE] = _error(stored_TD[:-1], streams_TLD[1:, tap])
    nearest = min(errors, key=lambda name: float(errors[name]))
    return nearest if errors[nearest] <= CLOSE else ""


def _teacher_figures(item: dict[str, Any], raw_TD: Tensor, last_TD: Tensor, lm_head_VD: Tensor, softcap: float | None) -> dict[str, float]:
    """Over the rows that predict a label: the relative error of last, or half the sum of the likeliest tokens' differences in probability,
    against the true states and those that may have been stored instead."""
    rows, top = label_rows(item["loss_mask"]).nonzero().squeeze(1), item["last"] is None
    stored, label = (item["top_log_p"][rows].exp() if top else item["last"][rows].float()), item["token_ids"][rows + 1]

    def log_p(state_RD: Tensor) -> Tensor:
        return softcapped(state_RD @ lm_head_VD.T, softcap).log_softmax(-1)

    def error(state_RD: Tensor) -> float:
        if not top:
            return float(_error(stored, state_RD))
        return float((log_p(state_RD).exp().gather(1, item["top_ids"][rows].long()) - stored).abs().sum(-1).mean() / 2)

    true_RV = log_p(last_TD[rows])
    of_text_RV = true_RV if top else log_p(stored)
    best_R = item["top_ids"][rows, 0] if top else of_text_RV.argmax(-1)
    entropy_R = -(of_text_RV.exp() * of_text_RV).sum(-1)
    name = "top" if top else "last"
    figures = {
        name: error(last_TD[rows]),
        f"{name}, {BEFORE_NORM}": error(raw_TD[rows]),
        f"{name}, {EARLY}": error(last_TD[(rows - 1).clamp(min=0)]),
        f"{name}, {LATE}": error(last_TD[(rows + 1).clamp(max=len(last_TD) - 1)]),
        "argmax": float((best_R == true_RV.argmax(-1)).float().mean()),
        "surprise": float((-of_text_RV.gather(1, label[:, None]).squeeze(1) - entropy_R).mean()),
    }
    return figures | ({"tail": float(tail_mass(item["top_log_p"][rows]).mean())} if top else {})


def _judge(figures: dict[str, float], meant: dict[int, str]) -> list[Fault]:
    """meant: what each tap is nearest to, beside what it should be."""
    faults = []
    for tap, nearest in meant.items():
        if (error := figures[f"tap {tap}"]) > CLOSE:
            instead = f"it is {nearest}" if nearest else "nor is it any other layer's"
            text = f"tap {tap} is not the target's own state there (relative error {error:.2f}); {instead}. {anew()}"
            faults.append(Fault("slot" if nearest in (EARLY, LATE) else "tap", text))
    name = next((name for name in ("last", "top") if name in figures), None)
    if name is None:
        return faults
    if figures[name] <= CLOSE:
        if figures["surprise"] > OFF_POLICY:
            text = f"the answers surprise the target by {figures['surprise']:.2f} nats a token more than its own would"
            faults.append(Fault("off-policy", f"{text}: another hand wrote them. Sample them with `{command('respond')}`"))
        return faults
    kinds = {BEFORE_NORM: "norm", EARLY: "slot", LATE: "slot"}
    nearest = min(kinds, key=lambda kind: figures[f"{name}, {kind}"])
    if figures[f"{name}, {nearest}"] > CLOSE:
        what = "total variation" if name == "top" else "relative error"
        return [*faults, Fault(name, f"{name} is not the target's own ({what} {figures[name]:.2f}). {anew()}")]
    return [*faults, Fault(kinds[nearest], f"what is stored as {name} is the target's own {nearest}. {anew()}")]


def check_store(folder: Path, reference: Reference, answers_path: Path, count: int) -> tuple[list[Fault], dict[str, float], str]:
    """Checksums (UserError where one fails), then identity, masks and states. Returns faults, figures, and what the store holds."""
    store = Store(folder, verify=True)
    target = reference.folder
    others = other_maker(store.manifest, fingerprint(target), tokenizer_hash(target), template_hash(target))
    both = f"Set data.responses and data.store to new folders, then run `{command('respond')}` and `{command('capture')}`"
    faults = [Fault(part, f"{text}. {both}") for part, text in others] + mask_faults(store, answers_path)
    found, figures = state_faults(store, reference, count) if not any(f.cause == "target" for f in faults) else ([], {})
    meta = answers_path.with_suffix(".meta.json")
    if meta.is_file() and read_meta(meta).get("answers") == "given":  # they were to be another hand's
        found = [fault for fault in found if fault.cause != "off-policy"]
    size = sum(shard["bytes"] for shard in store.manifest["shards"])
    holds = f"{len(store):,} sequences, {int(store.lengths.sum()):,} tokens, {store.manifest['supervised_tokens']:,} supervised, "
    holds += f"{bytes_text(size)} ({size / max(1, int(store.lengths.sum())):,.0f} bytes a token), taps {store.manifest['taps']}, last: "
    holds += f"{store.manifest['last']}, {json.dumps(store.manifest['dtype'])}; checksums right"
    return faults + found, figures, holds


def check_splits(store: Path, responses: Path, target_dir: Path, count: int, splits: Sequence[str]) -> list[Fault]:
    """check_store of these parts, with what it found printed."""
    console, reference, faults = table_console(), Reference(target_dir), []
    for split in splits:
        found, figures, holds = check_store(store / split, reference, responses / f"{split}.jsonl", count)
        console.print(f"{split}: {holds}")
        console.print("  against transformers: " + ", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
        faults += [Fault(fault.cause, f"{split}: {fault.text}") for fault in found]
    return faults


def show_faults(faults: list[Fault], sound: str) -> int:
    """Prints them, or `sound` where there are none. Returns the exit status."""
    console = table_console()
    for fault in faults:
        console.print(f"[bold red]{fault.cause}[/]: {fault.text}", soft_wrap=True)
    if not faults:
        console.print(sound)
    return 1 if faults else 0
