"""One chunk of the fused loss: its logits, of which the gradients by them take the place, what they are made of and what they give.

Shape suffixes: L label positions of the chunk, D hidden, U draft vocab.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from heads.kernels import compiling, fused, rounded, wide
from heads.objectives import Rows, Scratch, mixture
from heads.teacher import Teacher, Top, from_logits, from_top

SLICE = 32  # rows of an element-wise pass on a CPU: what it touches stays in cache
COMPILED_SLICE = 128  # of a compiled one, which goes row by row
KEPT_BYTES = 128 << 20  # of logits' gradients that wait for one product with the inputs of a trained lm_head or low-rank term
SLICE_BYTES = 64 << 20  # of an element-wise pass on an accelerator: many times what its kernels take to start, little beside a chunk

Gradients = list[Tensor | None]


@fused
def _row_pass(  # noqa: PLR0913
    logits_LU: Tensor,
    teacher: Teacher | None,
    take_L: Tensor | None,
    y_L: Tensor,
    loss: Mapping[str, float],
    accepted_L: Tensor | None,
    scratch: Scratch,
) -> Tensor:
    """Writes the gradient into logits_LU, and sum min(p, q) into accepted_L where given; returns the losses [L]. take_L: rows of the
    teacher, all where not given."""
    if teacher is None:
        p, negentropy = None, None
    else:
        p, negentropy = teacher if take_L is None else (x[take_L] for x in teacher)
    rows = Rows(wide(logits_LU), p, negentropy, y_L, scratch)
    loss_L = mixture(loss, rows)
    if accepted_L is not None:
        accepted_L.copy_(rows.accepted)
    logits_LU.copy_(rows.gradient())
    return loss_L


class Chunk:
    """What one call of the loss needs for a chunk, allocated once: fresh memory of this size costs as much as a pass over it.

    The logits are the sum of products, rows by rows of a weight. The gradients of the weights wait until the room for logits is full, so
    that depths share a product."""

    def __init__(self, rows: int, depths: int, weights: list[Tensor], needed: list[bool], with_teacher: bool) -> None:
        """rows: of a chunk, at most; needed: which of the weights want a gradient."""
        (size, _), here, dtype = weights[0].shape, weights[0], torch.promote_types(weights[0].dtype, torch.float32)
        room = rounded(rows) * (kept_depths(rounded(rows), size, here.element_size(), depths) if any(needed) else 1)
        on_cpu = COMPILED_SLICE if compiling() else SLICE
        self._step = min(rows, on_cpu if here.device.type == "cpu" else max(1, SLICE_BYTES // (size * dtype.itemsize)))
        self._weights, self._logits_LU = weights, here.new_empty(room, size)
        self._inputs = [here.new_empty(room, weight.shape[1]) for weight in weights]
        self._p_LU = here.new_empty(rows if with_teacher else 0, size, dtype=dtype)
        self._spare_LU = None if compiling() else [here.new_empty(self._step, size, dtype=dtype) for _ in range(3)]
        self._here, self._needed = slice(0, 0), needed
        self._totals: Gradients = [None] * len(weights)

    def _spare(self, rows: int) -> Scratch:
        """A compiled pass has its own."""
        return (None, None, None) if self._spare_LU is None else tuple(x[:rows] for x in self._spare_LU)

    def teacher(self, known: Tensor | Top, position_L: Tensor, teacher_UD: Tensor, softcap: float | None) -> Teacher:
        """The first stay until the next call."""
        p_LU = self._p_LU[: len(position_L)]
        if isinstance(known, Top):
            return p_LU, from_top(known, position_L, p_LU)
        self._add_weight_gradients()  # which makes room
        x_LD = _filled(known.new_empty(rounded(len(position_L)), known.shape[1]), known, position_L)
        logits_LU = torch.mm(x_LD, teacher_UD.T, out=self._logits_LU[: len(x_LD)])
        negentropy_L = p_LU.new_empty(len(position_L))
        for part in self._parts(len(position_L)):
            z_LU = logits_LU[part]
            negentropy_L[part] = from_logits(z_LU, softcap, p_LU[part], self._spare(len(z_LU))[0])
        return p_LU, negentropy_L

    def row_losses(  # noqa: PLR0913
        self,
        given: list[Tensor],
        rows: Tensor,
        teacher: Teacher | None,
        take_L: Tensor | None,
        y_L: Tensor,
        loss: Mapping[str, float],
        accepted_L: Tensor | None = None,
    ) -> Tensor:
        """Loss [L] of each of the `rows` of `given` [R, *]. See heads.objectives for y and loss; take_L: these rows of `teacher`.
        accepted_L, where given, receives sum min(p, q)."""
        logits_LU = self._product(given, rows)
        loss_L = self._p_LU.new_empty(len(rows))
        for part in self._parts(len(rows)):
            z_LU, take = logits_LU[part], None if take_L is None else take_L[part]
            of_part = (teacher[0][part], teacher[1][part]) if teacher is not None and take is None else teacher
            accepted = None if accepted_L is None else accepted_L[part]
            loss_L[part] = _row_pass(z_LU, of_part, take, y_L[part], loss, accepted, self._spare(len(z_LU)))
        return loss_L

    def _product(self, given: list[Tensor], rows: Tensor) -> Tensor:
        """Logits [L, U] in the next free rows, with zeros behind up to a number that products like."""
        count = rounded(len(rows))
        if self._here.stop + count > len(self._logits_LU):
            self._add_weight_gradients()
        self._here = slice(self._here.stop, self._here.stop + count)
        logits_LU = self._logits_LU[self._here]
        for i, (x, weight, room) in enumerate(zip(given, self._weights, self._inputs, strict=True)):
            x_LD = _filled(room[self._here], x, rows)
            torch.mm(x_LD, weight.T, out=logits_LU) if i == 0 else logits_LU.addmm_(x_LD, weight.T)
        return logits_LU

    def add_gradients(self, rows: Tensor, scale: Tensor, grads: Gradients) -> None:
        """After row_losses: those of its inputs into `grads` at `rows`, where there is one; scale: of its losses, one or [L, 1]."""
        for weight, room, grad, needed in zip(self._weights, self._inputs, grads, self._needed, strict=True):
            if grad is not None:
                grad[rows] = (self._logits_LU[self._here] @ weight)[: len(rows)].mul_(scale.to(grad.dtype))
            if needed:  # the inputs make the weight's gradient, with that of their logits
                room[self._here][: len(rows)] *= scale.to(room.dtype)

    def _add_weight_gradients(self) -> None:
        """Of all rows since the last call."""
        used, self._here = slice(0, self._here.stop), slice(0, 0)
        for i, (room, total) in enumerate(zip(self._inputs, self._totals, strict=True)):
            if not (self._needed[i] and used.stop):
                continue
            dlogits_LU, x_LD = self._logits_LU[used], room[used]
            if total is None:
                self._totals[i] = dlogits_LU.T @ x_LD
            elif wide(total).dtype == x_LD.dtype:
                total.addmm_(dlogits_LU.T, x_LD)
            else:
                self._totals[i] = wide(total).add_(dlogits_LU.T @ x_LD)

    def weight_gradients(self) -> Gradients:
        """Where wanted; zeros where there was no row."""
        self._add_weight_gradients()
        found = zip(self._weights, self._totals, self._needed, strict=True)
        return [torch.zeros_like(weight) if needed and total is None else total for weight, total, needed in found]

    def _parts(self, rows: int) -> Iterator[slice]:
        return (slice(i, min(i + self._step, rows)) for i in range(0, rows, self._step))


def _filled(out: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """out [>= L, D]: x at `rows` [L], then zeros."""
    torch.index_select(x, 0, rows, out=out[: len(rows)])
    out[len(rows) :] = 0
    return out


def kept_depths(rows: int, size: int, itemsize: int, depths: int) -> int:
    """Of how many depths the gradients by the logits [rows, size] wait for one another where a weight that makes them is trained."""
    return max(1, min(depths, KEPT_BYTES // max(1, rows * size * itemsize)))
