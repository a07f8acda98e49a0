"""Chains, trees and references of one run side by side, and the command that prints them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import refused
from safetensors.torch import save_file

from data.builtin import build_tiny
from data.check import Reference
from data.prompts import read_prompts, select
from data.target import fingerprint, frozen, spec
from eval.compare import Bench, Method, compare, rank_rates
from eval.decode import Answer, no_drafts
from heads import build
from heads.base import Batch
from train.config import load

ROOT = Path(__file__).resolve().parents[1]


def trained(cfg, target_dir, prompts, steps):
    """A head trained on the target's own greedy answers to these prompts: it drafts well there, and not always."""
    torch.manual_seed(0)
    head = build(cfg.head, spec(target_dir))
    head.attach(frozen(target_dir, torch.float32, "cpu"))
    head.start_from(head.frozen)
    requests, plain = Bench(cfg, head, target_dir, "cpu").requests(prompts, "heldout")
    reference, parts = Reference(target_dir), []
    for request in requests:
        tokens = torch.tensor(request["prompt_ids"] + plain[request["id"]].token_ids)
        streams, last = reference.states(tokens)
        parts.append((tokens, torch.arange(len(tokens)) >= len(request["prompt_ids"]), streams[:, list(head.taps)], last))
    tokens, mask, taps, last = (torch.cat(x) for x in zip(*parts, strict=True))
    batch = Batch(tokens, mask, torch.tensor([0, *(len(part[0]) for part in parts)]).cumsum(0), taps, last)
    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        head.loss(batch).total.backward()
        optimizer.step()
    return head


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, config, target folder, held-out prompts, head): the head learnt the answers that are measured."""
    folder = tmp_path_factory.mktemp("compare")
    target = build_tiny(folder / "target")
    cfg = load(["conf=tiny_medusa", f"target.model={target}", f"run_dir={folder}/run", "eval.k=[2,6]", "eval.max_tokens=20"])
    prompts = select(read_prompts(cfg.data.prompts, ROOT, cfg.data.prompt_chars), "heldout", 2)
    return folder, cfg, target, prompts, trained(cfg, target, prompts, 60)


def test_methods_at_equal_drafts(made):
    _, cfg, target, prompts, head = made
    report = compare(cfg, head, target, prompts, prompts, "cpu")
    rows = {(m["drafter"], m["shape"], round(m["nodes"])): m for m in report["methods"]}
    greedy = [m for m in report["methods"] if m["temperature"] == 0]
    assert len(greedy) == 2 * 4 and all(m["lossless"] == 1.0 for m in greedy) and len(report["methods"]) == 8 + 2 * 2
    assert ("head", "chain", 4) in rows, "a chain of a head of 4 depths has 4 drafts at most"
    assert all(m["tokens_per_pass"] == m["output_tokens"] / m["passes"] <= m["acceptance_length"] for m in report["methods"])
    assert any(m["discarded_tokens"] for m in report["methods"]), "or the line above holds nothing"
    chain, static, dynamic = (
        rows[key]["acceptance_length"] for key in (("head", "chain", 4), *(("head", f"{s} tree", 6) for s in ("static", "dynamic")))
    )
    assert 1.3 < chain <= static and dynamic > 1.3
    assert rows["early exit 1/2", "chain", 6]["acceptance_length"] > 1.1
    assert [len(paths) for paths in report["static_trees"].values()] == [2, 6] and len(report["rank_rates"]) == 4


def test_rank_rates_by_hand():
    """Two levels, three ranks: of four passes two accept rank 0 first, of which one goes on with rank 2; one accepts rank 1."""
    answers = [Answer([], [[0, 5], [0]]), Answer([], [[1], []])]
    assert rank_rates(answers, 2, 3) == [[0.5, 0.25, 0.0], [0.0, 0.0, 0.5]]


def test_loops_are_cut_for_all_alike(made):
    _, cfg, target, prompts, head = made
    cfg = load(["conf=tiny_medusa", f"target.model={target}", "eval.max_tokens=20", "eval.cut_loops=true", "data.loop_ngram=1"])
    bench = Bench(cfg, head, target, "cpu")
    requests, plain = bench.requests(prompts, "heldout")
    again = bench.run(Method("head", "plain", no_drafts), requests)
    assert any(request["max_tokens"] < 20 for request in requests)
    assert [answer.token_ids for answer in again.values()] == [answer.token_ids for answer in plain.values()]


def test_what_cannot_be_compared_is_refused(made):
    _, cfg, target, prompts, head = made
    refused(lambda: compare(cfg, head, target, [], prompts, "cpu"), "data.prompts", "heldout")
    other = load(["conf=tiny_dflash", f"target.model={target}"])
    refused(
        lambda: compare(other, build(other.head, spec(target)), target, prompts, prompts, "cpu"),
        "head: heads.dflash.DFlash",
        "docs/evaluation.md",
    )
    other = load(["conf=tiny_medusa", f"target.model={target}", "eval.draft_model=nowhere"])
    refused(lambda: compare(other, head, target, prompts, prompts, "cpu"), "eval.draft_model")


def run(*words):
    command = [sys.executable, "launch/trees.py", "conf=tiny_medusa", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout, done.stderr


def test_the_command_reads_a_checkpoint_and_writes_trees_json(made):
    folder, cfg, target, _, head = made
    words = [f"target.model={target}", f"run_dir={folder}/run", "eval.limit=1", "eval.max_tokens=12", f"eval.draft_model={target}"]
    status, _, err = run(*words)
    assert status == 2 and "no checkpoint yet" in err and "launch/train.py" in err
    step = folder / "run/step-000001"
    step.mkdir(parents=True)
    save_file(head.state_dict(), step / "head.safetensors")
    (step / "state.json").write_text("{}")
    (step / "config.yaml").write_text(yaml.safe_dump({"head": cfg.head}))
    (folder / "run/latest").write_text("step-000001\n")
    (folder / "run/provenance.json").write_text(json.dumps({"target": {"fingerprint": fingerprint(target)}}))
    status, out, err = run(*words)
    assert status == 0, err[-2000:]
    report = json.loads((folder / "run/eval/trees.json").read_text())
    assert report["checkpoint"] == "step-000001" and all(m["lossless"] in (1.0, None) for m in report["methods"])
    drafts = [m for m in report["methods"] if m["drafter"] == "draft model"]
    assert len(drafts) == 3 and all(m["accepted_tokens"] == m["draft_tokens"] for m in drafts), "the target drafts for itself"
    assert all(word in out for word in ("dynamic tree", "static tree", "early exit 1/2", "draft model", "vLLM serves chains"))
