"""Engines that take turns: who runs when, what is made of the turns, and that one engine drafts k as one started with this k does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_engine import config, prompts
from test_serve import HEADS, trained_run

from data import engine_job
from data.builtin import build_tiny
from data.engine import Drafting, generate_each
from data.engine_job import side_by_side
from data.turns import BLOCK, Turn, measured, slices, turns
from eval.methods import LOOKUPS, drafting, speculation
from train.config import ROOT, RunConfig


@pytest.mark.parametrize(("count", "concurrency", "sizes"), [(16, 1, [2] * 8), (20, 8, [10, 10]), (7, 4, [3, 4]), (1, 1, [1])])
def test_slices_hold_every_prompt_once_and_fill_the_engine(count, concurrency, sizes):
    parts = slices(count, concurrency)
    assert [i for part in parts for i in part] == list(range(count)) and [len(part) for part in parts] == sizes


def test_the_others_are_as_far_from_plain_decoding_before_as_after():
    """So that a steady drift of the machine's speed changes no speed-up."""
    order = turns([(0,), (1, 2), (3,)], [1], 8)
    places = {cell: [] for cell in ((1, 1), (1, 2), (2, 3))}
    for start in range(0, len(order), 4):
        part = order[start : start + 4]
        plain = next(i for i, turn in enumerate(part) if turn.engine == 0)
        for i, turn in enumerate(part):
            if turn.engine:
                places[turn.engine, turn.k].append(i - plain)
    assert all(sum(found) == 0 and len(found) == 4 for found in places.values())


def test_plain_decoding_runs_once_for_six_others_and_an_engine_alone_takes_all_prompts():
    many = turns([(0,), tuple(range(1, 7)), tuple(range(1, 7))], [1], 2)
    assert [turn.block for turn in many if not turn.engine] == [0, 1, 1, 0] and BLOCK == 6
    assert turns([(3,)], [1, 4], 9) == [Turn(0, 3, c, 0, list(range(9))) for c in (1, 4)]
    assert turns([(0,)], [2], 3) == [Turn(0, 0, 2, 0, [0, 1, 2])]
    assert [t.k for t in turns([(1, 2)], [1], 3)] == [1, 2]


def result(turn: Turn, seconds: float) -> dict[str, Any]:
    outputs = {f"p{i}": {"token_ids": [i]} for i in turn.items}
    counters = {"drafts": 1, "draft_tokens": turn.k, "accepted_tokens": 1, "accepted_per_position": [1] * turn.k}
    times = {key: [seconds for _ in turn.items] for key in ("ttft_ms", "itl_ms")}
    return {"outputs": outputs, "counters": counters, **times, "seconds": seconds, "output_tokens": len(turn.items)}


def test_a_speed_up_is_taken_against_the_neighbours_whatever_the_machine_does():
    """It is three times as slow in the second half; a method of double speed is found at double speed."""
    engines, concurrencies = [(0,), (1, 2), (1,)], [1, 2]
    order = turns(engines, concurrencies, 8)
    half = [turn.concurrency == 1 for turn in order].count(True) // 2
    results = [result(t, (1.0 if i < half else 3.0) / (2 if t.engine else 1)) for i, t in enumerate(order)]
    found = measured(engines, concurrencies, order, results)
    assert len(found) == 2 * 4
    for m in found[2:]:
        assert m.reference and m.reference["seconds"] == pytest.approx(2 * m.result["seconds"])
        assert list(m.result["outputs"]) == [f"p{i}" for i in range(8)] == list(m.reference["outputs"])
        assert m.result["counters"]["drafts"] == m.rounds > 1 and m.result["output_tokens"] == 8
    assert found[0].reference is None and found[0].result["seconds"] == pytest.approx(8.0)


def test_engines_are_alive_together_as_far_as_memory_goes(monkeypatch):
    engine = {"llm": {"tensor_parallel_size": 1}, "speculative": None, "cache_need": 0}
    monkeypatch.setattr(engine_job, "weight_bytes", lambda llm: 2 * 2**30)  # with the process: 4 GiB
    for gigabytes, groups in ((100, [[0, 1, 2, 3]]), (16, [[0, 1, 2], [0, 3]]), (10, [[0, 1], [0, 2], [0, 3]]), (9, [[0], [1], [2], [3]])):
        monkeypatch.setattr(psutil, "virtual_memory", lambda g=gigabytes: type("", (), {"available": g * 2**30}))
        assert side_by_side([engine] * 4) == groups
    assert side_by_side([engine]) == [[0]]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("", (), {"available": 100 * 2**30}))
    wide = {**engine, "llm": {"tensor_parallel_size": 2}}  # has processes of its own, which a daemonic fork may not have
    assert side_by_side([wide] * 3) == [[0], [1], [2]]


