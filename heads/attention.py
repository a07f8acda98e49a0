"""The training attention of draft heads, documents isolated. Recurrent heads: causal over depth 0 plus one diagonal per further depth.
Block heads: each block over the context before its anchor and over itself.

Shape suffixes: T packed tokens, S documents, R rows with queries, Q rows of one document, N query heads, M key/value heads,
G = N / M, H head size; B blocks, W slots of a block, C context rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

QUERIES = 256  # of one call of block attention: bounds its mask


@dataclass
class Rows:
    """One span of rows in each of some documents. spans: (start of the document, first row, row after the last), places in the pack."""

    spans: list[tuple[int, int, int]]
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

    def _rows(self, spans: list[tuple[int, int, int]]) -> Rows:
        parts = [torch.arange(first, end) for _, first, end in spans]
        index_R = (torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)).to(self._device)
        return Rows(spans, index_R, self.positions_T[index_R], len(self._document_T))


@dataclass
class KeyValues:
    """Keys and values per depth: entry 0 [T, M, H] is the causal part, entry j [R, M, H] the diagonal of depth j."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def causal_diagonal_dense(q: Tensor, keys: list[Tensor], values: list[Tensor], rows: Rows, scale: float) -> Tensor:
    """The definition, with the whole score matrix of each document: the query of row t at depth k sees the depth-0 keys of rows
    s <= t of its document, and the keys of row t at depths 1..k.

    q [R, N, H] at `rows`; keys, values: the causal part [T, M, H], then [R, M, H] each. Returns [R, N, H].
    """
    group, out, done = q.shape[1] // keys[0].shape[1], [], 0
    for start, first, end in rows.spans:
        here, done = slice(done, done + end - first), done + end - first
        part = [[xs[0][start:end], *(x[here] for x in xs[1:])] for xs in (keys, values)]
        wide_k, wide_v = ([x.repeat_interleave(group, 1) for x in xs] for xs in part)
        future = torch.ones(end - first, end - start, dtype=torch.bool, device=q.device).triu(first - start + 1)
        scores = (torch.einsum("qnh,snh->nqs", q[here], wide_k[0]) * scale).masked_fill(future, float("-inf"))
        columns = [scores] + [((q[here] * k).sum(-1) * scale).T[..., None] for k in wide_k[1:]]
        p = torch.cat(columns, -1).softmax(-1, torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        mixed = torch.einsum("nqs,snh->qnh", p[..., : end - start], wide_v[0])
        out.append(sum((p[..., end - start + j].T[..., None] * v for j, v in enumerate(wide_v[1:])), mixed))
    return torch.cat(out) if out else q


class _Merged(torch.autograd.Function):
    """Flash attention over depth 0 merged with the diagonals by log-sum-exp.

    The rows of a document see two parts of depth 0: all of what lies before their span, and causally the span itself.
    The backward hands the *merged* output O and log-sum-exp L to the flash backward: with P = exp(s - L) and
    delta = sum(dO * O) its formulas are those of the joint softmax, so no derivative of L itself is needed; the
    diagonals use the same L and delta.
    """

    @staticmethod
    def forward(ctx, scale: float, rows: Rows, q: Tensor, k0: Tensor, v0: Tensor, *diagonals: Tensor) -> Tensor:  # type: ignore[override]
        split, out, lse = _split(q, k0), *_flash(q, k0, v0, rows, scale)
        scores = [(split * k[:, :, None]).sum(-1) * scale for k in diagonals[::2]]
        if scores:
            merged = torch.logsumexp(torch.stack([lse, *scores]), 0)
            out *= (lse - merged).exp_()[..., None]
            for s, v in zip(scores, diagonals[1::2], strict=True):
                out.addcmul_((s - merged).exp_()[..., None], v[:, :, None])
            lse = merged
        out = out.flatten(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k0, v0, out, lse, *diagonals, *scores)
        ctx.scale, ctx.rows = scale, rows
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        q, k0, v0, out, lse, *rest = ctx.saved_tensors
        count, scale = len(rest) // 3, ctx.scale
        diagonals, scores = rest[: 2 * count], rest[2 * count :]
        dq, dk, dv = _flash_backward(grad, q, k0, v0, out, lse, ctx.rows, scale)
        grads: list[Tensor] = []
        if count:
            split_q, split_g = _split(q, k0), _split(grad, k0)
            delta = (split_g * _split(out, k0)).sum(-1)
            for s, k, v in zip(scores, diagonals[::2], diagonals[1::2], strict=True):
                p = (s - lse).exp_()
                ds = p * ((split_g * v[:, :, None]).sum(-1) - delta) * scale
                dq.addcmul_(ds[..., None], k[:, :, None])
                grads.append((ds[..., None] * split_q).sum(2).to(k.dtype))
                grads.append((p[..., None] * split_g).sum(2).to(v.dtype))
        return None, None, dq.flatten(1, 2).to(q.dtype), dk, dv, *grads


def _split(x: Tensor, k0: Tensor) -> Tensor:
    """[R, N, H] -> [R, M, G, H], at least in float32."""
    return x.unflatten(1, (k0.shape[1], -1)).to(torch.promote_types(x.dtype, torch.float32))


def _parts(rows: Rows):
    """Per document: its rows among the queries, and (keys, whether causal) of the parts of depth 0 that they see."""
    done = 0
    for start, first, end in rows.spans:
        here, done = slice(done, done + end - first), done + end - first
        yield here, [(slice(first, end), True)] + ([(slice(start, first), False)] if first > start else [])


def _grouped(x: Tensor, group: int) -> Tensor:
    """Keys [Q, M, H] as [M, G, Q, H], without a copy."""
    return x.transpose(0, 1)[:, None].expand(-1, group, -1, -1)


def _flash(q: Tensor, k0: Tensor, v0: Tensor, rows: Rows, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over depth 0: output [R, M, G, H] and log-sum-exp [R, M, G], at least in float32."""
    group = q.shape[1] // k0.shape[1]
    out = _split(q, k0).new_empty(len(q), k0.shape[1], group, q.shape[2])
    lse = out.new_empty(out.shape[:3])
    for here, parts in _parts(rows):
        queries = q[here].unflatten(1, (-1, group)).permute(1, 2, 0, 3)
        found = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries, _grouped(k0[keys], group), _grouped(v0[keys], group), 0.0, causal, scale=scale
            )
            for keys, causal in parts
        ]
        mixed, merged = found[0]
        if len(found) == 2:
            merged = torch.logaddexp(found[0][1], found[1][1])
            mixed = sum(((x * (part - merged).exp_()[..., None]) for x, part in found), torch.zeros_like(merged)[..., None])
        out[here], lse[here] = mixed.permute(2, 0, 1, 3), merged.permute(2, 0, 1)
    return out, lse


def _flash_backward(grad, q, k0, v0, out, lse, rows: Rows, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients over depth 0: of q [R, M, G, H], at least in float32, of k0 and v0 [T, M, H]."""
    group = q.shape[1] // k0.shape[1]
    dq = _split(q, k0).new_zeros(len(q), k0.shape[1], group, q.shape[2])
    dk, dv = torch.zeros_like(k0), torch.zeros_like(v0)
    for here, parts in _parts(rows):
        g, queries, o = (x[here].unflatten(1, (-1, group)).permute(1, 2, 0, 3) for x in (grad, q, out))
        for keys, causal in parts:
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g, queries, _grouped(k0[keys], group), _grouped(v0[keys], group), o, lse[here].permute(1, 2, 0), 0.0, causal, scale=scale
            )
            dq[here] += found[0].permute(2, 0, 1, 3)
            dk[keys], dv[keys] = (x.sum(1).transpose(0, 1) for x in found[1:])
    return dq, dk, dv


def causal_diagonal(q: Tensor, keys: list[Tensor], values: list[Tensor], rows: Rows, scale: float) -> Tensor:
    """Attention of the deepest entry's queries; see `causal_diagonal_dense` for shapes. Exact on every path."""
    if q.device.type != "cpu":
        return causal_diagonal_dense(q, keys, values, rows, scale)
    diagonals = [x for pair in zip(keys[1:], values[1:], strict=True) for x in pair]
    return _Merged.apply(scale, rows, q, keys[0], values[0], *diagonals)


class Blocks:
    """Blocks of `width` slots, ascending. place_B: where in the pack the anchor, a block's first slot, lies (in the row after the
    document's last for an anchor that is not in the pack); start_B: where its document begins. A block sees start <= t < place."""

    def __init__(self, place_B: Tensor, start_B: Tensor, width: int, causal: bool) -> None:
        self.place_B, self.width = place_B, width
        slot_W = torch.arange(width, device=place_B.device)
        self.positions_R = ((place_B - start_B)[:, None] + slot_W).flatten()  # in their documents, R = B W
        self.inner_WW = slot_W <= slot_W[:, None] if causal else torch.ones(width, width, dtype=torch.bool, device=place_B.device)
        self.parts: list[tuple[int, int, int, int]] = []  # (first context row, row after the last, first block, block after the last)
        places, starts, step = place_B.tolist(), start_B.tolist(), max(1, QUERIES // width)
        for i, (place, start) in enumerate(zip(places, starts, strict=True)):
            begun = self.parts.pop() if self.parts and self.parts[-1][0] == start and i - self.parts[-1][2] < step else (start, 0, i, 0)
            self.parts.append((start, place, begun[2], i + 1))

    def mask(self, part: tuple[int, int, int, int]) -> Tensor:
        """What the slots of a part see of its context rows and of its own slots: [n W, C + n W] bool."""
        start, end, first, last = part
        n, W, device = last - first, self.width, self.place_B.device
        context_nC = torch.arange(start, end, device=device) < self.place_B[first:last, None]
        own_nWnW = torch.eye(n, dtype=torch.bool, device=device)[:, None, :, None] & self.inner_WW[:, None]
        return torch.cat([context_nC[:, None].expand(-1, W, -1), own_nWnW.reshape(n, W, n * W)], -1).flatten(0, 1)


def block_attention(q: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], blocks: Blocks, scale: float) -> Tensor:
    """Queries of all slots over the context before their anchor and over their own block (DFlash, arXiv 2602.06036).

    q [R, N, H] with R = B W; own: keys and values of the slots [R, M, H]; context: those of the pack [T, M, H]. Returns [R, N, H].
    """
    group, out = q.shape[1] // own[0].shape[1], []
    for part in blocks.parts:
        start, end, first, last = part
        rows = slice(first * blocks.width, last * blocks.width)
        k, v = (torch.cat([c[start:end], x[rows]]) for c, x in zip(context, own, strict=True))
        queries = q[rows].unflatten(1, (-1, group)).permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(queries, _grouped(k, group), _grouped(v, group), blocks.mask(part), scale=scale)
        out.append(mixed.permute(2, 0, 1, 3).flatten(1, 2))
    # Without a block the gradients of all that went in must be zeros, not missing.
    return torch.cat(out) if out else q + 0 * sum(x.sum() for x in (*own, *context))
