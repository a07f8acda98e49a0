"""Muon through DeepSpeed: an orthogonal step, the same for any split over ranks and ZeRO stages, and a resume that is the whole run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.errors import UserError
from tests.toy import ROOT, ToyHead, make_config, make_store, on_two_ranks, read_metrics, train
from train import checkpoint, checks

MUON = {"optim.algorithm": "muon", "optim.clip": 0.0, "optim.lr": 0.02, "optim.adam_lr": 0.05}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("toy") / "store")


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run_dir)]


def test_a_step_has_the_same_size_in_every_direction(tmp_path: Path, store: Path) -> None:
    """The matrix [11, 8] moves by lr * sqrt(11 / 8) times an orthogonal one, as near as five Newton-Schulz rounds come."""
    settings = {"train.steps": 1, "optim.schedule": "constant", "optim.warmup": 0.0, "optim.weight_decay": 0.0}
    cfg = make_config(tmp_path, store, **MUON, **settings)
    torch.manual_seed(cfg.train.seed)
    before = {name: value.clone() for name, value in ToyHead().state_dict().items()}
    train(cfg)
    after = checkpoint.load_head(tmp_path / "step-000001")
    sizes = torch.linalg.svdvals(before["layers.0.weight"] - after["layers.0.weight"]) / 0.02 / (11 / 8) ** 0.5
    assert 0.5 < sizes[-2] and sizes.max() < 1.3  # the last direction has next to no gradient, and five rounds do not lift that to one
    assert (before["norm.weight"] - after["norm.weight"]).abs().mean().item() == pytest.approx(0.05, rel=0.05)


def test_any_split_takes_the_same_steps_and_a_resume_is_the_whole_run(tmp_path: Path, store: Path) -> None:
    jobs: list[dict] = [{"run_dir": f"stage{stage}", "set": {**MUON, "zero.stage": stage}} for stage in (1, 2, 3)]
    for job in jobs[1:]:
        jobs += [{**job, "run_dir": job["run_dir"] + "broken", "stop_before": 7, "error": "went away"}]
        jobs += [{**job, "run_dir": job["run_dir"] + "broken"}]
    train(make_config(tmp_path / "resized", store, **MUON, **{"train.steps": 5, "train.accum": 2}))
    jobs += [{"run_dir": "resized", "set": MUON, "error": "goes on with as many ranks as before, 1"}]
    on_two_ranks(tmp_path, store, jobs)
    for stage in (1, 2, 3):
        train(make_config(tmp_path / f"one{stage}", store, **{**MUON, "train.accum": 2, "zero.stage": stage}))
        assert losses(tmp_path / f"one{stage}") == pytest.approx(losses(tmp_path / "one1"), rel=1e-3)
        assert losses(tmp_path / f"stage{stage}") == pytest.approx(losses(tmp_path / "one1"), rel=1e-3)
    assert losses(tmp_path / "one1")[-1] < losses(tmp_path / "one1")[0]
    for stage in (2, 3):
        assert losses(tmp_path / f"stage{stage}broken") == losses(tmp_path / f"stage{stage}")


def test_clipping_is_refused(tmp_path: Path, store: Path) -> None:
    cfg = make_config(tmp_path, store, **{**MUON, "optim.clip": 1.0})
    with pytest.raises(UserError, match="optim.clip=1.0: must be 0 with optim.algorithm=muon"):
        checks.check(cfg, ROOT)
