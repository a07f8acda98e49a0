"""Prompts from JSONL, ShareGPT, Parquet, plain text or data sets to one chat record type; what cannot be used is put aside with its reason.

Also the JSONL reader and writer of the response files, which must survive a kill in the middle of a line.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

from data.errors import UserError
from data.packages import MARK, package_rows
from data.record import OTHER, SPLITS, ChatRecord, Unusable, asked, parse, question, record_of, split_of

QUARANTINE_CHARS = 2000  # of a bad line that are kept: enough to recognise it
WEIGHTED = re.compile(r"(\d+(?:\.\d+)?)\*(.+)")  # 3*data/promptset

Row = tuple[str, int, "bytes | dict[str, Any]"]  # file, line (1-based), raw line or an already parsed row


def read_prompts(
    sources: list[str],
    root: Path,
    chars: tuple[int, int | None] = (0, None),
    left_out: list[dict[str, Any]] | None = None,
    one_more: Callable[[list[ChatRecord]], str] | None = None,
) -> list[ChatRecord]:
    """Every usable record of `sources`, in order. A source is a .jsonl or .parquet file, a folder of them, a .txt file with a question on
    each line, a folder written by datasets' save_to_disk, `hf:<id>[:split]` or `package:<name>`, each perhaps with a weight before it
    (`3*<source>`, for `select`); relative paths count from `root`. Of records that ask the same the first is used, or that of a package,
    all of which are held out: none is trained on under another name. `chars`: the least and the most characters of a question. one_more:
    makes a last source out of the records of these.

    Unusable rows are counted on stderr, and go to the list `left_out` as {file, line, reason, text}. UserError: a source that is missing or
    of unknown kind, or no usable record in all of them.
    """
    records: list[ChatRecord] = []
    bad: list[dict[str, Any]] = []
    seen: dict[str, str] = {}

    def read(source: str) -> None:
        for file, line, raw in _rows(_weight(source)[1], root):
            try:
                record = record_of(parse(raw), source)
                _check_length(record, *chars)
                _check_new(record, seen, f"{file}:{line}")
            except Unusable as why:
                bad.append({"file": file, "line": line, "reason": str(why), "text": _excerpt(raw)})
                continue
            records.append(record)

    for source in sorted(sources, key=lambda source: not _weight(source)[1].startswith(MARK)):  # sorted keeps the order of the others
        read(source)
    if one_more and (records or not bad):
        read(one_more(records))
    if not records and not bad:
        raise UserError(f"no prompts in [{', '.join(sources)}]; name files that hold some: data.prompts=[...]")
    if bad:
        where = f"{bad[0]['file']}:{bad[0]['line']}: {bad[0]['reason']}"
        if not records:
            raise UserError(f"none of the {len(bad)} prompt records can be used; the first, {where}; mend the file or data.prompts")
        print(f"{len(bad)} of {len(bad) + len(records)} prompt records left out; the first, {where}", file=sys.stderr)
    if left_out is not None:
        left_out += bad
    return records


def select(records: list[ChatRecord], split: str, limit: int | None) -> list[ChatRecord]:
    """The records of `split`, at most `limit`; a smaller limit gives a prefix of a larger one. Records without meta.split get one by
    the hash of their question, and carry it from here on.

    One of each category in turn; where sources have weights, so within each source, and the sources in these shares. Then the mix
    ends with the first source that has no more, for no record is taken twice.
    """
    assert split in SPLITS and (limit is None or limit >= 0)
    chosen = [replace(record, meta={**record.meta, "split": split}) for record in records if split_of(record) == split]
    sources = dict.fromkeys(record.source or "" for record in chosen)  # in the order in which they are named
    if all(_weight(source)[0] is None for source in sources):
        return _by_category(chosen)[:limit]
    queues = [_by_category([record for record in chosen if record.source == source]) for source in sources]
    mix, ended = _mixed(queues, [_weight(source)[0] or 1.0 for source in sources])
    if limit is None or len(mix) < limit:
        print(f"data.prompts: the mix for {split} ends after {len(mix)}: {list(sources)[ended]} has no more", file=sys.stderr)
    return mix[:limit]


def need(records: list[ChatRecord], split: str) -> None:
    """UserError: none of the records is of this split."""
    if not any(split_of(record) == split for record in records):
        raise UserError(f"data.prompts: no prompt for the split {split!r} among {len(records)}; add records, or give some meta.split")


def _by_category(records: list[ChatRecord]) -> list[ChatRecord]:
    queues: dict[str, list[ChatRecord]] = {}
    for record in records:
        queues.setdefault(record.meta.get("category", OTHER), []).append(record)
    turns = zip_longest(*(queues[category] for category in sorted(queues)))
    return [record for turn in turns for record in turn if record is not None]


def _mixed(queues: list[list[ChatRecord]], weights: list[float]) -> tuple[list[ChatRecord], int]:
    """Takes each record from the queue that is furthest behind its share, until that one (whose number is returned) is empty."""
    taken, mix = [0] * len(queues), []
    while True:
        i = min(range(len(queues)), key=lambda i: (taken[i] + 1) / weights[i])
        if taken[i] == len(queues[i]):
            return mix, i
        mix.append(queues[i][taken[i]])
        taken[i] += 1


def _weight(source: str) -> tuple[float | None, str]:
    """`3*<source>` -> 3.0 and the source; None where it has no weight. UserError: a weight of 0."""
    found = WEIGHTED.fullmatch(source)
    if found is None:
        return None, source
    if float(found[1]) == 0:
        raise UserError(f"data.prompts: {source} has the weight 0; leave it out, or give it more")
    return float(found[1]), found[2]


def _check_new(record: ChatRecord, seen: dict[str, str], place: str) -> None:
    """Unusable: its id or its question was there before. seen: id or hash of a question -> place."""
    if record.id in seen:
        raise Unusable(f"id {record.id!r} was already used at {seen[record.id]}; give it another, or none")
    asks = f"sha256:{question(record)}"
    if asks in seen:
        raise Unusable(f"asks the same as {seen[asks]}")
    seen[record.id] = seen[asks] = place


def _check_length(record: ChatRecord, least: int, most: int | None) -> None:
    n = sum(len(message["content"]) for message in asked(record))
    if n < least or (most is not None and n > most):
        bound = f"fewer than data.min_prompt_chars={least}" if n < least else f"more than data.max_prompt_chars={most}"
        raise Unusable(f"asks in {n} characters, {bound}")


def jsonl_line(obj: dict[str, Any]) -> str:
    return json.dumps(obj, ensure_ascii=False, allow_nan=False) + "\n"


def write_jsonl_line(f: IO[str], obj: dict[str, Any]) -> None:
    """Appends one object to a UTF-8 text file in one flushed write, so that a kill leaves at most one incomplete line, the last."""
    f.write(jsonl_line(obj))
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
                    records.append(parse(raw))
            except Unusable as why:
                broken = (line, str(why))
            else:
                valid_bytes += len(raw)
    return records, valid_bytes


def _rows(source: str, root: Path) -> Iterator[Row]:
    if source.startswith("hf:"):
        yield from _hub_rows(source)
        return
    if source.startswith(MARK):
        yield from package_rows(source)
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
        raise UserError(f"data.prompts: {path} does not exist; name a file, a folder, hf:<id>[:split] or package:<name>")


def _file_rows(path: Path, label: str) -> Iterator[Row]:
    if path.suffix == ".jsonl":
        with path.open("rb") as f:  # bytes: str.splitlines would also break at U+2028 inside a text
            for line, raw in enumerate(f, 1):
                if raw.strip():
                    yield label, line, raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
    elif path.suffix == ".txt":
        with path.open("rb") as f:
            for line, raw in enumerate(f, 1):
                if text := raw.decode("utf-8-sig" if line == 1 else "utf-8", "surrogateescape").strip():
                    yield label, line, {"messages": [{"role": "user", "content": text}]}
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path, label)
    else:
        raise UserError(f"data.prompts: {path} is neither .jsonl, .parquet nor .txt; convert it, one JSON object a line")


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


def _excerpt(raw: bytes | dict[str, Any]) -> str:
    text = raw.decode(errors="replace") if isinstance(raw, bytes) else json.dumps(raw, default=str)
    return text.rstrip("\r\n")[:QUARANTINE_CHARS]
