"""Losses over a frozen or trained lm_head, chunked over label positions; the teacher is computed once for all depths.

Shape suffixes: T packed tokens, R rows that the head worked out, L label positions, D hidden, V vocab, U draft vocab, K depths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.objectives import mixture

SLICE = 32  # rows of an element-wise pass on a CPU: what it touches stays in cache


@dataclass
class Labels:
    """Where the labels are. position_L: places j in the pack whose state predicts a supervised token; row_KL: the head's row for
    depth k, whose place is j - 1 - k, or -1 where that lies outside the document. token_L: that token as an index into the draft
    vocabulary, -1 where it lacks it. weight_KL: weight of each row's loss, 1 where not given."""

    position_L: Tensor
    row_KL: Tensor
    token_L: Tensor
    weight_KL: Tensor | None = None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Scratch:
    """What one call of the loss needs for a chunk, allocated once: fresh memory of this size costs as much as a pass over it."""

    def __init__(self, rows: int, head_UD: Tensor) -> None:
        size, wide = len(head_UD), torch.promote_types(head_UD.dtype, torch.float32)
        self.step = min(rows, SLICE) if head_UD.device.type == "cpu" else rows
        self.logits_LU = head_UD.new_empty(rows, size)
        self.p_LU = head_UD.new_empty(rows, size, dtype=wide)
        self._slice_LU = head_UD.new_empty(self.step, size, dtype=wide)

    def teacher(self, last_LD: Tensor, teacher_UD: Tensor) -> tuple[Tensor, Tensor]:
        """The target's probabilities [L, U] and sum p log p [L]. The first stay until the next call."""
        logits_LU = torch.mm(last_LD, teacher_UD.T, out=self.logits_LU[: len(last_LD)])
        negentropy_L = self.p_LU.new_empty(len(last_LD))
        for part in self._parts(len(last_LD)):
            z, p = _wide(logits_LU[part]), self.p_LU[part]
            torch.softmax(z, -1, out=p)
            negentropy_L[part] = self._dot(p, z) - _logsumexp(z, p)
        return self.p_LU[: len(last_LD)], negentropy_L

    def row_losses(self, x_LD: Tensor, head_UD: Tensor, p_LU: Tensor, negentropy_L: Tensor, y_L: Tensor, loss: Mapping[str, float]):
        """Loss of each row [L] and its gradient by the logits [L, U], in the scratch. See heads.objectives for p, y and loss."""
        logits_LU = torch.mm(x_LD, head_UD.T, out=self.logits_LU[: len(x_LD)])
        loss_L = p_LU.new_empty(len(x_LD))
        for part in self._parts(len(x_LD)):
            z, p = _wide(logits_LU[part]), p_LU[part]
            if loss.keys() == {"kl"}:  # the usual one, in as few passes as it takes
                cross_L = self._dot(p, z)
                q = torch.softmax(z, -1, out=self._slice_LU[: len(z)])
                loss_L[part] = loss["kl"] * (negentropy_L[part] - cross_L + _logsumexp(z, q))
                logits_LU[part] = q.sub_(p).mul_(loss["kl"])
            else:
                log_q = z.log_softmax(-1)
                loss_L[part], logits_LU[part] = mixture(loss, p, log_q.exp(), log_q, y_L[part])
        return loss_L, logits_LU

    def _parts(self, rows: int) -> Iterator[slice]:
        return (slice(i, min(i + self.step, rows)) for i in range(0, rows, self.step))

    def _dot(self, p_LU: Tensor, z_LU: Tensor) -> Tensor:
        return torch.mul(p_LU, z_LU, out=self._slice_LU[: len(z_LU)]).sum(-1)


def _logsumexp(z_LU: Tensor, softmax_LU: Tensor) -> Tensor:
    """Of z, whose softmax is known: at the largest entry, log softmax = z - logsumexp."""
    return z_LU.amax(-1) - softmax_LU.amax(-1).log()


