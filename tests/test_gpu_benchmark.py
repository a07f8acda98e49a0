"""The prepared GPU benchmark runs: here with --smoke, on whatever there is."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "gpu"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("run")


def report(folder):
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


def test_it_checks_measures_and_reports(script, tmp_path):
    assert script.main(["--smoke", "--out", str(tmp_path)]) == 0
    found, table = report(tmp_path)
    assert all(check["ok"] for check in found["correctness"]) and len(found["correctness"]) > 10
    assert {row["way"] for row in found["rows"]} == {"ours", "recompute", "published"}
    assert all(row["tokens_per_second"] > 0 for row in found["rows"])
    assert found["machine"]["date"] in table and found["machine"]["device"] in table and "WRONG" not in table


def test_a_row_that_runs_out_of_memory_or_time_says_so_and_the_rest_go_on(script, tmp_path, monkeypatch):
    def hungry(case):
        if case.way == "published":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if case.way == "recompute":
            raise RuntimeError("no such kernel\nstack")
        return lambda: None

    def broken(*_):
        raise RuntimeError("no kernel here")

    checks = importlib.import_module("checks")
    monkeypatch.setattr(script, "stepper", hungry)
    monkeypatch.setattr(checks, "OBJECTIVES", ["kl"])
    monkeypatch.setattr(checks, "loss_errors", lambda *_: (1.0, 0.0))
    monkeypatch.setattr(checks, "attention_errors", broken)
    assert script.main(["--smoke", "--out", str(tmp_path)]) == 1
    found, table = report(tmp_path)
    assert [row.get("note") for row in found["rows"]] == [None, "no such kernel", "out of memory"] * 2
    assert "out of memory" in table and "WRONG |" in table and "WRONG no kernel here" in table
    assert {check["what"]: check["ok"] for check in found["correctness"]}["documents in a pack and alone"]
    assert script.main(["--smoke", "--minutes", "0", "--out", str(tmp_path)]) == 1
    assert all(row["note"] == "no time left" for row in report(tmp_path)[0]["rows"])


def test_what_is_published_and_what_we_train_have_the_same_gradient(script):
    """Else their times would not compare."""
    head = script.head_of(script.TINY, 3, 128, torch.float32)
    batch = script.batch_of(head, [20, 12], torch.float32)
    parameters = [p for p in head.parameters() if p.requires_grad]
    grads = [torch.autograd.grad(loss, parameters) for loss in (head.loss(batch).total, script.published_loss(head, batch))]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
