"""The cost model: the textbook's numbers, and what follows from measured acceptance."""

import pytest

from eval.speedup import (
    best_k,
    cost_per_draft,
    expected_tokens,
    geometric_tokens,
    predicted_speedup,
    speedup_cost_ratio,
    speedup_fixed_cost,
)


def test_textbook_formula_with_cost_ratio():
    assert round(speedup_cost_ratio(0.8, 4, 9), 2) == 2.33


@pytest.mark.parametrize(("a", "expected"), [(0.9, 3.56), (0.7, 2.41), (0.5, 1.68), (0.3, 1.24)])
def test_textbook_formula_with_fixed_cost(a, expected):
    assert round(speedup_fixed_cost(a, 4, 0.15), 2) == expected


def test_certain_acceptance_is_the_limit_of_the_geometric_formula():
    assert geometric_tokens(1.0, 4) == 5
    assert geometric_tokens(1 - 1e-9, 4) == pytest.approx(5)


def test_expected_tokens_equals_the_geometric_formula_for_independent_drafts():
    a = 0.6
    assert expected_tokens([a, a**2, a**3], 3) == pytest.approx(geometric_tokens(a, 3))


def test_measured_cost_gives_the_measured_speedup_back():
    rates, k, speedup = [0.6, 0.4, 0.2], 3, 1.5
    cost = cost_per_draft(expected_tokens(rates, k), speedup, k)
    assert predicted_speedup(rates, k, cost) == pytest.approx(speedup)


def test_best_k_grows_with_acceptance_and_shrinks_with_cost():
    good, poor = [0.9, 0.8, 0.7, 0.6], [0.4, 0.1, 0.02, 0.0]
    assert best_k(good, 0.05)[0] == 4
    assert best_k(poor, 0.05)[0] == 2
    assert best_k(poor, 0.5) == (0, 1.0), "where a draft costs more than it earns, no draft is best"


def test_noise_never_makes_a_draft_cheaper_than_nothing():
    assert cost_per_draft(tokens_per_pass=1.2, speedup=1.3, k=3) == 0
