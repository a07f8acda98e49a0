"""Stores and engines that were damaged or edited: one line that names the place, before anything is read or removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import make_config, make_store

from data.builtin import build_tiny
from data.engine_job import run_child
from data.errors import UserError
from data.store import Store, StoreWriter
from train.config import load
from train.inputs import missing_inputs
from train.log import Log
from train.plan import count_tokens


def edited(folder: Path, change) -> Path:
    path = make_store(folder) / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    return folder


EDITS = {
    "taps": lambda m: m.pop("taps"),
    "closed": lambda m: m.pop("closed"),
    "lengths": lambda m: m["shards"][0]["lengths"].pop(),
    "first_labels": lambda m: m["shards"][0].pop("first_labels"),
    "ids": lambda m: m["shards"][0]["ids"].append("one more"),
    "tokens": lambda m: m["shards"][0].pop("tokens"),
}


@pytest.mark.parametrize("key", EDITS)
def test_an_edited_manifest_is_refused_by_key(key, tmp_path):
    folder = edited(tmp_path / "store", EDITS[key])
    with pytest.raises(UserError, match=rf"manifest.json: .*{key}.*launch/capture.py"):
        Store(folder)


def test_shards_without_their_manifest_are_not_thrown_away(tmp_path):
    folder = make_store(tmp_path / "store")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="no manifest.json"):
        StoreWriter(folder, {k: v for k, v in manifest.items() if k not in ("closed", "shards", "format_version")})
    assert (folder / "shard-00000.safetensors").is_file()


@pytest.mark.parametrize("content", ["[]", "{}", '{"closed": true}', "{oops"])
def test_a_plan_takes_a_broken_manifest_for_none(content, tmp_path):
    for split in ("train", "heldout"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "manifest.json").write_text(content)
    cfg = load(["conf=tiny_mtp", f"data.store={tmp_path}", f"data.responses={tmp_path}/none"])
    assert len(missing_inputs(cfg)) == 2
    tokens = count_tokens(cfg, "train")
    assert tokens is not None and tokens.source == "bound"


def test_a_wrong_key_of_wandb_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "wrong")
    cfg = make_config(tmp_path / "run", tmp_path)
    cfg.log.wandb = True
    with pytest.raises(UserError, match="W&B: .*log=console"):
        Log(cfg, 0)


def test_an_engine_that_cannot_be_imported_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libcudart.so.12: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = {"task": "respond", "llm": {"model": str(build_tiny(tmp_path / "target")), "tensor_parallel_size": 1}}
    with pytest.raises(UserError, match=r"^vLLM cannot be imported \(libcudart.so.12: no such file\); .*make setup$"):
        run_child(job, [], "respond", 0, "answers")