def test_one_engine_serves_all_k_only_where_that_is_known_to_be_exact(tmp_path):
    cfg = RunConfig()
    cfg.eval.k, cfg.eval.draft_model = [1, 3], str(tmp_path)
    assert [e.ks for e in drafting(cfg, "ngram", tmp_path)] == [(1, 3)]
    (tmp_path / "config.json").write_text('{"architectures": ["MedusaModel"]}')
    assert [e.ks for e in drafting(cfg, str(tmp_path), tmp_path)] == [(1,), (3,)]
    (tmp_path / "config.json").write_text('{"speculators_model_type": "peagle"}')
    assert [e.speculative and e.speculative["num_speculative_tokens"] for e in drafting(cfg, str(tmp_path), tmp_path)] == [1, 3]
    cfg.eval.temperature = 1.0
    assert [e.ks for e in drafting(cfg, "draft_model", tmp_path)] == [(1,), (3,)]


NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def same_as_started_anew(target: Path, told: dict[str, Any], overrides: dict[str, Any] | None = None) -> None:
    """One engine with k 1, 4 and 2 in turn gives the texts, the counts of every request and vLLM's own counters that an engine started
    with each gives; the texts are those of plain decoding."""
    asked = [{"id": r["id"], "prompt_ids": r["prompt_ids"] * 2, "max_tokens": 40} for r in prompts(6)]
    engines = [Drafting(None, None, (0,)), Drafting({**told, "num_speculative_tokens": 4}, overrides, (1, 4, 2))]
    engines += [Drafting({**told, "num_speculative_tokens": k}, overrides, (k,)) for k in (1, 4, 2)]
    shared = {"target_dir": target, "target_cfg": config(target), "prompts": asked, "dtype": "float32", "max_model_len": 256}
    plain, *found = generate_each(engines=engines, concurrencies=[3], **shared)
    texts = {name: output["token_ids"] for name, output in plain.result["outputs"].items()}
    for one, fresh in zip(found[:3], found[3:], strict=True):
        assert one.result["outputs"] == fresh.result["outputs"] and one.result["counters"] == fresh.result["counters"]
        assert {name: output["token_ids"] for name, output in one.result["outputs"].items()} == texts
        assert one.result["counters"]["drafts"] > 0
    counts = found[1].result["counters"]
    assert 0 < counts["accepted_tokens"] < counts["draft_tokens"], "it must be right in part for this test to tell anything"


@pytest.mark.slow
def test_ngram_drafts_k_as_started_with_it(tmp_path):
    same_as_started_anew(build_tiny(tmp_path / "tiny"), NGRAM)


@pytest.mark.slow
def test_suffix_drafts_k_as_started_with_it(tmp_path):
    pytest.importorskip("arctic_inference")
    same_as_started_anew(build_tiny(tmp_path / "tiny"), LOOKUPS["suffix"])


@pytest.mark.slow
def test_a_draft_model_drafts_k_as_started_with_it(tmp_path):
    """The target with another lm_head, right in part."""
    target, draft = build_tiny(tmp_path / "tiny"), build_tiny(tmp_path / "draft")
    tensors = load_file(draft / "model.safetensors")
    tensors["lm_head.weight"] += 0.2 * torch.randn(tensors["lm_head.weight"].shape, generator=torch.Generator().manual_seed(1))
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    same_as_started_anew(target, {"method": "draft_model", "model": str(draft)})


ALL = HEADS | {
    "eagle": {"_target_": "heads.mtp.MTP", "depths": 3, "norms": False},
    "hydra": {"_target_": "heads.hydra_heads.HydraHeads", "depths": 4},  # as all of our plug-in's, which count their depths
}


@pytest.mark.slow
@pytest.mark.parametrize("head", ALL)
def test_a_head_drafts_k_as_started_with_it(tmp_path, head):
    cfg, target, _, _, out = trained_run(ALL[head], tmp_path)
    speculative, overrides = speculation(cfg, "head", 4, out)
    assert speculative is not None
    same_as_started_anew(target, speculative, overrides)


WORK = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
import test_turns as t
t.generate_each(
    target_dir=Path({target!r}), target_cfg=t.config({target!r}), dtype="float32",
    prompts=[r | {{"max_tokens": 400}} for r in t.prompts(60)],
    engines=[t.Drafting(None, None, (0,)), t.Drafting(t.NGRAM | {{"num_speculative_tokens": 3}}, None, (1, 3))],
    concurrencies=[1], max_model_len=512,
)
"""


@pytest.mark.slow
def test_a_killed_measurement_leaves_no_engine_behind(tmp_path):
    target = build_tiny(tmp_path / "tiny")
    code = WORK.format(root=str(ROOT), tests=str(ROOT / "tests"), target=str(target))
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        said = ""
        while " answers" not in said:
            said = process.stderr.readline()
            assert said, "it ended before it was killed"
        below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(below) == 3, "the engines' process and a fork for each"
    assert not psutil.wait_procs(below, timeout=20)[1], "an engine outlived its parent"
