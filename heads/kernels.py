"""Element-wise passes of training, their backwards written out: they keep their inputs alone, where autograd would keep what lies between.

Each is a function of tensors. Where a conf asks for it (train.compile), torch.compile makes one pass over memory of each.

Shape suffixes: R rows, D hidden, N query heads, H head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

MULTIPLE = 16  # rows: of a matrix unit's tile
P = ParamSpec("P")
T = TypeVar("T")
_compiling = False


def compile_passes(*, on: bool) -> None:
    """Whether from now on the `fused` functions of this process are compiled, each at its first call (seconds, and on a CPU a C++ compiler)
    and once more for other numbers of rows."""
    global _compiling  # noqa: PLW0603
    _compiling = on


def compiling() -> bool:
    return _compiling


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """Marks a function that compile_passes speaks of."""
    compiled: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _compiling:
            return function(*args, **kwargs)
        if not compiled:  # late: it imports half of torch
            compiled.append(torch.compile(function))
        return compiled[0](*args, **kwargs)

    return call


def wide(x: Tensor) -> Tensor:
    """x in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rounded(rows: int) -> int:
    """The next number of rows that products of matrices like: on CPUs those of 1,022 rows take up to a sixth longer than those of 1,024."""
    return -(-rows // MULTIPLE) * MULTIPLE


def softcapped(z: Tensor, softcap: float | None) -> Tensor:
    """Logits as a target with a final softcap gives them; None: it has none."""
    return z if softcap is None else (z / softcap).tanh() * softcap


@fused
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


@fused
def _rms_norm_backward(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x_RD, grad_RD = wide(x).flatten(0, -2), wide(grad).flatten(0, -2)
    scale_R1 = torch.rsqrt(x_RD.pow(2).mean(-1, keepdim=True) + eps)
    x_RD = x_RD * scale_R1
    dweight = (grad_RD * x_RD).sum(0)
    grad_RD = grad_RD * weight
    dx_RD = scale_R1 * (grad_RD - x_RD * (grad_RD * x_RD).mean(-1, keepdim=True))
    return dx_RD.to(x.dtype).view(x.shape), dweight.to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return *_rms_norm_backward(x, weight, grad, ctx.eps), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, statistics in at least float32."""
    if x.device.type != "cpu" and not _compiling:  # where torch has one kernel for each way
        return _rms_norm(x, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


@fused
def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, still = wide(x).split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, still.expand(len(cos), -1, -1)], dim=-1).to(x.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout. x [R, N, H], or [1, N, H] where all rows are the same; cos, sin [R, H/2], or fewer
    columns, which turn the first part of each head alone."""
    return _Rotate.apply(x, cos, sin)


@fused
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


@fused
def _swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        gate, up = ctx.saved_tensors
        return _swiglu_backward(gate, up, grad)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _SwiGLU.apply(gate, up)
