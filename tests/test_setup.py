"""From files to the loop: whose answers and states a run may use, what is cut, and the draft vocabulary of a resumed run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import refused

from data.answers import check_meta, write_asked
from data.builtin import build_tiny
from data.errors import UserError
from data.identity import asks, check_responses, identity
from data.store import StoreWriter
from data.target import spec
from heads import build, kernels
from tests.toy import make_config
from train import dist, setup

HEAD = {"_target_": "heads.eagle3.Eagle3", "taps": [0, 1, 2], "draft_vocab_size": 5, "train_lm_head": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("target") / "tiny")


def changed(target: Path, folder: Path, name: str, **values: Any) -> Path:
    """A copy of the target in which `values` are set in one of its JSON files."""
    shutil.copytree(target, folder)
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def store(cfg: Any, target: Path, tokens: list[int], split: str = "train") -> None:
    """Three sequences of `tokens`, the first two of them a prompt."""
    manifest = {**identity(target, cfg.target), "taps": [0, 1, 2], "hidden_size": 64, "last": "supervised", "dtype": "float32"}
    with StoreWriter(Path(cfg.data.store) / split, {**manifest, "engine": {"name": "vllm", "version": "0"}}) as writer:
        for i in range(3):
            n = len(tokens)
            writer.add(f"{i}", torch.tensor(tokens), torch.arange(n) >= 2, torch.randn(n, 3, 64), torch.randn(n, 64))


def config(tmp_path: Path) -> Any:
    cfg = make_config(tmp_path / "run", tmp_path / "store")
    cfg.head = HEAD
    return cfg


def test_quantised_states_say_so_and_are_another_targets(target, tmp_path):
    """A head for the quantised target is trained on what the quantised target computes, or not at all."""
    cfg = config(tmp_path)
    quantised = changed(target, tmp_path / "fp8", "config.json", quantization_config={"quant_method": "fp8"})
    served = identity(quantised, cfg.target)["target"]
    assert served["quantisation"] == "fp8" and served["dtype"] == cfg.target.dtype
    store(cfg, target, list(range(10, 20)))
    head = build(HEAD, spec(target))
    assert len(setup.open_store(cfg, head, target, "train")) == 3
    with pytest.raises(UserError, match=r"target: the store was captured from.*launch/capture\.py"):
        setup.open_store(cfg, head, quantised, "train")


def test_a_store_of_more_than_is_asked_for_is_not_trained_on(target, tmp_path):
    """Or a run with data.limit=8 would be trained on what another limit had captured."""
    cfg = config(tmp_path)
    cfg.data.responses = str(tmp_path)
    store(cfg, target, list(range(10, 20)))
    answers, head = tmp_path / "train.jsonl", build(HEAD, spec(target))
    assert len(setup.open_store(cfg, head, target, "train")) == 3, "a store may come without its answers"
    check_meta(answers, identity(target, cfg.target))
    answers.touch()
    write_asked(answers, asks(cfg.data, "train"), ["0", "1", "2"])
    assert len(setup.open_store(cfg, head, target, "train")) == 3
    write_asked(answers, asks(cfg.data, "train"), ["0", "1"])
    refused(lambda: setup.open_store(cfg, head, target, "train"), "1 sequences in it, 2 the first", "data.store", "launch/capture.py")
    cfg.data.limit = 2
    refused(lambda: setup.open_store(cfg, head, target, "train"), "data.limit was", "launch/respond.py")


def test_states_under_another_chat_template_are_refused(target, tmp_path):
    cfg = config(tmp_path)
    store(cfg, target, list(range(10, 20)))
    other = shutil.copytree(target, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(UserError, match="template: the answers were made with another template"):
        setup.open_store(cfg, build(HEAD, spec(target)), other, "train")


def test_only_the_targets_own_answers_are_captured(target, tmp_path):
    """Also the held-out ones: acceptance on text that the target did not write says little of what it will be."""
    cfg, path = config(tmp_path), tmp_path / "heldout.jsonl"
    maker = identity(target, cfg.target)
    path.write_text('{"id": "a#0"}\n')
    with pytest.raises(UserError, match=r"no answers of the target here.*launch/respond\.py"):  # given answers have no maker beside them
        check_responses(path, maker, {})
    path.with_suffix(".meta.json").write_text(json.dumps({**maker, "sampling": {}}))
    write_asked(path, {}, [])
    check_responses(path, maker, {})
    other = changed(target, tmp_path / "other", "config.json", rms_norm_eps=1e-3)
    with pytest.raises(UserError, match="written by another target .*fingerprint"):
        check_responses(path, identity(other, cfg.target), {})


def test_documents_over_the_limit_are_said(target, tmp_path, capsys):
    cfg = config(tmp_path)
    cfg.data.max_length = 6
    store(cfg, target, list(range(10, 20)))
    head = build(HEAD, spec(target))
    setup.open_batches(cfg, head, setup.open_store(cfg, head, target, "train"))
    said = capsys.readouterr().out
    assert "3 sequences, 24 supervised tokens" in said and "data.max_length=6: 3 cut, 0 left out" in said
    assert "micro_tokens" not in said
    cfg.train.micro_tokens = 5
    setup.open_batches(cfg, head, setup.open_store(cfg, head, target, "train"))
    assert "train.micro_tokens=5: 3 are longer, up to 6, and each is a batch by itself" in capsys.readouterr().out


@pytest.mark.parametrize("wanted", [False, True])
def test_the_head_learns_what_the_conf_says_of_recomputing(target, tmp_path, wanted):
    cfg = config(tmp_path)
    cfg.train.recompute = wanted
    dist.start()
    store(cfg, target, list(range(10, 20)))
    head = build(HEAD, spec(target))
    setup.equip(cfg, head, target, setup.open_store(cfg, head, target, "train"))
    assert head.recompute == wanted


def test_compiling_is_switched_by_the_conf_and_refused_without_a_compiler(target, tmp_path, monkeypatch):
    cfg = config(tmp_path)
    dist.start()
    store(cfg, target, list(range(10, 20)))
    head = build(HEAD, spec(target))
    states = setup.open_store(cfg, head, target, "train")
    monkeypatch.setenv("CXX", "sh")  # any program that is there
    for wanted in (True, False):
        cfg.train.compile = wanted
        setup.equip(cfg, head, target, states)
        assert kernels.compiling() == wanted
    cfg.train.compile = True
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="train.compile=true: there is no no-such-compiler here"):
        setup.equip(cfg, head, target, states)
    assert not kernels.compiling()


def test_a_run_keeps_its_draft_vocabulary_whatever_the_store_holds_later(target, tmp_path, capsys):
    cfg = config(tmp_path)
    dist.start()
    store(cfg, target, [1, 2, 30, 31, 32, 33, 34, 35, 30, 31, 32, 33, 34])
    head = build(HEAD, spec(target))
    setup.equip(cfg, head, target, setup.open_store(cfg, head, target, "train"))
    assert head.draft_ids_U.tolist() == [30, 31, 32, 33, 34] and "5 of 512 tokens, 90.91% of the supervised ones" in capsys.readouterr().out
    assert torch.equal(head.lm_head.weight.to(torch.float32), head.frozen.lm_head_VD[head.draft_ids_U].float())
    step = tmp_path / "run" / "step-000001"
    step.mkdir(parents=True)
    (step / "state.json").write_text("{}")
    (tmp_path / "run" / "latest").write_text(step.name)
    saved = {**head.state_dict(), "draft_ids_U": torch.tensor([3, 5, 7, 11, 13])}
    setup.checkpoint.save_file(saved, step / "head.safetensors")
    again = build(HEAD, spec(target))
    setup.equip(cfg, again, target, setup.open_store(cfg, again, target, "train"))
    assert again.draft_ids_U.tolist() == [3, 5, 7, 11, 13]
