"""The fused loss equals the plain one, whatever the chunk, for values and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from heads.losses import Labels, LowRank, fused_loss
from heads.metrics import hits
from heads.objectives import OBJECTIVES, parse
from heads.teacher import Top

T, D, V, K = 23, 8, 37, 3


def inputs(trained: bool):
    torch.manual_seed(0)
    x = [torch.randn(T, D, dtype=torch.float64, requires_grad=True) for _ in range(K)]
    teacher = torch.randn(V, D, dtype=torch.float64)
    head = torch.randn(V, D, dtype=torch.float64).requires_grad_() if trained else teacher
    position = torch.tensor([1, 2, 3, 7, 8, 20, 22])
    rows = torch.stack([position - 1 - k for k in range(K)])
    rows[rows < 0] = -1
    token = torch.tensor([5, 36, -1, 0, 7, 7, 20])
    return x, head, teacher, torch.randn(T, D, dtype=torch.float64), Labels(position, rows, token)


def plain(name, p, log_q, y):
    """Each objective from its definition, for autograd."""
    q = log_q.exp()
    m = (p + q) / 2
    a = torch.minimum(p, q).sum()
    zero = log_q.sum() * 0
    kl = (p * (p.log() - log_q)).sum()
    w = torch.exp(-3 * a.detach())
    return {
        "ce": zero if y < 0 else -log_q[y],
        "argmax_ce": -log_q[p.argmax()],
        "kl": kl,
        "reverse_kl": (q * (log_q - p.log())).sum(),
        "jsd": ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2,
        "tv": 1 - a,
        "log_acceptance": -a.log(),
        "lk": w * kl + (1 - w) * (1 - a),
        "top_ce": -sum(p[v] * log_q[v] for v in p.argsort(descending=True)[:10]),
    }[name]


def naive(x, head, teacher, last, labels, loss):
    total = []
    for k in range(K):
        value = torch.zeros((), dtype=torch.float64)
        for n, (j, row) in enumerate(zip(labels.position_L.tolist(), labels.row_KL[k].tolist(), strict=True)):
            if row >= 0:
                p, log_q = (teacher @ last[j]).softmax(-1), (head @ x[k][row]).log_softmax(-1)
                weight = 1.0 if labels.weight_KL is None else labels.weight_KL[k, n]
                value = value + weight * sum(w * plain(name, p, log_q, labels.token_L[n]) for name, w in loss.items())
        total.append(value)
    return torch.stack(total)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(("trained", "kept"), [(False, 0), (True, 0), (True, 2 * 16 * V * 8), (True, 1 << 20)])
@pytest.mark.parametrize("loss", [*OBJECTIVES, "0.1*ce + 0.9*tv", "2*kl", "0.2*ce + kl + 0.4*lk", "reverse_kl + 0.5*tv + jsd + top_ce"])
def test_the_fused_loss_equals_the_naive_loop(monkeypatch, loss, chunk, trained, kept, weighted):
    """kept: bytes of gradients by logits that wait for a product: of one depth, two, all."""
    monkeypatch.setattr("heads.chunk.KEPT_BYTES", kept)
    x, head, teacher, last, labels = inputs(trained)
    if weighted:
        labels.weight_KL = torch.rand(labels.row_KL.shape, dtype=torch.float64)
    weight = torch.tensor([1.0, 0.8, 0.5], dtype=torch.float64)
    wanted = [*x, head] if trained else x
    total, value = fused_loss(x, head, teacher, last, labels, weight, parse(loss), chunk)
    plain = naive(x, head, teacher, last, labels, parse(loss))
    torch.testing.assert_close(value.double(), plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total.double(), (plain * weight).sum(), rtol=1e-6, atol=1e-6)
    grads = torch.autograd.grad(2 * total, wanted)
    for a, b in zip(grads, torch.autograd.grad(2 * (plain * weight).sum(), wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kept", [0, 2 * 16 * V * 8, 1 << 20])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("known", ["states", "tokens", "nothing"])
def test_gradients_of_two_trained_products_wait_across_chunks_too(monkeypatch, known, chunk, kept):
    """An lm_head and a low-rank term, against autograd over the whole logits. Where no chunk works out the teacher's logits, what waits
    goes on waiting into the next one."""
    monkeypatch.setattr("heads.chunk.KEPT_BYTES", kept)
    x, head, teacher, last, labels = inputs(True)
    term = LowRank([torch.randn(T, 5, dtype=torch.float64, requires_grad=True) for _ in range(K)], torch.randn(V, 5, dtype=torch.float64))
    term.weight_UE.requires_grad_()
    likely = (last @ teacher.T).log_softmax(-1).sort(descending=True)
    top = Top(likely.indices, likely.values, V)
    loss = "ce" if known == "nothing" else "kl"
    weight, wanted = torch.tensor([1.0, 0.8, 0.5], dtype=torch.float64), [*x, head, *term.rows_KRE, term.weight_UE]
    given = {"states": last, "tokens": top, "nothing": None}[known]
    total, value = fused_loss(x, head, teacher, given, labels, weight, parse(loss), chunk, term)
    both = [torch.cat(pair, 1) for pair in zip(x, term.rows_KRE, strict=True)]
    plain = naive(both, torch.cat([head, term.weight_UE], 1), teacher, last, labels, parse(loss))
    torch.testing.assert_close(value.double(), plain, rtol=1e-6, atol=1e-6)
    grads = torch.autograd.grad(2 * total, wanted)
    for a, b in zip(grads, torch.autograd.grad(2 * (plain * weight).sum(), wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("trained", [False, True])
def test_without_gradients_none_are_worked_out(trained):
    """Of held-out data: the products of the teacher and of each depth, and no more."""
    x, head, teacher, last, labels = inputs(trained)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        fused_loss(x, head, teacher, last, labels, torch.ones(K), {"kl": 1.0}, 100)
    assert counter.get_total_flops() == (1 + K) * 2 * 16 * D * V  # 7 label positions, rounded up


class Waits(TorchDispatchMode):
    """Counts what a GPU would have to be waited for: operations whose result's shape, or a Python number, depends on data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = [x for x in args[1] if x is not None] if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_) else []
        names = ("nonzero", "_local_scalar_dense", "is_nonzero", "masked_select")
        self.count += func.overloadpacket.__name__ in names or any(x.dtype == torch.bool for x in masks)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss", ["kl", "0.1*ce + 0.9*tv", "ce"])