class _FusedLoss(torch.autograd.Function):
    """Sums of row losses per depth without ever holding [T, U] for more than one chunk of one depth. The gradients are worked out
    with the values, while a chunk's logits are there; so the depths' weights must be known before."""

    @staticmethod
    def forward(ctx, head_UD, teacher_UD, last_TD, labels: Labels, weight_K, loss, chunk: int, *x_KRD):  # type: ignore[override]
        loss_K = torch.zeros(len(x_KRD), dtype=torch.float32, device=head_UD.device)
        head_grad = torch.zeros_like(head_UD, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grads = [torch.zeros_like(x) if needed else None for x, needed in zip(x_KRD, ctx.needs_input_grad[7:], strict=True)]
        scratch = _Scratch(min(chunk, len(labels.position_L)), head_UD)
        for i in range(0, len(labels.position_L), chunk):
            here = slice(i, i + chunk)
            p, negentropy = scratch.teacher(last_TD[labels.position_L[here]], teacher_UD)
            for k, x_RD in enumerate(x_KRD):
                valid = labels.row_KL[k, here] >= 0
                full, rows = bool(valid.all()), labels.row_KL[k, here][valid]
                x_LD, grad, y_L = x_RD[rows], grads[k], labels.token_L[here][valid]
                given = (p, negentropy) if full else (p[valid], negentropy[valid])
                loss_L, dlogits = scratch.row_losses(x_LD, head_UD, *given, y_L, loss)
                scale = weight_K[k].to(loss_L.dtype)
                if labels.weight_KL is not None:
                    scale = scale * labels.weight_KL[k, here][valid]
                    loss_L = loss_L * labels.weight_KL[k, here][valid]
                loss_K[k] += loss_L.sum()
                if scale.dim():
                    scale = scale[:, None]
                if grad is not None:
                    grad[rows] = (dlogits @ head_UD).mul_(scale.to(grad.dtype))
                if head_grad is not None:
                    _add_product(head_grad, dlogits, x_LD * scale.to(x_LD.dtype))
        ctx.with_head, ctx.with_x = head_grad is not None, [grad is not None for grad in grads]
        ctx.save_for_backward(*(x for x in (head_grad, *grads) if x is not None))
        ctx.dtype = head_UD.dtype
        ctx.mark_non_differentiable(loss_K)
        return (loss_K * weight_K).sum(), loss_K

    @staticmethod
    def backward(ctx, grad_total: Tensor, _):  # type: ignore[override]
        saved = [(x.float() * grad_total).to(ctx.dtype) for x in ctx.saved_tensors]
        head_grad = saved.pop(0) if ctx.with_head else None
        return head_grad, None, None, None, None, None, None, *(saved.pop(0) if there else None for there in ctx.with_x)


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
    last_TD: Tensor,
    labels: Labels,
    weight_K: Tensor,
    loss: Mapping[str, float],
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """The mixture `loss` of heads.objectives, summed over rows; target and head both over the draft vocabulary.

    x_KRD: per depth the normed outputs [R, D] that enter the lm_head. head_UD: the head's lm_head rows, frozen or trained.
    teacher_UD: the target's lm_head rows of the draft vocabulary, never trained. last_TD: the target's post-final-norm states.
    The target's softmax is renormalised on the draft vocabulary, as in EAGLE-3. Returns the sum over depths of weight_K times the
    sums, which carries the gradient, and the sums, float32 [K], which do not.
    """
    return _FusedLoss.apply(head_UD, teacher_UD, last_TD, labels, weight_K, loss, chunk, *x_KRD)


@torch.no_grad()
def hits(x_KRD: list[Tensor], head_UD: Tensor, draft_ids_U: Tensor | None, lm_head_VD: Tensor, last_TD: Tensor, labels: Labels, chunk: int):
    """Whether the head's first choice is the target's own, over the whole target vocabulary: [K, R] bool.

    A token that the draft vocabulary lacks can never be hit, as in the engine.
    """
    hit_KR = torch.zeros(len(x_KRD), len(x_KRD[0]), dtype=torch.bool, device=last_TD.device)
    for i in range(0, len(labels.position_L), chunk):
        best_L = (last_TD[labels.position_L[i : i + chunk]] @ lm_head_VD.T).argmax(-1)
        for k, x_RD in enumerate(x_KRD):
            rows = labels.row_KL[k, i : i + chunk]
            valid = rows >= 0
            choice = (x_RD[rows[valid]] @ head_UD.T).argmax(-1)
            hit_KR[k, rows[valid]] = (choice if draft_ids_U is None else draft_ids_U[choice]) == best_L[valid]
    return hit_KR
