"""Prompts from JSONL, ShareGPT, Parquet or HF data sets to one record type; what cannot be used is quarantined with file:line and reason.

Also the JSONL reader and writer of the response files, which must survive a kill in the middle of a line.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

from data.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {"system": "system", "human": "user", "gpt": "assistant", "tool": "tool"}
SPLITS = ("train", "heldout")
HELDOUT_ONE_IN = 10  # share of the records without a split that are held out
OTHER = "other"
QUARANTINE_CHARS = 2000  # of a bad line that are kept: enough to recognise it

Row = tuple[str, int, "bytes | dict[str, Any]"]  # file, line (1-based), raw line or an already parsed row


@dataclass
class ChatRecord:
    """One conversation. messages: [{"role", "content": str, ...}]; meta: category, language, perhaps split ("train" | "heldout")."""

    id: str
    messages: list[dict[str, Any]]
    meta: dict[str, Any]
    tools: list[Any] | None = None


class _Unusable(Exception):
    """Why one row cannot be used; becomes the reason in the quarantine."""


def read_prompts(sources: list[str], quarantine: Path | None, root: Path) -> list[ChatRecord]:
    """Every usable record of `sources`, in order. A source is a .jsonl or .parquet file, a folder of them, a folder written by
    datasets' save_to_disk, or `hf:<id>[:split]`; relative paths count from `root`.

    Unusable rows go to the file `quarantine` as JSONL {file, line, reason, text} (it is replaced whole, and empty when all is well)
    and are counted on stderr. UserError: a source that is missing or of unknown kind, or no usable record in all of them.
    """
    records: list[ChatRecord] = []
    bad: list[dict[str, Any]] = []
    seen: dict[str, str] = {}
    for source in sources:
        for file, line, raw in _rows(source, root):
            try:
                record = _record(_parse(raw))
                if record.id in seen:
                    raise _Unusable(f"id {record.id!r} was already used at {seen[record.id]}")
            except _Unusable as why:
                bad.append({"file": file, "line": line, "reason": str(why), "text": _excerpt(raw)})
                continue
            seen[record.id] = f"{file}:{line}"
            records.append(record)
    if quarantine is not None:
        _write_atomic(quarantine, bad)
    if not records and not bad:
        raise UserError(f"no prompts in [{', '.join(sources)}]; name files that hold some: data.prompts=[...]")
    if bad:
        where = f"{bad[0]['file']}:{bad[0]['line']}: {bad[0]['reason']}"
        if not records:
            raise UserError(f"none of the {len(bad)} prompt records can be used; the first, {where}; mend the file or data.prompts")
        kept_in = f" (all in {quarantine})" if quarantine is not None else ""
        print(f"{len(bad)} of {len(bad) + len(records)} prompt records left out{kept_in}; the first, {where}", file=sys.stderr)
    return records


def select(records: list[ChatRecord], split: str, limit: int | None) -> list[ChatRecord]:
    """The records of `split`, one of each category in turn, at most `limit`; a smaller limit gives a prefix of a larger one.

    Records without meta.split get one by a hash of the id, and carry it from here on.
    """
    assert split in SPLITS and (limit is None or limit >= 0)
    queues: dict[str, list[ChatRecord]] = {}
    for record in records:
        if _split(record) == split:
            queue = queues.setdefault(record.meta.get("category", OTHER), [])
            queue.append(replace(record, meta={**record.meta, "split": split}))
    turns = zip_longest(*(queues[category] for category in sorted(queues)))
    return [record for turn in turns for record in turn if record is not None][:limit]


def write_jsonl_line(f: IO[str], obj: dict[str, Any]) -> None:
    """Appends one object to a UTF-8 text file in one flushed write, so that a kill leaves at most one incomplete line, the last."""
    f.write(json.dumps(obj, ensure_ascii=False, allow_nan=False) + "\n")
    f.flush()


def read_jsonl_tolerant(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a file that may have been cut in its last line, and how many bytes they span.

    A last line without newline or with broken JSON is left out: a byte count below the file's size says so, and a writer that
    resumes truncates to it. UserError: no such file, or any other line that is not a JSON object.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    records: list[dict[str, Any]] = []
    valid_bytes = 0
    broken: tuple[int, str] | None = None  # a bad line is an error only once another follows it
    with path.open("rb") as f:
        for line, raw in enumerate(f, 1):
            if broken is not None:
                raise UserError(f"{path}:{broken[0]}: {broken[1]}; delete that line, or the file to start anew")
            if not raw.endswith(b"\n"):
                break
            try:
                if raw.strip():
                    records.append(_parse(raw))
            except _Unusable as why:
                broken = (line, str(why))
            else:
                valid_bytes += len(raw)
    return records, valid_bytes


def _rows(source: str, root: Path) -> Iterator[Row]:
    if source.startswith("hf:"):
        yield from _hub_rows(source)
        return
    path = root / Path(source).expanduser()
    if path.is_file():
        yield from _file_rows(path, source)
    elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        yield from _saved_rows(path, source)
    elif path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in (".jsonl", ".parquet"))
        if not files:
            raise UserError(f"data.prompts: {path} holds no .jsonl or .parquet file")
        for file in files:
            yield from _file_rows(file, str(Path(source) / file.name))
    else:
        raise UserError(f"data.prompts: {path} does not exist; name a file, a folder or hf:<id>[:split]")


def _file_rows(path: Path, label: str) -> Iterator[Row]:
    if path.suffix == ".jsonl":
        with path.open("rb") as f:  # bytes: str.splitlines would also break at U+2028 inside a text
            for line, raw in enumerate(f, 1):
                if raw.strip():
                    yield label, line, raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path, label)
    else:
        raise UserError(f"data.prompts: {path} is neither .jsonl nor .parquet; convert it, one JSON object a line")


def _parquet_rows(path: Path, label: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024)
        for line, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            yield label, line, row
    except (pyarrow.ArrowException, OSError) as why:
        raise UserError(f"data.prompts: {path} is not a readable Parquet file ({why}); write it again") from why


def _saved_rows(path: Path, label: str) -> Iterator[Row]:
    import datasets

    try:
        data = datasets.load_from_disk(str(path))
    except Exception as why:  # datasets and Arrow have many words for a damaged folder
        raise UserError(f"data.prompts: {path} is no readable folder of save_to_disk ({why}); save it again") from why
    if isinstance(data, datasets.DatasetDict):
        if len(data) != 1:
            splits = sorted(str(split) for split in data)
            raise UserError(f"data.prompts: {path} holds the splits {', '.join(splits)}; name one: {label}/{splits[0]}")
        data = next(iter(data.values()))
    for line, row in enumerate(data, 1):
        yield label, line, dict(row)


def _hub_rows(source: str) -> Iterator[Row]:
    import datasets
    from datasets.exceptions import DatasetsError

    name, _, split = source.removeprefix("hf:").partition(":")
    try:
        data = datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError, DatasetsError) as why:
        raise UserError(f"data.prompts: cannot load {source} ({why}); check the name, the split (hf:<id>:<split>) and the network") from why
    for line, row in enumerate(data, 1):
        yield source, line, dict(row)


def _parse(raw: bytes | dict[str, Any]) -> dict[str, Any]:
    try:
        row = json.loads(raw.decode()) if isinstance(raw, bytes) else raw
    except (ValueError, RecursionError) as why:  # ValueError: bad JSON, bad UTF-8
        raise _Unusable(f"malformed JSON: {why}") from why
    if not isinstance(row, dict):
        raise _Unusable(f"a JSON object is expected, not {type(row).__name__}")
    return row


def _record(row: dict[str, Any]) -> ChatRecord:
    turns = row.get("messages") or row.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise _Unusable("no list `messages` or `conversations` with a turn in it")
    messages = [_message(turn, n) for n, turn in enumerate(turns, 1)]
    _check_order([m["role"] for m in messages])
    tools = row.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise _Unusable("`tools` is not a list")
    content = json.dumps([messages, tools], sort_keys=True, default=str)
    record = ChatRecord(_record_id(row.get("id"), content), messages, _meta(row.get("meta")), tools)
    try:
        json.dumps([record.id, messages, record.meta, tools], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError) as why:  # a lone surrogate (valid JSON, no text), NaN, or a date in a Parquet column
        raise _Unusable(f"cannot be written as UTF-8 JSON: {why}") from why
    return record


def _message(turn: Any, n: int) -> dict[str, Any]:
    """A turn in either spelling as {"role", "content", ...}; null fields, which Parquet makes of absent ones, are dropped."""
    if not isinstance(turn, dict):
        raise _Unusable(f"turn {n} is not an object")
    named = turn.get("role") or SHAREGPT_ROLES.get(str(turn.get("from")), turn.get("from"))
    if named not in ROLES:
        raise _Unusable(f"turn {n} has the unknown role {named!r}; known: {', '.join(ROLES)} or ShareGPT's {', '.join(SHAREGPT_ROLES)}")
    content = turn["content"] if turn.get("content") is not None else turn.get("value")
    text = _text(content, n)
    if not text.strip() and (named == "user" or (named == "assistant" and not turn.get("tool_calls"))):
        raise _Unusable(f"turn {n} ({named}) is empty")
    extra = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value") and v is not None}
    return {"role": named, "content": text, **extra}


def _text(content: Any, n: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _Unusable(f"turn {n}: the content is {type(content).__name__}, not a text or a list of text parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _Unusable(f"turn {n}: only parts of the form {{'type': 'text', 'text': ...}} can be used")
    return "\n".join(part["text"] for part in content)  # as vLLM joins them when it serves


def _check_order(roles: list[str]) -> None:
    if "user" not in roles:
        raise _Unusable("no user turn")
    first = next(role for role in roles if role != "system")
    if first != "user":
        raise _Unusable(f"the conversation starts with the {first}")


def _record_id(given: Any, content: str) -> str:
    if given is None or given == "":
        return "sha-" + hashlib.sha256(content.encode()).hexdigest()[:16]
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise _Unusable(f"the id is {type(given).__name__}, not a text or a whole number")
    return str(given)


def _meta(given: Any) -> dict[str, Any]:
    if given is not None and not isinstance(given, dict):
        raise _Unusable("`meta` is not an object")
    meta = {"category": OTHER, "language": "und"} | {k: v for k, v in (given or {}).items() if v is not None}
    for key in ("category", "language"):
        if not isinstance(meta[key], str):
            raise _Unusable(f"meta.{key} is not a text")
    if "split" in meta and meta["split"] not in SPLITS:
        raise _Unusable(f"meta.split is {meta['split']!r}; known: {', '.join(SPLITS)}")
    return meta


def _split(record: ChatRecord) -> str:
    digest = int(hashlib.sha256(record.id.encode()).hexdigest()[:8], 16)
    return record.meta.get("split") or SPLITS[digest % HELDOUT_ONE_IN == 0]


def _excerpt(raw: bytes | dict[str, Any]) -> str:
    text = raw.decode(errors="replace") if isinstance(raw, bytes) else json.dumps(raw, default=str)
    return text.rstrip("\r\n")[:QUARANTINE_CHARS]


def _write_atomic(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as f:
        for row in rows:
            f.write(json.dumps(row) + "\n")
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)
