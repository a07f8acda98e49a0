"""Losses over a frozen or trained lm_head, chunked over label positions; the teacher is computed once for all depths.

Shape suffixes: T packed tokens, R rows that the head worked out, L label positions, D hidden, V vocab, U draft vocab, K depths,
E rank of a low-rank term.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.kernels import compiling, fused, wide
from heads.objectives import Rows, Scratch, mixture, reads_target
from heads.teacher import Teacher, Top, from_logits, from_top

SLICE = 32  # rows of an element-wise pass on a CPU: what it touches stays in cache
COMPILED_SLICE = 128  # of a compiled one, which goes row by row
SLICE_BYTES = 64 << 20  # of an element-wise pass on an accelerator: many times what its kernels take to start, little beside a chunk


@dataclass
class Labels:
    """Where the labels are. position_L: places j in the pack whose state predicts a supervised token; row_KL: the head's row for
    depth k, whose place is j - 1 - k, or -1 where that lies outside the document. token_L: that token as an index into the draft
    vocabulary, -1 where it lacks it. weight_KL: weight of each row's loss, 1 where not given."""

    position_L: Tensor
    row_KL: Tensor
    token_L: Tensor
    weight_KL: Tensor | None = None


@dataclass
class LowRank:
    """A trained term e W^T of the logits beside the lm_head's. rows_KRE: per depth e [R, E]; weight_UE: W."""

    rows_KRE: list[Tensor]
    weight_UE: Tensor


Products = list[tuple[Tensor, Tensor]]  # (rows [L, *], weight [U, *]): the logits are the sum of rows @ weight^T


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


