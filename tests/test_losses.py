"""The fused loss equals the plain one, whatever the chunk, for values and every gradient."""

from __future__ import annotations

import pytest
import torch

from heads.losses import Labels, chunked_kl, hits

T, D, V, K = 23, 8, 37, 3


def inputs(trained: bool):
    torch.manual_seed(0)
    x = [torch.randn(T, D, dtype=torch.float64, requires_grad=True) for _ in range(K)]
    teacher = torch.randn(V, D, dtype=torch.float64)
    head = torch.randn(V, D, dtype=torch.float64).requires_grad_() if trained else teacher
    position = torch.tensor([1, 2, 3, 7, 8, 20, 22])
    rows = torch.stack([position - 1 - k for k in range(K)])
    rows[rows < 0] = -1
    return x, head, teacher, torch.randn(T, D, dtype=torch.float64), Labels(position, rows)


def naive(x, head, teacher, last, labels):
    total = []
    for k in range(K):
        value = torch.zeros((), dtype=torch.float64)
        for j, row in zip(labels.position_L.tolist(), labels.row_KL[k].tolist(), strict=True):
            if row >= 0:
                p = (teacher @ last[j]).softmax(-1)
                value = value + (p * (p.log() - (head @ x[k][row]).log_softmax(-1))).sum()
        total.append(value)
    return torch.stack(total)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("trained", [False, True])
def test_chunked_kl_equals_the_naive_loop(chunk, trained):
    x, head, teacher, last, labels = inputs(trained)
    weight = torch.tensor([1.0, 0.8, 0.5], dtype=torch.float64)
    wanted = [*x, head] if trained else x
    total, loss = chunked_kl(x, head, teacher, last, labels, weight, chunk)
    plain = naive(x, head, teacher, last, labels)
    torch.testing.assert_close(loss.double(), plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total.double(), (plain * weight).sum(), rtol=1e-5, atol=1e-6)
    grads = torch.autograd.grad(2 * total, wanted)
    for a, b in zip(grads, torch.autograd.grad(2 * (plain * weight).sum(), wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_no_labels_is_a_zero_loss_with_a_zero_gradient():
    x, head, teacher, last, _ = inputs(False)
    empty = Labels(torch.zeros(0, dtype=torch.long), torch.zeros(K, 0, dtype=torch.long))
    total, loss = chunked_kl(x, head, teacher, last, empty, torch.ones(K), 4)
    assert loss.tolist() == [0.0] * K
    assert all(g.abs().sum() == 0 for g in torch.autograd.grad(total, x))


def test_hits_use_the_whole_vocabulary():
    x, _, teacher, last, labels = inputs(False)
    ids = torch.arange(0, V, 2)
    hit = hits([v.detach() for v in x], teacher[ids], ids, teacher, last, labels, 2)
    for k in range(K):
        for j, row in zip(labels.position_L.tolist(), labels.row_KL[k].tolist(), strict=True):
            if row >= 0:
                choice = ids[(teacher[ids] @ x[k][row]).argmax()]
                assert hit[k, row] == (choice == (teacher @ last[j]).argmax())
