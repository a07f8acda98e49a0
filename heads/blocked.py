"""Attention over depth 0 on a CPU that keeps its probabilities for the backward, which torch's flash kernel makes again: half its time, for
memory that grows with the square of a document's length; so for documents up to LONGEST alone.

As in transformers' eager attention, scores leave their product in bfloat16, and their softmax is float32's.

Shape suffixes: T packed tokens, R rows with queries, Q rows of one block, N query heads, M key/value heads, G = N / M, H head size, S keys
that a block sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heads.kernels import compiling, fused, wide

if TYPE_CHECKING:
    from heads.attention import Rows

BLOCK = 128  # rows: what an element-wise pass touches stays in cache, and the keys that a block's first rows do not see cost little
COMPILED_BLOCK = 256  # a compiled pass goes row by row
LONGEST = 1024  # tokens of a document: at most LONGEST * N bytes a row are kept


@fused
def _probabilities(scores: Tensor, scale: float) -> Tensor:
    """Writes softmax(scale * scores) [*, S] over the scores; returns its log-sum-exp [*]."""
    z = wide(scores) * scale
    top = z.amax(-1, keepdim=True)
    e = (z - top).exp_()
    total = e.sum(-1, keepdim=True)
    scores.copy_(e / total)
    return (top + total.log()).squeeze(-1)


@fused
def _score_gradients(p: Tensor, dp: Tensor, delta: Tensor, factor: Tensor) -> None:
    """Writes factor * p * (dp - delta) over dp [*, S]."""
    dp.copy_(wide(p) * (wide(dp) - delta[..., None]) * factor[..., None])


Block = tuple[slice, slice, Tensor]


class Blocked:
    """See heads.flash.Kernel. Kept: the log-sum-exp of depth 0 [M, R, G] and per block its probabilities [M, Q G, S]."""

    @staticmethod
    def takes(q: Tensor, rows: Rows) -> bool:
        return q.dtype == torch.bfloat16 and all(end - start <= LONGEST for start, _, end in rows.spans)

    def forward(self, q: Tensor, k0: Tensor, v0: Tensor, rows: Rows, scale: float) -> tuple[Tensor, Tensor, list[Tensor]]:
        q, k, v = _by_head(q, k0), k0.transpose(0, 1).contiguous(), v0.transpose(0, 1).contiguous()
        out, lse, kept = torch.empty_like(q), wide(q).new_empty(q.shape[:3]), []
        for block, keys, hidden_Q1S in rows.blocks:
            p = torch.bmm(_flat(q[:, block]), k[:, keys].transpose(1, 2))
            p[..., p.shape[2] - hidden_Q1S.shape[2] :].unflatten(1, (-1, q.shape[2])).masked_fill_(hidden_Q1S, float("-inf"))
            lse[:, block] = _probabilities(p, scale).unflatten(1, (-1, q.shape[2]))
            out[:, block] = torch.bmm(p, v[:, keys]).view_as(out[:, block])
            kept.append(p)
        return wide(out).transpose(0, 1).contiguous(), lse.transpose(0, 1).contiguous(), [lse, *kept]

    def backward(  # noqa: PLR0913
        self, grad: Tensor, q: Tensor, k0: Tensor, v0: Tensor, out: Tensor, lse: Tensor, kept: list[Tensor], rows: Rows, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        (q, grad, out), (k, v) = (_by_head(x, k0) for x in (q, grad, out)), (x.transpose(0, 1).contiguous() for x in (k0, v0))
        share = (kept[0] - lse.transpose(0, 1)).exp_()  # of depth 0 in the whole softmax
        delta = (wide(grad) * wide(out)).sum(-1)
        of_values = (grad * share[..., None]).to(grad.dtype)
        dq, dk, dv = torch.empty_like(q), wide(k).new_zeros(k.shape), wide(v).new_zeros(v.shape)
        for (block, keys, _), p in zip(rows.blocks, kept[1:], strict=True):
            ds = torch.bmm(_flat(grad[:, block]), v[:, keys].transpose(1, 2))
            _score_gradients(p, ds, delta[:, block].flatten(1), share[:, block].flatten(1) * scale)
            dq[:, block] = torch.bmm(ds, k[:, keys]).view_as(dq[:, block])
            dk[:, keys] += torch.bmm(ds.transpose(1, 2), _flat(q[:, block]))
            dv[:, keys] += torch.bmm(p.transpose(1, 2), _flat(of_values[:, block]))
        return wide(dq).transpose(0, 1).contiguous(), dk.transpose(0, 1).to(k0.dtype), dv.transpose(0, 1).to(v0.dtype)


def _by_head(x: Tensor, k0: Tensor) -> Tensor:
    """[R, N, H] -> [M, R, G, H]."""
    return x.unflatten(1, (k0.shape[1], -1)).transpose(0, 1).contiguous()


def _flat(x: Tensor) -> Tensor:
    """[M, Q, G, H] -> [M, Q G, H], without a copy."""
    return x.flatten(1, 2)


def blocks(rows: Rows) -> list[Block]:
    """Its rows, the keys that its last one sees, and of these, from the first that its first row does not see, which are hidden from each
    row [Q, 1, *] bool."""
    found, size = [], COMPILED_BLOCK if compiling() else BLOCK
    for here, (start, _, _) in rows.parts():
        for first in range(here.start, here.stop, size):
            block = slice(first, min(first + size, here.stop))
            seen = rows.positions_R[block] + 1
            low, high = int(seen[0]), int(seen[-1])
            found.append((block, slice(start, start + high), torch.arange(low, high) >= seen[:, None, None]))
    return found
