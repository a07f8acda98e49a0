"""The verification mathematics of speculative decoding, chains and trees, and the figures made from its counts. Pure functions: what
is random comes in as uniform numbers.

Shape suffixes: B passes, k drafts of a pass, n = k + 1, V target vocab, U draft vocab, R requests, C columns, S samples. Acceptance
length, tokens per pass and every rate are pooled: sums over requests are divided, never a mean of ratios, which weighs short answers as
much as long ones and can turn a comparison round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def greedy_accepted(drafts: Sequence[int], truth: Sequence[int]) -> int:
    """Length of the common prefix of the drafts and the target's own tokens. A draft beyond the known truth is not accepted.

    Lossless at any temperature where the truth is what the target itself chose after each draft, greedily or by sampling."""
    count = 0
    for draft, true in zip(drafts, truth, strict=False):
        if draft != true:
            break
        count += 1
    return count


def tree_accepted(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> list[int]:
    """Accepted nodes of a draft tree, from the root down: `greedy_accepted` along the only path on which it can go on.

    tokens, parents: of each node, parents before children, -1 for a child of the root, which is the last token of the text.
    choices: the target's own token after the root, then after each node. The pass emits the accepted nodes and
    choices[1 + last accepted node]."""
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path: list[int] = []
    at = -1
    while (at := children.get((at, choices[at + 1]), -1)) >= 0:
        path.append(at)
    return path


def draw(weight_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """A token [B] int64 per row of weights (not negative, of any sum above 0), by the inverse of the distribution function at
    uniform_B, float64 in [0, 1)."""
    sums_BV = weight_BV.double().cumsum(-1)
    found_B1 = torch.searchsorted(sums_BV, (uniform_B * sums_BV[:, -1])[:, None], right=True)
    return found_B1.squeeze(1).clamp(max=weight_BV.shape[1] - 1)


def rejection_sample(drafts_Bk: Tensor, q_BkV: Tensor, p_BnV: Tensor, uniform_Bn: Tensor) -> tuple[Tensor, Tensor]:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1): accepted drafts [B] and the token after them [B], both int64.

    drafts_Bk int64, each sampled from its row of q_BkV; q_BkV the head's and p_BnV the target's distributions (rows sum to 1);
    uniform_Bn float64: k for the drafts, the last for the token. Draft i is kept with probability min(1, p_i(x) / q_i(x)); at the
    first refusal a token is drawn from max(p - q, 0), renormalised; when all are kept, from the last row of p. The tokens follow the
    target's distribution exactly. Greedy drafts are the special case of a one-hot q. k may be 0."""
    q_Bk, p_Bk = _of_drafts(drafts_Bk, q_BkV), _of_drafts(drafts_Bk, p_BnV)
    accepted_B = (uniform_Bn[:, :-1] * q_Bk < p_Bk).long().cumprod(1).sum(1)
    return accepted_B, _corrected(accepted_B, q_BkV, p_BnV, p_BnV.new_ones(len(p_BnV)), uniform_Bn[:, -1])


def block_verify(drafts_Bk: Tensor, q_BkV: Tensor, p_BnV: Tensor, uniform_Bn: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification (Sun et al. 2024, arXiv 2403.10444, algorithm 2), which keeps at least as many drafts on average as
    `rejection_sample`, whose arguments and results it has.

    w_0 = 1, w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)). Prefix i < k passes with probability r / (r + 1 - w_i), r the sum of
    max(w_i p_{i+1} - q_{i+1}, 0), prefix k with w_k; the longest that passes is kept, and the token is drawn from
    max(w_i p_{i+1} - q_{i+1}, 0), or after all k drafts from the last row of p."""
    k = drafts_Bk.shape[1]
    ratio_Bk = _of_drafts(drafts_Bk, p_BnV) / _of_drafts(drafts_Bk, q_BkV)
    weight_Bn = torch.ones_like(p_BnV[..., 0])
    accepted_B = drafts_Bk.new_zeros(len(drafts_Bk))
    for i in range(1, k + 1):
        weight_Bn[:, i] = (weight_Bn[:, i - 1] * ratio_Bk[:, i - 1]).clamp(max=1)
        chance_B = weight_Bn[:, i]
        if i < k:
            rest_B = (chance_B[:, None] * p_BnV[:, i] - q_BkV[:, i]).clamp_min(0).sum(-1)
            chance_B = torch.where(rest_B > 0, rest_B / (rest_B + 1 - chance_B), (chance_B >= 1).to(chance_B))
        accepted_B = torch.where(uniform_Bn[:, i - 1] < chance_B, i, accepted_B)
    weight_B = weight_Bn.gather(1, accepted_B[:, None]).squeeze(1)
    return accepted_B, _corrected(accepted_B, q_BkV, p_BnV, weight_B, uniform_Bn[:, -1])


def _of_drafts(drafts_Bk: Tensor, rows_BnV: Tensor) -> Tensor:
    """What each draft's row gives it, [B, k]."""
    return rows_BnV[:, : drafts_Bk.shape[1]].gather(2, drafts_Bk[..., None]).squeeze(2)


