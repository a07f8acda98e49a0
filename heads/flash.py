"""Attention over depth 0 by torch's flash kernels: outputs with their log-sum-exp, and gradients for a softmax that has more columns.

The backward of a flash kernel works out P = exp(s - L) and delta = sum(dO * O) from the output O and the log-sum-exp L that it is given.
Given those of a softmax over more columns, it returns that softmax's gradients for the columns it knows; so parts can be merged.

A document's rows ask from the span [first, end), and see two parts of depth 0: causally the span itself, and all of [start, first).
Neither asks how a kernel aligns its causal mask where queries and keys differ in number, in which CUDA and ROCm differ.

Shape suffixes: T packed tokens, S spans, R rows with queries, E rows of all spans, those in their gaps too, N query heads, M key/value
heads, G = N / M, H head size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from heads.kernels import wide

if TYPE_CHECKING:
    from heads.attention import Rows


class Kernel(Protocol):
    """Attention of the queries q [R, N, H] at `rows` over depth 0, k0 and v0 [T, M, H]."""

    def forward(self, q: Tensor, k0: Tensor, v0: Tensor, rows: Rows, scale: float) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Output [R, M, G, H] and log-sum-exp [R, M, G], at least in float32, and what the backward wants to have kept."""
        ...

    def backward(  # noqa: PLR0913
        self, grad: Tensor, q: Tensor, k0: Tensor, v0: Tensor, out: Tensor, lse: Tensor, kept: list[Tensor], rows: Rows, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q [R, M, G, H], at least in float32, of k0 and v0 [T, M, H]. grad, out [R, N, H] and lse [R, M, G]: of the whole
        softmax."""
        ...


def split(x: Tensor, k0: Tensor) -> Tensor:
    """[R, N, H] -> [R, M, G, H], at least in float32."""
    return wide(x.unflatten(1, (k0.shape[1], -1)))


def grouped(x: Tensor, group: int) -> Tensor:
    """Keys [Q, M, H] as [M, G, Q, H], without a copy."""
    return x.transpose(0, 1)[:, None].expand(-1, group, -1, -1)


class PerDocument:
    """On a CPU: a call per document and part. Where rows of a span were left out, its mask is spelt out, and for nothing before it."""

    def forward(self, q: Tensor, k0: Tensor, v0: Tensor, rows: Rows, scale: float) -> tuple[Tensor, Tensor, list[Tensor]]:
        group = q.shape[1] // k0.shape[1]
        out = split(q, k0).new_empty(len(q), k0.shape[1], group, q.shape[2])
        lse = out.new_empty(out.shape[:3])
        for here, parts in self._parts(rows, q.dtype):
            queries = q[here].unflatten(1, (-1, group)).permute(1, 2, 0, 3)
            found = [
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    queries, grouped(k0[keys], group), grouped(v0[keys], group), 0.0, causal, attn_mask=mask, scale=scale
                )
                for keys, causal, mask in parts
            ]
            mixed, merged = found[0]
            if len(found) == 2:
                merged = torch.logaddexp(found[0][1], found[1][1])
                mixed = sum(((x * (part - merged).exp_()[..., None]) for x, part in found), torch.zeros_like(merged)[..., None])
            out[here], lse[here] = mixed.permute(2, 0, 1, 3), merged.permute(2, 0, 1)
        return out, lse, []

    def backward(  # noqa: PLR0913
        self, grad: Tensor, q: Tensor, k0: Tensor, v0: Tensor, out: Tensor, lse: Tensor, kept: list[Tensor], rows: Rows, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[1] // k0.shape[1]
        dq = split(q, k0).new_zeros(len(q), k0.shape[1], group, q.shape[2])
        dk, dv = torch.zeros_like(k0), torch.zeros_like(v0)
        for here, parts in self._parts(rows, q.dtype):
            g, queries, o = (x[here].unflatten(1, (-1, group)).permute(1, 2, 0, 3) for x in (grad, q, out))
            for keys, causal, mask in parts:
                k, v, total = grouped(k0[keys], group), grouped(v0[keys], group), lse[here].permute(1, 2, 0)
                found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    g, queries, k, v, o, total, 0.0, causal, attn_mask=mask, scale=scale
                )
                dq[here] += found[0].permute(2, 0, 1, 3)
                dk[keys], dv[keys] = (x.sum(1).transpose(0, 1) for x in found[1:])
        return dq, dk, dv

    @staticmethod
    def _parts(rows: Rows, dtype: torch.dtype):
        """Per document: its rows among the queries, and the parts of depth 0 that they see: (keys, whether causal, mask or None)."""
        for here, (start, first, end) in rows.parts():
            inner: tuple[slice, bool, Tensor | None] = (slice(first, end), True, None)
            if here.stop - here.start < end - first:
                future = torch.arange(first - start, end - start, device=rows.positions_R.device) > rows.positions_R[here][:, None]
                inner = (slice(first, end), False, torch.zeros(future.shape, dtype=dtype).masked_fill_(future, float("-inf"))[None, None])
            yield here, [inner] + ([(slice(start, first), False, None)] if first > start else [])


@dataclass
class Ragged:
    """One part of all documents at once. asks: which of the E rows ask, None for all; keys: the rows of depth 0 that they see, None for
    all T; then the first row of each sequence among these, and the end of the last, int32 both, and the longest of each."""

    asks: Tensor | None
    keys: Tensor | None
    starts_q: Tensor
    starts_k: Tensor
    longest_q: int
    longest_k: int
    causal: bool
    padded: bool = False  # whether the kernel's log-sum-exp is [S, N, longest_q], as ROCm's is, instead of [N, Q]: its forward shows it

    @classmethod
    def of(cls, asks: Tensor | None, keys: Tensor | None, asked: list[int], seen: list[int], device: torch.device) -> Ragged:
        """asked, seen: rows and keys of each sequence."""
        starts_q, starts_k = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32).to(device) for x in (asked, seen))
        return cls(asks, keys, starts_q, starts_k, max(asked), max(seen), causal=asks is None)

    @property
    def bounds(self) -> tuple[Tensor, Tensor, int, int]:
        return self.starts_q, self.starts_k, self.longest_q, self.longest_k

    def by_row(self, lse: Tensor, rows: int) -> Tensor:
        """A kernel's log-sum-exp as [Q, N]."""
        self.padded = lse.dim() == 3
        if not self.padded:
            return lse.T
        sequence, place = self._places(rows)
        return lse[sequence, :, place]

    def for_kernel(self, lse: Tensor) -> Tensor:
        """What by_row undoes."""
        if not self.padded:
            return lse.T.contiguous()
        sequence, place = self._places(len(lse))
        padded = lse.new_zeros(len(self.starts_q) - 1, lse.shape[1], self.longest_q)
        padded[sequence, :, place] = lse
        return padded

    def _places(self, rows: int) -> tuple[Tensor, Tensor]:
        lengths = self.starts_q.diff()
        sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths, output_size=rows)
        return sequence, torch.arange(rows, device=lengths.device) - self.starts_q[sequence]


