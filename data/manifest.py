"""What a store says of itself: its manifest, the bytes it takes, and whether it fits a run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from data.commands import command
from data.errors import UserError
from data.files import bytes_text
from data.states import row_bytes
from data.teacher import LAST_POLICIES, holds, top_bytes, top_k

FORMAT_VERSION = 1
COUNTS = ("sequences", "tokens", "supervised_tokens")  # of a store and of each shard
PER_SEQUENCE = ("ids", "lengths", "first_labels")  # lists of a shard
# What a capture is: two runs that differ in one of these must not share a store.
IDENTITY = ("target", "tokenizer_hash", "template_hash", "taps", "hidden_size", "last", "dtype", "engine")


def plan_bytes(n_tokens: int, n_supervised: int, L: int, D: int, last: str, dtype: str) -> int:
    """Bytes of a store of L taps of width D with these counts; file headers and offsets (well below 1 %) are left out."""
    tap_bytes, last_bytes = row_bytes(dtype, D)
    if (k := top_k(last)) is not None:
        last_bytes = top_bytes(k, dtype)
    rows = n_supervised if k else {"none": 0, "supervised": n_supervised, "all": n_tokens}[last]
    return n_tokens * (4 + 1 + L * tap_bytes) + rows * last_bytes


def check_disk(folder: Path, need_bytes: int, cap_gb: float) -> None:
    """Refuses a store of `need_bytes` in all that is over the cap or, beyond what `folder` already holds, over the free space."""
    if need_bytes > cap_gb * 1e9:
        raise UserError(
            f"{folder}: the hidden states take {bytes_text(need_bytes)}, over the cap data.max_store_gb={cap_gb:g}; "
            "raise data.max_store_gb, or lower data.limit or data.max_length"
        )
    check_free(folder, need_bytes - stored_bytes(folder))


def stored_bytes(folder: Path) -> int:
    """Of all shards in `folder` and below."""
    return sum(path.stat().st_size for path in folder.rglob("shard-*.safetensors"))


def free_bytes(folder: Path) -> int:
    """Free on the disk of `folder`, which need not exist yet."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def check_free(folder: Path, need_bytes: int) -> None:
    """Refuses to write `need_bytes` more where they do not fit; `folder` need not exist yet."""
    free = free_bytes(folder)
    if need_bytes > free:
        raise UserError(
            f"{folder}: {bytes_text(need_bytes)} of hidden states are still to be written and {bytes_text(free)} are free; "
            "free some space, set data.store to another disk, or lower data.limit or data.max_length"
        )


def check_compatible(
    manifest: dict[str, Any], *, fingerprint: str, taps: tuple[int, ...], needs_last: str, tokenizer_hash: str, template_hash: str
) -> None:
    """Refuses (UserError) a store that cannot train a head: other target, tokenizer or chat template, a tap or `last` missing, or
    unfinished. More than is needed is fine.
    """
    found = [f"{part}: {text}" for part, text in other_maker(manifest, fingerprint, tokenizer_hash, template_hash)]
    if missing := sorted(set(taps) - set(manifest["taps"])):
        found.append(f"taps: the head reads {list(taps)}, the store holds {manifest['taps']} and lacks {missing}")
    if not holds(manifest["last"], needs_last):
        found.append(f"last (data.teacher): the head needs {needs_last!r}, the store holds {manifest['last']!r}")
    if found:
        raise UserError(f"the store does not fit this run: {'; '.join(found)}. {anew()}")
    if not manifest["closed"]:
        raise UserError(
            f"the capture of this store stopped after {manifest['sequences']} sequences; `{command('capture')}` goes on from there"
        )


def other_maker(manifest: dict[str, Any], fingerprint: str, tokenizer_hash: str, template_hash: str) -> list[tuple[str, str]]:
    """("target", "tokenizer" or "template", what is wrong) for each that the store was captured with and is another now."""
    found = []
    if manifest["target"]["fingerprint"] != fingerprint:
        found.append(("target", f"the store was captured from {manifest['target']}, this run has fingerprint {fingerprint}"))
    for part, value in (("tokenizer", tokenizer_hash), ("template", template_hash)):
        if (old := manifest[f"{part}_hash"]) != value:
            found.append((part, f"the answers were made with another {part} (hash {old}, now {value})"))
    return found


