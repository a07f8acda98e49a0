"""What one row of a loss is, and its gradient by the logits, in closed form: the parts that a conf's `loss` mixes.

p is the target's distribution of the token, q = softmax(z) the head's, both over the draft vocabulary; y the token that the text has
there (-1 where the draft vocabulary lacks it), a = sum min(p, q) the chance that a draft sampled from q is accepted (Leviathan et
al. 2023). For any f(q): df/dz = q * (g - sum q g) with g = df/dq.

Shape suffixes: L rows, U draft vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

TINY = 1e-30
ETA = 3.0  # of `lk`: how fast it goes over from KL to total variation as acceptance grows (arXiv 2602.23881)
TOP = 10  # of `top_ce`

Row = tuple[Tensor, Tensor]  # loss [L], gradient by the logits [L, U]


def _through_softmax(q_LU: Tensor, g_LU: Tensor) -> Tensor:
    return q_LU * (g_LU - (q_LU * g_LU).sum(-1, keepdim=True))


def _minus_log(log_q_LU: Tensor, q_LU: Tensor, index_L: Tensor) -> Row:
    """-log q of one token; nothing where its index is -1."""
    there_L1, index_L1 = (index_L >= 0)[:, None], index_L.clamp(min=0)[:, None]
    grad_LU = q_LU.clone().scatter_add_(1, index_L1, torch.full_like(index_L1, -1, dtype=q_LU.dtype))
    return (-log_q_LU.gather(1, index_L1) * there_L1).squeeze(1), grad_LU * there_L1


def ce(p: Tensor, q: Tensor, log_q: Tensor, y: Tensor) -> Row:
    """-log q(y), y the text's own token: needs no target."""
    return _minus_log(log_q, q, y)


def argmax_ce(p: Tensor, q: Tensor, log_q: Tensor, y: Tensor) -> Row:
    """-log q of the target's likeliest token: what greedy verification asks for."""
    return _minus_log(log_q, q, p.argmax(-1))


def kl(p: Tensor, q: Tensor, log_q: Tensor, y: Tensor) -> Row:
    """KL(p || q)."""
    return torch.special.xlogy(p, p).sum(-1) - (p * log_q).sum(-1), q - p


def reverse_kl(p: Tensor, q: Tensor, log_q: Tensor, y: Tensor) -> Row:
    """KL(q || p)."""
    ratio = log_q - p.clamp(min=TINY).log()
    return (q * ratio).sum(-1), _through_softmax(q, ratio)


def jsd(p: Tensor, q: Tensor, log_q: Tensor, y: Tensor) -> Row:
    """Jensen-Shannon: (KL(p || m) + KL(q || m)) / 2, m = (p + q) / 2."""
    log_m = ((p + q) / 2).clamp(min=TINY).log()
    ratio = log_q - log_m
    loss = torch.special.xlogy(p, p).sum(-1) - (p * log_m).sum(-1) + (q * ratio).sum(-1)
    return loss / 2, _through_softmax(q, ratio / 2)


def tv(p: Tensor, q: Tensor, log_q: Tensor, y: Tensor) -> Row:
    """Total variation, 1 - a: what acceptance of *sampled* drafts asks for. Greedy drafts are accepted otherwise."""
    return (p - q).abs().sum(-1) / 2, _through_softmax(q, (q - p).sign() / 2)


def log_acceptance(p: Tensor, q: Tensor, log_q: Tensor, y: Tensor) -> Row:
    """-log a: total variation with a gradient that does not vanish where hardly anything is accepted."""
    loss, grad = tv(p, q, log_q, y)
    accepted = (1 - loss).clamp(min=1e-6)
    return -accepted.log(), grad / accepted[:, None]


def lk(p: Tensor, q: Tensor, log_q: Tensor, y: Tensor) -> Row:
    """w KL + (1 - w) TV, w = exp(-ETA a) without gradient: KL while little is accepted, then total variation."""
    (far, far_grad), (near, near_grad) = kl(p, q, log_q, y), tv(p, q, log_q, y)
    w = torch.exp(-ETA * (1 - near))
    return w * far + (1 - w) * near, w[:, None] * far_grad + (1 - w)[:, None] * near_grad


def top_ce(p: Tensor, q: Tensor, log_q: Tensor, y: Tensor) -> Row:
    """-sum p log q over the TOP likeliest tokens of the target (HASS, arXiv 2408.15766)."""
    top, index = p.topk(min(TOP, p.shape[-1]), dim=-1)
    grad = (q * top.sum(-1, keepdim=True)).scatter_add_(1, index, -top)
    return -(top * log_q.gather(1, index)).sum(-1), grad


OBJECTIVES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Row]] = {
    f.__name__: f for f in (ce, argmax_ce, kl, reverse_kl, jsd, tv, log_acceptance, lk, top_ce)
}


def parse(loss: str) -> dict[str, float]:
    """Weights by name of what a conf writes: `kl`, or a mixture as in `0.1*ce + 0.9*tv`. ValueError: anything else."""
    found: dict[str, float] = {}
    for part in loss.split("+"):
        weight, star, name = part.rpartition("*")
        try:
            found[name.strip()] = float(weight) if star else 1.0
        except ValueError:
            found[part.strip()] = 0.0
    if not all(name in OBJECTIVES and 0 < weight < float("inf") for name, weight in found.items()):
        raise ValueError(f"head.loss={loss}: must be one of {', '.join(OBJECTIVES)}, or a mixture of them as in 0.1*ce+0.9*tv")
    return found


def reads_target(loss: Mapping[str, float]) -> bool:
    """Whether a checked mixture asks for the target's distribution; cross-entropy to the text alone does not."""
    return loss.keys() != {"ce"}


def mixture(loss: Mapping[str, float], p: Tensor, q: Tensor, log_q: Tensor, y: Tensor) -> Row:
    """Loss [L] and gradient [L, U] of a checked mixture."""
    parts = [(weight, *OBJECTIVES[name](p, q, log_q, y)) for name, weight in loss.items()]
    return sum((w * value for w, value, _ in parts), torch.zeros_like(parts[0][1])), sum(w * grad for w, _, grad in parts)  # type: ignore[return-value]
