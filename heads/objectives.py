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

Weight = float | Tensor  # of a part: one number, or one per row [L]
Scratch = tuple[Tensor | None, ...]  # three [L, U]; None: to be allocated


class Rows:
    """Some rows of a loss: their statistics, worked out once for all parts of a mixture, and the sum of the parts' gradients, which passes
    the softmax once. p_LU, negentropy_L = sum p log p: None where no part reads the target.

    Gradient by the logits: q (slope - sum q slope) + of_q q + of_p p, and what single tokens add (`points`).
    """

    def __init__(self, z_LU: Tensor, p_LU: Tensor | None, negentropy_L: Tensor | None, y_L: Tensor, scratch: Scratch) -> None:
        """scratch: its first becomes q."""
        self.z, self.y = z_LU, y_L
        self._p, self._negentropy = p_LU, negentropy_L
        q, self._unused, self._free = scratch
        self.q = torch.softmax(z_LU, -1, out=q)
        self.lse = logsumexp(z_LU, self.q)
        self.of_q: Weight = 0.0
        self.of_p: Weight = 0.0
        self.slope: Tensor | None = None
        self.points: list[tuple[Tensor, Tensor]] = []  # tokens and what to add there, [L, *] both
        self._accepted: Tensor | None = None

    @property
    def p(self) -> Tensor:
        assert self._p is not None
        return self._p

    @property
    def negentropy(self) -> Tensor:
        assert self._negentropy is not None
        return self._negentropy

    @property
    def accepted(self) -> Tensor:
        """a [L]."""
        if self._accepted is None:
            self._accepted = torch.minimum(self.p, self.q, out=self._free).sum(-1)
        return self._accepted

    def dot(self, a_LU: Tensor, b_LU: Tensor) -> Tensor:
        return torch.mul(a_LU, b_LU, out=self._free).sum(-1)

    def add_slope(self, g_LU: Tensor, weight: Weight) -> None:
        """g_LU: df/dq of a part."""
        if self.slope is None:
            self.slope = torch.mul(g_LU, _column(weight), out=self._unused)
        else:
            self.slope += g_LU * _column(weight)

    def minus_log(self, index_L: Tensor, weight: Weight) -> Tensor:
        """Loss [L] -log q of one token; nothing where its index is -1."""
        there_L, index_L1 = weight * (index_L >= 0).to(self.z.dtype), index_L.clamp(min=0)[:, None]
        self.of_q = self.of_q + there_L
        self.points.append((index_L1, -there_L[:, None]))
        return there_L * (self.lse - self.z.gather(1, index_L1).squeeze(1))

    def gradient(self) -> Tensor:
        """By the logits [L, U], in the place of q."""
        grad_LU, of_q, of_p = self.q, self.of_q, self.of_p
        if self.slope is not None:
            shift_L = of_q - self.dot(grad_LU, self.slope)
            grad_LU *= self.slope.add_(shift_L[:, None])
        elif isinstance(of_q, float) and of_p == -of_q:  # KL alone
            return grad_LU.sub_(self.p) if of_q == 1 else grad_LU.sub_(self.p).mul_(of_q)
        else:
            grad_LU *= _column(of_q)
        if isinstance(of_p, Tensor):
            grad_LU.addcmul_(self.p, of_p[:, None])
        elif of_p:
            grad_LU.add_(self.p, alpha=of_p)
        for index, value in self.points:
            grad_LU.scatter_add_(1, index, value)
        return grad_LU


def _column(weight: Weight) -> Weight:
    return weight[:, None] if isinstance(weight, Tensor) else weight


def logsumexp(z_LU: Tensor, softmax_LU: Tensor) -> Tensor:
    """Of z, whose softmax is known: at the largest entry, log softmax = z - logsumexp."""
    return z_LU.amax(-1) - softmax_LU.amax(-1).log()


# Each part: adds its gradient, times the weight, to `r`, and returns its loss [L], times the weight.


def ce(r: Rows, weight: Weight) -> Tensor:
    """-log q(y), y the text's own token: needs no target."""
    return r.minus_log(r.y, weight)


def argmax_ce(r: Rows, weight: Weight) -> Tensor:
    """-log q of the target's likeliest token: what greedy verification asks for."""
    return r.minus_log(r.p.argmax(-1), weight)


def kl(r: Rows, weight: Weight) -> Tensor:
    """KL(p || q)."""
    r.of_q, r.of_p = r.of_q + weight, r.of_p - weight
    return weight * (r.negentropy - r.dot(r.p, r.z) + r.lse)


def reverse_kl(r: Rows, weight: Weight) -> Tensor:
    """KL(q || p)."""
    ratio_LU = r.z - r.lse[:, None] - r.p.clamp(min=TINY).log_()
    r.add_slope(ratio_LU, weight)
    return weight * r.dot(r.q, ratio_LU)


def jsd(r: Rows, weight: Weight) -> Tensor:
    """Jensen-Shannon: (KL(p || m) + KL(q || m)) / 2, m = (p + q) / 2."""
    log_m_LU = (r.p + r.q).div_(2).clamp_(min=TINY).log_()
    ratio_LU = r.z - r.lse[:, None] - log_m_LU
    r.add_slope(ratio_LU, weight / 2)
    return weight * (r.negentropy - r.dot(r.p, log_m_LU) + r.dot(r.q, ratio_LU)) / 2


def tv(r: Rows, weight: Weight) -> Tensor:
    """Total variation, 1 - a: what acceptance of *sampled* drafts asks for. Greedy drafts are accepted otherwise."""
    loss_L = weight * (1 - r.accepted)
    r.add_slope(r.q < r.p, -weight)  # where more of q is more acceptance
    return loss_L


def log_acceptance(r: Rows, weight: Weight) -> Tensor:
    """-log a: total variation with a gradient that does not vanish where hardly anything is accepted."""
    accepted_L = r.accepted.clamp(min=1e-6)
    tv(r, weight / accepted_L)
    return -weight * accepted_L.log()


def lk(r: Rows, weight: Weight) -> Tensor:
    """w KL + (1 - w) TV, w = exp(-ETA a) without gradient: KL while little is accepted, then total variation."""
    w_L = torch.exp(-ETA * r.accepted)
    return kl(r, weight * w_L) + tv(r, weight * (1 - w_L))


def top_ce(r: Rows, weight: Weight) -> Tensor:
    """-sum p log q over the TOP likeliest tokens of the target (HASS, arXiv 2408.15766)."""
    top, index = r.p.topk(min(TOP, r.p.shape[-1]), dim=-1)
    r.of_q = r.of_q + weight * top.sum(-1)
    r.points.append((index, -top * _column(weight)))
    return weight * (top * (r.lse[:, None] - r.z.gather(1, index))).sum(-1)


OBJECTIVES: dict[str, Callable[[Rows, Weight], Tensor]] = {
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


def mixture(loss: Mapping[str, float], rows: Rows) -> Tensor:
    """Losses [L] of a checked mixture; their gradient is then `rows.gradient()`."""
    return sum((OBJECTIVES[name](rows, weight) for name, weight in loss.items()), torch.zeros_like(rows.lse))
