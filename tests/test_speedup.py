"""The cost model: the textbook's numbers as special cases, and what follows from measured acceptance and times."""

import pytest

from eval.speedup import Costs, best_k, expected_tokens, fit_costs, predicted_speedup


def independent(a: float, k: int) -> list[float]:
    """Acceptance at each position of drafts that are accepted with probability a, each for itself."""
    return [a**i for i in range(1, k + 1)]


def test_textbook_formula_with_cost_ratio():
    """(1 - a^(k+1)) / ((1 - a)(1 + k/c)), Leviathan et al. 2023."""
    found = predicted_speedup(independent(0.8, 4), 4, Costs(0.0, 1 / 9))
    assert round(found, 2) == 2.33 and found == pytest.approx((1 - 0.8**5) / ((1 - 0.8) * (1 + 4 / 9)))


@pytest.mark.parametrize(("a", "expected"), [(0.9, 3.56), (0.7, 2.41), (0.5, 1.68), (0.3, 1.24)])
def test_textbook_formula_with_fixed_cost(a, expected):
    found = predicted_speedup(independent(a, 4), 4, Costs(0.15, 0.0))
    assert round(found, 2) == expected and found == pytest.approx((1 - a**5) / (1 - a) / 1.15)


def test_certain_acceptance_emits_every_draft_and_one_more():
    assert expected_tokens(independent(1.0, 4), 4) == 5 and expected_tokens([0.6], 0) == 1


@pytest.mark.parametrize("costs", [Costs(0.0, 0.1), Costs(0.3, 0.0), Costs(0.2, 0.07)])
def test_costs_are_found_again_from_the_times_of_passes(costs):
    found = fit_costs([(k, costs.of_pass(k)) for k in (1, 2, 4, 6)])
    assert (found.fixed, found.per_draft) == (pytest.approx(costs.fixed, abs=1e-12), pytest.approx(costs.per_draft, abs=1e-12))


def test_one_k_gives_the_measured_speedup_back():
    rates, k, speedup = [0.6, 0.4, 0.2], 3, 1.5
    costs = fit_costs([(k, expected_tokens(rates, k) / speedup)])
    assert costs.fixed == 0 and predicted_speedup(rates, k, costs) == pytest.approx(speedup)


@pytest.mark.parametrize("passes", [[(3, 0.9)], [(1, 0.95), (3, 0.9)], [(1, 1.3), (3, 1.1)], [(1, 0.9), (4, 1.4)], [(2, 0.8), (2, 0.9)]])
def test_noise_never_makes_speculation_cheaper_than_nothing(passes):
    found = fit_costs(passes)
    assert found.fixed >= 0 and found.per_draft >= 0


def test_best_k_grows_with_acceptance_and_shrinks_with_cost():
    good, poor = [0.9, 0.8, 0.7, 0.6], [0.4, 0.1, 0.02, 0.0]
    assert best_k(good, Costs(0, 0.05))[0] == 4
    assert best_k(poor, Costs(0, 0.05))[0] == 2
    assert best_k(poor, Costs(0, 0.5)) == (0, 1.0), "where a draft costs more than it earns, no draft is best"
    assert best_k(good, Costs(9.0, 0.0)) == (0, 1.0)
