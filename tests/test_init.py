"""A run that begins with another's weights (train.init): those weights, that draft vocabulary, and only at its own start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from data.builtin import build_tiny
from data.errors import UserError
from data.identity import identity
from data.store import Store, StoreWriter
from data.target import spec
from heads import build
from train import dist, setup
from train.config import TargetConfig, load


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


@pytest.mark.parametrize(("conf", "what"), [("tiny_eagle3", "the 1 ranks do not fall"), ("tiny_dflash", "whole documents")])
def test_ranks_that_cannot_share_a_batch_are_refused(made, conf, what, monkeypatch):
    folder, target, store, _ = made
    cfg = load([f"conf={conf}", f"target.model={target}", f"run_dir={folder}/new", "train.sequence_parallel=2"])
    if conf == "tiny_dflash":
        monkeypatch.setattr(dist, "world", lambda: 2)
    with pytest.raises(UserError, match=f"train.sequence_parallel=2: .*{what}"):
        setup.open_batches(cfg, build(cfg.head, spec(target)), store)
