"""The teacher: the target's distribution of the next token over the draft vocabulary, from its last state or from its likeliest tokens.

From the state it is the softmax over the draft vocabulary. Of likeliest tokens S the probabilities p are known and so the mass of all
others, the tail t = 1 - p(S); it is spread evenly over the V - C others, and of the whole the part in the draft vocabulary is
renormalised, as by the softmax. With a the mass of those of S in the draft vocabulary, the total variation between the two is at most
t / (a + t), for on these tokens they agree but for a factor: at most t over the whole vocabulary, and less where the tail is even.
For KL(q || p) and the like no token has probability 0.

Shape suffixes: T packed tokens, L label positions, C likeliest tokens, U draft vocab, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.base import Batch
from heads.kernels import fused, softcapped, wide
from heads.objectives import logsumexp

LEAST_TAIL = 1e-9  # where rounding leaves none, a draft vocabulary without any of S must still have a distribution

Teacher = tuple[Tensor, Tensor]  # the target's probabilities [L, U] and sum p log p [L]


@dataclass
class Top:
    """The target's likeliest tokens after each position, the likeliest first."""

    place_TC: Tensor  # int64: their indices into the draft vocabulary, -1 where it lacks one
    log_p_TC: Tensor  # over the whole vocabulary, at least float32
    vocab_size: int  # V


def teacher_of(batch: Batch, vocab_size: int, draft_index: Callable[[Tensor], Tensor] | None = None) -> Tensor | Top:
    """What the batch has of the target's distributions: its likeliest tokens, else its last states [T, D]. draft_index: from target ids to
    indices into the draft vocabulary; None: it is the whole one."""
    if batch.top_ids_TC is not None and batch.top_log_p_TC is not None:
        ids_TC = batch.top_ids_TC.long()
        return Top(ids_TC if draft_index is None else draft_index(ids_TC), batch.top_log_p_TC, vocab_size)
    assert batch.last_TD is not None
    return batch.last_TD


@fused
def from_logits(logits_LU: Tensor, softcap: float | None, p_LU: Tensor, spare_LU: Tensor | None) -> Tensor:
    """Writes the probabilities into p_LU; returns sum p log p [L]."""
    z_LU = softcapped(wide(logits_LU), softcap)
    torch.softmax(z_LU, -1, out=p_LU)
    return torch.mul(p_LU, z_LU, out=spare_LU).sum(-1) - logsumexp(z_LU, p_LU)


def from_top(top: Top, position_L: Tensor, p_LU: Tensor) -> Tensor:
    """As from_logits, of the tokens stored at these positions."""
    place_LC, p_LC = top.place_TC[position_L], top.log_p_TC[position_L].to(p_LU.dtype).exp()
    there_LC, others = place_LC >= 0, top.vocab_size - p_LC.shape[1]
    tail_L1 = (1 - p_LC.sum(-1, keepdim=True)).clamp(min=LEAST_TAIL)
    even_L1 = tail_L1 / others if others else torch.zeros_like(tail_L1)
    more_LC = torch.where(there_LC, p_LC - even_L1, 0)
    whole_L1 = p_LU.shape[1] * even_L1 + more_LC.sum(-1, keepdim=True)
    p_LU.copy_(even_L1 / whole_L1).scatter_add_(1, place_LC.clamp(min=0), more_LC / whole_L1)
    kept_LC, even_L = torch.where(there_LC, p_LC / whole_L1, 0), (even_L1 / whole_L1).squeeze(1)
    return torch.xlogy(kept_LC, kept_LC).sum(-1) + (p_LU.shape[1] - there_LC.sum(-1)) * torch.xlogy(even_L, even_L)
