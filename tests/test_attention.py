"""The merged attention equals its definition, values and gradients, on every shape that packing makes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from heads.attention import Documents, causal_diagonal, causal_diagonal_dense, merged
from heads.blocked import Blocked
from heads.flash import PerDocument, Varlen


class Spelt(Varlen):
    """The accelerators' path with their kernels spelt out: sequences end to end; log-sum-exp [N, Q] on CUDA, padded on ROCm."""

    def __init__(self, padded):
        self.padded = padded

    def sequences(self, part):
        assert part.starts_q.dtype == part.starts_k.dtype == torch.int32
        for s, (a, b) in enumerate(zip(part.starts_q.tolist(), part.starts_q.tolist()[1:], strict=False)):
            c, d = part.starts_k[s : s + 2].tolist()
            assert 0 < b - a <= part.longest_q and 0 < d - c <= part.longest_k
            assert not part.causal or b - a == d - c, "kernels differ in how they align the mask of unequal lengths"
            yield s, slice(a, b), slice(c, d)

    def scores(self, q, k, part, scale):
        scores = torch.einsum("qnh,snh->nqs", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
        return scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf) if part.causal else scores

    def call(self, q, k, v, part, scale):
        out, total = torch.empty_like(q), torch.full((len(part.starts_q) - 1, q.shape[1], part.longest_q), torch.nan)
        rows = torch.empty(q.shape[1], len(q))
        for s, here, there in self.sequences(part):
            scores = self.scores(q[here], k[there], part, scale)
            rows[:, here] = total[s, :, : here.stop - here.start] = scores.logsumexp(-1)
            wide_v = v[there].repeat_interleave(q.shape[1] // v.shape[1], 1)
            out[here] = torch.einsum("nqs,snh->qnh", scores.softmax(-1), wide_v)
        return out, total if self.padded else rows

    def call_backward(self, grad, q, k, v, out, lse, part, scale):
        grads, group = [torch.zeros_like(x) for x in (q, k, v)], q.shape[1] // k.shape[1]
        for s, here, there in self.sequences(part):
            total = lse[s, :, : here.stop - here.start] if self.padded else lse[:, here]
            p = (self.scores(q[here], k[there], part, scale) - total[..., None]).exp()
            wide_k, wide_v = (x[there].repeat_interleave(group, 1) for x in (k, v))
            delta = (grad[here] * out[here]).sum(-1).T[..., None]
            ds = p * (torch.einsum("qnh,snh->nqs", grad[here], wide_v) - delta) * scale
            grads[0][here] = torch.einsum("nqs,snh->qnh", ds, wide_k)
            grads[1][there] = torch.einsum("nqs,qnh->snh", ds, q[here]).unflatten(1, (-1, group)).sum(2)
            grads[2][there] = torch.einsum("nqs,qnh->snh", p, grad[here]).unflatten(1, (-1, group)).sum(2)
        return grads


PATHS = {
    "cpu": causal_diagonal,
    "blocked": partial(merged, Blocked()),
    "cuda": partial(merged, Spelt(False)),
    "rocm": partial(merged, Spelt(True)),
    "dense": causal_diagonal_dense,
}
path = pytest.mark.parametrize("function", PATHS.values(), ids=PATHS)

# Documents of 1, 7 and 70 tokens; the rows whose output is read: all, none of one document, from the middle on, one alone.
OFFSETS = torch.tensor([0, 1, 8, 78])
NEEDED = {"all": range(78), "not the first document": [3, 60, 77], "from the middle": range(40, 70), "the first row": [0], "none": []}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr("heads.blocked.BLOCK", 16)  # several of the longest document
    monkeypatch.setattr("heads.kernels.MULTIPLE", 1)  # no more rows than are asked for


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("needed", NEEDED)
@pytest.mark.parametrize("groups", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("function", [PATHS[name] for name in ("cpu", "blocked", "cuda", "rocm")], ids=["cpu", "blocked", "cuda", "rocm"])
def test_merged_equals_dense(function, depth, needed, groups):
    """The definition in float64, so that what differs is the path."""
    torch.manual_seed(depth)
    heads, kv = groups
    docs = Documents(OFFSETS, torch.device("cpu"))
    docs.need(torch.tensor(NEEDED[needed], dtype=torch.long))
    rows = docs.needed
    count = len(rows.index_R)
    q = torch.randn(count, heads, 32, requires_grad=True)
    keys, values = ([torch.randn(n, kv, 32, requires_grad=True) for n in (78, *[count] * depth)] for _ in range(2))
    out = function(q, keys, values, rows, 0.3)
    dense = causal_diagonal_dense(q.double(), [x.double() for x in keys], [x.double() for x in values], rows, 0.3).float()
    torch.testing.assert_close(out, dense, rtol=1e-5, atol=2e-6)
    weight = torch.randn_like(out)
    if not count:
        assert all(not x.any() for x in torch.autograd.grad(out, [q, *keys, *values], weight))
        return
    for a, b in zip(*(torch.autograd.grad(x, [q, *keys, *values], weight) for x in (out, dense)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-6)


@path
def test_rows_left_out_change_nothing_for_the_others(function):
    docs = Documents(OFFSETS, torch.device("cpu"))
    q, *kv = (torch.randn(78, 2, 32) for _ in range(5))
    everything = function(q, kv[:2], kv[2:], docs.every, 0.3)
    docs.need(torch.tensor([5, 50, 60]))
    rows = docs.needed
    assert rows.spans == [(1, 5, 6), (8, 50, 61)] and rows.positions_R.tolist() == [4, *range(42, 53)]
    narrow = [[x, rows.of(y)] for x, y in (kv[:2], kv[2:])]
    torch.testing.assert_close(function(rows.of(q), *narrow, rows, 0.3), rows.of(everything))


@path
@pytest.mark.parametrize("needed", NEEDED)
def test_rows_dropped_here_and_there_change_neither_values_nor_gradients(function, needed):
    """Of each document some rows, none, or by chance one span; twice, as depth after depth drops more."""
    torch.manual_seed(0)
    docs = Documents(OFFSETS, torch.device("cpu"))
    docs.need(torch.tensor(NEEDED[needed], dtype=torch.long))
    q, *kv = (torch.randn(78, n, 32, requires_grad=True) for n in (4, 2, 2, 2, 2))
    everything = function(q, kv[:2], kv[2:], docs.every, 0.3)
    for share in (0.6, 0.7):
        docs.keep(torch.rand(78) < share)
        rows = docs.needed
        assert sum(rows.counts) == len(rows.index_R) and (rows.positions_R == docs.positions_T[rows.index_R]).all()
        if not len(rows.index_R):
            continue
        out = function(q[rows.index_R], [kv[0], kv[1][rows.index_R]], [kv[2], kv[3][rows.index_R]], rows, 0.3)
        torch.testing.assert_close(out, everything[rows.index_R], rtol=1e-5, atol=2e-6)
        weight = torch.randn_like(out)
        pair = (torch.autograd.grad(x, [q, *kv], weight, retain_graph=True) for x in (out, everything[rows.index_R]))
        for a, b in zip(*pair, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("needed", NEEDED)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_an_accelerator_gets_tensors_that_its_kernels_take(needed, share):
    """Without one: torch's own rules of their shapes and dtypes, for values and gradients."""
    docs = Documents(OFFSETS, torch.device("cpu"))
    docs.need(torch.tensor(NEEDED[needed], dtype=torch.long))
    docs.keep(torch.rand(78, generator=torch.Generator().manual_seed(0)) < share)
    rows = docs.needed
    rows.index_R, count = rows.index_R.to("meta"), len(rows.index_R)
    q, k0, v0 = (torch.empty(n, heads, 32, device="meta", dtype=torch.bfloat16) for n, heads in ((count, 4), (78, 2), (78, 2)))
    assert Varlen.takes(q, rows)
    out, lse, kept = Varlen().forward(q, k0, v0, rows, 0.3)
    found = Varlen().backward(torch.empty_like(q), q, k0, v0, out.flatten(1, 2).bfloat16(), lse, kept, rows, 0.3)
    assert [(*x.shape,) for x in (out, lse, *found)] == [(count, 2, 2, 32), (count, 2, 2), (count, 2, 2, 32), (78, 2, 32), (78, 2, 32)]
    assert [x.dtype for x in (out, lse, *found)] == [torch.float32] * 3 + [torch.bfloat16] * 2


def test_what_no_kernel_takes_goes_by_the_definition():
    docs = Documents(OFFSETS, torch.device("cpu"))
    q = torch.empty(78, 2, 32, dtype=torch.bfloat16)
    assert Varlen.takes(q, docs.every) and not Varlen.takes(q.float(), docs.every) and not Varlen.takes(q[..., :20], docs.every)
    docs.repeat(40, 3)
    assert not Varlen.takes(q[:3], docs.needed)


def test_the_way_that_keeps_probabilities_is_for_bfloat16_and_short_documents(monkeypatch):
    docs = Documents(OFFSETS, torch.device("cpu"))
    q = torch.empty(78, 2, 32, dtype=torch.bfloat16)
    assert Blocked.takes(q, docs.every) and not Blocked.takes(q.float(), docs.every)
    monkeypatch.setattr("heads.blocked.LONGEST", 69)
    assert not Blocked.takes(q, docs.every)


@pytest.mark.parametrize("kernel", [Blocked(), PerDocument()], ids=["blocked", "flash"])
def test_bfloat16_is_off_by_its_own_rounding_alone(kernel):
    """Relative error in the 2-norm against float64 of the same inputs: bfloat16 has steps of 0.8 %."""
    torch.manual_seed(0)
    docs = Documents(OFFSETS, torch.device("cpu"))
    q, *kv = (torch.randn(78, n, 64).bfloat16().requires_grad_() for n in (6, 2, 2, 2, 2))
    wide = [x.detach().double().requires_grad_() for x in (q, *kv)]
    out = merged(kernel, q, kv[:2], kv[2:], docs.every, 0.125)
    dense = causal_diagonal_dense(wide[0], wide[1:3], wide[3:], docs.every, 0.125)
    weight = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, [q, *kv], weight)]
    wanted = [dense, *torch.autograd.grad(dense, wide, weight.double())]
    assert max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)) < 8e-3


