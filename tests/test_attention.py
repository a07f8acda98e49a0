"""The merged attention equals its definition, values and gradients, on every shape that packing makes."""

from __future__ import annotations

import pytest
import torch

from heads.attention import Documents, causal_diagonal, causal_diagonal_dense


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("length", [1, 5, 70])
@pytest.mark.parametrize("groups", [(4, 4), (6, 2), (4, 1)])
def test_merged_equals_dense(depth, length, groups):
    torch.manual_seed(depth)
    heads, kv = groups
    q = torch.randn(2, heads, length, 32, requires_grad=True)
    keys, values = ([torch.randn(2, kv, length, 32, requires_grad=True) for _ in range(depth + 1)] for _ in range(2))
    out, dense = (f(q, keys, values, 0.3) for f in (causal_diagonal, causal_diagonal_dense))
    torch.testing.assert_close(out, dense, rtol=1e-5, atol=2e-6)
    weight = torch.randn_like(out)
    for a, b in zip(*(torch.autograd.grad(x, [q, *keys, *values], weight) for x in (out, dense)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-6)


def test_large_scores_do_not_overflow():
    q = torch.full((1, 1, 3, 32), 30.0)
    out = causal_diagonal(q, [q, -q], [q, q], 1.0)
    assert torch.isfinite(out).all()


def test_documents_pad_unpad_and_shift():
    docs = Documents(torch.tensor([0, 3, 4, 8]), torch.device("cpu"))
    x = torch.randn(8, 2, 5)
    padded = docs.pad(x)
    assert padded.shape == (3, 2, 4, 5) and padded[0, :, 3].abs().sum() == 0
    assert torch.equal(docs.unpad(padded), x)
    assert docs.positions_T.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    index, inside = docs.shifted(2)
    assert index.tolist() == [2, 2, 2, 3, 6, 7, 7, 7]
    assert inside.tolist() == [True, False, False, False, True, True, False, False]
