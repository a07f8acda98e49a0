"""The verification mathematics of chain speculative decoding, and the figures made from its counts. Pure functions.

Shape suffixes: k drafts of a pass, V target vocab, U draft vocab, R requests. Acceptance length, tokens per pass and every
rate are pooled: sums over requests are divided, never a mean of ratios, which weighs short answers as much as long ones and
can turn a comparison round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def greedy_accepted(drafts: Sequence[int], truth: Sequence[int]) -> int:
    """Length of the common prefix of the drafts and the target's own greedy tokens. A draft beyond the known truth is not
    accepted."""
    count = 0
    for draft, true in zip(drafts, truth, strict=False):
        if draft != true:
            break
        count += 1
    return count


def rejection_sample(drafts_k: Tensor, q_kV: Tensor, p_k1V: Tensor, generator: torch.Generator) -> list[int]:
    """One pass of speculative sampling (Leviathan et al. 2023, algorithm 1): the emitted tokens, accepted drafts plus one
    more.

    drafts_k int64, each sampled from its row of q_kV; q_kV the head's and p_k1V the target's distributions (rows sum to 1).
    Draft i is kept with probability min(1, p_i(x) / q_i(x)); at the first refusal a token is drawn from max(p - q, 0),
    renormalised; when all are kept, from the last row of p. The tokens follow the target's distribution exactly. Greedy
    drafts are the special case of a one-hot q."""
    emitted: list[int] = []
    for i, draft in enumerate(drafts_k.tolist()):
        if torch.rand((), generator=generator, dtype=torch.float64) * q_kV[i, draft] < p_k1V[i, draft]:
            emitted.append(draft)
            continue
        residual_V = (p_k1V[i] - q_kV[i]).clamp_min(0)
        return [*emitted, int(torch.multinomial(residual_V, 1, generator=generator))]
    return [*emitted, int(torch.multinomial(p_k1V[-1], 1, generator=generator))]


def expected_acceptance(p_V: Tensor, q_V: Tensor) -> Tensor:
    """Probability that one sampled draft is kept: sum over the vocabulary of min(p, q) = 1 - total variation distance."""
    return torch.minimum(p_V, q_V).sum(-1)


def scatter_draft_vocab(q_kU: Tensor, draft_ids_U: Tensor, vocab_size: int) -> Tensor:
    """A distribution over a reduced draft vocabulary as one over the target's [k, V]; ids outside have probability 0.
    Rejection sampling against the unscattered rows would compare probabilities of different tokens."""
    q_kV = q_kU.new_zeros(*q_kU.shape[:-1], vocab_size)
    q_kV[..., draft_ids_U] = q_kU
    return q_kV


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
    (output - accepted). `passes` counts the prefill and puts the discarded drafts back: output - accepted + discarded."""
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
        "tokens_per_pass": tokens_per_pass(counts.output_tokens, counts.accepted),
        "discarded_tokens": counts.discarded,
        "passes": counts.output_tokens - counts.accepted + counts.discarded,
    }


def tokens_per_pass(output_tokens: int, accepted: int) -> float:
    """output / (output - accepted); 0 for no output at all."""
    return output_tokens / max(1, output_tokens - accepted)


def conditional(accepted_per_position: Sequence[int], drafts: int) -> list[float]:
    """Acceptance of position i given that all before it were accepted: accepted_i / accepted_{i-1}, and / drafts for the
    first."""
    before = [drafts, *accepted_per_position[:-1]]
    return [count / whole if whole else 0.0 for count, whole in zip(accepted_per_position, before, strict=True)]


def bootstrap(pairs: Iterable[tuple[int, int]], samples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the pooled tokens per pass: prompts are drawn with replacement, sums recomputed. pairs: (output,
    accepted) per prompt."""
    data_R2 = torch.tensor(list(pairs), dtype=torch.float64)
    if data_R2.shape[0] == 0:
        return (0.0, 0.0)
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(samples):
        pick_R = torch.randint(data_R2.shape[0], (data_R2.shape[0],), generator=generator)
        output, accepted = data_R2[pick_R].sum(0).tolist()
        values.append(output / max(1.0, output - accepted))
    low, high = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return (low, high)
