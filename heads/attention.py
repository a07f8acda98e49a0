"""The training attention of recurrent heads: causal over depth 0 plus one diagonal per further depth, documents isolated.

Shape suffixes: T packed tokens, S documents, Q longest document, N query heads, M key/value heads, G = N / M, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


class Documents:
    """Index arithmetic of a packed batch: padding to [S, heads, Q, H] for attention, and shifts that never cross a document."""

    def __init__(self, offsets_S1: Tensor, device: torch.device) -> None:
        lengths = offsets_S1.diff()
        self.total, self.longest = int(offsets_S1[-1]), int(lengths.max())
        column = torch.arange(self.longest)
        index_SQ = offsets_S1[:-1, None] + column
        # Right padding needs no mask: a padded key comes after every real query of its document.
        self._pad_SQ = index_SQ.where(column < lengths[:, None], self.total).to(device)
        document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        self._last_T = (offsets_S1[1:][document] - 1).to(device)
        self.positions_T = (torch.arange(self.total) - offsets_S1[:-1][document]).to(device)
        self._unpad_T = (document * self.longest).to(device) + self.positions_T
        self._row_T = torch.arange(self.total, device=device)

    def pad(self, x_T: Tensor) -> Tensor:
        """[T, heads, H] -> [S, heads, Q, H], zeros behind each document."""
        x_T = torch.cat([x_T, x_T.new_zeros(1, *x_T.shape[1:])])
        return x_T[self._pad_SQ].transpose(1, 2).contiguous()

    def unpad(self, x: Tensor) -> Tensor:
        """[S, heads, Q, H] -> [T, heads, H]."""
        return x.transpose(1, 2).flatten(0, 1)[self._unpad_T]

    def shifted(self, by: int) -> tuple[Tensor, Tensor]:
        """(index [T] of the token `by` places later, clamped to the document; whether it lies inside [T] bool)."""
        index = self._row_T + by
        return torch.minimum(index, self._last_T), index <= self._last_T


@dataclass
class KeyValues:
    """Keys and values per depth, each [S, M, Q, H]; entry 0 is the causal part, entry j the diagonal of depth j."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def causal_diagonal_dense(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """The definition, with the whole score matrix: query t of depth k sees depth-0 keys s <= t and key t of depths 1..k.

    q [S, N, Q, H]; keys, values [S, M, Q, H] each. Returns [S, N, Q, H].
    """
    group, length = q.shape[1] // keys[0].shape[1], q.shape[2]
    wide = [[x.repeat_interleave(group, 1) for x in xs] for xs in (keys, values)]
    scores = q @ wide[0][0].transpose(-1, -2) * scale
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    columns = [scores.masked_fill(future, float("-inf"))] + [(q * k).sum(-1, keepdim=True) * scale for k in wide[0][1:]]
    p = torch.cat(columns, -1).float().softmax(-1).to(q.dtype)
    out = p[..., :length] @ wide[1][0]
    for j, v in enumerate(wide[1][1:]):
        out = out + p[..., length + j, None] * v
    return out


class _Merged(torch.autograd.Function):
    """Flash attention over depth 0 merged with the diagonals by log-sum-exp.

    The backward hands the *merged* output O and log-sum-exp L to the flash backward: with P = exp(s - L) and
    delta = sum(dO * O) its formulas are those of the joint softmax, so no derivative of L itself is needed; the
    diagonals use the same L and delta.
    """

    @staticmethod
    def forward(ctx, scale: float, q: Tensor, k0: Tensor, v0: Tensor, *diagonals: Tensor) -> Tensor:  # type: ignore[override]
        group = q.shape[1] // k0.shape[1]
        wide_k, wide_v = k0.repeat_interleave(group, 1), v0.repeat_interleave(group, 1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, wide_k, wide_v, 0.0, True, scale=scale)
        split = q.unflatten(1, (-1, group)).float()  # [S, M, G, Q, H]
        scores = [(split * k[:, :, None]).sum(-1).flatten(1, 2) * scale for k in diagonals[::2]]
        if scores:
            merged = torch.logsumexp(torch.stack([lse, *scores]), 0)
            total = out.float() * (lse - merged).exp()[..., None]
            for s, v in zip(scores, diagonals[1::2], strict=True):
                total += ((s - merged).exp().unflatten(1, (-1, group))[..., None] * v[:, :, None]).flatten(1, 2)
            out, lse = total.to(q.dtype), merged
        ctx.save_for_backward(q, wide_k, wide_v, out, lse, *diagonals, *scores)
        ctx.scale, ctx.group = scale, group
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        q, wide_k, wide_v, out, lse, *rest = ctx.saved_tensors
        count, group, scale = len(rest) // 3, ctx.group, ctx.scale
        diagonals, scores = rest[: 2 * count], rest[2 * count :]
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.contiguous(), q, wide_k, wide_v, out, lse, 0.0, True, scale=scale
        )
        dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
        grads: list[Tensor] = []
        if count:
            split_q, split_g = (x.unflatten(1, (-1, group)).float() for x in (q, grad))
            delta = (grad.float() * out.float()).sum(-1)
            dq = dq.float()
            for s, k, v in zip(scores, diagonals[::2], diagonals[1::2], strict=True):
                p = (s - lse).exp()
                ds = p.unflatten(1, (-1, group)) * ((split_g * v[:, :, None]).sum(-1) - delta.unflatten(1, (-1, group))) * scale
                dq += (ds[..., None] * k[:, :, None]).flatten(1, 2)
                grads.append((ds[..., None] * split_q).sum(2).to(k.dtype))
                grads.append((p.unflatten(1, (-1, group))[..., None] * split_g).sum(2).to(v.dtype))
        return None, dq.to(q.dtype), dk, dv, *grads


def causal_diagonal(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """Attention of the deepest entry's queries; see `causal_diagonal_dense` for shapes. Exact on every path."""
    if q.device.type != "cpu":
        return causal_diagonal_dense(q, keys, values, scale)
    diagonals = [x for pair in zip(keys[1:], values[1:], strict=True) for x in pair]
    return _Merged.apply(scale, q, keys[0], values[0], *diagonals)