class _Scratch:
    """What one call of the loss needs for a chunk, allocated once: fresh memory of this size costs as much as a pass over it."""

    def __init__(self, rows: int, head_UD: Tensor, with_teacher: bool, softcap: float | None) -> None:
        size, dtype, self.softcap = len(head_UD), torch.promote_types(head_UD.dtype, torch.float32), softcap
        on_cpu = COMPILED_SLICE if compiling() else SLICE
        self.step = min(rows, on_cpu if head_UD.device.type == "cpu" else max(1, SLICE_BYTES // (size * dtype.itemsize)))
        self.logits_LU = head_UD.new_empty(rows, size)
        self.p_LU = head_UD.new_empty(rows if with_teacher else 0, size, dtype=dtype)
        self._spare_LU = None if compiling() else [head_UD.new_empty(self.step, size, dtype=dtype) for _ in range(3)]

    def _spare(self, rows: int) -> Scratch:
        """A compiled pass has its own."""
        return (None, None, None) if self._spare_LU is None else tuple(x[:rows] for x in self._spare_LU)

    def teacher(self, known: Tensor | Top, position_L: Tensor, teacher_UD: Tensor) -> Teacher:
        """The first stay until the next call."""
        p_LU = self.p_LU[: len(position_L)]
        if isinstance(known, Top):
            return p_LU, from_top(known, position_L, p_LU)
        logits_LU = torch.mm(known[position_L], teacher_UD.T, out=self.logits_LU[: len(position_L)])
        negentropy_L = self.p_LU.new_empty(len(position_L))
        for part in self._parts(len(position_L)):
            z_LU = logits_LU[part]
            negentropy_L[part] = from_logits(z_LU, self.softcap, p_LU[part], self._spare(len(z_LU))[0])
        return p_LU, negentropy_L

    def row_losses(  # noqa: PLR0913
        self,
        products: Products,
        teacher: Teacher | None,
        take_L: Tensor | None,
        y_L: Tensor,
        loss: Mapping[str, float],
        accepted_L: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Loss of each row [L] and its gradient by the logits [L, U], in the scratch. See heads.objectives for y and loss; take_L: these
        rows of `teacher`. accepted_L, where given, receives sum min(p, q)."""
        (x_LD, head_UD), *terms = products
        logits_LU = torch.mm(x_LD, head_UD.T, out=self.logits_LU[: len(x_LD)])
        for added, weight in terms:
            logits_LU.addmm_(added, weight.T)
        loss_L = self.p_LU.new_empty(len(logits_LU))
        for part in self._parts(len(logits_LU)):
            z_LU, take = logits_LU[part], None if take_L is None else take_L[part]
            of_part = (teacher[0][part], teacher[1][part]) if teacher is not None and take is None else teacher
            accepted = None if accepted_L is None else accepted_L[part]
            loss_L[part] = _row_pass(z_LU, of_part, take, y_L[part], loss, accepted, self._spare(len(z_LU)))
        return loss_L, logits_LU

    def _parts(self, rows: int) -> Iterator[slice]:
        return (slice(i, min(i + self.step, rows)) for i in range(0, rows, self.step))


def _pieces(row_KL: Tensor, chunk: int) -> list[list[Tensor]]:
    """By chunk and depth the label positions of the chunk, as places in L, that have a row. All at once: the one place where the loss
    waits for the device."""
    valid_KL = row_KL >= 0
    counts = torch.stack([part.sum(1) for part in valid_KL.split(chunk, 1)], 1).tolist()  # [K, chunks]
    by_depth = valid_KL.nonzero()[:, 1].split([sum(sizes) for sizes in counts])
    return list(zip(*(places.split(sizes) for places, sizes in zip(by_depth, counts, strict=True)), strict=True))  # type: ignore[arg-type]


class _FusedLoss(torch.autograd.Function):
    """Sums of row losses per depth without ever holding [T, U] for more than one chunk of one depth. The gradients are worked out
    with the values, while a chunk's logits are there; so the depths' weights must be known before.

    tensors: the weights of the products that the logits are the sum of, the lm_head's first, then the rows of each, depth by depth."""

    @staticmethod
    def forward(ctx, teacher_UD, known, labels: Labels, weight_K, loss, chunk: int, softcap, accepted_KR, *tensors):  # type: ignore[override]
        count = len(tensors) // (len(weight_K) + 1)  # of products
        weights, rows_KR = tensors[:count], [tensors[i : i + count] for i in range(count, len(tensors), count)]
        loss_K = torch.zeros(len(rows_KR), dtype=torch.float32, device=weights[0].device)
        needed = ctx.needs_input_grad[8:]
        grads = [torch.zeros_like(w, dtype=torch.float32) if need else None for w, need in zip(weights, needed, strict=False)]
        grads += [torch.zeros_like(x) if need else None for x, need in zip(tensors[count:], needed[count:], strict=True)]
        scratch = _Scratch(min(chunk, len(labels.position_L)), weights[0], known is not None, softcap)
        for i, pieces in zip(range(0, len(labels.position_L), chunk), _pieces(labels.row_KL, chunk), strict=False):
            here = slice(i, i + chunk)
            teacher = None if known is None else scratch.teacher(known, labels.position_L[here], teacher_UD)
            for k, (given_rows, places) in enumerate(zip(rows_KR, pieces, strict=True)):
                rows = labels.row_KL[k, places]
                products = [(x[rows], w) for x, w in zip(given_rows, weights, strict=True)]
                take_L = None if teacher is None or len(rows) == len(teacher[0]) else places - i
                accepted_L = None if accepted_KR is None else accepted_KR.new_empty(len(rows))
                loss_L, dlogits = scratch.row_losses(products, teacher, take_L, labels.token_L[places], loss, accepted_L)
                if accepted_KR is not None:
                    accepted_KR[k, rows] = accepted_L
                scale = weight_K[k].to(loss_L.dtype)
                if labels.weight_KL is not None:
                    scale = scale * labels.weight_KL[k, places]
                    loss_L = loss_L * labels.weight_KL[k, places]
                loss_K[k] += loss_L.sum()
                _add_gradients(products, dlogits, scale[:, None] if scale.dim() else scale, rows, grads[:count], grads[count * (k + 1) :])
        ctx.there, ctx.dtype = [grad is not None for grad in grads], weights[0].dtype
        ctx.save_for_backward(*(x for x in grads if x is not None))
        ctx.mark_non_differentiable(loss_K)
        return (loss_K * weight_K).sum(), loss_K

    @staticmethod
    def backward(ctx, grad_total: Tensor, _):  # type: ignore[override]
        saved = [(x.float() * grad_total).to(ctx.dtype) for x in ctx.saved_tensors]
        return *[None] * 8, *(saved.pop(0) if there else None for there in ctx.there)


Gradients = list[Tensor | None]


def _add_gradients(products: Products, dlogits_LU: Tensor, scale: Tensor, rows: Tensor, weights: Gradients, inputs: Gradients) -> None:
    """Of one depth's rows: written into `inputs` at `rows`, added to `weights`, where there is one."""
    for (x, weight), of_x, of_weight in zip(products, inputs, weights, strict=False):
        if of_x is not None:
            of_x[rows] = (dlogits_LU @ weight).mul_(scale.to(of_x.dtype))
        if of_weight is not None:
            _add_product(of_weight, dlogits_LU, x * scale.to(x.dtype))


def _add_product(total_UD: Tensor, dlogits_LU: Tensor, x_LD: Tensor) -> None:
    """total += dlogits^T x, in one pass where the dtypes allow it."""
    if x_LD.dtype == total_UD.dtype:
        total_UD.addmm_(dlogits_LU.T, x_LD)
    else:
        total_UD += dlogits_LU.T @ x_LD


def fused_loss(  # noqa: PLR0913
    x_KRD: list[Tensor],
    head_UD: Tensor,
    teacher_UD: Tensor,
    known: Tensor | Top | None,
    labels: Labels,
    weight_K: Tensor,
    loss: Mapping[str, float],
    chunk: int,
    term: LowRank | None = None,
    accepted_KR: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The mixture `loss` of heads.objectives, summed over rows; target and head both over the draft vocabulary.

    x_KRD: per depth the normed outputs [R, D] that enter the lm_head. head_UD: the head's lm_head rows, frozen or trained.
    teacher_UD: the target's lm_head rows of the draft vocabulary, never trained. known: the target's post-final-norm states [T, D], or
    its likeliest tokens, of which heads.teacher says what they lose; None where the loss does not read the target. The target's softmax
    is renormalised on the draft vocabulary, as in EAGLE-3. term: added to the logits. accepted_KR [K, R], where given, receives the
    chance sum min(p, q) that a draft sampled from a row is accepted, for rows that have a label. softcap: of the target's logits.
    Returns the sum over depths of weight_K times the sums, which carries the gradient, and the sums, float32 [K], which do not.
    """
    assert known is not None or not (reads_target(loss) or accepted_KR is not None)
    if term is None:
        tensors = [head_UD, *x_KRD]
    else:
        tensors = [head_UD, term.weight_UE, *(x for pair in zip(x_KRD, term.rows_KRE, strict=True) for x in pair)]
    return _FusedLoss.apply(teacher_UD, known, labels, weight_K, loss, chunk, softcap, accepted_KR, *tensors)


@torch.no_grad()
def log_likelihood(x_KRD: list[Tensor], head_UD: Tensor, labels: Labels, chunk: int) -> Tensor:
    """log q of the text's own token at every row that has a label, 0 at the others: [K, R], at least float32."""
    found_KR = wide(head_UD.new_zeros(len(x_KRD), len(x_KRD[0])))
    for k, x_RD in enumerate(x_KRD):
        there = labels.row_KL[k] >= 0
        for rows, token_L in zip(labels.row_KL[k][there].split(chunk), labels.token_L[there].split(chunk), strict=True):
            log_q = wide(x_RD[rows] @ head_UD.T).log_softmax(-1)
            found_KR[k, rows] = log_q.gather(1, token_L[:, None]).squeeze(1)
    return found_KR