@dataclass
class Layout:
    """gaps: where the R rows lie among the E of their spans; None where these have no gaps, so that E = R. parts: none without rows."""

    gaps: Tensor | None
    size: int  # E
    parts: list[Ragged]

    @classmethod
    def of(cls, rows: Rows) -> Layout:
        device, lengths = rows.index_R.device, [end - first for _, first, end in rows.spans]
        ends = list(itertools.accumulate(lengths))
        if not ends:
            return cls(None, 0, [])
        keys = None if ends[-1] == rows.total else _index([(first, end) for _, first, end in rows.spans], device)
        parts = [Ragged.of(None, keys, lengths, lengths, device)]
        before = [i for i, (start, first, _) in enumerate(rows.spans) if first > start]
        if before:
            sees = [rows.spans[i][:2] for i in before]
            asks, keys = _index([(ends[i] - lengths[i], ends[i]) for i in before], device), _index(sees, device)
            parts.append(Ragged.of(asks, keys, [lengths[i] for i in before], [b - a for a, b in sees], device))
        gaps = None
        if len(rows.index_R) < ends[-1]:
            shift = torch.tensor([end - last for end, (_, _, last) in zip(ends, rows.spans, strict=True)])
            gaps = rows.index_R + torch.repeat_interleave(shift, torch.tensor(rows.counts)).to(device)
        return cls(gaps, ends[-1], parts)

    def spread(self, x: Tensor) -> Tensor:
        """x [R, ...] as [E, ...], zeros in the gaps."""
        return x if self.gaps is None else x.new_zeros(self.size, *x.shape[1:]).index_copy_(0, self.gaps, x)

    def gather(self, x: Tensor) -> Tensor:
        """What spread undoes."""
        return _take(x, self.gaps)


