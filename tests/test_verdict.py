"""The verdict under a plan: what fits and what does not, advice that makes it fit, and whose dimensions, stores and answers count."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from conftest import refused
from test_plan import answers, write_store

from data.builtin import build_tiny
from data.target import fingerprint, planned_spec, spec_from_config
from train import devices, inputs, plan, plan_table, verdict
from train.config import ROOT, load
from train.devices import GPUS, Device

CPU = Device("this CPU", 8e9, 1e11, 1e10, shared=True)
PLENTY = 10**15


@pytest.fixture(autouse=True)
def disk(monkeypatch):
    monkeypatch.setattr(verdict, "free_bytes", lambda folder: PLENTY)


def judged(cfg, world, device):
    """(the verdict's lines by what they speak of, with their marks; the lines of time by stage; the first line)."""
    spec = spec_from_config(cfg.target)
    first, *lines = verdict.verdict(cfg, spec, plan.plan(cfg, spec, world), device)
    cut = next(i for i, line in enumerate(lines) if line.startswith("Time of each stage"))
    by_name = lambda part, skip: {line[skip:].partition(":")[0]: line for line in part}  # noqa: E731
    return by_name(lines[:cut], 5), by_name(lines[cut + 1 :], 2), first


def test_what_fits_is_said_with_the_room_there_is(tmp_path):
    cfg = load(["conf=llama70b_mtp", f"data.store={tmp_path}"])
    lines, times, first = judged(cfg, 8, GPUS["h100"])
    assert first == "Verdict: it fits." and all(line.startswith("  ok ") for line in lines.values())
    assert "H100 has 80.00 GB, 72.00 GB of it usable" in lines["training"] and "17.64 GB on each" in lines["answers, capture, evaluation"]
    assert all(" on 8 x H100; 40% of 989 TFLOP/s" in times[stage] for stage in ("answers", "capture", "training"))
    assert "at most" in times["answers"] and "data.batch_size=128" in times["answers"], "what is assumed stands beside it"


def test_a_target_that_one_gpu_does_not_hold_is_said_so_with_the_number_that_does():
    cfg = load(["conf=llama70b_mtp", "target.tensor_parallel=1"])
    lines, times, first = judged(cfg, 8, GPUS["h100"])
    line = lines["answers, capture, evaluation"]
    assert line.startswith("  NO ") and "141.11 GB" in line and line.endswith(": target.tensor_parallel=4 is enough")
    assert first.startswith("Verdict: it does not fit") and lines["training"].startswith("  ok ")
    lines, _, _ = judged(load(["conf=llama70b_mtp"]), 1, GPUS["h100"])
    assert lines["answers, capture, evaluation"].endswith("There is 1 (gpus=1)")


def test_numbers_that_do_not_divide_are_no_fit():
    lines, _, first = judged(load(["conf=llama70b_mtp", "train.sequence_parallel=3", "target.tensor_parallel=6"]), 8, GPUS["h100"])
    assert first.startswith("Verdict: it does not fit")
    assert lines["training"].endswith("train.sequence_parallel=3 does not divide the 8 ranks: set it to one of 1, 2, 4, 8")
    assert lines["answers, capture, evaluation"].endswith(
        "The target has 64 attention heads and 8 of keys and values: set it to one of 1, 2, 4, 8"
    )


@pytest.mark.parametrize(
    ("conf", "world", "gb"),
    [("llama70b_mtp", 8, 16), ("llama70b_mtp", 1, 32), ("llama8b_eagle3", 4, 8), ("demo train.dtype=float32", 1, 0.5)],
)
def test_advice_on_memory_is_right(conf, world, gb):
    """What it says to set is set, and then it fits; without it it does not."""
    device = Device("small", gb * 1e9, 1e15, 1e12)
    asked = f"conf={conf}".split()
    lines, _, first = judged(load(asked), world, device)
    assert lines["training"].startswith("  NO ") and "does not fit" in first
    too_much = float(re.search(r": ([\d.]+) [GM]B too much", lines["training"])[1])
    words = re.search(r"It fits with (.*?) \(", lines["training"])[1].split()
    assert too_much > 0 and words
    cfg = load([*asked, *words])
    lines, _, _ = judged(cfg, world, device)
    assert lines["training"].startswith("  ok "), lines["training"]
    assert "micro_tokens" not in " ".join(words) or cfg.data.max_length <= cfg.train.micro_tokens, "a longer document is a larger batch"


def test_memory_that_nothing_makes_fit_names_larger_devices():
    lines, _, _ = judged(load(["conf=llama70b_mtp"]), 1, Device("tiny", 4e9, 1e15, 1e12))
    assert "No micro-batch is small enough" in lines["training"] and "as it is it fits H100 (80.00 GB) or H200" in lines["training"]


def test_ranks_on_a_cpu_share_its_memory():
    cfg = load(["conf=demo"])
    one, many = (judged(cfg, world, CPU)[0]["training"] for world in (1, 64))
    assert one.startswith("  ok ") and many.startswith("  NO ") and "in all" in one


def test_a_disk_that_is_too_small_is_said_with_what_fits(monkeypatch):
    words = ["conf=llama8b_eagle3", "data.max_store_gb=300"]
    lines, _, first = judged(load(words), 8, GPUS["h100"])
    line = lines["disk"]
    assert "over data.max_store_gb=300" in line and line.startswith("  ?  "), "no more than a bound: answers may be shorter"
    assert "it may not fit" in first
    fewer = re.search(r"data.limit=\d+", line)[0]
    assert judged(load([*words, fewer]), 8, GPUS["h100"])[0]["disk"].startswith("  ok ")
    window = re.search(r"data.window_gb=[\d.]+( train.save_every=\d+)?", line)[0].split()
    assert judged(load([*words, *window]), 8, GPUS["h100"])[0]["disk"].startswith("  ok ")
    monkeypatch.setattr(verdict, "free_bytes", lambda folder: 10**9)
    lines, _, _ = judged(load(words), 8, GPUS["h100"])
    assert lines["disk"].startswith("  NO ") and "train.keep=" in lines["disk"]


def test_a_store_that_is_counted_is_no_bound(monkeypatch, tmp_path):
    for split in inputs.SPLITS:
        answers(tmp_path / "responses", split, [(10, 20)] * 24)
    cfg = load(["conf=tiny_eagle3", f"data.responses={tmp_path}/responses", f"data.store={tmp_path}/store", "data.max_store_gb=0.0001"])
    lines, times, _ = judged(cfg, 1, CPU)
    assert lines["disk"].startswith("  NO ") and "at most" not in times["capture"] and "there already" in times["answers"]
    for split in inputs.SPLITS:
        write_store(tmp_path / "store" / split, [9])
    assert "there already" in judged(cfg, 1, CPU)[1]["capture"]


def test_prompts_that_nothing_bounds_leave_disk_and_time_unknown():
    lines, times, first = judged(load(["conf=llama8b_eagle3", "data.limit=null"]), 8, GPUS["h100"])
    assert "set data.limit" in lines["disk"] and "unknown" in times["answers, capture"] and "may not fit" in first and "training" in times


@pytest.fixture
def target(tmp_path):
    return build_tiny(tmp_path / "target")


def words_of(tmp_path, target):
    return ["conf=tiny_eagle3", f"target.model={target}", f"data.responses={tmp_path}/responses", f"data.store={tmp_path}/store"]


def test_a_local_targets_own_dimensions_are_planned_with(tmp_path, target, capsys):
    cfg = load(words_of(tmp_path, target))
    path = target / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"intermediate_size": 256}))
    refused(lambda: plan_table.made(cfg, 1, CPU), "intermediate_size: conf 128, target 256", "config.json")
    cfg.target.spec = {}
    assert planned_spec(cfg.target, ROOT).intermediate_size == 256
    before = plan.plan(cfg, replace(planned_spec(cfg.target, ROOT), intermediate_size=128), 1).head_parameters
    plan_table.show(plan_table.made(cfg, 1, CPU))
    assert f"{(before + 3 * 64 * 128) / 1e6:,.1f} M" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["/no/such/folder", "./nor/this/one", "nor_this"])