def as_stored(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The identity of a capture that goes on with the store in `folder`: where that holds what `manifest` asks for and more taps or `last`,
    with these, for heads may share a store; else `manifest`."""
    if not (folder / "manifest.json").is_file():
        return manifest
    there = read_manifest(folder)
    taps, last = there["taps"], there["last"]
    known = last in LAST_POLICIES or top_k(str(last)) is not None
    if not isinstance(taps, list) or taps != sorted(set(taps)) or not known:  # by hand: refused as another capture
        return manifest
    enough = set(manifest["taps"]) <= set(taps) and holds(last, manifest["last"])
    return manifest | {"taps": taps, "last": last} if enough else manifest


def check_same_capture(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuses (UserError) to go on with a store whose manifest says otherwise than `new`."""
    if found := differences(old, new):
        raise UserError(f"{folder}: holds another capture ({'; '.join(found)}). {anew()}")


def check_same_sequences(folder: Path, tokens: dict[str, list[int]]) -> None:
    """Refuses (UserError) to go on with a store that holds other sequences than `tokens` (id -> token ids): to other prompts, sampled
    again, or cut shorter by another data.max_length. Longer ones are fine, for readers cut them; shards cut short do not count anyway.
    """
    there: list[str] = []
    for shard in read_manifest(folder)["shards"]:
        path = folder / shard["file"]
        if not is_whole(folder, shard):
            continue
        try:
            with safe_open(path, framework="pt") as f:
                stored = f.get_tensor("token_ids").split(shard["lengths"])
        except (SafetensorError, RuntimeError) as error:
            raise UserError(f"{path}: unreadable ({error}); {recapture(path)}") from error
        for name, ids_T in zip(shard["ids"], stored, strict=True):
            if name in tokens and ids_T[: len(tokens[name])].tolist() != tokens[name]:
                what = f"{name} has {len(ids_T)} tokens there and {len(tokens[name])} others now"
                raise UserError(f"{folder}: {what}: the answers were sampled again, or data.max_length was raised. {anew()}")
        there += shard["ids"]
    check_asked(folder, there, tokens)


def check_asked(folder: Path, there: Iterable[str], wanted: Container[str]) -> None:
    """Refuses (UserError) a store that holds more than is asked for, by the ids of its sequences: a training reads all of it."""
    if more := [name for name in there if name not in wanted]:
        raise UserError(f"{folder}: {len(more)} sequences in it, {more[0]} the first, are no answers to what this conf asks now. {anew()}")


def anew(start: str = "Delete") -> str:
    """How to have a store that fits. start: up to the word `delete`."""
    return f"{start} the folder or set data.store to a new one, then run `{command('capture')}`"


def recapture(path: Path) -> str:
    """How to mend a shard whose content is bad."""
    return f"delete it (`rm {path}`) and run `{command('capture')}`, which captures its sequences again"


def is_whole(folder: Path, shard: dict[str, Any]) -> bool:
    """Whether a listed shard is there, with the bytes that the manifest gives it."""
    path = folder / shard["file"]
    return path.is_file() and path.stat().st_size == shard["bytes"]


def check_shard(folder: Path, shard: dict[str, Any], verify: bool) -> None:
    """Refuses (UserError) a listed shard that is gone or of another size; with verify=True also one of another checksum."""
    path = folder / shard["file"]
    if not is_whole(folder, shard):
        found = f"has {path.stat().st_size} bytes" if path.is_file() else "is missing"
        raise UserError(f"{path}: {found}, the manifest says {shard['bytes']} bytes; `{command('capture')}` captures its sequences again")
    if verify and sha256(path) != shard["sha256"]:
        raise UserError(f"{path}: its checksum is not the manifest's, so the file was altered; {recapture(path)}")


def sha256(path: Path) -> str:
    """Checksum of a file, in hex."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fsync_path(path: Path) -> None:
    """Makes the content of a file, or the renames in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically and durably: after a kill or a power cut it is either the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)
    fsync_path(path.parent)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a store; UserError where there is none, or none of this format."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file, so there is no store here; make it with `{command('capture')}`")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a store manifest ({error!r}). {anew()}") from error
    if version != FORMAT_VERSION:
        newer = isinstance(version, int) and version > FORMAT_VERSION
        mend = anew("A newer version of this program wrote it: update this one, or delete") if newer else anew()
        raise UserError(f"{path}: format version {version}, this program reads {FORMAT_VERSION}. {mend}")
    missing = [key for key in (*IDENTITY, "closed", *COUNTS, "shards") if key not in manifest]
    faults = (
        [f"it has no {', no '.join(missing)}"] if missing else [fault for shard in manifest["shards"] for fault in _shard_faults(shard)]
    )
    if faults:
        raise UserError(f"{path}: not a whole store manifest ({faults[0]}), so it was edited. {anew()}")
    return manifest


def _shard_faults(shard: dict[str, Any]) -> list[str]:
    missing = [key for key in ("file", "bytes", "sha256", *COUNTS, *PER_SEQUENCE) if key not in shard]
    if missing:
        return [f"a shard has no {', no '.join(missing)}"]
    return [f"{shard['file']} lists {len(shard[key])} {key}" for key in PER_SEQUENCE if len(shard[key]) != shard["sequences"]]


def _flat(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {key: value}
    return {name: leaf for part, inner in value.items() for name, leaf in _flat(inner, f"{key}.{part}").items()}


def unequal(before: Any, now: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """(key.subkey, value before, value now) of every single value that differs; None where one side lacks it."""
    old, new = _flat(before, key), _flat(now, key)
    return [(name.removeprefix("."), old.get(name), new.get(name)) for name in {**new, **old} if old.get(name) != new.get(name)]


def differences(store: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """What `run` says otherwise than the manifest of `store`, as `key.subkey: the store has .., this run ..`."""
    there = {key: store.get(key) for key in run}
    return [f"{key}: the store has {old!r}, this run {new!r}" for key, old, new in unequal(there, run)]
