"""Every fused path on the device against float64 on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from parts import DEVICE, DTYPE, TINY, batch_of, head_of
from torch import Tensor

from heads.attention import Documents, Rows, causal_diagonal, causal_diagonal_dense
from heads.base import Batch
from heads.losses import Labels, fused_loss
from heads.objectives import OBJECTIVES, parse, reads_target

CPU = torch.device("cpu")
# Largest error allowed, in the 2-norm, relative to float64 on the same rounded inputs. In bfloat16 three times the CPU's own is allowed
# too: where two logits round to one number, the likeliest token is a matter of luck.
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a.cpu().double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(found, wanted, strict=True))


def errors(run: Callable[[torch.device, torch.dtype], list[Tensor]], dtype: torch.dtype, exact: list[Tensor]) -> tuple[float, float]:
    """On the device, and on the CPU."""
    found = error(run(DEVICE, dtype), exact)
    return found, found if DEVICE == CPU else error(run(CPU, dtype), exact)


def loss_errors(loss: str, dtype: torch.dtype, trained: bool) -> tuple[float, float]:
    """fused_loss against itself in float64 on the CPU, which tests/test_losses.py holds against plain autograd: on the device, and on the
    CPU in the same dtype."""
    L, D, U, K = 150, 64, 1000, 3
    torch.manual_seed(0)
    x = [torch.randn(L, D).to(dtype) for _ in range(K)]
    head, teacher, last = ((0.3 * torch.randn(n, D)).to(dtype) for n in (U, U, L))
    position = torch.arange(4, L)
    rows = torch.stack([position - 1 - k for k in range(K)])
    rows[1, ::5] = -1
    token, weight_KL = torch.randint(-1, U, (len(position),)), torch.rand(K, len(position))

    def run(device: torch.device, kind: torch.dtype) -> list[Tensor]:
        xs = [v.to(device, kind).requires_grad_() for v in x]
        own = head.to(device, kind, copy=True).requires_grad_(trained)
        labels = Labels(*(v.to(device) for v in (position, rows, token, weight_KL)))
        states = last.to(device, kind) if reads_target(parse(loss)) else None
        weight = torch.tensor([1.0, 0.8, 0.64], device=device)
        total, sums = fused_loss(xs, own, teacher.to(device, kind), states, labels, weight, parse(loss), 64)
        return [sums, *torch.autograd.grad(total, [*xs, own] if trained else xs)]

    exact = run(CPU, torch.float64)
    return errors(run, dtype, exact)


def attention_errors(which: str, depth: int, dtype: torch.dtype) -> tuple[float, float]:
    """The merged attention against its definition in float64 on the CPU: on the device, and on the CPU in the same dtype."""
    torch.manual_seed(depth)
    keep_T = torch.rand(400) < 0.6

    def rows_on(device: torch.device) -> Rows:
        docs = Documents(torch.tensor([0, 1, 8, 78, 400]), device)
        if which != "all rows":
            docs.need(torch.tensor([3, 50, 77, 130, 399]))
        if which == "some rows left out":
            docs.keep(keep_T)
        return docs.needed

    count = len(rows_on(CPU).index_R)
    sizes = [(count, 8), (400, 2), (400, 2), *[(count, 2)] * (2 * depth)]
    q, *kv = (torch.randn(rows, heads, 64).to(dtype) for rows, heads in sizes)
    weight = torch.randn(q.shape).to(dtype)

    def run(function: Any, device: torch.device, kind: torch.dtype) -> list[Tensor]:
        given = [v.to(device, kind).requires_grad_() for v in (q, *kv)]
        out = function(given[0], given[1::2], given[2::2], rows_on(device), 64**-0.5)
        return [out.detach(), *torch.autograd.grad(out, given, weight.to(device, kind))]

    exact = run(causal_diagonal_dense, CPU, torch.float64)
    return errors(lambda device, kind: run(causal_diagonal, device, kind), dtype, exact)


def isolation_errors(dtype: torch.dtype) -> tuple[float, float]:
    """Documents in a pack against each alone: error of the gradient; and the largest gradient that a document's loss has in the states of
    the other documents, which must be nothing."""
    head, lengths = head_of(TINY, 3, 128, dtype, chunk=32), [37, 5, 60]
    batch = batch_of(head, lengths, dtype)
    ends = batch.offsets_S1.tolist()
    parameters = [p for p in head.parameters() if p.requires_grad]
    packed = torch.autograd.grad(head.loss(batch).total, parameters, allow_unused=True)
    alone = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    for a, b in itertools.pairwise(ends):
        states = (batch.taps_TLD[a:b], batch.last_TD[a:b])  # type: ignore[index]
        part = Batch(batch.token_ids_T[a:b], batch.loss_mask_T[a:b], torch.tensor([0, b - a]), *states)
        for total, x in zip(alone, torch.autograd.grad(head.loss(part).total, parameters, allow_unused=True), strict=True):
            total += 0 if x is None else x.double()
    pairs = [(x, y.cpu()) for x, y in zip(packed, alone, strict=True) if x is not None]
    batch.loss_mask_T[: ends[1]] = batch.loss_mask_T[ends[2] :] = False
    batch.taps_TLD.requires_grad_()  # type: ignore[union-attr]
    (grad,) = torch.autograd.grad(head.loss(batch).total, [batch.taps_TLD])  # type: ignore[list-item]
    leak = max(float(grad[: ends[1]].abs().max()), float(grad[ends[2] :].abs().max()))
    return error([x for x, _ in pairs], [y for _, y in pairs]), leak


def correctness() -> list[dict[str, Any]]:
    found = []

    def add(what: str, dtype: torch.dtype, allowed: float, errors: list[tuple[float, float]]) -> None:
        value, on_cpu = (max(values) for values in zip(*errors, strict=True))
        right = value <= max(allowed, 3 * on_cpu if dtype == torch.bfloat16 else 0.0)
        found.append({"what": what, "dtype": str(dtype).removeprefix("torch."), "error": value, "on_cpu": on_cpu, "ok": right})

    for dtype in dict.fromkeys((torch.float32, DTYPE)):
        allowed = ALLOWED[dtype]
        for loss in (*OBJECTIVES, "0.1*ce + 0.9*tv", "0.2*ce + kl + 0.4*lk"):
            add(f"loss {loss}", dtype, allowed, [loss_errors(loss, dtype, trained) for trained in (False, True)])
        for which in ("all rows", "later rows", "some rows left out"):
            add(f"attention, {which}", dtype, allowed, [attention_errors(which, depth, dtype) for depth in (0, 1, 3)])
        apart, leak = isolation_errors(dtype)
        add("documents in a pack and alone", dtype, allowed, [(apart, 0.0)])
        add("gradient in other documents", dtype, 0.0, [(leak, 0.0)])
    return found
