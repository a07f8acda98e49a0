"""Answers whose states are worked out when they are asked for: nothing is stored. For targets small enough to run beside the training.

Shape suffixes: T tokens of a sequence, S sequences, L taps, D hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.answers import asked_answers, cut_answers, mask_of
from data.errors import UserError
from data.forward import Forward
from data.sequences import Sequences, document
from data.states import label_rows


class Answers(Sequences):
    """The answers in a file that were asked for, in its order, cut to max_length tokens; those without a supervised token within are left
    out, as capture does. others: how many more there are in the file.

    forward: works out the states, whose taps it was made with; None where no state is read. last: the policy of a store ("none",
    "supervised", "all"; "top<k>" without a `forward` alone). maker: what data.identity says of the target. kv_layers: see
    heads.base.DraftHead. UserError: no answer is left.
    """

    def __init__(
        self, path: Path, max_length: int, forward: Forward | None, last: str, maker: dict[str, Any], kv_layers: tuple[int, ...] = ()
    ) -> None:
        self.folder, self.forward, self.last, self.kv_layers = path, forward, last, kv_layers
        answers, self.others = asked_answers(path)
        kept = cut_answers(answers, max_length, path)
        self.ids = [s["id"] for s in kept]
        self._tokens = [np.array(s["token_ids"], dtype=np.int32) for s in kept]
        self._spans = [s["spans"] for s in kept]
        self.lengths = np.array([len(x) for x in self._tokens], dtype=np.int64)
        rows = [label_rows(self.tokens(i)[1]) for i in range(len(kept))]
        self.first_labels = np.array([int(x.byte().argmax()) + 1 if x.any() else len(x) for x in rows], dtype=np.int64)
        self.manifest = {**maker, "supervised_tokens": sum(int(x.sum()) for x in rows)}

    def tokens(self, i: int, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """As Store.tokens."""
        ids = self._tokens[i]
        return torch.from_numpy(ids[:stop]).long(), torch.tensor(mask_of(self._spans[i], len(ids)))[:stop]

    def get(self, i: int, taps: tuple[int, ...], stop: int | None = None, with_last: bool = True, micro: int = 0) -> dict[str, Any]:
        """As Store.get, on the CPU, in the target's dtype. UserError: a state that is NaN or Inf."""
        ids_T, mask_T = self.tokens(i, stop)
        found = document(ids_T, mask_T)
        if self.forward is None:
            assert not taps and self.last == "none" and not self.kv_layers, "no states without the target"
            return found
        columns = [self.forward.taps.index(tap) for tap in taps]
        if self.kv_layers:
            streams_TLD, last_TD, kv = self.forward.states_and_kv(ids_T, self.kv_layers)
            found["kv"] = [x.cpu() for x in kv]
        else:
            streams_TLD, last_TD = self.forward.states(ids_T)
        if columns:
            found["taps"] = streams_TLD[:, columns].cpu()
        if with_last and self.last != "none":
            found["last"] = last_TD.cpu()
            if self.last == "supervised":  # zero rows as in a store that holds no others
                found["last"][~label_rows(self.tokens(i)[1])[: len(ids_T)]] = 0
        for key in ("taps", "last", "kv"):
            parts = found["kv"] if key == "kv" else [found[key]]
            if not all(x is None or x.isfinite().all() for x in parts):
                raise UserError(f"{self.folder}: NaN or Inf in {key} of {self.ids[i]}: delete its line, or set target.dtype=float32")
        return found
