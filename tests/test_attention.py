"""The merged attention equals its definition, values and gradients, on every shape that packing makes."""

from __future__ import annotations

import pytest
import torch

from heads.attention import Documents, causal_diagonal, causal_diagonal_dense

# Documents of 1, 7 and 70 tokens; the rows whose output is read: all, none of one document, from the middle on, one alone.
OFFSETS = torch.tensor([0, 1, 8, 78])
NEEDED = {"all": range(78), "not the first document": [3, 60, 77], "from the middle": range(40, 70), "the first row": [0], "none": []}


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("needed", NEEDED)
@pytest.mark.parametrize("groups", [(4, 4), (6, 2), (4, 1)])
def test_merged_equals_dense(depth, needed, groups):
    torch.manual_seed(depth)
    heads, kv = groups
    docs = Documents(OFFSETS, torch.device("cpu"))
    docs.need(torch.tensor(NEEDED[needed], dtype=torch.long))
    rows = docs.needed
    count = len(rows.index_R)
    q = torch.randn(count, heads, 32, requires_grad=True)
    keys, values = ([torch.randn(n, kv, 32, requires_grad=True) for n in (78, *[count] * depth)] for _ in range(2))
    out, dense = (f(q, keys, values, rows, 0.3) for f in (causal_diagonal, causal_diagonal_dense))
    torch.testing.assert_close(out, dense, rtol=1e-5, atol=2e-6)
    if not count:
        return
    weight = torch.randn_like(out)
    for a, b in zip(*(torch.autograd.grad(x, [q, *keys, *values], weight) for x in (out, dense)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("function", [causal_diagonal, causal_diagonal_dense])
def test_rows_left_out_change_nothing_for_the_others(function):
    docs = Documents(OFFSETS, torch.device("cpu"))
    q, *kv = (torch.randn(78, 2, 32) for _ in range(5))
    everything = function(q, kv[:2], kv[2:], docs.every, 0.3)
    docs.need(torch.tensor([5, 50, 60]))
    rows = docs.needed
    assert rows.spans == [(1, 5, 6), (8, 50, 61)] and rows.positions_R.tolist() == [4, *range(42, 53)]
    narrow = [[x, rows.of(y)] for x, y in (kv[:2], kv[2:])]
    torch.testing.assert_close(function(rows.of(q), *narrow, rows, 0.3), rows.of(everything))


@pytest.mark.parametrize("function", [causal_diagonal, causal_diagonal_dense])
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
