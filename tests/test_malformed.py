"""Rows damaged at random in every format: none ends the reading, each is told by file, line and reason, and the rows around it are kept."""

from __future__ import annotations

import copy
import datetime
import decimal
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data.prompts import read_prompts

DAMAGED = 100  # rows of each format that must come out as unusable
ASKED = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
ROWS: dict[str, dict[str, Any]] = {
    "messages": {
        "id": "x",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": "So."},
        ],
        "meta": {"category": "chat", "language": "en", "split": "train"},
    },
    "sharegpt": {"id": "x", "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
    "openai": {
        "id": "x",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "How is the weather?"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
            {"role": "tool", "content": "rain", "tool_call_id": "c"},
        ],
        "tools": [ASKED],
    },
}
JUNK: list[Any] = [
    None,
    True,
    3,
    -1.5,
    "",
    " \n",
    "narrator",
    "\ud800",
    "\x00",
    [],
    {},
    [None],
    [[]],
    [{}],
    {"a": 1},
    "{",
    '"',
    10**30,
    float("nan"),
]
ODD: list[Any] = [b"\xff", datetime.datetime(9999, 1, 1), datetime.timedelta(1), decimal.Decimal("1.5"), datetime.time(1)]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything within."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def damaged(row: dict[str, Any], rng: random.Random, junk: list[Any]) -> dict[str, Any]:
    row = copy.deepcopy(row)
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(list(places(row)))
        if rng.random() < 0.3:
            del container[key]
        else:
            container[key] = copy.deepcopy(rng.choice(junk))
        if not list(places(row)):
            break
    return row


def torn(line: bytes, rng: random.Random) -> bytes:
    """Without line breaks of its own."""
    at = rng.randrange(1, len(line))
    raw = rng.choice(
        [line[:at], line[at:], line[:at] + bytes([rng.randrange(256)]) + line[at + 1 :], line[:at] + b"\xff\x00" + line[at:], line * 2]
    )
    return raw.replace(b"\n", b" ").replace(b"\r", b" ") or b"x"


def good(i: int) -> dict[str, Any]:
    return {"id": f"good{i}", "messages": [{"role": "user", "content": f"What is {i}?"}]}


def check(folder: Path, source: str, rows: int, wanted: int, place: Callable[[int], tuple[str, int]]) -> int:
    """Reads `rows` damaged rows, each with a good one before it, and says how many were unusable. place: file and line of a damaged one."""
    bad: list[dict[str, Any]] = []
    records = read_prompts([source], folder, left_out=bad)
    assert [r.id for r in records if r.id.startswith("good")] == [f"good{i}" for i in range(wanted)]
    assert len(records) + len(bad) == rows + wanted, "a row is gone"
    where = {place(i) for i in range(rows)}
    for line in bad:
        assert (line["file"], line["line"]) in where and line["reason"].strip() and "\n" not in line["reason"]
    return len(bad)


@pytest.mark.parametrize("kind", ROWS)
def test_damaged_lines_of_jsonl(kind, tmp_path):
    rng, rows = random.Random(kind), 300
    with (tmp_path / "p.jsonl").open("wb") as f:
        for i in range(rows):
            line = json.dumps(damaged(ROWS[kind] | {"id": f"x{i}"}, rng, JUNK)).encode()
            f.write(json.dumps(good(i)).encode() + b"\n" + (torn(line, rng) if i % 3 == 0 else line) + b"\n")
    assert check(tmp_path, "p.jsonl", rows, rows, lambda i: ("p.jsonl", 2 * i + 2)) >= DAMAGED


@pytest.mark.parametrize("kind", ROWS)
def test_damaged_rows_of_parquet(kind, tmp_path):
    """A file each, for the rows of one have the same columns."""
    rng, rows = random.Random(kind), 0
    (tmp_path / "set").mkdir()
    while rows < 250:
        row = damaged(ROWS[kind] | {"id": f"x{rows}"}, rng, [x for x in JUNK if x != "\ud800"] + ODD)
        try:
            table = pyarrow.Table.from_pylist([row])
            if not table.num_columns:  # no row then
                continue
            pyarrow.parquet.write_table(table, tmp_path / "set" / f"{rows:03d}-bad.parquet")
        except (pyarrow.ArrowException, OverflowError, TypeError):  # what no table can hold
            continue
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([good(rows)]), tmp_path / "set" / f"{rows:03d}-a.parquet")
        rows += 1
    assert check(tmp_path, "set", rows, rows, lambda i: (f"set/{i:03d}-bad.parquet", 1)) >= DAMAGED


def test_damaged_lines_of_plain_text(tmp_path):
    rng, rows = random.Random(0), 120
    with (tmp_path / "p.txt").open("wb") as f:
        for i in range(rows):
            junk = bytes(rng.choice([*range(1, 10), *range(14, 256)]) for _ in range(rng.randint(1, 40)))
            f.write(f"What is {i}?\n".encode() + junk.replace(b"\n", b" ") + b"\xfe\n")
    bad: list[dict[str, Any]] = []
    records = read_prompts(["p.txt"], tmp_path, left_out=bad)
    assert [r.messages[0]["content"] for r in records] == [f"What is {i}?" for i in range(rows)]
    assert [(line["file"], line["line"]) for line in bad] == [("p.txt", 2 * i + 2) for i in range(rows)]
    assert all("UTF-8" in line["reason"] for line in bad) and rows >= DAMAGED


SAVED_JUNK: list[Any] = [None, "", " \n", "narrator", "\x00", '{"a": 1}', "\u00ad"]


@pytest.mark.parametrize("kind", ["messages", "sharegpt"])
def test_damaged_rows_of_a_folder_of_save_to_disk(kind, tmp_path):
    """One folder, whose columns have a type each: what is damaged are values, turns and whole conversations."""
    import datasets

    rng, rows, key = random.Random(kind), 250, "messages" if kind == "messages" else "conversations"
    whole = {"id": "x", key: ROWS[kind][key]}

    def bad(i: int) -> dict[str, Any]:
        row = copy.deepcopy(whole | {"id": f"x{i}"})
        if rng.random() < 0.3:
            row[key] = rng.choice([None, [], [None], row[key][-1:], [*row[key], None]])
        else:
            turn = rng.choice(row[key])
            turn[rng.choice(list(turn))] = rng.choice(SAVED_JUNK)
        return row

    sound = [copy.deepcopy(whole | {"id": f"good{i}"}) for i in range(rows)]
    for i, row in enumerate(sound):  # each another text: a record may not come twice
        row[key][-2]["content" if kind == "messages" else "value"] = f"What is {i}?"
    datasets.Dataset.from_list([row for i in range(rows) for row in (sound[i], bad(i))]).save_to_disk(tmp_path / "saved")
    assert check(tmp_path, "saved", rows, rows, lambda i: ("saved", 2 * i + 2)) >= DAMAGED
