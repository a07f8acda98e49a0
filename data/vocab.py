"""Draft vocabularies: which target tokens a head with a reduced output layer may propose.

Shape suffixes: V vocab, U draft vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from data.errors import UserError
from data.manifest import anew
from data.sequences import Sequences


def count_supervised(store: Sequences, vocab_size: int) -> Tensor:
    """How often each token is a label in the store [V] int64. The first token of a sequence is never one: no state predicts it."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for i in range(len(store)):
        ids_T, mask_T = store.tokens(i)
        labels = ids_T[1:][mask_T[1:]]
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < vocab_size:
            raise UserError(
                f"{store.folder}: sequence {i} ({store.ids[i]}) holds token {int(labels.max())}, beyond the target's {vocab_size}; "
                f"the store comes from another target. {anew()}"
            )
        counts_V += torch.bincount(labels, minlength=vocab_size)
    return counts_V


def draft_vocab(counts_V: Tensor, size: int, keep: Sequence[int] = ()) -> Tensor:
    """Exactly `size` target ids, sorted [U] int64: those in `keep`, then the most counted; ties go to the lower id.

    Never cached by path: the ids belong to the run that counted them. UserError for a size that cannot be met.
    """
    kept = torch.tensor(sorted(set(keep)), dtype=torch.int64)
    if not max(1, len(kept)) <= size <= len(counts_V):
        raise UserError(f"a draft vocabulary of {size} tokens: it must be between {max(1, len(kept))} and the target's {len(counts_V)}")
    if len(kept) and not 0 <= int(kept[0]) <= int(kept[-1]) < len(counts_V):
        raise UserError(f"tokens kept in the draft vocabulary must lie in 0..{len(counts_V) - 1}, got {kept.tolist()}")
    rank_V = counts_V.to(torch.int64, copy=True)
    rank_V[kept] = torch.iinfo(torch.int64).max
    return rank_V.sort(descending=True, stable=True).indices[:size].sort().values


def coverage(counts_V: Tensor, draft_ids_U: Tensor) -> float:
    """Share of the counted labels that a draft vocabulary holds: the ceiling it sets on acceptance. 0.0 where nothing was counted."""
    return float(counts_V[draft_ids_U].sum()) / max(1, int(counts_V.sum()))
