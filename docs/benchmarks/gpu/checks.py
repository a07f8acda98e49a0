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


def packing_error(dtype: torch.dtype) -> tuple[float, float]:
    """Gradients of documents in a pack against the sum of each alone."""
    head = head_of(TINY, 3, 128, dtype, chunk=32)
    batch = batch_of(head, [37, 5, 60], dtype)
    parameters = [p for p in head.parameters() if p.requires_grad]
    packed = torch.autograd.grad(head.loss(batch).total, parameters)
    alone = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    for a, b in itertools.pairwise(batch.offsets_S1.tolist()):
        states = (batch.taps_TLD[a:b], batch.last_TD[a:b])  # type: ignore[index]
        part = Batch(batch.token_ids_T[a:b], batch.loss_mask_T[a:b], torch.tensor([0, b - a]), *states)
        for total, x in zip(alone, torch.autograd.grad(head.loss(part).total, parameters), strict=True):
            total += x.double()
    return error(list(packed), [x.cpu() for x in alone]), 0.0


def leak(dtype: torch.dtype) -> tuple[float, float]:
    """The largest gradient that a document's loss has in the states of the documents beside it."""
    head = head_of(TINY, 3, 128, dtype, chunk=32)
    batch = batch_of(head, [37, 5, 60], dtype)
    batch.loss_mask_T[:37] = batch.loss_mask_T[42:] = False
    batch.taps_TLD.requires_grad_()  # type: ignore[union-attr]
    (grad,) = torch.autograd.grad(head.loss(batch).total, [batch.taps_TLD])  # type: ignore[list-item]
    assert grad[37:42].any()
    return max(float(grad[:37].abs().max()), float(grad[42:].abs().max())), 0.0


def correctness() -> list[dict[str, Any]]:
    found = []

    def add(what: str, dtype: torch.dtype, allowed: float, check: Callable[..., tuple[float, float]], *cases: tuple[Any, ...]) -> None:
        row: dict[str, Any] = {"what": what, "dtype": str(dtype).removeprefix("torch."), "error": None, "on_cpu": None, "ok": False}
        found.append(row)
        try:
            row["error"], row["on_cpu"] = (max(values) for values in zip(*(check(*case) for case in cases), strict=True))
        except RuntimeError as error:  # a kernel that this device lacks: the other checks and the measurements go on
            row["note"] = str(error).splitlines()[0]
            return
        row["ok"] = row["error"] <= max(allowed, 3 * row["on_cpu"] if dtype == torch.bfloat16 else 0.0)

    for dtype in dict.fromkeys((torch.float32, DTYPE)):
        for loss in (*OBJECTIVES, "0.1*ce + 0.9*tv", "0.2*ce + kl + 0.4*lk"):
            add(f"loss {loss}", dtype, ALLOWED[dtype], loss_errors, *((loss, dtype, trained) for trained in (False, True)))
        for which in ("all rows", "later rows", "some rows left out"):
            add(f"attention, {which}", dtype, ALLOWED[dtype], attention_errors, *((which, depth, dtype) for depth in (0, 1, 3)))
        add("documents in a pack and alone", dtype, ALLOWED[dtype], packing_error, (dtype,))
        add("gradient in other documents", dtype, 0.0, leak, (dtype,))
    return found
