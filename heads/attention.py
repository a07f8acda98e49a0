"""The training attention of heads that draft from every row: causal over depth 0 plus one diagonal per further depth, documents isolated.

Shape suffixes: T packed tokens, S documents, R rows with queries, Q rows of one document, N query heads, M key/value heads,
G = N / M, H head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from heads.blocked import Block, Blocked, blocks
from heads.flash import Kernel, Layout, PerDocument, Varlen, split
from heads.kernels import fused, rounded

Pair = tuple[Tensor, Tensor]  # keys, values [*, M, H]


class _Take(torch.autograd.Function):
    """x[index], each row at most once: then the backward writes where indexing's own adds, six times slower on a CPU."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x[index]

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad), None


@dataclass
class Rows:
    """Rows of some documents, ascending. spans: (start of the document, first row, row after the last), places in the pack;
    counts: how many rows of each span are among these: all, unless some were left out."""

    spans: list[tuple[int, int, int]]
    counts: list[int]
    index_R: Tensor  # their places in the pack
    host_R: Tensor  # the same on the CPU
    positions_R: Tensor  # in their documents
    total: int  # T

    def of(self, x_T: Tensor) -> Tensor:
        """These rows of x_T [T, ...]. Its gradient takes it that none of them is there twice."""
        return x_T if len(self.index_R) == self.total else _Take.apply(x_T, self.index_R)

    def place(self, index: Tensor) -> Tensor:
        """Where rows of the pack lie among these; -1 for those that do not, and for -1."""
        place_T1 = torch.full((self.total + 1,), -1, device=index.device)
        place_T1[self.index_R] = torch.arange(len(self.index_R), device=index.device)
        return place_T1[index]

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self)

    @cached_property
    def blocks(self) -> list[Block]:
        return blocks(self)

    def parts(self) -> Iterator[tuple[slice, tuple[int, int, int]]]:
        """Per span: where its rows lie among these, and the span."""
        done = 0
        for span, count in zip(self.spans, self.counts, strict=True):
            yield slice(done, done + count), span
            done += count


class Documents:
    """Index arithmetic of a packed batch. `every`: all its rows; `needed`: those whose output is read, all until `need` says less."""

    def __init__(self, offsets_S1: Tensor, device: torch.device) -> None:
        self._starts, ends = offsets_S1[:-1].tolist(), offsets_S1[1:]
        document = torch.repeat_interleave(torch.arange(len(ends)), offsets_S1.diff())
        self._ends, self._document_T, self._device = ends.tolist(), document, device
        self._last_T = (ends[document] - 1).to(device)
        self._row_T = torch.arange(len(document), device=device)
        self.positions_T = self._row_T - offsets_S1[:-1][document].to(device)
        self.every = self._rows([(start, start, end) for start, end in zip(self._starts, self._ends, strict=True)])
        self.needed = self.every

    def shifted(self, by: int) -> tuple[Tensor, Tensor]:
        """(index [T] of the token `by` places later, clamped to the document; whether it lies inside [T] bool)."""
        index = self._row_T + by
        return torch.minimum(index, self._last_T), index <= self._last_T

    def need(self, rows: Tensor) -> None:
        """From now on the outputs at `rows` (places in the pack, any shape, negative ones ignored) are all that is read.

        Kept is one span a document, from its first such row to its last: what lies between is computed too, and beside them as many more
        as make their number one that products of matrices like (see heads.kernels.rounded), as far as these documents have them.
        """
        index = rows[rows >= 0].cpu()
        document = self._document_T[index]
        first_S = torch.full((len(self._starts),), len(self._document_T)).scatter_reduce(0, document, index, "amin")
        last_S = torch.full((len(self._starts),), -1).scatter_reduce(0, document, index, "amax")
        bounds = zip(self._starts, first_S.tolist(), last_S.tolist(), self._ends, strict=True)
        spans = [(start, first, last + 1, end) for start, first, last, end in bounds if last >= 0]
        count = sum(last - first for _, first, last, _ in spans)
        short = rounded(count) - count
        for i, (start, first, last, end) in enumerate(spans):
            after = min(short, end - last)
            before = min(short - after, first - start)
            spans[i], short = (start, first - before, last + after, end), short - after - before
        self.needed = self._rows([span[:3] for span in spans])

    def keep(self, keep_T: Tensor) -> None:
        """Of the needed rows those alone where keep_T [T] bool, on the CPU, is set, wherever they lie, and as many more as `need` says."""
        spans, parts, dropped = [], [], self.needed.host_R[~keep_T[self.needed.host_R]]
        count = len(self.needed.host_R) - len(dropped)
        keep_T = keep_T.index_fill(0, dropped[: rounded(count) - count], True)  # noqa: FBT003
        for start, first, end in self.needed.spans:
            part = keep_T[first:end].nonzero().squeeze(1) + first
            if len(part):
                spans.append((start, int(part[0]), int(part[-1]) + 1))
                parts.append(part)
        self.needed = self._rows(spans, parts)

    def repeat(self, row: int, count: int) -> None:
        """From now on one row alone, so many times: nodes of a draft tree, each with the diagonals of its own path."""
        start = self._starts[int(self._document_T[row])]
        self.needed = self._rows([(start, row, row + 1)], [torch.full((count,), row)])

    def _rows(self, spans: list[tuple[int, int, int]], parts: list[Tensor] | None = None) -> Rows:
        """parts: the rows of each span, all where not given."""
        parts = [torch.arange(first, end) for _, first, end in spans] if parts is None else parts
        host_R = torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)
        index_R = host_R.to(self._device)
        return Rows(spans, [len(part) for part in parts], index_R, host_R, self.positions_T[index_R], len(self._document_T))


