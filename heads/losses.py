"""Losses over a frozen or trained lm_head, chunked over label positions; the teacher is computed once for all depths.

Shape suffixes: T packed tokens, R label positions, D hidden, V vocab, U draft vocab, K depths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SLICE = 64  # rows per element-wise pass: the float32 scratch of a slice stays in cache


@dataclass
class Labels:
    """Where the labels are. position_R: rows j whose state predicts a supervised token; row_KR: the head's row for depth k
    (j - 1 - k), or -1 where that lies outside the document."""

    position_R: Tensor
    row_KR: Tensor


def _softmax_(logits_RU: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities float32 [R, U] and sum p log p [R]."""
    p = torch.empty(logits_RU.shape, dtype=torch.float32, device=logits_RU.device)
    negentropy = p.new_empty(len(p))
    for i in range(0, len(p), SLICE):
        z = logits_RU[i : i + SLICE].float()
        z -= z.logsumexp(-1, keepdim=True)
        p[i : i + SLICE] = torch.exp(z)
        negentropy[i : i + SLICE] = (p[i : i + SLICE] * z).sum(-1)
    return p, negentropy


def _kl_(logits_RU: Tensor, p_RU: Tensor, negentropy_R: Tensor) -> Tensor:
    """Sum of KL(p || softmax(logits)); overwrites the logits with its gradient softmax(logits) - p."""
    total = p_RU.new_zeros(())
    for i in range(0, len(logits_RU), SLICE):
        z, p = logits_RU[i : i + SLICE].float(), p_RU[i : i + SLICE]
        z -= z.logsumexp(-1, keepdim=True)
        total += (negentropy_R[i : i + SLICE] - (p * z).sum(-1)).sum()
        logits_RU[i : i + SLICE] = z.exp_().sub_(p).to(logits_RU.dtype)
    return total


class _ChunkedKL(torch.autograd.Function):
    """Per-depth sums of KL(p || q) without ever holding [T, U] for more than one chunk of one depth."""

    @staticmethod
    def forward(ctx, head_UD, teacher_UD, last_TD, labels: Labels, chunk: int, *x_KTD):  # type: ignore[override]
        loss_K = torch.zeros(len(x_KTD), dtype=torch.float32, device=last_TD.device)
        with_grad = any(ctx.needs_input_grad)
        grads = [torch.zeros_like(x) for x in x_KTD] if with_grad else []
        for i in range(0, len(labels.position_R), chunk):
            p, negentropy = _softmax_(last_TD[labels.position_R[i : i + chunk]] @ teacher_UD.T)
            for k, x_TD in enumerate(x_KTD):
                rows = labels.row_KR[k, i : i + chunk]
                valid = rows >= 0
                rows = rows[valid]
                logits = x_TD[rows] @ head_UD.T
                full = bool(valid.all())
                loss_K[k] += _kl_(logits, p if full else p[valid], negentropy if full else negentropy[valid])
                if with_grad:
                    grads[k][rows] = logits @ head_UD
        ctx.save_for_backward(head_UD, teacher_UD, last_TD, *x_KTD, *grads)
        ctx.labels, ctx.chunk = labels, chunk
        return loss_K

    @staticmethod
    def backward(ctx, grad_K: Tensor):  # type: ignore[override]
        head_UD, teacher_UD, last_TD, *rest = ctx.saved_tensors
        x_KTD, grads = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        head_grad = _head_gradient(head_UD, teacher_UD, last_TD, ctx, x_KTD, grad_K) if ctx.needs_input_grad[0] else None
        return head_grad, None, None, None, None, *(g * w.to(g.dtype) for g, w in zip(grads, grad_K, strict=True))


def _head_gradient(head_UD, teacher_UD, last_TD, ctx, x_KTD, grad_K) -> Tensor:
    """Gradient of a trained lm_head. Needs the weight of each depth, known only in the backward: the logits are computed again."""
    total = torch.zeros(head_UD.shape, dtype=torch.float32, device=head_UD.device)
    labels, chunk = ctx.labels, ctx.chunk
    for i in range(0, len(labels.position_R), chunk):
        p, negentropy = _softmax_(last_TD[labels.position_R[i : i + chunk]] @ teacher_UD.T)
        for k, x_TD in enumerate(x_KTD):
            rows = labels.row_KR[k, i : i + chunk]
            valid = rows >= 0
            logits = x_TD[rows[valid]] @ head_UD.T
            _kl_(logits, p[valid], negentropy[valid])
            total += grad_K[k] * (logits.T @ x_TD[rows[valid]]).float()
    return total.to(head_UD.dtype)


def chunked_kl(x_KTD: list[Tensor], head_UD: Tensor, teacher_UD: Tensor, last_TD: Tensor, labels: Labels, chunk: int) -> Tensor:
    """Forward KL from the target's distribution to the head's, both over the draft vocabulary, summed per depth.

    x_KTD: per depth the normed outputs [T, D] that enter the lm_head. head_UD: the head's lm_head rows, frozen or trained.
    teacher_UD: the target's lm_head rows of the draft vocabulary, never trained. last_TD: the target's post-final-norm states.
    The target's softmax is renormalised on the draft vocabulary, as in EAGLE-3. Returns float32 [K].
    """
    return _ChunkedKL.apply(head_UD, teacher_UD, last_TD, labels, chunk, *x_KTD)


@torch.no_grad()
def hits(x_KTD: list[Tensor], head_UD: Tensor, draft_ids_U: Tensor | None, lm_head_VD: Tensor, last_TD: Tensor, labels: Labels, chunk: int):
    """Whether the head's first choice is the target's own, over the whole target vocabulary: [K, T] bool.

    A token that the draft vocabulary lacks can never be hit, as in the engine.
    """
    hit_KT = torch.zeros(len(x_KTD), len(last_TD), dtype=torch.bool, device=last_TD.device)
    for i in range(0, len(labels.position_R), chunk):
        best_R = (last_TD[labels.position_R[i : i + chunk]] @ lm_head_VD.T).argmax(-1)
        for k, x_TD in enumerate(x_KTD):
            rows = labels.row_KR[k, i : i + chunk]
            valid = rows >= 0
            choice = (x_TD[rows[valid]] @ head_UD.T).argmax(-1)
            hit_KT[k, rows[valid]] = (choice if draft_ids_U is None else draft_ids_U[choice]) == best_R[valid]
    return hit_KT
