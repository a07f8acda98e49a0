"""Verification keeps the target's distribution, and the figures made of counts say what they claim."""

import pytest
import torch

from eval.accept import (
    Counts,
    bootstrap,
    conditional,
    expected_acceptance,
    figures,
    greedy_accepted,
    rejection_sample,
    scatter_draft_vocab,
    tokens_per_pass,
)

CHI2_999 = {4: 18.47, 5: 20.52}  # 99.9 % quantiles by degrees of freedom


@pytest.mark.parametrize(
    ("drafts", "truth", "accepted"),
    [([1, 2, 3], [1, 2, 3, 4], 3), ([1, 9, 3], [1, 2, 3], 1), ([9, 2, 3], [1, 2, 3], 0), ([1, 2, 3], [1], 1), ([1], [], 0)],
)
def test_greedy_acceptance_ends_at_the_first_difference_and_at_the_known_truth(drafts, truth, accepted):
    assert greedy_accepted(drafts, truth) == accepted


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    p_k1V = torch.randn(3, 6, generator=generator).softmax(-1).double()
    q_kV = torch.randn(2, 6, generator=generator).softmax(-1).double()
    return p_k1V, q_kV


def run_passes(p_k1V: torch.Tensor, q_kV: torch.Tensor, passes: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    drafts = torch.stack([torch.multinomial(row, passes, replacement=True, generator=generator) for row in q_kV], 1)
    return [rejection_sample(drafts_k, q_kV, p_k1V, generator) for drafts_k in drafts]


def chi_square(tokens: list[int], p_V: torch.Tensor) -> float:
    expected = p_V * len(tokens)
    found = torch.bincount(torch.tensor(tokens), minlength=len(p_V)).double()
    assert found[p_V == 0].sum() == 0
    return float(((found - expected)[p_V > 0] ** 2 / expected[p_V > 0]).sum())


def test_rejection_sampling_is_lossless_at_every_position():
    p_k1V, q_kV = distributions()
    emitted = run_passes(p_k1V, q_kV, 12000)
    for i in range(3):
        tokens = [out[i] for out in emitted if len(out) > i]
        assert len(tokens) > 500
        assert chi_square(tokens, p_k1V[i]) < CHI2_999[5], f"token {i + 1} does not follow the target"


def test_rejection_sampling_accepts_as_often_as_the_overlap_says():
    p_k1V, q_kV = distributions()
    emitted = run_passes(p_k1V, q_kV, 12000)
    share = sum(len(out) > 1 for out in emitted) / len(emitted)
    assert share == pytest.approx(float(expected_acceptance(p_k1V[0], q_kV[0])), abs=0.02)


def test_equal_distributions_accept_everything():
    p_k1V, _ = distributions()
    assert all(len(out) == 3 for out in run_passes(p_k1V, p_k1V[:2], 200))


def test_greedy_drafts_are_lossless_as_a_one_hot_distribution():
    p_k1V, _ = distributions()
    one_hot = torch.nn.functional.one_hot(p_k1V[:2].argmin(-1), 6).double()
    emitted = run_passes(p_k1V, one_hot, 6000)
    assert chi_square([out[0] for out in emitted], p_k1V[0]) < CHI2_999[5]


def test_reduced_vocabulary_is_lossless_once_scattered():
    p_k1V, _ = distributions()
    ids_U = torch.tensor([0, 2, 5])
    q_kU = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]], dtype=torch.float64)
    q_kV = scatter_draft_vocab(q_kU, ids_U, 6)
    assert q_kV.sum(-1).tolist() == pytest.approx([1, 1]) and q_kV[:, [1, 3, 4]].sum() == 0
    emitted = run_passes(p_k1V, q_kV, 8000)
    assert {out[0] for out in emitted} == set(range(6)), "tokens outside the draft vocabulary come from the residual"
    assert chi_square([out[0] for out in emitted], p_k1V[0]) < CHI2_999[5]


def add(counts: Counts, passes: list[int], k: int, output: int | None = None) -> None:
    """One request whose passes accepted so many drafts each."""
    per_position = [sum(a > i for a in passes) for i in range(k)]
    counts.add(1 + sum(passes) + len(passes) if output is None else output, len(passes), k * len(passes), per_position)


def test_figures_of_counts_by_hand():
    counts = Counts()
    add(counts, [3, 0, 1], 3)
    found = figures(counts)
    assert found["accepted_per_position"] == [2, 1, 1]
    assert found["acceptance_per_position"] == [pytest.approx(x) for x in (2 / 3, 1 / 3, 1 / 3)], "unconditional: over all drafts"
    assert found["acceptance_rate"] == pytest.approx(4 / 9)
    assert found["acceptance_length"] == pytest.approx(1 + 4 / 3)
    assert (found["output_tokens"], found["tokens_per_pass"], found["passes"]) == (8, 2.0, 4)
    assert conditional(found["accepted_per_position"], 3) == [pytest.approx(x) for x in (2 / 3, 1 / 2, 1)]


def test_pooling_weighs_passes_and_not_requests():
    """A mean of per-request ratios would call b the better method; pooled, a is."""
    a, b = Counts(), Counts()
    add(a, [0], 2), add(a, [2] * 30, 2)
    add(b, [2], 2), add(b, [1] * 30, 2)
    per_request_a, per_request_b = (1 + 3) / 2, (3 + 2) / 2
    assert per_request_a < per_request_b
    assert figures(a)["acceptance_length"] > figures(b)["acceptance_length"]


def test_accepted_drafts_beyond_the_end_are_counted_as_the_engine_does_and_known():
    """max_tokens 2: the prefill's token and one more, of a pass in which the engine counted 3 accepted drafts."""
    counts = Counts()
    add(counts, [3], 3, output=2)
    found = figures(counts)
    assert (found["accepted_tokens"], found["discarded_tokens"], found["passes"]) == (3, 3, 2)


def test_plain_decoding_is_one_token_a_pass():
    counts = Counts()
    counts.add(40, 0, 0, [])
    found = figures(counts)
    assert (found["tokens_per_pass"], found["acceptance_length"], found["acceptance_rate"], found["discarded_tokens"]) == (1.0, 1.0, 0.0, 0)


def test_bootstrap_holds_the_pooled_value_narrows_with_more_prompts_and_repeats():
    few = [(64, 10 + 7 * (i % 5)) for i in range(10)]
    low, high = bootstrap(few)
    pooled = tokens_per_pass(sum(o for o, _ in few), sum(a for _, a in few))
    assert low < pooled < high and bootstrap(few) == (low, high)
    many_low, many_high = bootstrap(few * 20)
    assert many_high - many_low < (high - low) / 3
