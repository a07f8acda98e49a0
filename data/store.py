"""The hidden-state store: ragged safetensors shards, and a manifest that alone says which of them count.

A shard holds whole sequences end to end, without padding: token_ids [N] int32, loss_mask [N] uint8, offsets [S+1] int64,
taps [N, L, D] and last, the states after the target's final norm: [N, D] (policy "all"), [R, D] ("supervised": only the rows whose
next token is a label) or absent ("none"), or, in its place at these rows, the likeliest tokens top_ids and top_log_p [R, C] ("top<k>", see
data/teacher.py); compact states with scales beside them, see data/states.py. A shard is written in `writing/`,
synced and moved beside the others; then the manifest is replaced in the same way. A kill at any moment therefore leaves a store that
is valid up to its manifest.

Shape suffixes: N tokens of a shard, T tokens of a sequence, S sequences, L taps, D hidden, R stored `last` rows, C likeliest tokens.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.errors import UserError
from data.manifest import (
    FORMAT_VERSION,
    IDENTITY,
    anew,
    check_free,
    check_same_capture,
    check_shard,
    fsync_path,
    is_whole,
    read_manifest,
    recapture,
    replace_text,
    sha256,
)
from data.manifest import check_compatible as check_compatible
from data.manifest import check_disk as check_disk
from data.manifest import plan_bytes as plan_bytes
from data.sequences import Sequences, document
from data.states import finite, label_rows, pack_last, pack_taps, parts, read_dtype, unpack_taps
from data.teacher import LAST_POLICIES, pack_top, read_rows, tail_mass, top_k

MAX_OPEN_SHARDS = 256  # mapped at once by one reader


class StoreWriter:
    """Appends sequences to a store. Reopening one goes on from its manifest; `done` holds the ids that need no new capture
    (stored or quarantined). Leftovers of a killed run, and listed shards that are gone or cut short, are removed first: the
    sequences of the latter are captured again. As a context manager it closes only when no exception passed.

    manifest: the IDENTITY keys; taps are layers applied, in storage order. UserError: the folder holds another capture.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], shard_tokens: int = 65536) -> None:
        assert set(IDENTITY) <= set(manifest), f"manifest lacks {set(IDENTITY) - set(manifest)}"
        assert manifest["last"] in LAST_POLICIES or top_k(manifest["last"]), manifest["last"]
        self.folder, self.shard_tokens = folder, shard_tokens
        self.dtype = manifest["dtype"]
        read_dtype(self.dtype)  # refuses an unknown one
        plain = json.loads(json.dumps(manifest))  # as it will be read back: tuples become lists
        self._about = ("format_version", *plain)
        self.manifest: dict[str, Any] = {"format_version": FORMAT_VERSION, **plain, "closed": False, "shards": []}
        folder.mkdir(parents=True, exist_ok=True)
        # A folder of its own, because safetensors writes to a temporary name of its choice, which a kill leaves behind.
        self.writing = folder / "writing"
        shutil.rmtree(self.writing, ignore_errors=True)
        if (folder / "manifest.json").exists():
            self._adopt(read_manifest(folder))
        elif stray := sorted(folder.glob("shard-*.safetensors")):  # never of ours: the first manifest comes before the first shard
            raise UserError(f"{stray[0]}: there is no manifest.json that lists it; put that back, or: {anew()}")
        listed = {shard["file"] for shard in self.manifest["shards"]}
        for path in folder.glob("shard-*.safetensors"):
            if path.name not in listed:
                path.unlink()
        self.quarantined = self._read_quarantine()
        self.done: set[str] = {name for shard in self.manifest["shards"] for name in shard["ids"]} | self.quarantined
        self._pending: list[tuple[str, dict[str, Tensor]]] = []
        self._pending_tokens = 0
        self.write_manifest()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    @property
    def identity(self) -> dict[str, Any]:
        """What the manifest of the same capture must say too."""
        return {key: self.manifest[key] for key in self._about}

    def _adopt(self, old: dict[str, Any]) -> None:
        check_same_capture(self.folder, old, self.identity)
        self.manifest["shards"] = [shard for shard in old["shards"] if is_whole(self.folder, shard)]

    def _read_quarantine(self) -> set[str]:
        """Ids set aside by earlier runs. A line that a kill cut short is dropped; its sequence is captured again."""
        path = self.folder / "quarantine.jsonl"
        if not path.exists():
            return set()
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            replace_text(path, whole)
        return {json.loads(line)["id"] for line in whole.splitlines()}

    def add(
        self, name: str, token_ids_T: Tensor, loss_mask_T: Tensor, taps_TLD: Tensor | None = None, last_TD: Tensor | None = None,
        top: tuple[Tensor, Tensor] | None = None,
    ) -> bool:  # fmt: skip
        """Copies one sequence in: states of every token, `last` of every row whatever the policy stores (None for policy "none"), or for
        policy "top<k>" what data.teacher.likeliest has of the label_rows.

        False: it holds NaN or Inf in the storage dtype and was quarantined.
        """
        n_tokens, n_taps, policy = len(token_ids_T), len(self.manifest["taps"]), self.manifest["last"]
        assert name not in self.done, f"{name} was added before"
        assert n_tokens > 0 and loss_mask_T.shape == (n_tokens,), (name, loss_mask_T.shape)
        assert (taps_TLD is None) == (n_taps == 0) and (top is None) == (top_k(policy) is None), name
        assert (last_TD is None) == (policy == "none" or top is not None), name
        tensors = {"token_ids": token_ids_T.to("cpu", torch.int32, copy=True), "loss_mask": loss_mask_T.to("cpu", torch.bool, copy=True)}
        if taps_TLD is not None:
            assert taps_TLD.shape == (n_tokens, n_taps, self.manifest["hidden_size"]), (name, taps_TLD.shape)
            tensors |= pack_taps(taps_TLD, self.dtype)
        if last_TD is not None:
            assert last_TD.shape == (n_tokens, self.manifest["hidden_size"]), (name, last_TD.shape)
            rows_RD = last_TD if policy == "all" else last_TD[label_rows(loss_mask_T).to(last_TD.device)]
            tensors |= pack_last(rows_RD, self.dtype)
        if top is not None:
            assert {x.shape for x in top} == {(int(label_rows(loss_mask_T).sum()), top_k(policy))}, (name, policy)
            tensors |= pack_top(*top, self.dtype)
        self.done.add(name)
        if bad := [key for key in ("taps", "last", "top_log_p") if key in tensors and not finite(tensors, key)]:
            self.set_aside(name, f"NaN or Inf in {' and '.join(bad)}")
            return False
        self._pending.append((name, tensors))
        self._pending_tokens += n_tokens
        if self._pending_tokens >= self.shard_tokens:
            self._flush()
        return True

    def set_aside(self, name: str, reason: str) -> None:
        self.quarantined.add(name)
        with (self.folder / "quarantine.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps({"id": name, "reason": reason}, ensure_ascii=False) + "\n")
            f.flush()
            os.fsync(f.fileno())

    def _flush(self) -> None:
        """Writes the pending sequences as one shard and lists it."""
        pending = [tensors for _, tensors in self._pending]
        lengths = [len(each["token_ids"]) for each in pending]
        rows = [label_rows(each["loss_mask"]) for each in pending]
        tensors = {key: torch.cat([each[key] for each in pending]) for key in pending[0]}
        tensors["loss_mask"] = tensors["loss_mask"].to(torch.uint8)
        tensors["offsets"] = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int64)
        check_free(self.folder, sum(tensor.nbytes for tensor in tensors.values()))
        shards = self.manifest["shards"]
        taken = [int(Path(shard["file"]).stem[len("shard-") :]) for shard in shards if "/" not in shard["file"]]  # others are a part's
        number = max(taken, default=-1) + 1
        final = self.folder / f"shard-{number:05d}.safetensors"
        self.writing.mkdir(exist_ok=True)
        temporary = self.writing / final.name
        save_file(tensors, temporary)
        temporary.chmod((self.folder / "manifest.json").stat().st_mode)  # safetensors makes files that only their owner may read
        fsync_path(temporary)
        digest = sha256(temporary)
        temporary.replace(final)
        fsync_path(self.folder)
        shards.append(
            {
                "file": final.name,
                "bytes": final.stat().st_size,
                "sha256": digest,
                "sequences": len(pending),
                "tokens": sum(lengths),
                "supervised_tokens": int(sum(int(row.sum()) for row in rows)),
                "ids": [name for name, _ in self._pending],
                "lengths": lengths,
                # index of the first label of each sequence (its length: none), so that readers can plan without opening shards
                "first_labels": [int(row.byte().argmax()) + 1 if row.any() else len(row) for row in rows],
            }
        )
        if "top_log_p" in tensors:
            shards[-1]["tail_mass"] = round(float(tail_mass(tensors["top_log_p"]).sum()), 6)  # over its rows
        self._pending, self._pending_tokens = [], 0
        self.write_manifest()

    def write_manifest(self) -> None:
        for key in ("sequences", "tokens", "supervised_tokens"):
            self.manifest[key] = sum(shard[key] for shard in self.manifest["shards"])
        self.manifest["quarantined"] = len(self.quarantined)
        replace_text(self.folder / "manifest.json", json.dumps(self.manifest, ensure_ascii=False))

    def close(self) -> None:
        """Writes what is pending and marks the store as finished."""
        if self._pending:
            self._flush()
        shutil.rmtree(self.writing, ignore_errors=True)
        self.manifest["closed"] = True
        self.write_manifest()


