"""The engine run: equal conditions for every method, and counts that the training module reproduces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from data.builtin import build_tiny
from data.chat import load_tokenizer, prompt_ids
from data.engine import generate
from data.errors import UserError
from data.prompts import ChatRecord, read_jsonl_tolerant
from data.target import frozen, spec
from eval.chain import capture_answers, offline_report
from eval.export import export_head
from eval.report import headline, write
from eval.serve import cut_at_loops, evaluate, make_requests, parted
from heads import build
from heads.base import Batch
from train.config import RunConfig


def outputs(**answers: list[int]) -> dict[str, Any]:
    return {"outputs": {name: {"token_ids": ids} for name, ids in answers.items()}}


def test_answers_leave_room_for_a_whole_pass_before_the_limit():
    requests, skipped = make_requests({"a": [1] * 10, "b": [1] * 80, "c": [1] * 95}, max_tokens=32, max_model_len=100, k=3)
    assert [(r["id"], r["max_tokens"]) for r in requests] == [("a", 32), ("b", 16)] and skipped == 1
    with pytest.raises(UserError, match="target.max_model_len=100"):
        make_requests({"c": [1] * 95}, 32, 100, 3)


def test_all_methods_get_the_length_at_which_the_plain_answer_loops():
    requests = [{"id": name, "prompt_ids": [1], "max_tokens": 30} for name in ("loops", "early", "never")]
    plain = outputs(loops=[*range(12), 3, 4, 5, 6], early=[1, 2] * 15, never=list(range(30)))
    cut, count = cut_at_loops(requests, plain, 3)
    assert [r["max_tokens"] for r in cut] == [12, 8, 30] and count == 2
    assert [r["max_tokens"] for r in requests] == [30, 30, 30]


def test_parted_answers_are_named_with_place_and_tokens():
    plain = outputs(same=[1, 2], other=[1, 2, 3], shorter=[1, 2, 3], longer=[1])
    found = parted(outputs(same=[1, 2], other=[1, 9, 3], shorter=[1, 2], longer=[1, 7]), plain)
    assert [(d["id"], d["position"], d["plain"], d["token"]) for d in found] == [
        ("other", 1, 2, 9),
        ("shorter", 2, 3, None),
        ("longer", 1, None, 7),
    ]


K = 3
HEADS = {
    "mtp": {"_target_": "heads.mtp.MTP", "depths": 3},
    "eagle3": {"_target_": "heads.eagle3.Eagle3", "taps": [0, 1, 2], "depths": 2, "draft_vocab_size": 400},
}
PROMPTS = ["Say hello.", "What is gravity?", "List the numbers from one to twenty.", "Merhaba, nasılsın?", "a", "Write a poem about rain."]


def make_cfg(folder: Path, head: dict[str, Any]) -> RunConfig:
    cfg = RunConfig(name="tiny", run_dir=str(folder), head=head)
    cfg.target.model, cfg.target.dtype, cfg.target.max_model_len = "builtin:tiny", "float32", 256
    cfg.eval.k, cfg.eval.max_tokens, cfg.eval.concurrency = K, 40, 2
    return cfg


def train(head, cfg: RunConfig, target_dir: Path, folder: Path, prompts: list[dict[str, Any]]) -> None:
    """Some steps on the target's own answers to the very prompts: good at them in part, which is what the counts need."""
    plain = generate(
        target_dir=target_dir, target_cfg=cfg.target, prompts=prompts, speculative=None, hf_overrides=None,
        dtype="float32", concurrency=4, max_model_len=256,
    )  # fmt: skip
    answers = folder / "answers.jsonl"
    lines = [{**p, "response_ids": plain["outputs"][p["id"]]["token_ids"], "finish_reason": "stop"} for p in prompts]
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    torch.manual_seed(0)
    if head.get_buffer("draft_ids_U") is not None:
        head.set_draft_vocab(torch.arange(0, 400))
    head.attach(frozen(target_dir, torch.float32, "cpu"))
    head.start_from(head.frozen)
    reads = head.needs_last
    head.needs_last = "all"  # the loss reads the last state too
    store = capture_answers(cfg, target_dir, head, answers, folder / "train")
    head.needs_last = reads
    optimizer = torch.optim.Adam(head.parameters(), lr=2e-3)
    for step in range(60):
        item = store.get(step % len(store), head.taps)
        batch = Batch(item["token_ids"], item["loss_mask"], torch.tensor([0, len(item["token_ids"])]), item["taps"], item["last"])
        out = head.loss(batch)
        optimizer.zero_grad()
        (out.total / out.count_K.sum()).backward()
        optimizer.step()
    head.eval()


Run = tuple[RunConfig, Path, Any, list[ChatRecord], Path]


def trained_run(head_cfg: dict[str, Any], folder: Path) -> Run:
    """(config, target folder, head, prompts, export) of a head that was trained a little."""
    cfg = make_cfg(folder, head_cfg)
    target_dir = build_tiny(folder / "target")
    head = build(cfg.head, spec(target_dir))
    records = [
        ChatRecord(f"p{i}", [{"role": "user", "content": text}], {"category": "turkish" if i == 3 else "chat", "language": "en"}, None)
        for i, text in enumerate(PROMPTS)
    ]
    tokenizer = load_tokenizer(target_dir, False)
    prompts = [{"id": r.id, "prompt_ids": prompt_ids(tokenizer, r), "max_tokens": 60} for r in records]
    train(head, cfg, target_dir, folder, prompts)
    out = export_head(
        head,
        head.frozen,
        target_dir,
        folder / "export",
        dtype=torch.float32,
        head_cfg=cfg.head,
        k=K,
        provenance={"checkpoint": "step-000001"},
    )
    return cfg, target_dir, head, records, out


