"""The element-wise passes and their backwards: against autograd through the definition in float64, as they are and compiled."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F

from heads import kernels
from heads.losses import Labels, fused_loss
from heads.objectives import parse

COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile wants a C++ compiler on a CPU")


@pytest.fixture(params=[False, pytest.param(True, marks=COMPILER)], ids=["plain", "compiled"])
def compiled(request):
    kernels.compile_passes(on=request.param)
    yield request.param
    kernels.compile_passes(on=False)


def angles(rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(rows, size // 2)
    return angle.cos(), angle.sin()


def turned(x, cos, sin):
    pair = torch.complex(*x.chunk(2, -1)) * torch.complex(cos, sin)[:, None]
    return torch.cat([pair.real, pair.imag], -1)


PASSES = {
    "rms_norm": (
        lambda x, w: kernels.rms_norm(x, w, 1e-5),
        lambda x, w: x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w,
        lambda rows: [torch.randn(rows, 24), torch.randn(24)],
        0,
    ),
    "rms_norm of each head": (
        lambda x, w: kernels.rms_norm(x, w, 1e-5),
        lambda x, w: x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w,
        lambda rows: [torch.randn(rows, 3, 8), torch.randn(8)],
        0,
    ),
    "rotate": (kernels.rotate, turned, lambda rows: [torch.randn(rows, 3, 8), *angles(rows, 8)], 2),
    "swiglu": (kernels.swiglu, lambda gate, up: F.silu(gate) * up, lambda rows: [torch.randn(rows, 24), torch.randn(rows, 24)], 0),
}


@pytest.mark.parametrize("name", PASSES)
def test_values_and_gradients_are_the_definitions(name, compiled):
    """For several numbers of rows, as packs have them; constants: how many inputs at the end want no gradient."""
    function, definition, inputs, constants = PASSES[name]
    torch.manual_seed(0)
    for rows in (17, 33, 50):
        given = inputs(rows)
        wanted = [x.requires_grad_() for x in given[: len(given) - constants]]
        out, exact = function(*given), definition(*(x.double() for x in given))
        torch.testing.assert_close(out, exact.float(), rtol=1e-5, atol=1e-6)
        weight = torch.randn_like(out)
        found, right = (torch.autograd.grad(x, wanted, w) for x, w in ((out, weight), (exact, weight.double())))
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", PASSES)
def test_bfloat16_is_rounded_once_or_twice_and_no_more(name, compiled):
    function, definition, inputs, constants = PASSES[name]
    torch.manual_seed(0)
    given = inputs(64)
    given = [x.bfloat16() if i < len(given) - constants else x for i, x in enumerate(given)]
    exact = definition(*(x.double() for x in given))
    assert function(*given).dtype == torch.bfloat16
    torch.testing.assert_close(function(*given).double(), exact, rtol=2**-7, atol=2**-7)


@COMPILER
@pytest.mark.parametrize("loss", ["kl", "0.1*ce + lk + reverse_kl", "jsd + top_ce"])
def test_a_compiled_loss_is_the_loss(loss):
    """All rows of the teacher and some of them, chunk after chunk."""
    torch.manual_seed(0)
    x = [torch.randn(70, 8, requires_grad=True) for _ in range(2)]
    head, last = torch.randn(45, 8, requires_grad=True), torch.randn(70, 8)
    position = torch.arange(2, 70)
    labels = Labels(position, torch.stack([position - 1, torch.where(position > 3, position - 2, -1)]), torch.randint(-1, 45, (68,)))

    def found():
        total, loss_K = fused_loss(x, head, head.detach(), last, labels, torch.tensor([1.0, 0.5]), parse(loss), 41)
        return loss_K, *torch.autograd.grad(total, [*x, head])

    plain = found()
    kernels.compile_passes(on=True)
    try:
        for a, b in zip(found(), plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    finally:
        kernels.compile_passes(on=False)
