"""Losses over a frozen or trained lm_head, chunked over label positions; the teacher is computed once for all depths.

Shape suffixes: T packed tokens, R rows that the head worked out, L label positions, D hidden, V vocab, U draft vocab, K depths,
E rank of a low-rank term.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.chunk import Chunk
from heads.kernels import fused, wide
from heads.objectives import reads_target
from heads.teacher import Top


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


def _pieces(row_KL: Tensor, chunk: int) -> list[list[Tensor]]:
    """By chunk and depth the label positions of the chunk, as places in L, that have a row. All at once: the one place where the loss
    waits for the device."""
    valid_KL = row_KL >= 0
    counts = torch.stack([part.sum(1) for part in valid_KL.split(chunk, 1)], 1).tolist()  # [K, chunks]
    by_depth = valid_KL.nonzero()[:, 1].split([sum(sizes) for sizes in counts])
    return list(zip(*(places.split(sizes) for places, sizes in zip(by_depth, counts, strict=True)), strict=True))  # type: ignore[arg-type]


class _FusedLoss(torch.autograd.Function):
    """Sums of row losses per depth without ever holding [T, U] for more than one chunk. The gradients are worked out
    with the values, while a chunk's logits are there; so the depths' weights must be known before.

    tensors: the weights of the products that the logits are the sum of, the lm_head's first, then the rows of each, depth by depth."""

    @staticmethod
    def forward(ctx, teacher_UD, known, labels: Labels, weight_K, loss, chunk: int, softcap, accepted_KR, *tensors):  # type: ignore[override]
        count = len(tensors) // (len(weight_K) + 1)  # of products
        weights, rows_KR = list(tensors[:count]), [list(tensors[i : i + count]) for i in range(count, len(tensors), count)]
        loss_K = torch.zeros(len(rows_KR), dtype=torch.float32, device=weights[0].device)
        needed = ctx.needs_input_grad[8:]
        grads = [torch.zeros_like(x) if need else None for x, need in zip(tensors[count:], needed[count:], strict=True)]
        of_chunk = Chunk(min(chunk, len(labels.position_L)), len(rows_KR), weights, needed[:count], known is not None)
        for i, pieces in zip(range(0, len(labels.position_L), chunk), _pieces(labels.row_KL, chunk), strict=False):
            here = slice(i, i + chunk)
            teacher = None if known is None else of_chunk.teacher(known, labels.position_L[here], teacher_UD, softcap)
            for k, (given, places) in enumerate(zip(rows_KR, pieces, strict=True)):
                rows = labels.row_KL[k, places]
                take_L = None if teacher is None or len(rows) == len(teacher[0]) else places - i
                accepted_L = None if accepted_KR is None else accepted_KR.new_empty(len(rows))
                loss_L = of_chunk.row_losses(given, rows, teacher, take_L, labels.token_L[places], loss, accepted_L)
                if accepted_KR is not None:
                    accepted_KR[k, rows] = accepted_L
                scale = weight_K[k].to(loss_L.dtype)
                if labels.weight_KL is not None:
                    scale = scale * labels.weight_KL[k, places]
                    loss_L = loss_L * labels.weight_KL[k, places]
                loss_K[k] += loss_L.sum()
                of_chunk.add_gradients(rows, scale[:, None] if scale.dim() else scale, grads[count * k : count * (k + 1)])
        grads = of_chunk.weight_gradients() + grads
        ctx.there, ctx.dtype = [grad is not None for grad in grads], weights[0].dtype
        ctx.save_for_backward(*(x for x in grads if x is not None))
        ctx.mark_non_differentiable(loss_K)
        return (loss_K * weight_K).sum(), loss_K

    @staticmethod
    def backward(ctx, grad_total: Tensor, _):  # type: ignore[override]
        saved = [_scaled(x, grad_total, ctx.dtype) for x in ctx.saved_tensors]
        return *[None] * 8, *(saved.pop(0) if there else None for there in ctx.there)


@fused
def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return (wide(x) * factor).to(dtype)


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
    if not torch.is_grad_enabled():  # where a Function would still be told that its inputs want gradients
        tensors = [x.detach() for x in tensors]
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
