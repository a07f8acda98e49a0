"""An evaluation in W&B: the real package, offline, and what its file then holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_report import COUNT, with_offline
from test_report import made as made_report
from wandb.proto.wandb_internal_pb2 import Record

from eval.flat import points, tables
from eval.report import write
from tests.toy import make_config
from train import dist
from train.log import Log, chain_summary, send_report


def records(path: Path) -> Iterator[Record]:
    """Of a W&B file: LevelDB's log format after a header of 7 bytes. Pieces of a record begin with checksum (4), length (2) and type (1:
    whole, 2 to 4: first, middle, last), and none crosses a block of 32 KiB."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""


def name_of(item) -> str:
    return item.key or "/".join(item.nested_key)


def last_summary(run_dir: Path) -> dict[str, object]:
    """What the offline files of the run say in its summary or history, later ones last."""
    found = {}
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for record in records(path):
            items = [*record.history.item, *record.summary.update, *record.request.partial_history.item]
            found |= {name_of(item): json.loads(item.value_json) for item in items}
    return found


def report() -> dict:
    return with_offline(made_report(), 2.1)


def test_points_and_tables_hold_every_cell():
    found = points(report(), "eval")
    head = report()["methods"][2]
    assert found["eval/acceptance_length"] == found["eval/head-k3-c1/acceptance_length"] == head["acceptance_length"]
    assert found["eval/head-k3-c1/speedup"] == head["speedup"] and found["eval/plain-k0-c1/tokens_per_pass"] == 1
    assert found["eval/offline/acceptance_length"] == 2.1 and "eval/plain-k0-c1/acceptance_length" not in found
    assert "eval/acceptance_length" not in points(made_report(methods=("none", "ngram")), "eval")
    drawn = tables(report(), "eval-t1")
    assert [*drawn] == ["eval-t1/methods", "eval-t1/acceptance_per_position", "eval-t1/slices"]
    for columns, rows in drawn.values():
        assert rows and all(len(row) == len(columns) for row in rows)
    assert [row[0] for row in drawn["eval-t1/methods"][1]] == ["plain", "n-gram", "head"]
    assert drawn["eval-t1/acceptance_per_position"][1][-1] == ["head", 3, 1, 3, head["acceptance_per_position"][2]]
    assert ["head", 3, 1, "turkish", 7] in [row[:5] for row in drawn["eval-t1/slices"][1]] and COUNT == 21


def test_an_evaluation_joins_the_run_of_its_training(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    dist.start()
    cfg = make_config(tmp_path / "run", tmp_path / "store", **{"log.wandb": True})
    with Log(cfg, 0) as log:
        log.write("val", 5, {"loss": 1.0} | chain_summary(torch.tensor([2.0, 1.0])))
    page = tmp_path / "run" / "eval" / "report.html"
    write(report(), page.parent)
    sent = points(report(), "eval"), tables(report(), "eval"), page
    assert send_report(cfg, *sent)
    name = (tmp_path / "run/wandb_id.txt").read_text().strip()
    runs = list((tmp_path / "run/wandb").glob("offline-run-*"))
    assert len(runs) == 2 and all(f"-{name}" in run.name for run in runs)
    found = last_summary(tmp_path / "run")
    assert found["val/chain_acceptance_length"] == 1.5, "the training's own"
    assert {key: found[key] for key in sent[0]} == sent[0]
    names = ["methods", "acceptance_per_position", "slices", "report"]
    assert [found[f"eval/{name}/_type"] for name in names] == ["table-file"] * 3 + ["html-file"]
    root = tmp_path / "run" / "wandb"
    files = {name: next(root.glob(f"offline-run-*/files/{found[f'eval/{name}/path']}")) for name in names}
    table = json.loads(files["methods"].read_text())
    assert (table["columns"], table["data"]) == tuple(sent[1]["eval/methods"]) and files["report"].read_text() == page.read_text()
    assert "W&B: " in capsys.readouterr().out

    assert int(found["_step"]) == 5, "as far as was trained: beyond it W&B would drop what a resume says"
    assert not send_report(cfg, *sent), "it is there"
    assert len(list((tmp_path / "run/wandb").glob("offline-run-*"))) == 2
    write(report(), page.parent)
    assert send_report(cfg, *sent), "measured anew"


@pytest.mark.parametrize(("wandb", "trained"), [(False, True), (True, False)])
def test_a_run_without_wandb_gets_nothing(tmp_path, wandb, trained):
    cfg = make_config(tmp_path / "run", tmp_path / "store", **{"log.wandb": wandb})
    page = tmp_path / "run" / "eval" / "report.html"
    write(report(), page.parent)
    if trained:
        (tmp_path / "run/wandb_id.txt").write_text("abcd\n")
    before = {*tmp_path.rglob("*")}
    assert not send_report(cfg, points(report(), "eval"), tables(report(), "eval"), page)
    assert {*tmp_path.rglob("*")} == before