def test_the_device_is_waited_for_once_whatever_the_chunk(loss):
    x, head, teacher, last, labels = inputs(True)
    counts = []
    for chunk in (1, 3, 100):
        with Waits() as waits:
            waits.count = 0
            fused_loss(x, head, teacher, last, labels, torch.ones(K), parse(loss), chunk)
        counts.append(waits.count)
    assert counts == [1, 1, 1]


@pytest.mark.parametrize("loss", ["", "nothing", "0*kl", "-1*kl", "kl+", "x*kl", "kl*2", "nan*kl"])
def test_what_is_no_loss_is_refused(loss):
    with pytest.raises(ValueError, match="log_acceptance.*mixture"):
        parse(loss)


@pytest.mark.parametrize("trained", [False, True])
def test_no_labels_is_a_zero_loss_with_a_zero_gradient(trained):
    x, head, teacher, last, _ = inputs(trained)
    none = torch.zeros(0, dtype=torch.long)
    empty = Labels(none, none.expand(K, 0), none)
    total, loss = fused_loss(x, head, teacher, last, empty, torch.ones(K), {"kl": 1.0}, 4)
    assert loss.tolist() == [0.0] * K
    assert all(g.abs().sum() == 0 for g in torch.autograd.grad(total, [*x, head] if trained else x))


def test_bfloat16_is_off_by_its_rounding_alone_however_many_depths_wait(monkeypatch):
    """Against float64: relative error of the lm_head's gradient in the 2-norm."""
    x, head, teacher, last, labels = inputs(True)
    errors = []
    (exact,) = torch.autograd.grad(fused_loss(x, head, teacher, last, labels, torch.ones(K), {"kl": 1.0}, 100)[0], head)
    for kept in (0, 1 << 20):
        monkeypatch.setattr("heads.chunk.KEPT_BYTES", kept)
        rounded = [v.detach().bfloat16().requires_grad_() for v in (*x, head)]
        total, _ = fused_loss(rounded[:-1], rounded[-1], teacher.bfloat16(), last.bfloat16(), labels, torch.ones(K), {"kl": 1.0}, 100)
        (found,) = torch.autograd.grad(total, rounded[-1])
        errors.append(((found.double() - exact).norm() / exact.norm()).item())
    assert max(errors) < 0.02


def test_hits_use_the_whole_vocabulary():
    x, _, teacher, last, labels = inputs(False)
    ids = torch.arange(0, V, 2)
    hit = hits([v.detach() for v in x], teacher[ids], ids, teacher, last, labels, 2)
    for k in range(K):
        for j, row in zip(labels.position_L.tolist(), labels.row_KL[k].tolist(), strict=True):
            if row >= 0:
                choice = ids[(teacher[ids] @ x[k][row]).argmax()]
                assert hit[k, row] == (choice == (teacher @ last[j]).argmax())
