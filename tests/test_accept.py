"""What each rule of verification accepts (that it is lossless: test_lossless.py); the figures made of counts say what they claim."""

import pytest
import torch

from eval.accept import (
    Counts,
    block_verify,
    bootstrap,
    draw,
    figures,
    greedy_accepted,
    rejection_sample,
    tree_accepted,
)


@pytest.mark.parametrize(
    ("drafts", "truth", "accepted"),
    [([1, 2, 3], [1, 2, 3, 4], 3), ([1, 9, 3], [1, 2, 3], 1), ([9, 2, 3], [1, 2, 3], 0), ([1, 2, 3], [1], 1), ([1], [], 0)],
)
def test_greedy_acceptance_ends_at_the_first_difference_and_at_the_known_truth(drafts, truth, accepted):
    assert greedy_accepted(drafts, truth) == accepted


def passes(q_kV: torch.Tensor, p_nV: torch.Tensor, count: int, rule=rejection_sample) -> tuple[torch.Tensor, torch.Tensor]:
    """(accepted drafts, token after them) of so many passes over the same distributions."""
    generator = torch.Generator().manual_seed(7)
    drafts_Bk = torch.stack([torch.multinomial(row, count, replacement=True, generator=generator) for row in q_kV], 1)
    uniform_Bn = torch.rand(count, len(p_nV), generator=generator, dtype=torch.float64)
    return rule(drafts_Bk, q_kV.expand(count, -1, -1), p_nV.expand(count, -1, -1), uniform_Bn)


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    p_nV = torch.randn(3, 6, generator=generator, dtype=torch.float64).softmax(-1)
    return p_nV, torch.randn(2, 6, generator=generator, dtype=torch.float64).softmax(-1)


@pytest.mark.parametrize("rule", [rejection_sample, block_verify])
def test_one_draft_is_kept_as_often_as_the_overlap_says(rule):
    p_nV, q_kV = distributions()
    accepted, _ = passes(q_kV[:1], p_nV[:2], 20000, rule)
    assert accepted.double().mean().item() == pytest.approx(float(torch.minimum(p_nV[0], q_kV[0]).sum()), abs=0.01)


def test_a_block_keeps_more_drafts_than_one_by_one():
    p_nV, q_kV = distributions()
    single, block = (passes(q_kV, p_nV, 20000, rule)[0].double().mean().item() for rule in (rejection_sample, block_verify))
    assert block > single + 0.02


@pytest.mark.parametrize("rule", [rejection_sample, block_verify])
def test_equal_distributions_accept_everything(rule):
    p_nV, _ = distributions()
    assert passes(p_nV[:2], p_nV, 200, rule)[0].eq(2).all()


@pytest.mark.parametrize("rule", [rejection_sample, block_verify])
def test_what_the_target_never_says_is_never_emitted(rule):
    p_nV = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [0.0, 0.0, 1.0]], dtype=torch.float64)
    q_kV = torch.tensor([[0.9, 0.1, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    accepted, token = passes(q_kV, p_nV, 500, rule)
    assert (p_nV[accepted, token] > 0).all() and accepted.max() == 1


def test_a_weight_of_nothing_is_never_drawn():
    weight = torch.tensor([[0.0, 2.0, 0.0, 1.0, 0.0]])
    uniform = torch.tensor([0.0, 0.3, 0.667, 1 - 2**-53], dtype=torch.float64)
    assert draw(weight.expand(4, -1), uniform).tolist() == [1, 1, 3, 3]


def test_a_tree_is_accepted_along_the_path_that_the_target_takes():
    """Root -> 7, 8; 8 -> 7, 9; 9 (under 8) -> 7."""
    tokens, parents = [7, 8, 7, 9, 7], [-1, -1, 1, 1, 3]
    assert tree_accepted(tokens, parents, [8, 0, 9, 0, 7, 0]) == [1, 3, 4]
    assert tree_accepted(tokens, parents, [7, 9, 9, 9, 9, 9]) == [0], "9 is a child of 8, not of 7"
    assert tree_accepted(tokens, parents, [5, 7, 7, 7, 7, 7]) == []
    assert tree_accepted([], [], [3]) == []


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
    assert (found["accepted_tokens"], found["discarded_tokens"], found["passes"], found["tokens_per_pass"]) == (3, 3, 2, 1.0)


@pytest.mark.parametrize("output", range(2, 10))
def test_tokens_per_pass_counts_received_tokens_wherever_an_answer_ends(output):
    """Two passes that accept 3 drafts each, after the prefill, or one, and an answer cut anywhere within: what nobody received is in
    no figure of speed."""
    passes = [3] if output <= 5 else [3, 3]
    counts = Counts()
    add(counts, passes, 3, output)
    add(counts, [0, 0], 3)  # another request, whole
    assert figures(counts)["tokens_per_pass"] == pytest.approx((output + 3) / (1 + len(passes) + 3))


def test_plain_decoding_is_one_token_a_pass():
    counts = Counts()
    counts.add(40, 0, 0, [])
    found = figures(counts)
    assert (found["tokens_per_pass"], found["acceptance_length"], found["acceptance_rate"], found["discarded_tokens"]) == (1.0, 1.0, 0.0, 0)


def test_bootstrap_holds_the_pooled_value_narrows_with_more_prompts_and_repeats():
    few = [(64, 10 + 7 * (i % 5)) for i in range(10)]
    low, high = bootstrap(few, ratio := lambda sums: sums[0] / sums[1])
    pooled = sum(o for o, _ in few) / sum(p for _, p in few)
    assert low < pooled < high and bootstrap(few, ratio) == (low, high)
    many_low, many_high = bootstrap(few * 20, ratio)
    assert many_high - many_low < (high - low) / 3
