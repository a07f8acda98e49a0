"""The doctor: a sound run has no fault; each cause, put in on purpose, is named, and nothing else is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.builtin import build_tiny
from data.check import Reference
from data.identity import identity
from data.store import StoreWriter
from data.target import frozen, spec
from eval import doctor
from eval.export import export_head, trained_head
from heads import build
from train.config import RunConfig, TargetConfig, load

ROOT = Path(__file__).resolve().parents[1]
COUNTS = {"drafts": 100, "accepted_per_position": [60, 30, 10], "acceptance_length": 2.0}
HEAD = COUNTS | {"method": "head", "k": 3, "concurrency": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, config, target folder): stores of the target's own greedy text, a checkpoint of a fresh head, its export, a report."""
    folder = tmp_path_factory.mktemp("doctor")
    target = build_tiny(folder / "target")
    reference, frozen_parts = Reference(target), frozen(target, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(1)
    paths = [f"target.model={target}", f"data.store={folder}/store", f"data.responses={folder}", f"run_dir={folder}/run"]
    cfg = load(["conf=tiny_eagle3", *paths])
    manifest = {**identity(target, TargetConfig(model=str(target), dtype="float32")), "taps": [0, 1, 2], "hidden_size": 64}
    manifest |= {"last": "supervised"}
    for split in ("train", "heldout"):
        with StoreWriter(folder / "store" / split, {**manifest, "dtype": "float32", "engine": {"name": "t", "version": "0"}}) as writer:
            for i in range(3):
                ids = torch.randint(3, 500, (5,), generator=generator)
                for _ in range(20):
                    ids = torch.cat([ids, (reference.states(ids)[1][-1] @ frozen_parts.lm_head_VD.T).argmax()[None]])
                streams, last = reference.states(ids)
                writer.add(f"{split}{i}", ids, torch.arange(len(ids)) >= 5, streams, last)
    torch.manual_seed(0)
    head = build(cfg.head, spec(target))
    step = folder / "run/step-000001"
    step.mkdir(parents=True)
    save_file(head.state_dict(), step / "head.safetensors")
    (step / "state.json").write_text("{}")
    (folder / "run/latest").write_text("step-000001\n")
    about = {"head_cfg": cfg.head, "k": 3, "provenance": {"checkpoint": step.name}}
    export_head(head, frozen_parts, target, folder / "run/export/vllm", dtype=torch.float32, **about)
    (folder / "run/metrics.jsonl").write_text(json.dumps({"kind": "val", "acceptance_length": 2.05, "accept_k": [0.6, 0.35, 0.1]}) + "\n")
    report = {"offline": COUNTS | {"dtype": "float32"}, "methods": [HEAD], "target": {"dtype": "float32"}}
    (folder / "run/eval").mkdir()
    (folder / "run/eval/report.json").write_text(json.dumps(report))
    return folder, cfg, target


def causes(cfg: RunConfig, target: Path, head_cfg=None, state=None):
    state = state or load_file(Path(cfg.run_dir) / "step-000001/head.safetensors")
    head = trained_head(head_cfg or cfg.head, target, state, torch.float32, "cpu")
    return [fault.cause for fault in doctor.diagnose(cfg, head, target, 1)[1]]


def test_a_sound_run_has_no_fault_and_three_figures(made):
    folder, cfg, target = made
    assert causes(cfg, target) == []
    found = doctor.measurements(folder / "run")
    assert [row["length"] for row in found.values()] == [2.05, 2.0, 2.0] and found["engine"]["positions"] == [0.6, 0.3, 0.1]


def edited(path: Path, change):
    """Writes what `change` makes of the JSON at `path`; returns a function that puts the old text back."""
    old = path.read_text()
    path.write_text(json.dumps(change(json.loads(old))))
    return lambda: path.write_text(old)


@pytest.mark.parametrize(
    ("file", "change", "cause"),
    [
        ("export/vllm/config.json", lambda c: c | {"rope_theta": 500.0}, "rope"),
        ("export/vllm/config.json", lambda c: c | {"norm_before_residual": True}, "export"),
        ("export/vllm/config.json", lambda c: c | {"draft_vocab_size": 40}, "export"),
        ("eval/report.json", lambda r: r | {"methods": [HEAD | {"acceptance_length": 1.8}]}, "numerics"),
        ("eval/report.json", lambda r: r | {"methods": [HEAD | {"acceptance_length": 1.8}], "target": {"dtype": "bfloat16"}}, "dtype"),
        ("eval/report.json", lambda r: r | {"offline": r["offline"] | {"acceptance_length": 1.7}, "methods": []}, "text"),
    ],
)
def test_each_cause_is_named(made, file, change, cause):
    folder, cfg, target = made
    undo = edited(folder / "run" / file, change)
    try:
        assert causes(cfg, target) == [cause]
    finally:
        undo()


def test_an_export_of_other_weights_is_named(made):
    folder, cfg, target = made
    state = load_file(folder / "run/step-000001/head.safetensors")
    assert causes(cfg, target, state=state | {"fc.weight": state["fc.weight"] + 1e-3}) == ["weights"]


def test_a_draft_vocabulary_of_the_wrong_tokens_is_named(made):
    _, cfg, target = made
    head = build(cfg.head | {"draft_vocab_size": 30}, spec(target))
    head.set_draft_vocab(torch.arange(30))
    assert causes(cfg, target, cfg.head | {"draft_vocab_size": 30}, head.state_dict())[0] == "vocabulary"


def test_the_command_says_it_all_and_exits_with_status_one_on_a_fault(made):
    folder, cfg, target = made
    undo = edited(folder / "run/export/vllm/config.json", lambda c: c | {"rope_theta": 500.0})
    words = [f"target.model={target}", f"data.store={folder}/store", f"data.responses={folder}", f"run_dir={folder}/run", "sample=1"]
    try:
        done = subprocess.run(
            [sys.executable, ROOT / "launch/doctor.py", "conf=tiny_eagle3", *words], capture_output=True, text=True, check=False
        )
    finally:
        undo()
    assert done.returncode == 1, done.stderr
    assert "3 sequences, 75 tokens, 60 supervised" in done.stdout and "offline chain" in done.stdout and "rope: " in done.stdout


def test_capture_checks_what_it_has_written(made):
    folder, _, target = made
    words = [f"target.model={target}", f"data.store={folder}/store", f"data.responses={folder}", "check=true"]
    command = [sys.executable, ROOT / "launch/capture.py", "conf=tiny_eagle3", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "against transformers: tap 0 0.0000" in done.stdout and "the store holds what it says" in done.stdout