def _corrected(accepted_B: Tensor, q_BkV: Tensor, p_BnV: Tensor, weight_B: Tensor, uniform_B: Tensor) -> Tensor:
    """The token after the accepted drafts, from max(weight p - q, 0); after all of them nothing was drafted, so that q = 0."""
    row_B, q_BnV = torch.arange(len(accepted_B), device=p_BnV.device), torch.nn.functional.pad(q_BkV, (0, 0, 0, 1))
    p_BV = p_BnV[row_B, accepted_B]
    left_BV = (weight_B[:, None] * p_BV - q_BnV[row_B, accepted_B]).clamp_min(0)
    # Where p and q are equal but for rounding, a refusal leaves nothing.
    return draw(torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, p_BV), uniform_B)


@dataclass
class Counts:
    """Pooled counts. accepted_per_position[i]: passes in which draft i+1 was accepted. discarded: accepted drafts that never
    reached the output because the answer ended inside the pass (engines count them as accepted)."""

    requests: int = 0
    output_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    discarded: int = 0

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def passes(self) -> int:
        """Passes of the target, the prefill among them: each emits one token beside the drafts that it accepts."""
        return self.output_tokens - self.accepted + self.discarded

    def add(self, output_tokens: int, drafts: int, draft_tokens: int, accepted_per_position: Sequence[int]) -> None:
        """Adds one request. Its first token comes from the prefill, every drafting pass emits its accepted drafts and one
        more; what these sum up to beyond the output was discarded. Exact for a method that drafts in every pass, a lower
        bound for n-gram, whose passes without a draft hide some."""
        self.requests += 1
        self.output_tokens += output_tokens
        self.drafts += drafts
        self.draft_tokens += draft_tokens
        missing = len(accepted_per_position) - len(self.accepted_per_position)
        self.accepted_per_position += [0] * max(0, missing)
        for i, count in enumerate(accepted_per_position):
            self.accepted_per_position[i] += count
        self.discarded += max(0, 1 + drafts + sum(accepted_per_position) - output_tokens) if drafts else 0


def figures(counts: Counts) -> dict[str, Any]:
    """The figures of the report for one method or slice. Rates are 0 and lengths 1 where nothing was drafted.

    acceptance_rate = accepted / draft_tokens; acceptance_length = 1 + accepted / drafts; acceptance_per_position[i] =
    accepted_i / drafts (unconditional: not divided by the acceptance of the position before); tokens_per_pass = output /
    passes, where passes = output - accepted + discarded; 0 for no output at all."""
    drafts = counts.drafts
    return {
        "requests": counts.requests,
        "output_tokens": counts.output_tokens,
        "drafts": drafts,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted,
        "accepted_per_position": list(counts.accepted_per_position),
        "acceptance_per_position": [count / drafts if drafts else 0.0 for count in counts.accepted_per_position],
        "acceptance_rate": counts.accepted / counts.draft_tokens if counts.draft_tokens else 0.0,
        "acceptance_length": 1 + counts.accepted / drafts if drafts else 1.0,
        "tokens_per_pass": counts.output_tokens / max(1, counts.passes),
        "discarded_tokens": counts.discarded,
        "passes": counts.passes,
    }


def bootstrap(rows: Iterable[Sequence[float]], figure: Callable[[Tensor], Tensor], samples: int = 1000) -> tuple[float, float]:
    """95 % interval of a pooled figure: prompts are drawn with replacement, sums made anew. rows: the addends of one prompt each, at
    least one prompt; figure: of sums [C, samples], by column of `rows`, float64."""
    data_RC = torch.tensor(list(rows), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    picks_SR = torch.randint(len(data_RC), (samples, len(data_RC)), generator=generator)
    values = figure(torch.stack([column_R[picks_SR].sum(1) for column_R in data_RC.T]))
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return (low, high)
