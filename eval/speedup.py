"""The cost model: tokens per pass, speed-up and the best number of drafts, from acceptance measured per position.

Costs are in units of one plain decoding pass of the target (the time in which plain decoding emits one token).
"""

from __future__ import annotations

from collections.abc import Sequence


def expected_tokens(acceptance_per_position: Sequence[float], k: int) -> float:
    """Tokens that a pass with k drafts emits: 1 + the sum of the first k unconditional acceptances. Exact for any pattern of
    acceptance.

    Acceptances beyond the measured positions are unknown: asking for them is an error of the caller.
    """
    assert 0 <= k <= len(acceptance_per_position)
    return 1 + sum(acceptance_per_position[:k])


def geometric_tokens(a: float, k: int) -> float:
    """Tokens per pass when each draft is accepted with the same probability a, independently: (1 - a^(k+1)) / (1 - a)."""
    return float(k + 1) if a == 1 else (1 - a ** (k + 1)) / (1 - a)


def speedup_cost_ratio(a: float, k: int, c: float) -> float:
    """Leviathan et al. 2023: (1 - a^(k+1)) / ((1 - a)(1 + k/c)); c: how many drafts cost as much as one target pass."""
    return geometric_tokens(a, k) / (1 + k / c)


def speedup_fixed_cost(a: float, k: int, draft_cost: float) -> float:
    """(1 - a^(k+1)) / (1 - a) / (1 + draft cost); draft_cost: all k drafts together, in target passes."""
    return geometric_tokens(a, k) / (1 + draft_cost)


def cost_per_draft(tokens_per_pass: float, speedup: float, k: int) -> float:
    """What one draft adds to a pass, measured: a pass takes tokens_per_pass / speedup plain passes, the excess over 1 is
    shared by k drafts.

    It holds drafting and the wider verification together. Not below 0: noise can make a speculative pass look cheaper than a
    plain one."""
    assert k > 0 and speedup > 0
    return max(0.0, (tokens_per_pass / speedup - 1) / k)


def predicted_speedup(acceptance_per_position: Sequence[float], k: int, draft_cost: float) -> float:
    """expected_tokens(k) / (1 + k * draft_cost): draft_cost per draft, as `cost_per_draft` measures it."""
    return expected_tokens(acceptance_per_position, k) / (1 + k * draft_cost)


def best_k(acceptance_per_position: Sequence[float], draft_cost: float) -> tuple[int, float]:
    """The k among 0..measured positions with the largest predicted speed-up, and that speed-up. 0: better not to speculate.
    The smaller k on a tie."""
    options = [(predicted_speedup(acceptance_per_position, k, draft_cost), -k) for k in range(len(acceptance_per_position) + 1)]
    value, negative_k = max(options)
    return -negative_k, value
