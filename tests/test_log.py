"""Metrics: pooled means, the file that a resume cuts back, and W&B inside the run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from heads.base import LossOut
from tests.toy import make_config
from train import dist
from train.log import Log, Meter, console_line, cut_metrics, flat, summary


def out(loss: list[float], count: list[int], accept: list[int]) -> LossOut:
    counts = torch.tensor(count)
    return LossOut(torch.tensor(sum(loss)), torch.tensor(loss), counts, {"accept": (torch.tensor(accept), counts)})


def test_means_are_pooled_over_batches_not_averaged_per_batch() -> None:
    dist.start()
    meter = Meter()
    meter.add(out([10.0, 0.0], [10, 0], [10, 0]))
    meter.add(out([60.0, 0.0], [30, 0], [0, 0]))
    means = meter.means()
    assert means == {"loss": [1.75, None], "accept": [0.25, None]}
    record = summary(means, (1.0, 0.5))
    assert record == {"loss": 1.75, "loss_k": [1.75, None], "accept_k": [0.25, None], "acceptance_length": 1.25}
    assert json.loads(json.dumps(record)) == record
    assert flat("val", record) == {"val/loss": 1.75, "val/loss_0": 1.75, "val/accept_0": 0.25, "val/acceptance_length": 1.25}
    assert console_line("val", 5, 10, record) == "held out 5/10  loss 1.7500  accept 0.250 -  acceptance length 1.250"


def test_metrics_wait_for_the_device_only_when_they_are_read() -> None:
    """Tensors on `meta` have no value: whatever reads one fails."""
    meter, counts = Meter(), torch.zeros(3, dtype=torch.long, device="meta")
    for _ in range(2):
        meter.add(LossOut(torch.zeros((), device="meta"), torch.zeros(3, device="meta"), counts, {"hit": (counts, counts)}))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        meter.means()


def test_a_rank_without_batches_adds_nothing() -> None:
    dist.start()
    assert Meter().means(like=out([3.0], [2], [1])) == {"loss": [None], "accept": [None]}


@pytest.mark.parametrize(("step", "kept"), [(0, []), (2, [1, 2]), (9, [1, 2, 3])])
def test_a_resume_cuts_later_lines_and_an_unfinished_one(tmp_path: Path, step: int, kept: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"kind": "train", "step": i}) + "\n" for i in (1, 2, 3)) + '{"kind": "tr')
    cut_metrics(path, step)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == kept


def test_wandb_stays_offline_in_the_run_folder_and_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    dist.start()
    cfg = make_config(tmp_path / "run", tmp_path / "store", **{"log.wandb": True})
    for first in (0, 1):
        with Log(cfg, first) as log:
            log.write("val", first + 1, {"loss": 1.0, "loss_k": [1.0]})
    name = (tmp_path / "run/wandb_id.txt").read_text().strip()
    runs = list((tmp_path / "run/wandb").glob("offline-run-*"))
    assert runs and all(f"-{name}" in run.name for run in runs), "a resumed run goes on under the same id"
    assert list(elsewhere.iterdir()) == []
    assert [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == [1, 2]