@pytest.mark.slow
def test_offline_counts_are_the_engines_and_nothing_is_lost(tmp_path):
    """Where answers end, only the engine knows what the target would have written next: the counts may differ by those drafts."""
    cfg, target_dir, head, records, out = trained_run(HEADS["mtp"], tmp_path)
    answers = tmp_path / "eval" / "plain.jsonl"
    report = evaluate(cfg, target_dir, out, records, answers)
    report["offline"] = offline = offline_report(cfg, head, target_dir, answers)
    engine = next(m for m in report["methods"] if m["method"] == "head")
    assert [m["lossless"] for m in report["methods"]] == [1.0, 1.0, 1.0], [m["parted"] for m in report["methods"]]
    assert 0 < engine["accepted_tokens"] < engine["draft_tokens"], "the head must be right in part for this test to tell anything"
    assert offline["drafts"] == engine["drafts"]
    for here, there in zip(offline["accepted_per_position"], engine["accepted_per_position"], strict=True):
        assert here <= there <= here + offline["unjudged_drafts"]
    assert engine["passes"] == engine["requests"] + engine["drafts"], "one prefill a request, one pass a draft"
    assert set(engine["slices"]) == {"chat", "turkish"}
    write(report, tmp_path)
    assert not (answers.parent / "states").exists()


@pytest.mark.slow
def test_counts_are_equal_to_the_last_draft_where_the_continuation_is_known(tmp_path):
    """Answers cut at their loops: the longer plain run tells how the target goes on, so every draft of those can be judged."""
    cfg, target_dir, head, records, out = trained_run(HEADS["eagle3"], tmp_path)
    cfg.eval.cut_loops, cfg.data.loop_ngram, cfg.eval.max_tokens, cfg.eval.methods = True, 1, 60, ["none", "head"]
    answers = tmp_path / "eval" / "plain.jsonl"
    report = evaluate(cfg, target_dir, out, records, answers)
    offline, engine = offline_report(cfg, head, target_dir, answers), report["methods"][1]
    lines, _ = read_jsonl_tolerant(answers)
    tokenizer = load_tokenizer(target_dir, False)
    assert [line["prompt_ids"] for line in lines] == [prompt_ids(tokenizer, record) for record in records], "the chat template is in"
    assert report["prompts"]["answers_cut"] == len(records) == sum(len(line["tail_ids"]) >= K for line in lines)
    assert offline["unjudged_drafts"] == 0 and engine["lossless"] == 1.0
    assert 0 < engine["accepted_tokens"] < engine["draft_tokens"]
    assert (offline["drafts"], offline["accepted_per_position"]) == (engine["drafts"], engine["accepted_per_position"])
    assert engine["discarded_tokens"] == offline["discarded_tokens"]


@pytest.mark.slow
def test_a_grid_has_every_cell_and_the_target_accepts_itself(tmp_path):
    """Each k at each concurrency, one engine for the concurrencies. A draft model that is the target loses no draft."""
    cfg = make_cfg(tmp_path, HEADS["mtp"])
    target_dir = build_tiny(tmp_path / "target")
    cfg.eval.k, cfg.eval.concurrency, cfg.eval.methods = [1, 3], [1, 2], ["none", "draft_model"]
    cfg.eval.draft_model = str(target_dir)
    records = [ChatRecord(f"p{i}", [{"role": "user", "content": text}], {"category": "chat"}, None) for i, text in enumerate(PROMPTS[:4])]
    report = evaluate(cfg, target_dir, tmp_path / "export", records, tmp_path / "eval" / "plain.jsonl")
    cells = [(m["method"], m["k"], m["concurrency"]) for m in report["methods"]]
    assert cells == [("none", 0, 1), ("none", 0, 2)] + [("draft_model", k, c) for k in (1, 3) for c in (1, 2)]
    assert all(m["lossless"] == 1.0 for m in report["methods"])
    for m in report["methods"][2:]:
        assert m["accepted_tokens"] == m["draft_tokens"] == m["k"] * m["drafts"] > 0
        assert m["speedup_interval"][0] < m["speedup"] < m["speedup_interval"][1]
    assert all(m["speedup_interval"] == pytest.approx([1, 1]) for m in report["methods"][:2])
    assert headline(report).startswith("No advice: 4 prompts are too few") and "--dtype float32" in report["methods"][2]["command"]
    counts = {key: [m[key] for m in report["methods"]] for key in ("output_tokens", "drafts", "accepted_per_position")}
    assert all(figures[::2] == figures[1::2] for figures in counts.values()), "greedy counts do not depend on the concurrency"
    assert len(report["recommendation"]["choices"]) == 2 and len(report["recommendation"]["model"]) == 2
    write(report, tmp_path)