@dataclass
class _Shard:
    """An open shard. Its states stay on disk: slices of `file` read the rows asked for, through a memory map."""

    file: Any  # safe_open handle
    loss_mask_N: Tensor
    offsets: list[int]
    last_offsets: list[int]  # where the stored `last` rows of each sequence begin


class Store(Sequences):
    """Reads a store. Opening it reads the manifest and the sizes of the shards alone; verify=True also hashes every shard.

    lengths: tokens per sequence [S] int64; first_labels: index of the first label of each, its length where it has none;
    ids: names, in the same order. Handles open on first use. Safe to use from several threads.
    """

    def __init__(self, folder: Path, verify: bool = False) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        shards = self.manifest["shards"]
        for shard in shards:
            check_shard(folder, shard, verify)
        self.ids: list[str] = [name for shard in shards for name in shard["ids"]]
        self.lengths = np.array([n for shard in shards for n in shard["lengths"]], dtype=np.int64)
        self.first_labels = np.array([n for shard in shards for n in shard["first_labels"]], dtype=np.int64)
        self._starts = np.cumsum([0, *(shard["sequences"] for shard in shards)])  # first sequence of each shard
        self._open = functools.lru_cache(maxsize=MAX_OPEN_SHARDS)(self._open_shard)

    def __len__(self) -> int:
        return len(self.ids)

    def _open_shard(self, number: int) -> _Shard:
        shard = self.manifest["shards"][number]
        check_shard(self.folder, shard, verify=False)  # a map of a file that shrank would kill the process
        file = safe_open(self.folder / shard["file"], framework="pt")
        offsets_S1, mask_N = file.get_tensor("offsets"), file.get_tensor("loss_mask").bool()
        if offsets_S1.diff().tolist() != shard["lengths"] or len(mask_N) != shard["tokens"]:
            raise ValueError("its offsets are not those of the manifest")
        offsets = offsets_S1.tolist()
        policy = self.manifest["last"]
        if policy == "supervised" or top_k(policy):
            rows = [int(label_rows(mask_N[a:b]).sum()) for a, b in zip(offsets, offsets[1:], strict=False)]
            return _Shard(file, mask_N, offsets, np.cumsum([0, *rows]).tolist())
        return _Shard(file, mask_N, offsets, offsets)

    def close(self) -> None:
        """Closes its shards; they open again on their next use."""
        self._open.cache_clear()

    def tokens(self, i: int, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """Sequence i, its first `stop` tokens: token_ids [T] int64, loss_mask [T] bool. Reads no states."""
        found = self.get(i, (), stop, with_last=False)
        return found["token_ids"], found["loss_mask"]

    def get(self, i: int, taps: tuple[int, ...], stop: int | None = None, with_last: bool = True, micro: int = 0) -> dict[str, Any]:
        """Sequence i, its first `stop` tokens: token_ids [T] int64, loss_mask [T] bool, taps [T, L, D] in the order asked for
        (None for no taps), last [T, D] with zero rows where none is stored (None for policy "none" or with_last=False); states
        in the storage dtype, those of "fp8" in bfloat16; for policy "top<k>" instead of last top_ids int32 and top_log_p float32 [T, C], of
        which only the rows that predict a label say anything. UserError naming shard and sequence where it cannot be read.
        """
        columns = [self.manifest["taps"].index(tap) for tap in taps]
        number = int(np.searchsorted(self._starts, i, side="right")) - 1
        try:
            return self._read(self._open(number), i - int(self._starts[number]), columns, stop, with_last)
        except UserError:
            raise
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            path = self.folder / self.manifest["shards"][number]["file"]
            raise UserError(f"{path}: cannot read sequence {i} ({self.ids[i]}): {error}; {recapture(path)}") from error

    def _read(self, shard: _Shard, k: int, columns: list[int], stop: int | None, with_last: bool) -> dict[str, Any]:
        first, end, dtype = shard.offsets[k], shard.offsets[k + 1], self.manifest["dtype"]
        length = end - first if stop is None else min(end - first, stop)
        mask_T = shard.loss_mask_N[first : first + length].clone()
        ids_T = shard.file.get_slice("token_ids")[first : first + length].long()
        found = document(ids_T, mask_T)
        if columns:
            whole = columns == list(range(len(self.manifest["taps"])))
            slices = [shard.file.get_slice(key) for key in parts("taps", dtype)]
            found["taps"] = unpack_taps([x[first : first + length] if whole else x[first : first + length, columns] for x in slices], dtype)
        if with_last and (kept := self.manifest["last"]) != "none":
            rows_T = torch.ones_like(mask_T) if kept == "all" else label_rows(shard.loss_mask_N[first:end])[:length]
            here = slice(shard.last_offsets[k], shard.last_offsets[k] + int(rows_T.sum()))
            found |= read_rows(lambda key: shard.file.get_slice(key)[here], kept, rows_T, self.manifest["hidden_size"], dtype)
        return found