def _take(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, index)


def _index(spans: list[tuple[int, int]], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(a, b) for a, b in spans]).to(device)


class Varlen:
    """On CUDA and ROCm, in bfloat16 or float16: a call per part for all documents. Rows that were left out of a span ask with zeros."""

    @staticmethod
    def takes(q: Tensor, rows: Rows) -> bool:
        """Whether the kernels know the dtype and head size, and rows ascend (nodes of a draft tree are one row many times)."""
        fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] % 8 == 0 and q.shape[2] <= 256
        return fits and all(count <= end - first for count, (_, first, end) in zip(rows.counts, rows.spans, strict=True))

    def forward(self, q: Tensor, k0: Tensor, v0: Tensor, rows: Rows, scale: float) -> tuple[Tensor, Tensor, list[Tensor]]:
        layout, found = rows.layout, []
        wide_q = layout.spread(q)
        for part in layout.parts:
            queries, k, v = (_take(x, index) for x, index in ((wide_q, part.asks), (k0, part.keys), (v0, part.keys)))
            out, lse = self.call(queries, k, v, part, scale)
            found.append((wide(out), part.by_row(lse, len(queries))))
        if not found:
            out = split(q, k0).clone()
            return out, out[..., 0], []
        (out, lse), asks = found[0], layout.parts[-1].asks
        if asks is not None:
            own, (other, other_lse) = _take(lse, asks), found[1]
            merged = torch.logaddexp(own, other_lse)
            mixed = _take(out, asks) * (own - merged).exp_()[..., None] + other * (other_lse - merged).exp_()[..., None]
            out, lse = out.index_copy(0, asks, mixed), lse.index_copy(0, asks, merged)
        return split(layout.gather(out), k0), layout.gather(lse).unflatten(1, (k0.shape[1], -1)), []

    def backward(  # noqa: PLR0913
        self, grad: Tensor, q: Tensor, k0: Tensor, v0: Tensor, out: Tensor, lse: Tensor, kept: list[Tensor], rows: Rows, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        layout = rows.layout
        wide = [layout.spread(x.contiguous()) for x in (grad, q, out, lse.flatten(1))]
        dq, dk, dv = split(q, k0).new_zeros(layout.size, *q.shape[1:]), torch.zeros_like(k0), torch.zeros_like(v0)
        for part in layout.parts:
            g, queries, o, stats = (_take(x, part.asks) for x in wide)
            k, v = _take(k0, part.keys), _take(v0, part.keys)
            found = self.call_backward(g, queries, k, v, o, part.for_kernel(stats), part, scale)
            for total, x, index in zip((dq, dk, dv), found, (part.asks, part.keys, part.keys), strict=True):
                if index is None:
                    total += x
                else:
                    total.index_add_(0, index, x.to(total.dtype))
        return split(layout.gather(dq), k0), dk, dv

    def call(self, q: Tensor, k: Tensor, v: Tensor, part: Ragged, scale: float) -> tuple[Tensor, Tensor]:
        """Output like q, and the log-sum-exp in the kernel's own layout."""
        return torch.ops.aten._flash_attention_forward(q, k, v, *part.bounds, 0.0, part.causal, False, scale=scale)[:2]

    def call_backward(  # noqa: PLR0913
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Ragged, scale: float
    ) -> tuple[Tensor, ...]:
        """Gradients like q, k and v."""
        dropout = (torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device))  # its state: there is none
        return torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse, *part.bounds, 0.0, part.causal, *dropout, scale=scale)
