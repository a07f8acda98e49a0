"""What batches are made of: numbered sequences of tokens with the target's states, from wherever these come.

Shape suffixes: T tokens of a sequence, S sequences.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

TOP = ("top_ids", "top_log_p")  # of a document, where its teacher is the likeliest tokens


def document(token_ids_T: Tensor, loss_mask_T: Tensor) -> dict[str, Any]:
    """What Sequences.get returns, without any states yet."""
    return {"token_ids": token_ids_T, "loss_mask": loss_mask_T, "taps": None, "last": None, **dict.fromkeys(TOP), "kv": []}


class Sequences:
    """lengths: tokens [S] int64; first_labels: index of the first label of each, its length where it has none; ids: in the same order."""

    folder: Path  # names them in messages
    manifest: dict[str, Any]  # at least target and supervised_tokens
    ids: list[str]
    lengths: np.ndarray
    first_labels: np.ndarray

    def contents(self) -> dict[str, Any]:
        """What there is to read, in short: another digest is other sequences, or another order of them."""
        digest = hashlib.sha256("\n".join(self.ids).encode())
        for numbers in (self.lengths, self.first_labels):
            digest.update(numbers.tobytes())
        return {"sequences": len(self), "supervised_tokens": self.manifest["supervised_tokens"], "digest": digest.hexdigest()}

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self, i: int, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """Sequence i, its first `stop` tokens: token_ids [T] int64, loss_mask [T] bool."""
        raise NotImplementedError

    def get(self, i: int, taps: tuple[int, ...], stop: int | None = None, with_last: bool = True, micro: int = 0) -> dict[str, Any]:
        """Sequence i with its states, as Store.get says, and `kv` (see heads.base.Batch; empty where none is worked out). micro: the
        micro-batch that it is read for, for which `ready` was asked."""
        raise NotImplementedError

    def ready(self, reads: list[tuple[int, int]]) -> bool:
        """Whether `get` has these (micro-batch, i) already; only a window may have to wait for them."""
        return True

    def saved(self, micro: int, end: int) -> None:
        """The training will never again read for micro-batches before `micro`, and ends before `end`. On every rank."""
