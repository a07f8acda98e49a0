"""Answers as a head will see them: how much of them is supervised, slice by slice, and which tokens."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from data.answers import asked_answers, mask_of, spans_of
from data.commands import command
from data.errors import UserError
from data.progress import table_console
from data.record import OTHER

ENDS = ("stop", "length", "loop", "given")


def cut(answer: dict[str, Any], max_length: int) -> tuple[list[int], list[bool]]:
    """Token ids and loss mask of a response record, cut as capture cuts it."""
    ids = (answer["prompt_ids"] + answer["response_ids"])[:max_length]
    return ids, mask_of(spans_of(answer, max_length), len(ids))


def statistics(answers: list[dict[str, Any]], max_length: int) -> dict[str, dict[str, Any]]:
    """By slice, and `all`: records, mean tokens, supervised share, records cut at max_length, and what ended the answers."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for answer in answers:
        groups[answer.get("meta", {}).get("category") or OTHER].append(answer)
    found = {}
    for name, members in [*sorted(groups.items()), ("all", answers)]:
        masks = [cut(answer, max_length)[1] for answer in members]
        tokens = sum(len(mask) for mask in masks)
        found[name] = {
            "records": len(members),
            "tokens": tokens / len(members),
            "supervised": sum(sum(mask) for mask in masks) / tokens,
            "cut": sum(len(a["prompt_ids"]) + len(a["response_ids"]) > max_length for a in members),
            "ended": {end: sum(a["finish_reason"] == end for a in members) / len(members) for end in ENDS},
        }
    return found


def coloured(tokenizer: Any, ids: list[int], mask: list[bool]) -> Text:
    """The decoded text, supervised runs in bold green; special tokens are written out."""
    text = Text()
    for supervised, run in groupby(range(len(ids)), key=lambda i: mask[i]):
        positions = list(run)
        text.append(str(tokenizer.decode(ids[positions[0] : positions[-1] + 1])), style="bold green" if supervised else "dim")
    return text


def show(path: Path, tokenizer: Any, max_length: int, count: int) -> None:
    """Prints the statistics of a file of answers and `count` of them, spread over the file."""
    if not path.is_file():
        raise UserError(f"{path}: no answers yet; make them with `{command('respond')}`")
    answers, _ = asked_answers(path)
    if not answers:
        raise UserError(f"{path}: holds no answer; `{command('respond')}` goes on with them")
    table = Table(title=str(path), caption=f"tokens: mean of prompt and answer; cut: at {max_length}; then what ended the answers")
    for column in ("slice", "records", "tokens", "supervised", "cut", *ENDS):
        table.add_column(column, justify="left" if column == "slice" else "right")
    for name, row in statistics(answers, max_length).items():
        ended = (f"{row['ended'][end]:.0%}" for end in ENDS)
        table.add_row(name, f"{row['records']:,}", f"{row['tokens']:.0f}", f"{row['supervised']:.0%}", str(row["cut"]), *ended)
    console = table_console()
    console.print(table)
    step = max(1, len(answers) // max(1, count))
    for answer in answers[::step][:count]:
        console.rule(answer["id"])
        console.print(coloured(tokenizer, *cut(answer, max_length)))
