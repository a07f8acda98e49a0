"""The command line: composing a conf, and one helpful line for whatever is wrong with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from data.errors import UserError
from train.config import ROOT, RunConfig, load, to_yaml

FILES = {
    "config.yaml": "defaults: [schema, target: tiny, head: toy, zero: stage1, _self_, conf: '???']",
    "target/tiny.yaml": "model: builtin:tiny",
    "head/toy.yaml": "{_target_: heads.toy.Toy, depths: 2}",
    "zero/stage1.yaml": "stage: 1",
    "zero/stage2.yaml": "stage: 2",
    "conf/one.yaml": (
        "# @package _global_\ndefaults: [override /zero: stage2]\nname: one\n"
        "data: {responses: store/one/responses, store: /abs/states}\ntrain: {steps: 10}"
    ),
    "conf/bad_key.yaml": "# @package _global_\nname: bad_key\ntrain: {stepz: 10}",
    "conf/bad_type.yaml": "# @package _global_\nname: bad_type\ntrain: {steps: ten}",
    "conf/unset.yaml": "# @package _global_\nname: unset",
    "conf/broken.yaml": "# @package _global_\nname: [broken",
}


@pytest.fixture
def conf_dir(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return tmp_path / "conf"


def test_a_conf_composes_with_groups_and_overrides(conf_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    cfg = load(["conf=one", "train.seed=7", "head.depths=3", "optim.betas=[0.8,0.99]"], conf_dir)
    assert isinstance(cfg, RunConfig) and type(cfg.head) is dict and type(cfg.zero) is dict
    assert (cfg.train.steps, cfg.train.seed, cfg.optim.betas) == (10, 7, [0.8, 0.99])
    assert cfg.head == {"_target_": "heads.toy.Toy", "depths": 3} and cfg.zero == {"stage": 2}
    assert cfg.run_dir == str(ROOT / "runs/one"), "relative paths count from the repository"
    assert cfg.data.responses == str(ROOT / "store/one/responses") and cfg.data.store == "/abs/states"
    assert list(elsewhere.iterdir()) == [], "composing leaves no file or folder behind"


def test_the_yaml_of_a_config_says_the_same(conf_dir: Path) -> None:
    cfg = load(["conf=one"], conf_dir)
    again = yaml.safe_load(to_yaml(cfg))
    assert again["train"]["steps"] == 10 and again["zero"] == {"stage": 2} and again["run_dir"] == cfg.run_dir


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["no conf given", "conf=<name>", "bad_key", "one"]),
        (["conf=nope"], ["conf=nope does not exist", "conf/conf/nope.yaml", "one"]),
        (["conf=one", "zero=stage9"], ["zero=stage9 does not exist", "stage1, stage2"]),
        (["conf=one", "train.stepz=1"], ["unknown key train.stepz", "section train knows", "micro_tokens", "steps"]),
        (["conf=one", "bogus=1"], ["unknown key bogus", "top level knows", "optim"]),
        (["conf=one", "head.depht=3"], ["unknown key head.depht", "section head knows: _target_, depths"]),
        (["conf=bad_key"], ["conf/conf/bad_key.yaml", "unknown key train.stepz", "steps"]),
        (["conf=one", "train.steps=abc"], ["train.steps", "'abc'", "Integer"]),
        (["conf=bad_type"], ["conf/conf/bad_type.yaml", "train.steps", "'ten'"]),
        (["conf=one", "dry_run=maybe"], ["dry_run", "'maybe'", "bool"]),
        (["conf=unset"], ["data.responses has no value"]),
        (["conf=broken"], ["broken.yaml", "line 2"]),
        (["conf=one", "train.steps"], ["train.steps: no key=value", "did you mean train.steps=<value>?"]),
        (["conf=one", "train.steps", "5"], ["did you mean train.steps=5?"]),
        (["conf=one", "train.steps", "=", "5"], ["did you mean train.steps=5?"]),
        (["conf=one", "train.steps=", "5"], ["did you mean train.steps=5?"]),
        (["conf=one", "train.steps", "=5"], ["did you mean train.steps=5?"]),
        (["train.steps", "conf=one"], ["did you mean train.steps=<value>?"]),
        (["conf=one", "optim.betas=[0.8,", "0.9]"], ["did you mean optim.betas=[0.8,0.9]?"]),
        (["one"], ["did you mean conf=one?"]),
        (["conf", "one"], ["did you mean conf=one?"]),
        (["conf=unste"], ["did you mean conf=unset?"]),
        (["conf=one", "data.prompts=mine.jsonl"], ["data.prompts is a list: data.prompts=[mine.jsonl]"]),
        (["conf=one", "optim.betas=0.9"], ["optim.betas is a list: optim.betas=[0.9]"]),
        (["conf=one", "--local_rank=0"], ["unknown flag --local_rank=0"]),
        (["conf=one", "train.steps=0"], ["train.steps=0", "1 or more"]),
        (["conf=one", "optim.schedule=linear"], ["optim.schedule=linear", "cosine, wsd, constant"]),
        (["conf=one", "optim.warmup=2"], ["optim.warmup=2", "share"]),
        (["conf=one", "train.dtype=float16"], ["train.dtype=float16", "bfloat16"]),
        (["conf=one", "zero.stage=0"], ["zero.stage=0", "1, 2 or 3"]),
        (["conf=one", "head._target_=os.system"], ["head._target_=os.system", "heads."]),
    ],
)
def test_what_is_wrong_is_said_in_one_line(conf_dir: Path, argv: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load(argv, conf_dir)
    text = str(error.value)
    assert all(part in text for part in parts), text
    assert "\n" not in text


def run_train(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "launch/train.py"), *argv], cwd=cwd, capture_output=True, text=True, check=False)


def test_a_user_error_ends_with_2_and_no_traceback(tmp_path: Path) -> None:
    done = run_train("conf=none_such", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: conf=none_such does not exist")
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_lists_the_confs(tmp_path: Path) -> None:
    done = run_train("--help", cwd=tmp_path)
    assert done.returncode == 0 and "launch/train.py conf=<name>" in done.stdout and "train.steps=1000" in done.stdout
    assert all(path.stem in done.stdout for path in (ROOT / "conf/conf").glob("*.yaml"))


@pytest.mark.parametrize(
    ("cuda", "able", "dtype"),
    [(True, {}, "bfloat16"), (False, {"avx512_f": True, "avx512_bf16": False}, "float32"), (False, {"amx_bf16": True}, "bfloat16")],
)
def test_auto_dtype_is_what_the_machine_multiplies_fast(monkeypatch, cuda, able, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    run = load(["conf=smollm_mtp"])
    assert (run.target.dtype, run.train.dtype, run.data.states_dtype) == (dtype, dtype, "bfloat16")