def test_large_scores_do_not_overflow():
    q, docs = torch.full((3, 1, 32), 30.0), Documents(torch.tensor([0, 3]), torch.device("cpu"))
    out = causal_diagonal(q, [q, -q], [q, q], docs.every, 1.0)
    assert torch.isfinite(out).all()


def test_documents_shift_and_rows_find_their_places():
    docs = Documents(torch.tensor([0, 3, 4, 8]), torch.device("cpu"))
    assert docs.positions_T.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    index, inside = docs.shifted(2)
    assert index.tolist() == [2, 2, 2, 3, 6, 7, 7, 7]
    assert inside.tolist() == [True, False, False, False, True, True, False, False]
    x = torch.arange(8)
    assert docs.every.of(x) is x
    docs.need(torch.tensor([[1, -1], [7, 5]]))
    assert docs.needed.of(x).tolist() == [1, 5, 6, 7]
    assert docs.needed.place(torch.tensor([-1, 1, 2, 6])).tolist() == [-1, 0, -1, 2]


@pytest.mark.parametrize("needed", NEEDED)
def test_rows_are_as_many_as_products_like_where_their_documents_have_them(monkeypatch, needed):
    monkeypatch.setattr("heads.kernels.MULTIPLE", 8)
    docs, asked = Documents(OFFSETS, torch.device("cpu")), list(NEEDED[needed])
    docs.need(torch.tensor(asked, dtype=torch.long))
    rows, there = docs.needed, [b - a for a, b in zip(OFFSETS, OFFSETS[1:], strict=False) if any(a <= row < b for row in asked)]
    alone = Documents(OFFSETS, torch.device("cpu"))
    monkeypatch.setattr("heads.kernels.MULTIPLE", 1)
    alone.need(torch.tensor(asked, dtype=torch.long))
    count = len(alone.needed.index_R)
    assert len(rows.index_R) == min(-(-count // 8) * 8, sum(there))
    assert set(alone.needed.index_R.tolist()) <= set(rows.index_R.tolist())
    assert [span[0] for span in rows.spans] == [span[0] for span in alone.needed.spans]
    kept_T = torch.rand(78, generator=torch.Generator().manual_seed(1)) < 0.4
    monkeypatch.setattr("heads.kernels.MULTIPLE", 8)
    docs.keep(kept_T)
    kept = kept_T[rows.index_R].sum().item()
    assert set(rows.index_R[kept_T[rows.index_R]].tolist()) <= set(docs.needed.index_R.tolist()) <= set(rows.index_R.tolist())
    assert len(docs.needed.index_R) == min(-(-kept // 8) * 8, len(rows.index_R))
