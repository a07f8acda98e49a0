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

from heads.flash import Kernel, Layout, PerDocument, Varlen, split


@dataclass
class Rows:
    """Rows of some documents, ascending. spans: (start of the document, first row, row after the last), places in the pack;
    counts: how many rows of each span are among these: all, unless some were left out."""

    spans: list[tuple[int, int, int]]
    counts: list[int]
    index_R: Tensor  # their places in the pack
    positions_R: Tensor  # in their documents
    total: int  # T

    def of(self, x_T: Tensor) -> Tensor:
        """These rows of x_T [T, ...]."""
        return x_T if len(self.index_R) == self.total else x_T[self.index_R]

    def place(self, index: Tensor) -> Tensor:
        """Where rows of the pack lie among these; -1 for those that do not, and for -1."""
        place_T1 = torch.full((self.total + 1,), -1, device=index.device)
        place_T1[self.index_R] = torch.arange(len(self.index_R), device=index.device)
        return place_T1[index]

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self)

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

        Kept is one span a document, from its first such row to its last: what lies between is computed too.
        """
        index = rows[rows >= 0].cpu()
        document = self._document_T[index]
        first_S = torch.full((len(self._starts),), len(self._document_T)).scatter_reduce(0, document, index, "amin")
        last_S = torch.full((len(self._starts),), -1).scatter_reduce(0, document, index, "amax")
        bounds = zip(self._starts, first_S.tolist(), last_S.tolist(), strict=True)
        self.needed = self._rows([(start, first, last + 1) for start, first, last in bounds if last >= 0])

    def keep(self, keep_T: Tensor) -> None:
        """Of the needed rows those alone where keep_T [T] bool, on the CPU, is set, wherever they lie."""
        spans, parts = [], []
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
        index_R = (torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)).to(self._device)
        return Rows(spans, [len(part) for part in parts], index_R, self.positions_T[index_R], len(self._document_T))


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


class _Merged(torch.autograd.Function):
    """Flash attention over depth 0 merged with the diagonals by log-sum-exp.

    The backward hands the *merged* output O and log-sum-exp L to the flash backward (see heads/flash.py), so no derivative of L itself
    is needed; the diagonals use the same L and delta.
    """

    @staticmethod
    def forward(ctx, kernel: Kernel, scale: float, rows: Rows, q: Tensor, k0: Tensor, v0: Tensor, *diagonals: Tensor) -> Tensor:  # type: ignore[override]
        queries, (out, lse) = split(q, k0), kernel.forward(q, k0, v0, rows, scale)
        scores = [(queries * k[:, :, None]).sum(-1) * scale for k in diagonals[::2]]
        if scores:
            merged = torch.logsumexp(torch.stack([lse, *scores]), 0)
            out *= (lse - merged).exp_()[..., None]
            for s, v in zip(scores, diagonals[1::2], strict=True):
                out.addcmul_((s - merged).exp_()[..., None], v[:, :, None])
            lse = merged
        out = out.flatten(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k0, v0, out, lse, *diagonals, *scores)
        ctx.kernel, ctx.scale, ctx.rows = kernel, scale, rows
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        q, k0, v0, out, lse, *rest = ctx.saved_tensors
        count, scale = len(rest) // 3, ctx.scale
        diagonals, scores = rest[: 2 * count], rest[2 * count :]
        dq, dk, dv = ctx.kernel.backward(grad, q, k0, v0, out, lse, ctx.rows, scale)
        grads: list[Tensor] = []
        if count:
            split_q, split_g = split(q, k0), split(grad, k0)
            delta = (split_g * split(out, k0)).sum(-1)
            for s, k, v in zip(scores, diagonals[::2], diagonals[1::2], strict=True):
                p = (s - lse).exp_()
                ds = p * ((split_g * v[:, :, None]).sum(-1) - delta) * scale
                dq.addcmul_(ds[..., None], k[:, :, None])
                grads.append((ds[..., None] * split_q).sum(2).to(k.dtype))
                grads.append((p[..., None] * split_g).sum(2).to(v.dtype))
        return None, None, None, dq.flatten(1, 2).to(q.dtype), dk, dv, *grads


def causal_diagonal(q: Tensor, keys: list[Tensor], values: list[Tensor], rows: Rows, scale: float) -> Tensor:
    """Attention of the deepest entry's queries; see `causal_diagonal_dense` for shapes. Exact on every path. What an accelerator has no
    flash kernel for, float32 above all, takes the definition there."""
    if q.device.type == "cpu":
        return merged(PerDocument(), q, keys, values, rows, scale)
    if q.device.type == "cuda" and Varlen.takes(q, rows):
        return merged(Varlen(), q, keys, values, rows, scale)
    return causal_diagonal_dense(q, keys, values, rows, scale)


def merged(kernel: Kernel, q: Tensor, keys: list[Tensor], values: list[Tensor], rows: Rows, scale: float) -> Tensor:
    diagonals = [x for pair in zip(keys[1:], values[1:], strict=True) for x in pair]
    return _Merged.apply(kernel, scale, rows, q, keys[0], values[0], *diagonals)