@dataclass
class KeyValues:
    """Keys and values per depth: entry 0 [T, M, H] is the causal part, entry j [R, M, H] the diagonal of depth j."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def keep(self, index: Tensor) -> None:
        """Of the diagonals' rows those alone at `index`."""
        for kept in (self.keys, self.values):
            kept[1:] = [x[index] for x in kept[1:]]


def causal_diagonal_dense(q: Tensor, keys: list[Tensor], values: list[Tensor], rows: Rows, scale: float) -> Tensor:
    """The definition, with the whole score matrix of each document: the query of row t at depth k sees the depth-0 keys of rows
    s <= t of its document, and the keys of row t at depths 1..k.

    q [R, N, H] at `rows`; keys, values: the causal part [T, M, H], then [R, M, H] each. Returns [R, N, H].
    """
    group, out = q.shape[1] // keys[0].shape[1], []
    for here, (start, _, end) in rows.parts():
        part = [[xs[0][start:end], *(x[here] for x in xs[1:])] for xs in (keys, values)]
        wide_k, wide_v = ([x.repeat_interleave(group, 1) for x in xs] for xs in part)
        future = torch.arange(end - start, device=q.device) > rows.positions_R[here][:, None]
        scores = (torch.einsum("qnh,snh->nqs", q[here], wide_k[0]) * scale).masked_fill(future, float("-inf"))
        columns = [scores] + [((q[here] * k).sum(-1) * scale).T[..., None] for k in wide_k[1:]]
        p = torch.cat(columns, -1).softmax(-1, torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        mixed = torch.einsum("nqs,snh->qnh", p[..., : end - start], wide_v[0])
        out.append(sum((p[..., end - start + j].T[..., None] * v for j, v in enumerate(wide_v[1:])), mixed))
    return torch.cat(out) if out else q


@fused
def _diagonal_scores(queries: Tensor, k: Tensor, scale: float) -> Tensor:
    return (queries * k[:, :, None]).sum(-1) * scale


@fused
def _add_diagonal(out: Tensor, scores: Tensor, lse: Tensor, v: Tensor) -> None:
    out.addcmul_((scores - lse).exp_()[..., None], v[:, :, None])


@fused
def _diagonal_backward(dq: Tensor, q: Tensor, grad: Tensor, kv: Pair, of_row: tuple[Tensor, Tensor, Tensor], scale: float) -> Pair:
    """Adds to dq what one diagonal gives; returns the gradients of its keys and values. of_row: its scores, the log-sum-exp, delta."""
    (k, v), (scores, lse, delta) = kv, of_row
    p = (scores - lse).exp_()
    ds = p * ((grad * v[:, :, None]).sum(-1) - delta) * scale
    dq.addcmul_(ds[..., None], k[:, :, None])
    return (ds[..., None] * q).sum(2).to(k.dtype), (p[..., None] * grad).sum(2).to(v.dtype)


class _Merged(torch.autograd.Function):
    """A kernel's attention over depth 0 merged with the diagonals by log-sum-exp.

    The backward hands the *merged* output O and log-sum-exp L to the flash backward (see heads/flash.py), so no derivative of L itself
    is needed; the diagonals use the same L and delta.
    """

    @staticmethod
    def forward(ctx, kernel: Kernel, scale: float, rows: Rows, q: Tensor, k0: Tensor, v0: Tensor, *diagonals: Tensor) -> Tensor:  # type: ignore[override]
        (out, lse, kept), scores = kernel.forward(q, k0, v0, rows, scale), []
        if diagonals:
            queries = split(q, k0)
            scores = [_diagonal_scores(queries, k, scale) for k in diagonals[::2]]
            merged = torch.logsumexp(torch.stack([lse, *scores]), 0)
            out *= (lse - merged).exp_()[..., None]
            for s, v in zip(scores, diagonals[1::2], strict=True):
                _add_diagonal(out, s, merged, v)
            lse = merged
        out = out.flatten(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k0, v0, out, lse, *diagonals, *scores, *kept)
        ctx.kernel, ctx.scale, ctx.rows, ctx.count = kernel, scale, rows, len(scores)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        q, k0, v0, out, lse, *rest = ctx.saved_tensors
        count, scale = ctx.count, ctx.scale
        diagonals, scores, kept = rest[: 2 * count], rest[2 * count : 3 * count], rest[3 * count :]
        dq, dk, dv = ctx.kernel.backward(grad, q, k0, v0, out, lse, kept, ctx.rows, scale)
        grads: list[Tensor] = []
        if count:
            split_q, split_g = split(q, k0), split(grad, k0)
            delta = (split_g * split(out, k0)).sum(-1)
            for s, k, v in zip(scores, diagonals[::2], diagonals[1::2], strict=True):
                grads += _diagonal_backward(dq, split_q, split_g, (k, v), (s, lse, delta), scale)
        return None, None, None, dq.flatten(1, 2).to(q.dtype), dk, dv, *grads


def causal_diagonal(q: Tensor, keys: list[Tensor], values: list[Tensor], rows: Rows, scale: float) -> Tensor:
    """Attention of the deepest entry's queries; see `causal_diagonal_dense` for shapes. Exact on every path. What an accelerator has no
    flash kernel for, float32 above all, takes the definition there."""
    if q.device.type == "cpu":
        return merged(Blocked() if Blocked.takes(q, rows) else PerDocument(), q, keys, values, rows, scale)
    if q.device.type == "cuda" and Varlen.takes(q, rows):
        return merged(Varlen(), q, keys, values, rows, scale)
    return causal_diagonal_dense(q, keys, values, rows, scale)


def merged(kernel: Kernel, q: Tensor, keys: list[Tensor], values: list[Tensor], rows: Rows, scale: float) -> Tensor:
    diagonals = [x for pair in zip(keys[1:], values[1:], strict=True) for x in pair]
    return _Merged.apply(kernel, scale, rows, q, keys[0], values[0], *diagonals)