def test_a_folder_that_is_not_there_is_no_plan(tmp_path, model):
    refused(lambda: plan_table.made(load(words_of(tmp_path, model)), 1, CPU), f"target.model={model}", "no such folder")


def test_what_another_target_left_is_not_counted_and_is_named(tmp_path, target):
    cfg = load(words_of(tmp_path, target))
    bound = plan.count_tokens(cfg, "train")
    for split in inputs.SPLITS:
        write_store(tmp_path / "store" / split, [9])  # of the built-in target
        answers(tmp_path / "responses", split, [(3, 4)])
        (tmp_path / f"responses/{split}.meta.json").write_text(json.dumps({"target": {"id": "other", "fingerprint": "other"}}))
    assert plan.count_tokens(cfg, "train") == bound and bound.source == "bound"
    lines, times, first = judged(cfg, 1, CPU)
    assert all(f"data.{part}={tmp_path}/{part} holds another target's" in " ".join(lines.values()) for part in ("store", "responses"))
    assert "does not fit" in first and not any("there already" in line for line in times.values())
    about = {"target": {"id": "moved since", "fingerprint": fingerprint(target)}}
    for split in inputs.SPLITS:
        manifest = tmp_path / "store" / split / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | about))
    assert plan.count_tokens(cfg, "train") == plan.Tokens(9, 8, "store"), "of the same weights under another path"


def test_devices_are_chosen_by_word_else_what_is_here(monkeypatch):
    assert devices.choose("mi300x", True).name == "MI300X" and devices.choose("cpu", True).shared
    refused(lambda: devices.choose("a100", False), "device=a100", "h100, h200, mi300x, cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.choose(None, gpus=True) is GPUS["h100"] and devices.choose(None, gpus=False).shared


def test_a_container_has_the_memory_that_it_may_use(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "CGROUP", tmp_path / "memory.max")
    whole = devices.this_cpu()
    assert whole.flops > 1e8 and whole.bandwidth > 1e7
    devices.CGROUP.write_text("max\n")
    assert devices.this_cpu().memory == whole.memory
    devices.CGROUP.write_text("1000000000\n")
    assert devices.this_cpu().memory == 1e9


def test_a_shared_store_is_as_wide_as_it_is(tmp_path):
    """A capture goes on with the taps that the store holds, more than this head reads."""
    for split in inputs.SPLITS:
        answers(tmp_path / "responses", split, [(10, 20)] * 24)
    cfg = load(["conf=tiny_eagle3", "head.taps=[1]", f"data.responses={tmp_path}/responses", f"data.store={tmp_path}/store"])

    def size():
        number, unit = re.search(r"disk: ([\d.,]+) ([kM])B of states", judged(cfg, 1, CPU)[0]["disk"]).groups()
        return float(number.replace(",", "")) * {"k": 1e3, "M": 1e6}[unit]

    alone, path = size(), tmp_path / "store" / "train" / "manifest.json"
    write_store(path.parent, [9], taps=(0, 1, 2))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"closed": False}))  # a capture that was stopped
    wide = size()
    assert wide > 1.3 * alone
    path.write_text("{oops")
    assert size() < wide, "a broken manifest is taken for none"
