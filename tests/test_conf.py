"""Every conf composes into checked dataclasses, its head builds for its target, and defaults change only where a review sees it."""

import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import heads
from data.errors import UserError
from data.target import resolve, spec, spec_from_config
from train.config import choices, load, to_yaml

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "llama70b_mtp.yaml"
CONFS = choices("conf")
OF_THE_TARGET = {"taps": "[0,1,2]", "mask_token_id": "5"}  # what every run states, because it depends on the target


def portable(text: str) -> str:
    return text.replace(f"{ROOT}/", "")


@pytest.mark.parametrize("name", CONFS)
def test_conf_is_named_after_its_file_small_and_builds_its_head(name):
    cfg = load([f"conf={name}"])
    assert cfg.name == name
    assert len((ROOT / "conf" / "conf" / f"{name}.yaml").read_text().splitlines()) <= 25
    target = spec_from_config(cfg.target)
    with torch.device("meta"):
        head = heads.build(cfg.head, target)
    assert all(parameter.is_meta for parameter in head.parameters())
    assert all(0 <= tap <= target.num_layers for tap in head.taps)


@pytest.mark.parametrize("name", sorted({c.replace("_mtp", "_eagle3") for c in CONFS if c.startswith("llama")} & set(CONFS)))
def test_eagle3_taps_are_those_that_engines_assume(name):
    cfg = load([f"conf={name}"])
    L = spec_from_config(cfg.target).num_layers
    assert cfg.head["taps"] == [2, L // 2, L - 3]


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "head").glob("*.yaml")), ids=lambda p: p.stem)
def test_head_conf_mirrors_the_constructor(path):
    """Every knob of a head stands in its conf file, and nothing else does."""
    section = yaml.safe_load(path.read_text())
    module, _, name = section.pop("_target_").rpartition(".")
    parameters = inspect.signature(getattr(__import__(module, fromlist=[name]), name).__init__).parameters
    assert set(section) == set(parameters) - {"self", "target"}


@pytest.mark.parametrize("name", choices("target"))
def test_target_conf_states_whole_dimensions(name):
    stated = yaml.safe_load((ROOT / "conf" / "target" / f"{name}.yaml").read_text())["spec"]
    cfg = load(["conf=tiny_mtp", f"target={name}"])
    assert {key: getattr(spec_from_config(cfg.target), key) for key in stated} == stated


@pytest.mark.parametrize("conf", ["tiny_mtp", "tiny_mtp_native", "tiny_glm4_moe_mtp", "tiny_gemma4_mtp"])
def test_the_tiny_targets_are_what_their_confs_state(conf, tmp_path):
    cfg = load([f"conf={conf}"])
    assert spec(resolve(cfg.target, tmp_path)) == spec_from_config(cfg.target)


def test_golden_config():
    """Any change of a default shows here. To accept one: write portable(to_yaml(load(["conf=llama70b_mtp"]))) into the golden file."""
    assert portable(to_yaml(load(["conf=llama70b_mtp"]))) == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("group", ["optim", "zero", "eval", "log", "data", "target", "head"])
def test_every_choice_of_every_group_composes(group):
    for choice in choices(group):
        section = yaml.safe_load((ROOT / "conf" / group / f"{choice}.yaml").read_text())
        stated = [f"{group}.{key}={OF_THE_TARGET[key]}" for key, value in section.items() if value == "???"]
        assert load(["conf=tiny_mtp", f"{group}={choice}", *stated])


def test_composition_leaves_plain_values_and_no_interpolation():
    text = to_yaml(load(["conf=llama8b_eagle3", "name=other"]))
    assert "${" not in text and "???" not in text
    for value in dataclasses.asdict(load(["conf=smollm_mtp"])).values():
        assert type(value) in (str, int, float, bool, dict, list, type(None))


def test_command_line_wins_over_the_conf_and_the_conf_over_its_groups():
    cfg = load(["conf=tiny_eagle3", "train.steps=7", "zero=stage2", "data.sampling.top_k=3"])
    assert (cfg.train.steps, cfg.zero["stage"], cfg.data.sampling.top_k) == (7, 2, 3)
    assert cfg.eval.limit == 4 and cfg.eval.k == 3  # the first from the conf, the second from eval/cpu


@pytest.mark.parametrize("name", CONFS)
def test_another_optimizer_learns_at_its_own_rate(name):
    """A conf states AdamW's rate, on which Muon would learn nothing."""
    own = yaml.safe_load((ROOT / "conf" / "optim" / "muon.yaml").read_text())["lr"]
    assert load([f"conf={name}", "optim=muon"]).optim.lr == own
    adamw = load([f"conf={name}", "optim=wsd"]).optim
    assert adamw.lr == adamw.adam_lr < own


@pytest.mark.parametrize("optim", choices("optim"))
def test_a_rate_on_the_command_line_is_taken_by_every_optimizer(optim):
    assert load(["conf=tiny_mtp", f"optim={optim}", "optim.lr=0.123"]).optim.lr == 0.123


def test_another_name_keeps_the_store():
    """So that runs with other learning rates train on the same hidden states."""
    first, second = load(["conf=smollm_eagle3"]), load(["conf=smollm_eagle3", "name=lr2"])
    assert first.data.store == second.data.store and first.run_dir != second.run_dir


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["conf=<name>", "llama70b_mtp", "tiny_mtp"]),
        (["conf=nowhere"], ["nowhere", "tiny_mtp"]),
        (["conf=tiny_mtp", "train.stepz=3"], ["stepz", "steps", "micro_tokens"]),
        (["conf=tiny_mtp", "head=eagle7"], ["eagle7", "eagle3", "mtp"]),
        (["conf=tiny_mtp", "train.steps=many"], ["train.steps", "many"]),
        (["conf=tiny_mtp", "head=eagle3"], ["head.taps"]),
        (["conf=tiny_mtp", "optim.schedule=linear"], ["linear", "cosine", "wsd"]),
    ],
)
def test_mistakes_name_what_is_known(argv, words):
    with pytest.raises(UserError) as caught:
        load(argv)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_unknown_knob_of_a_head_names_the_known_ones():
    cfg = load(["conf=tiny_mtp", "+head.num_heads=3"])
    with pytest.raises(ValueError, match="num_heads.*depth_decay"):
        heads.build(cfg.head, spec_from_config(cfg.target))


def test_loading_works_from_anywhere_and_leaves_nothing(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from train.config import load; print(load(['conf=tiny_mtp']).data.store)"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str(ROOT / "store" / "tiny_mtp")
    assert not list(tmp_path.iterdir())
