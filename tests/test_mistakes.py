"""What a careless or unlucky user does: each must end in one line that names the place, and nothing may be wrong in silence."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SPEC, head_confs, refused
from toy import make_config, make_store, train

from data.answers import read_answers, write_asked
from data.builtin import build_tiny
from data.chat import all_prompt_ids, load_tokenizer
from data.files import read_object
from data.identity import check_responses, identity, prompts_hash, unfinished
from data.lock import alone
from data.prompts import ChatRecord, read_prompts
from data.target import resolve, spec, spec_from_config
from eval.export import read_export, trained_head
from eval.report import finished
from heads import build
from train import checkpoint, config
from train.config import ROOT, TargetConfig, load
from train.plan import build_on_meta, plan


@pytest.mark.parametrize(
    "word",
    """optim.eps=nan optim.eps=-1 optim.weight_decay=-1 optim.lr=nan data.sampling.temperature=inf data.sampling.top_k=-7 train.seed=-1
    data.max_store_gb=nan data.max_store_gb=-1 target.max_model_len=0 target.max_model_len=99999 target.tensor_parallel=0 eval.dtype=float17
    eval.methods=[] eval.methods=[none,medusa] eval.methods=[none,none] eval.methods=[ngram] zero.stage=true head=null name=
    data.prompts=foo run_dir= data.store= data.responses= run_dir=. data.store=/ target.spec.hidden_size=-64 target.spec.num_kv_heads=0
    target.spec.num_layers=two head.depths=1.5 head.depths=two head.depths=true head.depths=0 head.depth_decay=nan head.depth_decay=-1
    head.loss_chunk=0 head.loss_chunk=abc head.norms=maybe target.spec.head_dim=64""".split(),
)
def test_a_bad_value_is_refused_before_anything_is_made(word):
    def go():
        cfg = load(["conf=tiny_mtp", word])
        plan(cfg, spec_from_config(cfg.target), 1)

    refused(go, word.split("=")[0].split(".")[-1] if "head_dim" not in word else "head=mtp_eagle3")


ROPES = [{"rope_type": "longrope"}, {"rope_type": "yarn", "factor": 2.0}, {"rope_type": "default", "partial_rotary_factor": 0.5}]


@pytest.mark.parametrize("scaling", ROPES)
def test_rope_that_heads_do_not_know_is_refused_when_they_are_built(scaling):
    target = dataclasses.replace(SPEC, head_dim=16, rope_scaling=scaling)
    refused(lambda: build_on_meta(load(["conf=tiny_mtp"]), target), "head: ro")


@pytest.mark.parametrize(
    "change", [{"draft_vocab_size": n} for n in (0, -5, 1.5, 10**6)] + [{"num_layers": 0}, {"taps": ["a"]}, {"taps": [0.5]}]
)
def test_a_head_of_an_impossible_size_is_refused(change):
    with pytest.raises(ValueError, match=f"head.{next(iter(change))}"):
        build(head_confs()["eagle3"] | change, SPEC)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n"
TARGETS = {
    "a Git LFS pointer": ("model.safetensors", LFS, "unreadable weights"),
    "no weights in the file": ("model.safetensors", b"", "unreadable weights"),
    "an index that names a lost file": ("model.safetensors.index.json", b'{"weight_map": {"a": "lost.safetensors"}}', "lost.safetensors"),
    "an index without a map": ("model.safetensors.index.json", b"{}", "weight_map"),
    "Latin-1": ("config.json", b'{"a": "\xe9"}', "not UTF-8"),
    "a list": ("config.json", b"[]", "not a JSON object"),
    "a broken tokenizer config": ("tokenizer_config.json", b"{oops", "tokenizer_config.json:1"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_target_is_refused(name, tmp_path):
    folder = build_tiny(tmp_path / "target")
    file, content, word = TARGETS[name]
    (folder / file).write_bytes(content)
    cfg = TargetConfig(model=str(folder))
    refused(lambda: identity(resolve(cfg, tmp_path), cfg), word)


def test_weights_cut_short_are_refused_before_the_engine_starts(tmp_path):
    folder = build_tiny(tmp_path / "target")
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 100)
    refused(lambda: resolve(TargetConfig(model=str(folder)), tmp_path), "model.safetensors", "unreadable weights")


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "gemma2"},
        {"model_type": "gemma3_text"},
        {"final_logit_softcapping": 30.0},
        {"logits_scaling": 8.0},
        {"embedding_multiplier": 12.0},
        {"rope_scaling": "yarn"},
        {"num_hidden_layers": 0},
    ],
)
def test_a_target_for_which_states_or_loss_would_be_wrong_is_refused(keys, tmp_path):
    folder = build_tiny(tmp_path / "target")
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(whole | keys))
    refused(lambda: resolve(TargetConfig(model=str(folder)), tmp_path), "config.json")


@pytest.mark.parametrize("place", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}])
def test_partial_rotary_is_not_taken_for_whole(place, tmp_path):
    folder = build_tiny(tmp_path / "target")
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(whole | place))
    refused(lambda: build_on_meta(load(["conf=tiny_mtp"]), spec(folder)), "partial_rotary_factor=0.5")


def test_an_id_that_the_hub_would_not_allow(tmp_path):
    refused(lambda: resolve(TargetConfig(model="a--b/c"), tmp_path), "a--b/c", "/path/to/folder")


def test_a_damaged_folder_of_save_to_disk_is_refused(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    refused(lambda: read_prompts(["saved"], tmp_path), "saved", "save it again")


def test_a_record_that_the_template_refuses_stops_the_others_only_where_there_is_none(tmp_path, capsys):
    tokenizer = load_tokenizer(build_tiny(tmp_path / "target"), False)
    tokenizer.chat_template = "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('no') }}{% endif %}{{ messages[0]['content'] }}"
    good, bad = (ChatRecord(text, [{"role": "user", "content": text}], {}) for text in ("good", "bad"))
    assert set(all_prompt_ids(tokenizer, [bad, good])) == {"good"}
    assert "1 of 2 prompts left out" in capsys.readouterr().err
    refused(lambda: all_prompt_ids(tokenizer, [bad]), "none of the 1", "record bad")


ANSWER = {"id": "a#0", "prompt_ids": [1], "response_ids": [2], "finish_reason": "stop"}


def write_answers(path: Path, *answers: dict) -> Path:
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return path


def test_answers_that_are_none_or_twice_are_refused(tmp_path):
    path = write_answers(tmp_path / "train.jsonl", ANSWER, {"id": "b#0"})
    refused(lambda: read_answers(path), "record 2", "no prompt_ids")
    refused(lambda: read_answers(write_answers(path, ANSWER, ANSWER)), "record 2", "repeats the id a#0")


def test_answers_whose_sampling_was_stopped_are_not_captured(tmp_path):
    path = write_answers(tmp_path / "train.jsonl", ANSWER)
    path.with_suffix(".meta.json").write_text("{}")
    refused(lambda: check_responses(path, {}, {}), "nothing beside it says what was asked for", "launch/respond.py")
    write_asked(path, {"limit": 8, "sampling": {"samples": 1}}, ["a#0"])
    check_responses(path, {}, {"limit": 8, "sampling": {"samples": 1}})
    now = {"limit": 4, "sampling": {"samples": 2}}
    refused(lambda: check_responses(path, {}, now), "data.limit was 8, is 4; data.sampling.samples was 1, is 2", "launch/respond.py")
    unfinished(path).touch()
    refused(lambda: check_responses(path, {}, now), "launch/respond.py", ".unfinished")
    unfinished(path).unlink()
    path.with_suffix(".meta.json").write_text("{oops")
    refused(lambda: check_responses(path, {}, {}), "train.meta.json:1", "launch/respond.py")


def test_one_writer_per_folder_and_a_kill_lets_go(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from data.lock import alone; from pathlib import Path\n"
    code += f"with alone(Path({str(tmp_path)!r}), 'data.store'): print('in', flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"in\n"
    refused(alone(tmp_path, "data.store").__enter__, str(tmp_path), "another process", "data.store")
    other.kill()
    other.wait()
    with alone(tmp_path, "data.store"):
        pass


def ended(monkeypatch, error: BaseException) -> int:
    def fail(_: config.RunConfig) -> None:
        raise error

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "argv", ["train.py", "conf=tiny_mtp"])
    try:
        with pytest.raises(SystemExit) as caught:
            config.main(fail)
    finally:
        signal.signal(signal.SIGINT, handler)
    return int(str(caught.value.code))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ENOTDIR, errno.EROFS])
def test_a_full_disk_or_a_wrong_path_is_one_line(number, monkeypatch, capsys):
    assert ended(monkeypatch, OSError(number, os.strerror(number), "/some/path")) == 2
    assert capsys.readouterr().err.startswith(f"error: /some/path: {os.strerror(number)}; a run writes to run_dir")


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    assert ended(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "stopped; the same command goes on from what is done\n"


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch):
    with pytest.raises(OSError):
        ended(monkeypatch, OSError("not about a path"))


@pytest.mark.parametrize("content", [b"{oops", b"[]", b"\xff"])
def test_json_that_was_cut_or_edited_names_the_mend(content, tmp_path):
    (tmp_path / "x.json").write_bytes(content)
    refused(lambda: read_object(tmp_path / "x.json", "run it again"), "x.json", "run it again")
    refused(lambda: read_object(tmp_path / "none.json", "run it again"), "no such file", "run it again")


def test_an_export_edited_by_hand_is_refused(tmp_path):
    for about in ({"format_version": 1}, {"format_version": 1, "serving": {"method": "mtp"}, "provenance": []}):
        (tmp_path / "draftsmith.json").write_text(json.dumps(about))
        refused(lambda: read_export(tmp_path), "draftsmith.json", "export again")


def test_a_report_cut_short_is_made_again(tmp_path):
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "report.json").write_text('{"settings"')
    assert finished(tmp_path, {}) is None


def test_the_hash_of_prompts_sees_an_edited_one():
    one, other = (ChatRecord("a", [{"role": "user", "content": text}], {}) for text in "xy")
    assert prompts_hash([one]) == prompts_hash([one]) != prompts_hash([other])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    cfg = make_config(folder / "run", make_store(folder / "store"))
    train(cfg)
    return cfg


def resumed(trained, tmp_path, **overrides):
    shutil.copytree(trained.run_dir, tmp_path / "run")
    return make_config(tmp_path / "run", Path(trained.data.store), **{"train.steps": 12, **overrides})


@pytest.mark.parametrize("damage", ["model states", "optimizer states", "both cut", "state.json"])
def test_a_damaged_checkpoint_names_another_way(damage, trained, tmp_path):
    cfg = resumed(trained, tmp_path)
    step = tmp_path / "run" / "step-000010"
    if damage == "state.json":
        (step / "state.json").write_text("{")
    pattern = {"model states": "*model_states.pt", "optimizer states": "*optim_states.pt"}.get(damage, "*.pt")
    for path in step.glob(pattern) if damage != "state.json" else ():
        os.truncate(path, 50)
    refused(lambda: train(cfg), "step-000010", "latest")
    (tmp_path / "run" / "latest").write_text("step-000005\n")
    train(cfg)


def test_fewer_steps_than_were_taken_are_refused(trained, tmp_path):
    refused(lambda: train(resumed(trained, tmp_path, **{"train.steps": 7})), "train.steps=7", "step-000010")


def test_a_switch_that_changes_no_weight_may_not_change_after_training(trained):
    step = checkpoint.latest(Path(trained.run_dir))
    assert step is not None
    checkpoint.check_head(step, trained.head)
    refused(lambda: checkpoint.check_head(step, trained.head | {"norm_output": True}), "trained otherwise", "norm_output")


def test_weights_of_a_checkpoint_cut_short_are_refused(trained, tmp_path):
    resumed(trained, tmp_path)
    os.truncate(tmp_path / "run" / "step-000010" / "head.safetensors", 50)
    refused(lambda: checkpoint.load_head(tmp_path / "run" / "step-000010"), "head.safetensors", "latest")


def test_a_wrong_head_section_is_one_line_at_export(tmp_path):
    folder = build_tiny(tmp_path / "target")
    refused(lambda: trained_head({"_target_": "heads.mtp.MTP", "depths": 0}, folder, {}, torch.float32, "cpu"), "head.depths")


def test_a_wrong_key_of_deepspeed_is_one_line(trained, tmp_path):
    cfg = resumed(trained, tmp_path)
    cfg.zero = {"stage": 1, "foo": 1}
    refused(lambda: train(cfg), "zero: foo")
