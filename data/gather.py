"""From the stores of several engines to one: their shards stay where they are, and the manifest of the whole lists them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from data.lock import turn
from data.manifest import check_same_capture, is_whole, read_manifest
from data.prompts import read_jsonl_tolerant
from data.store import StoreWriter


def part_stores(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("part-*-of-*/manifest.json"))


def gather(folder: Path, manifest: dict[str, Any], wanted: set[str]) -> set[str]:
    """Lists in the store at `folder` what the stores `part-*-of-*` in it hold, which may go on growing meanwhile. It is finished where it
    holds all that is wanted. Returns the ids that need no new capture. UserError: one of them is another capture."""
    folder.mkdir(parents=True, exist_ok=True)
    with turn(folder):
        whole = StoreWriter(folder, manifest)
        for part in part_stores(folder):
            _adopt(whole, part)
        if wanted <= whole.done:
            whole.close()
        return whole.done


def finish_part(folder: Path, name: str, manifest: dict[str, Any], wanted: set[str]) -> set[str]:
    """`gather` at the end of a part, whose own store goes where nothing of the whole lies in it."""
    done, own = gather(folder, manifest, wanted), folder / name
    with turn(folder):
        if not any(own.glob("shard-*.safetensors")):  # what it set aside is in the list of the whole by now
            shutil.rmtree(own, ignore_errors=True)
    return done


def _adopt(whole: StoreWriter, part: Path) -> None:
    theirs, mine = read_manifest(part), whole.manifest
    check_same_capture(part, theirs, whole.identity)
    own = {name: {**s, "file": name} for s in theirs["shards"] if is_whole(part, s) for name in [f"{part.name}/{s['file']}"]}
    listed = {s["file"]: s for s in mine["shards"] if s["file"] in own or not s["file"].startswith(f"{part.name}/")}
    # by name, not by who ended first: a training draws its batches in this order
    mine["shards"] = sorted((listed | own).values(), key=lambda shard: ("/" in shard["file"], shard["file"]))
    whole.done = {name for shard in mine["shards"] for name in shard["ids"]} | whole.quarantined
    listed_aside = part / "quarantine.jsonl"
    for line in read_jsonl_tolerant(listed_aside)[0] if listed_aside.exists() else []:
        if line["id"] not in whole.done:
            whole.done.add(line["id"])
            whole.set_aside(line["id"], line["reason"])
    whole.write_manifest()
