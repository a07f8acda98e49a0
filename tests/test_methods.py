"""The methods of an evaluation: what vLLM is told, and what is refused before an engine starts."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
from pathlib import Path

import pytest
from conftest import refused

from data.builtin import build_tiny
from eval import methods
from eval.methods import check_methods, command, label, published, speculation, stamps
from train.config import RunConfig, load

EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("target") / "tiny")


def config(*names: str, draft_model: Path | None = None) -> RunConfig:
    cfg = RunConfig(name="x", head={"_target_": "heads.medusa.Medusa", "depths": 3})
    cfg.eval.methods, cfg.eval.draft_model = ["none", *names], draft_model and str(draft_model)
    return cfg


def folder(path: Path, content: dict) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(content))
    return path


def sizes(target: Path) -> dict[str, int]:
    config = json.loads((target / "config.json").read_text())
    return {key: config[key] for key in ("vocab_size", "hidden_size")}


def test_command_can_be_pasted_into_a_shell():
    text = command(Path("/a b/it's"), "float32", {"method": "mtp", "model": "/x y"}, {"num_nextn_predict_layers": 1})
    words = shlex.split(text.replace("\\\n", ""))
    assert words[:7] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/a b/it's", "--dtype", "float32"]
    assert json.loads(words[8])["model"] == "/x y"


def test_each_method_names_itself_to_the_engine(tmp_path):
    head = folder(tmp_path / "some" / "head", EAGLE3)
    cfg = config("ngram", "suffix", "draft_model", str(head), draft_model=tmp_path / "small")
    told = {name: speculation(cfg, name, 4, tmp_path)[0] for name in cfg.eval.methods}
    assert told.pop("none") is None and all(s["num_speculative_tokens"] == 4 for s in told.values())
    assert [s["method"] for s in told.values()] == ["ngram", "suffix", "draft_model", "eagle3"]
    assert told["draft_model"]["model"] == str(tmp_path / "small") and told[str(head)]["model"] == str(head)
    assert told["suffix"]["suffix_decoding_max_cached_requests"] == 0, "else it knows the answers from the concurrency before"
    assert [label(name) for name in cfg.eval.methods] == ["plain", "n-gram", "suffix", "draft model", "head"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (EAGLE3, {"method": "eagle3"}),
        ({"architectures": ["EagleLlamaForCausalLM"]}, {"method": "eagle"}),
        ({"model_type": "medusa"}, {"method": "medusa"}),
        ({"architectures": ["DFlashDraftModel"]}, {"method": "dflash"}),
        ({"speculators_model_type": "peagle"}, {"method": "eagle3", "parallel_drafting": True}),
    ],
)
def test_a_published_head_says_what_it_is(content, expected, tmp_path):
    assert published(folder(tmp_path / "x", content)) == expected


@pytest.mark.parametrize("content", [{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, {"speculators_model_type": "new"}, {}])
def test_a_folder_that_does_not_say_is_refused(content, tmp_path):
    refused(lambda: published(folder(tmp_path / "x", content)), "eval.methods", "config.json", "eval.draft_model=<folder>")


def test_what_would_stop_the_engine_is_said_before_it_starts(target, tmp_path, monkeypatch):
    def go(*names: str, draft_model: Path | None = None):
        check_methods(config(*names, draft_model=draft_model), target, tmp_path / "export")

    go("ngram")
    fitting = folder(tmp_path / "fitting", EAGLE3 | sizes(target))
    go("ngram", str(fitting), "draft_model", draft_model=target)
    refused(lambda: go(str(tmp_path / "nowhere")), "eval.methods", "nowhere/config.json: no such file")
    other = folder(tmp_path / "other", EAGLE3 | sizes(target) | {"hidden_size": 4096})
    refused(lambda: go(str(other)), "eval.methods", "another target", "hidden_size 4096, the target has")
    refused(lambda: go("draft_model", draft_model=tmp_path / "none"), "eval.draft_model", "no such file")
    foreign = folder(tmp_path / "foreign", {"vocab_size": 7})
    refused(lambda: go("draft_model", draft_model=foreign), "eval.draft_model", "vocab_size 7, the target has")
    taken = folder(tmp_path / "eagle3-like", sizes(target))
    refused(lambda: go("draft_model", draft_model=taken), "'eagle3' in it for another", "rename it")
    refused(lambda: go("head"), "draftsmith.json", "launch/export.py")
    monkeypatch.setattr(methods.importlib.util, "find_spec", lambda name: None)
    refused(lambda: go("suffix"), "eval.methods", "arctic-inference==", "leave suffix out")


def test_suffix_is_allowed_where_its_package_is(target, tmp_path, monkeypatch):
    spec = importlib.util.find_spec("json")
    monkeypatch.setattr(methods.importlib.util, "find_spec", lambda name: spec)
    check_methods(config("suffix"), target, tmp_path)


def test_every_k_must_be_within_the_depths_of_the_head(target, tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "validate_export", lambda *_: None)
    monkeypatch.setattr(methods, "check_fingerprint", lambda *_: None)
    monkeypatch.setattr(methods, "read_export", lambda _: {"target_fingerprint": ""})
    cfg = config("head")
    cfg.eval.k = [1, 3]
    check_methods(cfg, target, tmp_path)
    cfg.eval.k = [1, 4]
    refused(lambda: check_methods(cfg, target, tmp_path), "head.depths=3", "eval.k=4")


def test_a_report_knows_the_files_of_the_folders_it_measured(tmp_path):
    head = folder(tmp_path / "head", EAGLE3)
    before = stamps(["none", "ngram", str(head)], None)
    assert list(before) == [str(head)] and stamps(["none"], str(head)) == {}
    os.utime(head / "config.json", ns=(1, 1))
    assert stamps(["none", "ngram", str(head)], None) != before
    assert stamps(["none", "draft_model"], str(head)).keys() == {str(head)}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("eval.k=[2,1]", "ascending"),
        ("eval.k=[]", "or a list"),
        ("eval.k=[1,1]", "ascending"),
        ("eval.k=0", "1 or more"),
        ("eval.k=2.5", "whole number"),
        ("eval.k=many", "whole number"),
        ("eval.concurrency=[0,4]", "1 or more"),
        ("eval.concurrency=true", "whole number"),
        ("eval.methods=[none,draft_model]", "eval.draft_model=None"),
    ],
)
def test_a_grid_is_checked_when_the_conf_is_read(word, message):
    refused(lambda: load(["conf=tiny_mtp", word]), message, word.split("=")[0].replace("methods", "draft_model"))


def test_a_grid_and_folders_come_from_the_command_line():
    words = ["eval.k=[1,2,4]", "eval.concurrency=[1,8]", "eval.methods=[none,draft_model,heads/x]", "eval.draft_model=small"]
    cfg = load(["conf=tiny_mtp", *words])
    assert (cfg.eval.ks, cfg.eval.concurrencies) == ([1, 2, 4], [1, 8])
    assert Path(cfg.eval.methods[2]).is_absolute() and Path(cfg.eval.draft_model or "").is_absolute()
    single = load(["conf=tiny_mtp"])
    assert (single.eval.k, single.eval.ks, single.eval.concurrencies) == (3, [3], [1])
