"""The cost model: tokens per pass, speed-up and the best number of drafts, from acceptance measured per position and measured times.

Costs are in units of one plain decoding pass of the target (the time in which plain decoding emits one token).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Costs:
    """What speculation adds to a pass, in plain passes: `fixed` in every pass, `per_draft` for each draft made and verified in it."""

    fixed: float
    per_draft: float

    def of_pass(self, k: int) -> float:
        return 1 + self.fixed + k * self.per_draft if k else 1.0


def expected_tokens(acceptance_per_position: Sequence[float], k: int) -> float:
    """Tokens that a pass with k drafts emits: 1 + the sum of the first k unconditional acceptances. Exact for any pattern of
    acceptance.

    Acceptances beyond the measured positions are unknown: asking for them is an error of the caller.
    """
    assert 0 <= k <= len(acceptance_per_position)
    return 1 + sum(acceptance_per_position[:k])


def predicted_speedup(acceptance_per_position: Sequence[float], k: int, costs: Costs) -> float:
    """expected_tokens(k) / costs.of_pass(k), against plain decoding.

    With independent drafts, each accepted with probability a, position i has acceptance a^i, and two textbook formulas are special
    cases: Costs(0, 1/c) is (1 - a^(k+1)) / ((1 - a)(1 + k/c)) of Leviathan et al. 2023, where c drafts cost as much as a target pass;
    Costs(d, 0) is (1 - a^(k+1)) / ((1 - a)(1 + d)), where all drafts of a pass together cost d of one.
    """
    return expected_tokens(acceptance_per_position, k) / costs.of_pass(k)


def best_k(acceptance_per_position: Sequence[float], costs: Costs) -> tuple[int, float]:
    """The k among 0..measured positions with the largest predicted speed-up, and that speed-up. 0: better not to speculate.
    The smaller k on a tie."""
    options = [(predicted_speedup(acceptance_per_position, k, costs), -k) for k in range(len(acceptance_per_position) + 1)]
    value, negative_k = max(options)
    return -negative_k, value


def fit_costs(passes: Sequence[tuple[float, float]]) -> Costs:
    """Least squares over measured passes (drafts in it, its time in plain passes), neither cost below 0: noise can make a
    speculative pass look cheaper than a plain one. Passes of one width cannot tell the two apart: all is put down to the drafts."""
    drafts, excess = [float(k) for k, _ in passes], [time - 1 for _, time in passes]
    mean_drafts, mean_excess = fmean(drafts), fmean(excess)
    if spread := sum((k - mean_drafts) ** 2 for k in drafts):
        slope = sum((k - mean_drafts) * (e - mean_excess) for k, e in zip(drafts, excess, strict=True)) / spread
        fixed = mean_excess - slope * mean_drafts
        if slope >= 0 and fixed >= 0:
            return Costs(fixed, slope)
        if slope < 0:
            return Costs(max(0.0, mean_excess), 0.0)
    through_zero = sum(k * e for k, e in zip(drafts, excess, strict=True)) / sum(k * k for k in drafts)
    return Costs(0.0, max(0.0, through_zero))
