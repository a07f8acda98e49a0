"""docs/heads.md: its table is the one that the code makes, and its example of a new head is a head."""

from __future__ import annotations

import json
import re
import sys
from types import ModuleType

import pytest
import test_heads
import torch
import yaml
from conftest import ROOT, SPEC, ready

from data.builtin import build_tiny
from data.target import frozen, spec
from eval.catalogue import PAGE, measured, page, table
from eval.export import export_head, validate_export
from heads import build


def test_the_page_holds_the_table_that_the_code_makes(tmp_path):
    text = PAGE.read_text()
    assert page(text, table()) == text, "run `make docs`"
    rows = [line for line in table(tmp_path).splitlines() if line.startswith("| `head=")]
    assert len(rows) == len(list((ROOT / "conf/head").glob("*.yaml"))) and all(row.endswith(" - |") for row in rows)


def test_measured_lengths_come_from_the_sweep(tmp_path):
    rows = [{"head": "smollm_eagle3", "acceptance_length": 1.5}, {"head": "smollm_hydra-k=2", "note": "failed"}]
    (tmp_path / "heads.json").write_text(json.dumps({"rows": rows}))
    assert len(found := measured(tmp_path)) == 1 and set(found.values()) == {1.5}
    assert f"{1.5:.3f} |" in table(tmp_path)


@pytest.fixture
def example(monkeypatch) -> dict:
    """The conf of the page's example, whose module can be imported."""
    text = PAGE.read_text().partition("### An example")[2]
    code, conf = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL)[1] for kind in ("python", "yaml"))
    assert len(code.splitlines()) < 60 and max(map(len, code.splitlines())) <= 140
    conf = yaml.safe_load(conf)
    name = conf["_target_"].rpartition(".")[0]
    assert f"`{name.replace('.', '/')}.py`" in text
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(code, name, "exec"), module.__dict__)
    return conf


CONTRACT = [
    test_heads.test_shapes_counts_and_metrics,
    test_heads.test_counts_follow_the_shifted_mask,
    test_heads.test_causality,
    test_heads.test_gradients_of_packed_and_split_batches_agree,
    test_heads.test_every_parameter_learns_and_frozen_parts_do_not,
    test_heads.test_training_and_drafting_agree,
    test_heads.test_export_names_every_parameter_once,
]


@pytest.mark.parametrize("holds", CONTRACT, ids=lambda test: test.__name__)
def test_the_example_keeps_the_contract(example, holds):
    holds(ready(example).eval())


def test_the_example_is_exported_as_the_engine_reads_it(example, tmp_path):
    with torch.device("meta"):
        assert all(p.is_meta for p in build(example, SPEC).parameters())
    target_dir = build_tiny(tmp_path / "target")
    head, parts = build(example, spec(target_dir)), frozen(target_dir, torch.float32, "cpu")
    about = {"head_cfg": example, "k": 3, "provenance": {"checkpoint": "step-000001"}}
    validate_export(export_head(head, parts, target_dir, tmp_path / "out", dtype=torch.float32, **about), spec(target_dir))
