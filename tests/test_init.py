"""A run that begins with another's weights (train.init): those weights, that draft vocabulary, and only at its own start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import refused
from safetensors.torch import load_file, save_file

from data.builtin import build_tiny
from data.errors import UserError
from data.identity import identity
from data.store import Store, StoreWriter
from data.target import frozen, spec
from eval.export import export_head
from heads import build
from heads.base import DraftHead
from train import dist, setup
from train.config import TargetConfig, load

FULL = {"_target_": "heads.mtp.MTP", "depths": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, target, store, an older head whose run lies in folder/old)."""
    folder = tmp_path_factory.mktemp("init")
    target = build_tiny(folder / "target")
    manifest = {**identity(target, TargetConfig(model=str(target), dtype="float32")), "taps": [0, 1, 2], "hidden_size": 64}
    manifest |= {"last": "supervised", "dtype": "float32", "engine": {"name": "t", "version": "0"}}
    with StoreWriter(folder / "store", manifest) as writer:
        ids = torch.arange(100, 130)
        writer.add("a", ids, torch.arange(30) >= 5, torch.randn(30, 3, 64), torch.randn(30, 64))
    old = build(config(folder, target).head, spec(target))
    old.set_draft_vocab(torch.arange(7, 47))
    step = folder / "old/step-000004"
    step.mkdir(parents=True)
    save_file(old.state_dict(), step / "head.safetensors")
    (step / "state.json").write_text("{}")
    (folder / "old/latest").write_text("step-000004\n")
    dist.start(1)
    return folder, target, Store(folder / "store"), old


def config(folder: Path, target: Path, *more: str):
    words = ["conf=tiny_eagle3", f"target.model={target}", f"run_dir={folder}/new", "head.draft_vocab_size=40", "head.train_lm_head=true"]
    return load([*words, *more])


@pytest.mark.parametrize("source", ["old", "old/step-000004"])
def test_weights_and_vocabulary_are_those_of_the_other_run(made, source):
    folder, target, store, old = made
    cfg = config(folder, target, f"train.init={folder / source}")
    head = build(cfg.head, spec(target))
    setup.equip(cfg, head, target, store)
    assert all(torch.equal(value, old.state_dict()[name]) for name, value in head.state_dict().items())
    assert torch.equal(head.teacher_UD, head.frozen.lm_head_VD[torch.arange(7, 47)])


def test_without_it_a_run_begins_afresh(made):
    folder, target, store, _ = made
    head = build(config(folder, target).head, spec(target))
    setup.equip(config(folder, target), head, target, store)
    assert torch.equal(head.lm_head.weight, head.teacher_UD) and set(range(105, 130)) <= set(head.draft_ids_U.tolist())


@pytest.mark.parametrize(
    ("more", "words"), [(["train.init={}/none"], "no run with a checkpoint"), (["train.init={}/old", "head.fc_norm=true"], "do not fit")]
)
def test_what_cannot_begin_is_refused(made, more, words):
    folder, target, store, _ = made
    cfg = config(folder, target, *(word.format(folder) for word in more))
    with pytest.raises(UserError, match=f"train.init=.*{words}"):
        setup.equip(cfg, build(cfg.head, spec(target)), target, store)


def exported(made, folder: Path) -> tuple[Path, DraftHead]:
    """A head of the whole vocabulary as the engine loads it, with none of the files of a run."""
    _, target, _, _ = made
    head = build(FULL, spec(target))
    about = {"head_cfg": FULL, "k": 3, "provenance": {"checkpoint": "step-000001"}}
    return export_head(head, frozen(target, torch.float32, "cpu"), target, folder / "published", dtype=torch.float32, **about), head


def test_a_published_head_is_begun_with(made, tmp_path):
    folder, target, store, _ = made
    published, head = exported(made, tmp_path)
    (published / "draftsmith.json").unlink()
    cfg = load(["conf=tiny_mtp", f"target.model={target}", f"run_dir={folder}/new", f"train.init={published}"])
    begun = build(cfg.head, spec(target))
    setup.equip(cfg, begun, target, store)
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in begun.state_dict().items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c, _: c.update(rope_theta=5.0), "rope_theta is 5.0 there and 10000.0 in this head section"),
        (lambda _, t: t.pop("model.mtp_layers.0.input_proj.weight"), "it has no model.mtp_layers.0.input_proj.weight"),
        (lambda _, t: t.update({"more.weight": torch.zeros(1)}), "this head has no more.weight"),
    ],
)
def test_another_published_head_is_refused(made, tmp_path, change, words):
    folder, target, store, _ = made
    published, _ = exported(made, tmp_path)
    stored, tensors = json.loads((published / "config.json").read_text()), load_file(published / "model.safetensors")
    change(stored, tensors)
    (published / "config.json").write_text(json.dumps(stored))
    save_file(tensors, published / "model.safetensors")
    cfg = load(["conf=tiny_mtp", f"target.model={target}", f"run_dir={folder}/new", f"train.init={published}"])
    refused(lambda: setup.equip(cfg, build(cfg.head, spec(target)), target, store), f"train.init={published}", words)


def test_a_published_head_gives_no_draft_vocabulary(made, tmp_path):
    folder, target, store, _ = made
    published, _ = exported(made, tmp_path)
    cfg = config(folder, target, f"train.init={published}")
    refused(lambda: setup.equip(cfg, build(cfg.head, spec(target)), target, store), "head.draft_vocab_size=null")


@pytest.mark.parametrize(("conf", "what"), [("tiny_eagle3", "the 1 ranks do not fall"), ("tiny_dflash", "whole documents")])
def test_ranks_that_cannot_share_a_batch_are_refused(made, conf, what, monkeypatch):
    folder, target, store, _ = made
    cfg = load([f"conf={conf}", f"target.model={target}", f"run_dir={folder}/new", "train.sequence_parallel=2"])
    if conf == "tiny_dflash":
        monkeypatch.setattr(dist, "world", lambda: 2)
    with pytest.raises(UserError, match=f"train.sequence_parallel=2: .*{what}"):
        setup.open_batches(cfg, build(cfg.head, spec(target)), store)
