"""Sweeps: which runs a command line makes, how they are named, and the table of what they measured."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from data.errors import UserError
from eval import sweep
from train.config import load


def test_values_parted_by_commas_make_every_combination():
    assert sweep.combinations(["conf=a,b", "x=1,2", "y=[1,2]", "z={q:1,r:2}"]) == [
        [f"conf={conf}", f"x={x}", "y=[1,2]", "z={q:1,r:2}"] for conf in "ab" for x in (1, 2)
    ]


def test_each_run_is_named_after_what_is_varied():
    runs = sweep.plan(["conf=a", "optim.lr=1e-3,2e-3", "train.steps=5"], untrained=True)
    names = [name for name, _ in runs]
    assert names == [f"sweep/a-lr_{lr}{end}" for lr in ("1e-3", "2e-3") for end in ("", "_untrained")]
    assert runs[0][1] == ["conf=a", "optim.lr=1e-3", "train.steps=5", "name=sweep/a-lr_1e-3"]
    assert runs[3][1][-3:] == ["optim.lr=1e-12", "eval.methods=[none,head]", "eval.limit=8"]
    assert [name for name, _ in sweep.plan(["conf=a,b", "head.loss=0.1*ce+0.9*tv"], untrained=False)] == ["sweep/a", "sweep/b"]


def test_the_name_of_a_run_is_a_word_that_the_command_line_takes():
    for name, words in sweep.plan(["conf=tiny_eagle3", "optim.lr=1e-3,2e-3", "head.loss=0.1*ce+0.9*tv,kl"], untrained=True):
        assert load(words).name == name


@pytest.mark.parametrize("argv", [["x=1"], ["conf=a", "name=mine"], ["conf=a", "run_dir=mine"]])
def test_a_sweep_wants_confs_and_names_its_runs(argv):
    with pytest.raises(UserError, match="conf=<name>"):
        sweep.plan(argv, untrained=False)


def fake_run(folder, length):
    """A finished run's files, as launch/run.py leaves them."""
    (folder / "eval").mkdir(parents=True)
    (folder / "export/vllm").mkdir(parents=True)
    (folder / "step-000003").mkdir()
    (folder / "latest").write_text("step-000003\n")
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5), "draft_ids_U": torch.zeros(7)}, folder / "step-000003/head.safetensors")
    (folder / "export/vllm/draftsmith.json").write_text(json.dumps({"serving": {"method": "eagle3"}}))
    head = {
        "method": "head",
        "k": 3,
        "concurrency": 1,
        "acceptance_length": length,
        "tokens_per_pass": length,
        "speedup": 1.1,
        "lossless": 1.0,
    }
    report = {"methods": [{"method": "none", "k": 0, "concurrency": 1}, head], "offline": {"acceptance_length": length + 0.01}}
    (folder / "eval/report.json").write_text(json.dumps(report))


def test_the_table_folds_untrained_runs_in_and_says_what_failed(tmp_path):
    for name, length in (("sweep/a", 1.5), ("sweep/a_untrained", 1.02)):
        fake_run(tmp_path / name, length)
    rows = sweep.table(tmp_path, ["sweep/a", "sweep/a_untrained", "sweep/b"], failed=["sweep/b"])
    assert rows[0] | {"head": "a", "vllm_method": "eagle3", "parameters": 17, "acceptance_length": 1.5} == rows[0]
    assert rows[0]["random_acceptance_length"] == 1.02 and rows[0]["offline_acceptance_length"] == 1.51
    assert rows[1] == {"head": "b", "note": "failed"}
    text = sweep.write(tmp_path / "docs/heads", rows, "python launch/sweep.py conf=a,b")
    assert (tmp_path / "docs/heads.md").read_text() == text and "| a | eagle3 | 17 | 1.500 |" in text
    assert json.loads((tmp_path / "docs/heads.json").read_text())["rows"] == rows
