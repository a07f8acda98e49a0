"""Schedules as functions of the step, and which parameters decay."""

from __future__ import annotations

import pytest
from torch import nn

from train.config import OptimConfig
from train.optim import lr_at, param_groups


def rates(steps: int = 100, **settings: object) -> list[float]:
    cfg = OptimConfig(lr=1.0, **settings)  # type: ignore[arg-type]
    return [lr_at(step, steps, cfg) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_never_zero(schedule: str) -> None:
    lr = rates(schedule=schedule, warmup=0.1)
    assert lr[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(lr) == 1.0 and min(lr) > 0


def test_cosine_falls_to_its_floor() -> None:
    lr = rates(schedule="cosine", warmup=0.1, min_lr_ratio=0.05)
    assert lr[10:] == sorted(lr[10:], reverse=True)
    assert lr[-1] == pytest.approx(0.05) and lr[54] == pytest.approx(0.525, abs=0.01)


def test_wsd_is_flat_then_linear() -> None:
    lr = rates(schedule="wsd", warmup=0.1, decay=0.2, min_lr_ratio=0.0)
    assert set(lr[10:80]) == {1.0}
    assert lr[80:] == pytest.approx([1 - (i + 1) / 20 for i in range(20)])


def test_constant_stays() -> None:
    assert set(rates(schedule="constant", warmup=0.0)) == {1.0}


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_one_step_and_all_warm_up_are_defined(schedule: str, warmup: float) -> None:
    assert all(0 <= lr <= 1 for lr in rates(1, schedule=schedule, warmup=warmup) + rates(7, schedule=schedule, warmup=warmup))


def test_norms_and_biases_do_not_decay_and_shared_weights_count_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    module[3].requires_grad_(False)
    decayed, kept = param_groups(module, OptimConfig(weight_decay=0.1), set())
    assert decayed["weight_decay"] == 0.1 and [p.shape for p in decayed["params"]] == [(4, 4)]
    assert kept["weight_decay"] == 0.0 and [p.ndim for p in kept["params"]] == [1, 1, 1]


def test_muon_takes_the_matrices_between_hidden_states_alone() -> None:
    module = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 9, bias=False), nn.Conv1d(4, 4, 3))
    optim = OptimConfig(algorithm="muon", lr=0.02, adam_lr=1e-3, weight_decay=0.1)
    hidden, tables, vectors = param_groups(module, optim, {9})
    assert [p.shape for p in hidden["params"]] == [(6, 4)] and hidden["use_muon"] and hidden["lr"] == 0.02
    assert [tuple(p.shape) for p in tables["params"]] == [(9, 4), (9, 6), (4, 4, 3)]
    assert [group["weight_decay"] for group in (hidden, tables, vectors)] == [0.1, 0.1, 0.0]
    assert not tables["use_muon"] and not vectors["use_muon"] and tables["lr"] == vectors["lr"] == 1e-3
    assert sum(len(group["params"]) for group in (hidden, tables, vectors)) == len(list(module.parameters()))
