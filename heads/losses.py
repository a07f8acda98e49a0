"""Losses over a frozen or trained lm_head, chunked over label positions; the teacher is computed once for all depths.

Shape suffixes: T packed tokens, R rows that the head worked out, L label positions, D hidden, V vocab, U draft vocab, K depths,
E rank of a low-rank term.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.objectives import Row, mixture, reads_target

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


@dataclass
class LowRank:
    """A trained term e W^T of the logits beside the lm_head's. rows_KRE: per depth e [R, E]; weight_UE: W."""

    rows_KRE: list[Tensor]
    weight_UE: Tensor


Products = list[tuple[Tensor, Tensor]]  # (rows [L, *], weight [U, *]): the logits are the sum of rows @ weight^T


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Scratch:
    """What one call of the loss needs for a chunk, allocated once: fresh memory of this size costs as much as a pass over it."""

    def __init__(self, rows: int, head_UD: Tensor, with_teacher: bool, softcap: float | None) -> None:
        self.softcap = softcap
        size, wide = len(head_UD), torch.promote_types(head_UD.dtype, torch.float32)
        self.step = min(rows, SLICE) if head_UD.device.type == "cpu" else rows
        self.logits_LU = head_UD.new_empty(rows, size)
        self.p_LU = head_UD.new_empty(rows if with_teacher else 0, size, dtype=wide)
        self._slice_LU = head_UD.new_empty(self.step, size, dtype=wide)

    def teacher(self, last_LD: Tensor, teacher_UD: Tensor) -> tuple[Tensor, Tensor]:
        """The target's probabilities [L, U] and sum p log p [L]. The first stay until the next call."""
        logits_LU = torch.mm(last_LD, teacher_UD.T, out=self.logits_LU[: len(last_LD)])
        if self.softcap is not None:
            logits_LU.div_(self.softcap).tanh_().mul_(self.softcap)
        negentropy_L = self.p_LU.new_empty(len(last_LD))
        for part in self._parts(len(last_LD)):
            z, p = _wide(logits_LU[part]), self.p_LU[part]
            torch.softmax(z, -1, out=p)
            negentropy_L[part] = self._dot(p, z) - _logsumexp(z, p)
        return self.p_LU[: len(last_LD)], negentropy_L

    def _logits(self, products: Products) -> Tensor:
        (x_LD, head_UD), *terms = products
        logits_LU = torch.mm(x_LD, head_UD.T, out=self.logits_LU[: len(x_LD)])
        for rows, weight in terms:
            logits_LU.addmm_(rows, weight.T)
        return logits_LU

    def text_losses(self, products: Products, y_L: Tensor, weight: float) -> Row:
        """row_losses of cross-entropy to the text alone, which needs no target: in as few passes as it takes."""
        logits_LU = self._logits(products)
        loss_L = self.p_LU.new_empty(len(logits_LU))
        for part in self._parts(len(logits_LU)):
            z, y_L1 = _wide(logits_LU[part]), y_L[part].clamp(min=0)[:, None]
            there_L = weight * (y_L[part] >= 0).to(z.dtype)
            q = torch.softmax(z, -1, out=self._slice_LU[: len(z)])
            loss_L[part] = there_L * (_logsumexp(z, q) - z.gather(1, y_L1).squeeze(1))
            logits_LU[part] = q.scatter_add_(1, y_L1, torch.full_like(y_L1, -1, dtype=q.dtype)).mul_(there_L[:, None])
        return loss_L, logits_LU

    def row_losses(
        self, products: Products, p_LU: Tensor, negentropy_L: Tensor, y_L: Tensor, loss: Mapping[str, float], accepted_L: Tensor | None
    ) -> Row:
        """Loss of each row [L] and its gradient by the logits [L, U], in the scratch. See heads.objectives for p, y and loss.
        accepted_L, where given, receives sum min(p, q)."""
        logits_LU = self._logits(products)
        loss_L = p_LU.new_empty(len(logits_LU))
        for part in self._parts(len(logits_LU)):
            z, p = _wide(logits_LU[part]), p_LU[part]
            if loss.keys() == {"kl"}:  # the usual one, in as few passes as it takes
                cross_L = self._dot(p, z)
                q = torch.softmax(z, -1, out=self._slice_LU[: len(z)])
                loss_L[part] = loss["kl"] * (negentropy_L[part] - cross_L + _logsumexp(z, q))
                self._accept(p, q, accepted_L, part)
                logits_LU[part] = q.sub_(p).mul_(loss["kl"])
            else:
                log_q = z.log_softmax(-1)
                q = log_q.exp()
                self._accept(p, q, accepted_L, part)
                loss_L[part], logits_LU[part] = mixture(loss, p, q, log_q, y_L[part])
        return loss_L, logits_LU

    def _parts(self, rows: int) -> Iterator[slice]:
        return (slice(i, min(i + self.step, rows)) for i in range(0, rows, self.step))

    @staticmethod
    def _accept(p_LU: Tensor, q_LU: Tensor, accepted_L: Tensor | None, part: slice) -> None:
        if accepted_L is not None:
            accepted_L[part] = torch.minimum(p_LU, q_LU).sum(-1)

    def _dot(self, p_LU: Tensor, z_LU: Tensor) -> Tensor:
        return torch.mul(p_LU, z_LU, out=self._slice_LU[: len(z_LU)]).sum(-1)


