"""Checkpoints: whole or absent, float32, and a resume that is the uninterrupted run bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import refused

from data.errors import UserError
from data.manifest import IDENTITY
from data.store import StoreWriter
from tests.toy import SIZE, ToyHead, make_config, make_store, read_metrics, train
from train import checkpoint

TIMING = ("tokens_per_second", "data_wait", "seconds_left", "peak_memory_gb")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("toy") / "store")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("finished")
    train(make_config(run_dir, store, **{"train.save_every": 3}))
    return run_dir


def measured(run_dir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMING} for kind in ("train", "val") for line in read_metrics(run_dir, kind)]


@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16")])
def test_resume_is_the_uninterrupted_run(tmp_path: Path, store: Path, stage: int, dtype: str) -> None:
    settings = {"zero.stage": stage, "train.dtype": dtype, "train.accum": 2}
    train(make_config(tmp_path / "whole", store, **settings))
    with pytest.raises(RuntimeError, match="went away"):
        train(make_config(tmp_path / "broken", store, **settings), stop_before=7)
    assert (tmp_path / "broken/latest").read_text() == "step-000005\n"
    train(make_config(tmp_path / "broken", store, **settings))
    assert measured(tmp_path / "broken") == measured(tmp_path / "whole")
    whole, broken = (checkpoint.load_head(tmp_path / name / "step-000010") for name in ("whole", "broken"))
    assert whole.keys() == broken.keys() and all(torch.equal(whole[name], broken[name]) for name in whole)
    provenance = json.loads((tmp_path / "broken/provenance.json").read_text())
    assert [run["first_step"] for run in (provenance, *provenance["earlier"])] == [5, 0]


def test_head_file_holds_the_state_dict_in_float32(finished: Path) -> None:
    saved, head = checkpoint.load_head(checkpoint.latest(finished) or finished), ToyHead()
    assert saved.keys() == head.state_dict().keys()
    assert all(saved[name].dtype == value.dtype and saved[name].shape == value.shape for name, value in head.state_dict().items())
    head.load_state_dict(saved)


def test_the_last_n_stay_and_a_run_folder_says_what_it_is(finished: Path) -> None:
    assert sorted(path.name for path in finished.iterdir()) == [
        "config.yaml", "latest", "metrics.jsonl", "provenance.json", "step-000009", "step-000010",
    ]  # fmt: skip
    assert (finished / "step-000010/config.yaml").read_text() == (finished / "config.yaml").read_text()
    provenance = json.loads((finished / "provenance.json").read_text())
    assert {"command", "overrides", "git", "versions", "device"} <= provenance.keys()
    assert provenance["versions"]["torch"] == torch.__version__


def test_half_written_folders_are_ignored_and_removed(tmp_path: Path, store: Path) -> None:
    cfg = make_config(tmp_path, store, **{"train.steps": 2})
    train(cfg)
    (tmp_path / "step-000004.partial").mkdir()
    (tmp_path / "step-000003").mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000002"
    cfg.train.steps = 4
    train(cfg)
    assert not (tmp_path / "step-000004.partial").exists() and (tmp_path / "step-000004/head.safetensors").exists()


def spoil_world(run_dir: Path) -> None:
    path = run_dir / "step-000002/state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "world": 4}))


def spoil_latest(run_dir: Path) -> None:
    (run_dir / "latest").write_text("step-000077\n")


def spoil_keys(run_dir: Path) -> None:
    """A run of before there was data.teacher."""
    for path in run_dir.rglob("config.yaml"):
        path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if line.strip() != "teacher: last"))


@pytest.mark.parametrize(
    ("spoil", "settings", "parts"),
    [
        (spoil_keys, {}, ["belongs to another run: data.teacher was None, is last"]),
        (spoil_world, {}, ["4 ranks x train.accum=1 = 4 micro-batches, now it is 1 x 1", "set train.accum=4"]),
        (spoil_latest, {}, ["latest names step-000077", "step-000002"]),
        (None, {"optim.lr": 0.5}, ["belongs to another run: optim.lr was 0.05, is 0.5."]),
        (None, {"train.micro_tokens": 99}, ["train.micro_tokens was 40, is 99"]),
        (None, {"data.states": "online"}, ["data.states was store, is online"]),
        (None, {"data.max_length": 9}, ["data.max_length was 4096, is 9"]),
    ],
)
def test_what_cannot_be_resumed_is_refused(tmp_path: Path, store: Path, spoil: Any, settings: dict[str, Any], parts: list[str]) -> None:
    train(make_config(tmp_path, store, **{"train.steps": 2}))
    if spoil:
        spoil(tmp_path)
    with pytest.raises(UserError) as error:
        train(make_config(tmp_path, store, **{"train.steps": 4}, **settings))
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize("change", ["grown", "another order", "as long"])
def test_a_store_that_is_another_than_at_the_start_is_refused(tmp_path: Path, change: str) -> None:
    store = make_store(tmp_path / "store")
    train(make_config(tmp_path / "run", store, **{"train.steps": 2}))
    train(make_config(tmp_path / "run", store, **{"train.steps": 3}))
    path = store / "manifest.json"
    manifest = json.loads(path.read_text())
    shard = manifest["shards"][0]
    if change == "grown":
        with StoreWriter(store, {key: value for key, value in manifest.items() if key in IDENTITY}) as writer:
            writer.add("s40", torch.arange(6), torch.arange(6) > 2, None, torch.randn(6, SIZE))
    else:
        pair = shard["ids"] if change == "another order" else shard["first_labels"]
        pair[0], pair[1] = pair[1], pair[0]
        path.write_text(json.dumps(manifest))
    said = "now holds 41 sequences" if change == "grown" else "(others, or in another order)"
    words = [said, "was trained on 40 sequences with 271 supervised", f"data.store={store}", f"train.init={tmp_path}/run", "name=toy-2"]
    refused(lambda: train(make_config(tmp_path / "run", store, **{"train.steps": 4})), *words)
    train(make_config(tmp_path / "run-2", store, **{"train.steps": 1}))


def test_a_finished_run_says_so_and_takes_no_step(tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = make_config(tmp_path, store, **{"train.steps": 2})
    train(cfg)
    capsys.readouterr()
    train(cfg)
    assert capsys.readouterr().out == f"all 2 steps are done: {tmp_path}\n"


def test_no_head_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="launch/train.py"):
        checkpoint.load_head(tmp_path)