def _logsumexp(z_LU: Tensor, softmax_LU: Tensor) -> Tensor:
    """Of z, whose softmax is known: at the largest entry, log softmax = z - logsumexp."""
    return z_LU.amax(-1) - softmax_LU.amax(-1).log()


class _FusedLoss(torch.autograd.Function):
    """Sums of row losses per depth without ever holding [T, U] for more than one chunk of one depth. The gradients are worked out
    with the values, while a chunk's logits are there; so the depths' weights must be known before.

    tensors: the weights of the products that the logits are the sum of, the lm_head's first, then the rows of each, depth by depth."""

    @staticmethod
    def forward(ctx, teacher_UD, last_TD, labels: Labels, weight_K, loss, chunk: int, softcap, accepted_KR, *tensors):  # type: ignore[override]
        count = len(tensors) // (len(weight_K) + 1)  # of products
        weights, rows_KR = tensors[:count], [tensors[i : i + count] for i in range(count, len(tensors), count)]
        loss_K = torch.zeros(len(rows_KR), dtype=torch.float32, device=weights[0].device)
        needed = ctx.needs_input_grad[8:]
        grads = [torch.zeros_like(w, dtype=torch.float32) if need else None for w, need in zip(weights, needed, strict=False)]
        grads += [torch.zeros_like(x) if need else None for x, need in zip(tensors[count:], needed[count:], strict=True)]
        scratch = _Scratch(min(chunk, len(labels.position_L)), weights[0], last_TD is not None, softcap)
        for i in range(0, len(labels.position_L), chunk):
            here = slice(i, i + chunk)
            teacher = None if last_TD is None else scratch.teacher(last_TD[labels.position_L[here]], teacher_UD)
            for k, given_rows in enumerate(rows_KR):
                valid = labels.row_KL[k, here] >= 0
                full, rows = bool(valid.all()), labels.row_KL[k, here][valid]
                products, y_L = [(x[rows], w) for x, w in zip(given_rows, weights, strict=True)], labels.token_L[here][valid]
                if teacher is None:
                    loss_L, dlogits = scratch.text_losses(products, y_L, loss["ce"])
                else:
                    p, negentropy = teacher if full else (x[valid] for x in teacher)
                    accepted_L = None if accepted_KR is None else p.new_empty(len(rows))
                    loss_L, dlogits = scratch.row_losses(products, p, negentropy, y_L, loss, accepted_L)
                    if accepted_KR is not None and accepted_L is not None:
                        accepted_KR[k, rows] = accepted_L
                scale = weight_K[k].to(loss_L.dtype)
                if labels.weight_KL is not None:
                    scale = scale * labels.weight_KL[k, here][valid]
                    loss_L = loss_L * labels.weight_KL[k, here][valid]
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
    last_TD: Tensor | None,
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
    teacher_UD: the target's lm_head rows of the draft vocabulary, never trained. last_TD: the target's post-final-norm states;
    None where the loss does not read the target. The target's softmax is renormalised on the draft vocabulary, as in EAGLE-3. term:
    added to the logits. accepted_KR [K, R], where given, receives the chance sum min(p, q) that a draft sampled from a row is accepted,
    for rows that have a label. softcap: of the target's logits. Returns the sum over depths of weight_K times the sums, which carries
    the gradient, and the sums, float32 [K], which do not.
    """
    assert last_TD is not None or not (reads_target(loss) or accepted_KR is not None)
    if term is None:
        tensors = [head_UD, *x_KRD]
    else:
        tensors = [head_UD, term.weight_UE, *(x for pair in zip(x_KRD, term.rows_KRE, strict=True) for x in pair)]
    return _FusedLoss.apply(teacher_UD, last_TD, labels, weight_K, loss, chunk, softcap, accepted_KR, *tensors)


@torch.no_grad()
def log_likelihood(x_KRD: list[Tensor], head_UD: Tensor, labels: Labels, chunk: int) -> Tensor:
    """log q of the text's own token at every row that has a label, 0 at the others: [K, R], at least float32."""
    found_KR = _wide(head_UD.new_zeros(len(x_KRD), len(x_KRD[0])))
    for k, x_RD in enumerate(x_KRD):
        there = labels.row_KL[k] >= 0
        for rows, token_L in zip(labels.row_KL[k][there].split(chunk), labels.token_L[there].split(chunk), strict=True):
            log_q = _wide(x_RD[rows] @ head_UD.T).log_softmax(-1)
            found_KR[k, rows] = log_q.gather(1, token_L[:, None]).squeeze(1)
    return found_KR
