"""The teacher as the target's likeliest tokens: its bytes, its distribution and what that loses, who may use it, and trainings with it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import live
import pytest
import torch
from conftest import SPEC, batch_of, head_confs, ready, refused, store_manifest
from live import LONGEST, capture, config, make_answers, train, write_store
from test_losses import plain
from test_window import STEPS, beside, until, windowed

import data.batch
import data.capture
import data.engine
from data import check
from data.errors import UserError
from data.manifest import as_stored, check_compatible, plan_bytes
from data.online import Answers
from data.part import Part
from data.states import label_rows
from data.store import Store, StoreWriter
from data.target import spec, spec_from_config
from data.teacher import holds, kept_for, likeliest, tail_mass, top_bytes, top_k
from heads import build
from heads.losses import Labels, fused_loss
from heads.objectives import OBJECTIVES, parse
from heads.teacher import LEAST_TAIL, Top, from_top, teacher_of
from tests.toy import read_metrics
from train import inputs, plan, setup
from train.config import load

T, D, V, K = 23, 8, 37, 2
KEPT = torch.tensor([0, 3, 4, 8, 9, 15, 17, 20, 26, 30, 36])  # a draft vocabulary
TAUGHT = sorted(name for name, conf in head_confs().items() if build(conf, SPEC).needs_last == "supervised")


def given(k: int, whole: bool, spread: float = 1.0):
    """Head's rows, its lm_head, the target's, its states, labels, ids of the draft vocabulary, and the likeliest tokens of the states."""
    torch.manual_seed(0)
    ids = torch.arange(V) if whole else KEPT
    x = [torch.randn(T, D, dtype=torch.float64, requires_grad=True) for _ in range(K)]
    lm_head, last = torch.randn(V, D, dtype=torch.float64), spread * torch.randn(T, D, dtype=torch.float64)
    position = torch.tensor([1, 2, 3, 7, 8, 20, 22])
    rows = torch.stack([position - 1 - k for k in range(K)])
    labels = Labels(position, torch.where(rows < 0, -1, rows), torch.tensor([5, 10, -1, 0, 7, 7, 9]))
    found, log_p = likeliest(last, lm_head, k)
    place = torch.full((V,), -1).index_copy(0, ids, torch.arange(len(ids)))
    return x, lm_head, last, labels, ids, (found, log_p, Top(place[found.long()], log_p, V))


def truncated(state, lm_head, ids, k):
    """The definition: k probabilities, the rest even over all others, renormalised on the draft vocabulary."""
    p = (lm_head @ state).softmax(-1)
    top = p.topk(k)
    rest = torch.full_like(p, (1 - top.values.sum()).clamp(min=LEAST_TAIL) / max(1, V - k))
    p = rest.scatter(0, top.indices, top.values)[ids]
    return p / p.sum()


def settled(loss, k, whole):
    """Whether the loss reads stored tokens alone: which of those that share the tail comes first is nobody's business."""
    return k == V or not ("top_ce" in loss or (loss == "argmax_ce" and not whole))


LOSSES = [*OBJECTIVES, "0.2*ce + kl + 0.4*lk", "reverse_kl + 0.5*tv + jsd + top_ce"]
CASES = [(loss, k, chunk, whole) for loss in LOSSES for k, chunk in ((1, 3), (5, 100), (5, 1), (V, 3)) for whole in (True, False)]


@pytest.mark.parametrize(("loss", "k", "chunk", "whole"), [case for case in CASES if settled(case[0], case[1], case[3])])
def test_the_fused_loss_equals_the_naive_one_with_the_same_teacher(loss, k, chunk, whole):
    x, lm_head, last, labels, ids, (*_, top) = given(k, whole)
    weight, head = torch.tensor([1.0, 0.8], dtype=torch.float64), lm_head[ids]
    accepted = torch.zeros(K, T, dtype=torch.float64)
    total, value = fused_loss(x, head, head, top, labels, weight, parse(loss), chunk, accepted_KR=accepted)
    sums = []
    for i in range(K):
        found = torch.zeros((), dtype=torch.float64)
        for n, (j, row) in enumerate(zip(labels.position_L.tolist(), labels.row_KL[i].tolist(), strict=True)):
            if row >= 0:
                p, log_q = truncated(last[j], lm_head, ids, k), (head @ x[i][row]).log_softmax(-1)
                found = found + sum(w * plain(name, p, log_q, labels.token_L[n]) for name, w in parse(loss).items())
                torch.testing.assert_close(accepted[i, row], torch.minimum(p, log_q.exp()).sum())
        sums.append(found)
    expected = torch.stack(sums)
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-6)
    grads = torch.autograd.grad(total, x), torch.autograd.grad((expected * weight).sum(), x)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if k == V:  # everything is known
        total, whole_K = fused_loss(x, head, head, last, labels, weight, parse(loss), chunk)
        torch.testing.assert_close(value, whole_K, rtol=1e-6, atol=1e-6)
        for a, b in zip(grads[0], torch.autograd.grad(total, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spread", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("k", [1, 4, 12, V])
@pytest.mark.parametrize("whole", [True, False])
def test_the_tail_bounds_the_total_variation(k, whole, spread):
    _, lm_head, last, _, ids, (_, log_p, top) = given(k, whole, spread)
    p = torch.zeros(T, len(ids), dtype=torch.float64)
    negentropy = from_top(top, torch.arange(T), p)
    torch.testing.assert_close(p.sum(-1), torch.ones(T, dtype=torch.float64))
    torch.testing.assert_close(negentropy, torch.xlogy(p, p).sum(-1))
    true = (last @ lm_head[ids].T).softmax(-1)
    off, tail = (p - true).abs().sum(-1) / 2, tail_mass(log_p).clamp(min=LEAST_TAIL)
    there = (log_p.exp() * (top.place_TC >= 0)).sum(-1)
    assert (off <= tail / (there + tail) + 1e-9).all() and (off.max() < 1e-9 or k < V)
    if whole:
        assert (off <= tail + 1e-9).all()


def test_a_row_with_none_of_its_tokens_in_the_draft_vocabulary_knows_nothing():
    top = Top(torch.tensor([[-1, -1]]), torch.tensor([[0.0, -20.0]]), V)
    p = torch.zeros(1, 4)
    assert from_top(top, torch.tensor([0]), p).isfinite().all() and p.allclose(torch.tensor(0.25))


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_likeliest_are_those_of_the_whole_vocabulary(softcap):
    _, lm_head, last, *_ = given(3, True)
    ids, log_p = likeliest(last.repeat(30, 1), lm_head, 3, softcap)  # more than a chunk
    z = last @ lm_head.T
    best = (z if softcap is None else softcap * (z / softcap).tanh()).log_softmax(-1).topk(3)
    assert ids.dtype == torch.int32 and torch.equal(ids[-T:].long(), best.indices)
    torch.testing.assert_close(log_p[:T], best.values)
    assert likeliest(last[:0], lm_head, 3)[1].shape == (0, 3)


# --- on disk


def manifest(kept: str, dtype: str = "bfloat16"):
    return store_manifest((2, 5), 16) | {"last": kept, "dtype": dtype}


def write(folder: Path, kept: str, dtype: str = "bfloat16", n: int = 30) -> Store:
    generator = torch.Generator().manual_seed(0)
    with StoreWriter(folder, manifest(kept, dtype), shard_tokens=600) as writer:
        for i in range(n):
            mask = torch.arange(60 + i) >= 20
            states, rows = torch.randn(60 + i, 3, 16, generator=generator), int(label_rows(mask).sum())
            lm_head, k = torch.randn(V, 16, generator=generator), top_k(kept)
            taught = {"last_TD": states[:, 2]} if k is None else {"top": likeliest(states[:rows, 2], lm_head, k)}
            writer.add(f"s{i}", torch.arange(60 + i), mask, states[:, :2], **taught)
    return Store(folder, verify=True)


@pytest.mark.parametrize(("dtype", "bytes_each"), [("bfloat16", 6), ("fp8", 6), ("float32", 8)])
def test_bytes_on_disk_are_the_planned_ones_and_what_is_read_is_what_was_written(tmp_path, dtype, bytes_each):
    store, states = write(tmp_path / "top", "top7", dtype), write(tmp_path / "last", "supervised", dtype)
    counts = store.manifest["tokens"], store.manifest["supervised_tokens"]
    assert top_bytes(7, dtype) == 7 * bytes_each
    without = plan_bytes(*counts, 2, 16, "none", dtype)
    assert plan_bytes(*counts, 2, 16, "top7", dtype) == without + counts[1] * 7 * bytes_each
    disk = sum(path.stat().st_size for path in store.folder.glob("shard-*"))
    heads = 8 * (len(store) + len(store.manifest["shards"]))  # the offsets; and each file's own header
    assert 0 < disk - plan_bytes(*counts, 2, 16, "top7", dtype) - heads < 1000 * len(store.manifest["shards"])
    mass = rows = 0.0
    for i in range(len(store)):
        found, plain_one = store.get(i, (5, 2), stop=40), states.get(i, (5, 2), stop=40)
        assert found["last"] is None and plain_one["top_ids"] is None and torch.equal(found["taps"], plain_one["taps"])
        assert found["top_ids"].shape == found["top_log_p"].shape == (40, 7) and found["top_log_p"].dtype == torch.float32
        assert not found["top_ids"][:19].any() and (found["top_log_p"][19:].diff(dim=1) <= 0).all()
        every = store.get(i, ())
        there = label_rows(every["loss_mask"])
        mass, rows = mass + float(tail_mass(every["top_log_p"][there]).sum()), rows + int(there.sum())
        assert store.get(i, (), with_last=False)["top_ids"] is None
    assert sum(shard["tail_mass"] for shard in store.manifest["shards"]) == pytest.approx(mass, rel=1e-5) and rows == counts[1]


def test_nan_is_set_aside(tmp_path):
    with StoreWriter(tmp_path, manifest("top2")) as writer:
        bad = torch.tensor([[0.0, float("nan")]])
        assert not writer.add("a", torch.arange(2), torch.tensor([False, True]), torch.zeros(2, 2, 16), None, (bad.int(), bad))
    assert "NaN or Inf in top_log_p" in (tmp_path / "quarantine.jsonl").read_text()


def test_a_store_serves_only_the_teacher_that_it_holds(tmp_path):
    for stored, needed, enough in (
        ("top8", "top8", True), ("top8", "none", True), ("top8", "top4", False), ("top8", "supervised", False), ("all", "top8", False),
        ("supervised", "top8", False), ("all", "supervised", True), ("supervised", "all", False),
    ):  # fmt: skip
        assert holds(stored, needed) == enough
    about = {"fingerprint": "f0", "taps": (5,), "tokenizer_hash": "tok", "template_hash": "tpl"}
    stored = write(tmp_path, "top8", n=2).manifest
    check_compatible(stored, needs_last="top8", **about)
    refused(
        lambda: check_compatible(stored, needs_last="supervised", **about), "data.teacher", "'supervised'", "'top8'", "launch/capture.py"
    )
    assert (
        as_stored(tmp_path, manifest("top8") | {"taps": [2]})["taps"] == [2, 5] and as_stored(tmp_path, manifest("top4"))["last"] == "top4"
    )
    refused(lambda: StoreWriter(tmp_path, manifest("top4")), "another capture", "last", "'top8'", "'top4'")


# --- who may use it


def test_heads_that_read_the_state_itself_are_refused():
    refusing = set()
    for name, conf in head_confs().items():
        needs = build(conf, SPEC).needs_last
        if needs == "all":
            refusing.add(name)
            refused(
                lambda needs=needs: kept_for(needs, "top8"),
                "data.teacher=top8",
                "reads the target's last state itself",
                "data.teacher=last",
            )
        else:
            assert kept_for(needs, "top8") == ("none" if needs == "none" else "top8")
    assert {"mtp", "eagle", "medusa", "hydra", "mlp_speculator"} <= refusing and set(TAUGHT) >= {"eagle3", "peagle", "dflash", "dspark"}
    cfg = load(["conf=tiny_mtp", "data.teacher=top8"])
    refused(lambda: plan.build_on_meta(cfg, spec_from_config(cfg.target)), "data.teacher=top8", "data.teacher=last")
    cfg = load(["conf=tiny_eagle3", "data.teacher=top600"])
    refused(lambda: plan.build_on_meta(cfg, spec_from_config(cfg.target)), "data.teacher=top600", "512 tokens")


@pytest.mark.parametrize("word", ["data.teacher=top0", "data.teacher=top", "data.teacher=first", "data.teacher=top8 data.states=online"])
def test_what_is_no_teacher_is_refused(word):
    with pytest.raises(UserError, match=r"data\.teacher=.*must be last"):
        load(["conf=tiny_eagle3", *word.split()])


@pytest.mark.parametrize("name", TAUGHT)
def test_a_head_that_knows_all_tokens_learns_what_the_state_teaches(name):
    """Loss, gradient and hits; in evaluation mode, where no anchors are drawn."""
    head = ready(head_confs()[name]).eval()
    batch = batch_of(head)
    assert batch.last_TD is not None
    ids, log_p = likeliest(batch.last_TD, head.frozen.lm_head_VD, SPEC.vocab_size)
    top = dataclasses.replace(batch, last_TD=None, top_ids_TC=ids, top_log_p_TC=log_p)
    known = teacher_of(top.to("cpu", torch.bfloat16), SPEC.vocab_size)
    assert isinstance(known, Top) and known.log_p_TC.dtype == log_p.dtype, "log-probabilities keep their precision"
    found = [head.loss(each) for each in (batch, top)]
    torch.testing.assert_close(found[0].loss_K, found[1].loss_K, rtol=1e-5, atol=1e-5)
    for key, (total, count) in found[0].metrics.items():
        assert torch.equal(total, found[1].metrics[key][0]) and torch.equal(count, found[1].metrics[key][1])
    grads = [torch.autograd.grad(each.total, list(head.parameters()), allow_unused=True) for each in found]
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-6))


# --- the whole way


def test_the_plan_counts_its_bytes_and_products(target, made, tmp_path):
    for words, dtype, row in ((["data.states_dtype=fp8"], "fp8", 48), ([], "float32", 64)):
        cfg = config(target, made, tmp_path / "run", "data.teacher=top8", *words)
        last = config(target, made, tmp_path / "run", *words)
        shape, found, before = spec(target), plan.plan(cfg, spec(target), 1), plan.plan(last, spec(target), 1)
        head = plan.build_on_meta(cfg, shape)
        tokens = [plan.count_tokens(cfg, split) for split in ("train", "heldout")]
        total, supervised = (sum(getattr(each, name) for each in tokens if each) for name in ("total", "supervised"))
        assert found.store_bytes == plan_bytes(total, 0, len(head.taps), 64, "none", dtype) + supervised * row
        assert found.capture_flops - before.capture_flops == 2 * 64 * shape.vocab_size * total and found.flops < before.flops
        batch = plan.longest_batch(cfg)
        width = 4 if cfg.train.dtype == "float32" else 2
        key = "hidden states of a batch"
        assert before.memory[key] - found.memory[key] == batch * (64 * width - 8 * 8)


def test_trainings_from_a_store_and_from_several_engines(target, made, tmp_path, capsys, monkeypatch):
    """And with all of the tokens the training is that of the last state."""
    monkeypatch.setattr(data.engine, "prefill", live.prefill)
    monkeypatch.setattr(data.capture, "prefill", live.prefill)
    whole, some, last = ([f"data.teacher={name}"] for name in (f"top{spec(target).vocab_size}", "top16", "last"))
    heads, looks = {}, {}
    for name, words in (("whole", whole), ("some", some), ("last", last)):
        cfg = config(target, made, tmp_path / name, f"data.store={tmp_path}/store-{name}", *words)
        capture(cfg, target)
        said = capsys.readouterr().out
        assert ("16 tokens as the teacher" in said and "tail mass" in said) == (name == "some")
        heads[name] = train(cfg, target)
        looks[name] = read_metrics(tmp_path / name, "val")[-1]
    assert all(torch.allclose(heads["whole"][key], heads["last"][key], rtol=1e-3, atol=1e-5) for key in heads["last"])
    assert not all(torch.allclose(heads["some"][key], heads["last"][key], rtol=1e-3, atol=1e-5) for key in heads["last"])
    assert looks["whole"]["accept_k"] == looks["last"]["accept_k"] == looks["some"]["accept_k"] or looks["some"]["accept_k"]
    parts = config(target, made, tmp_path / "parts", f"data.store={tmp_path}/store-parts", *some)
    for number in range(2):
        capture(parts, target, Part(number, 2))
    assert "tail mass" in capsys.readouterr().out
    stores = [Store(tmp_path / f"store-{name}" / "train") for name in ("some", "parts")]
    place = {name: i for i, name in enumerate(stores[1].ids)}
    for i, name in enumerate(stores[0].ids):
        a, b = stores[0].get(i, (1,)), stores[1].get(place[name], (1,))
        assert all(torch.equal(a[key], b[key]) for key in ("taps", "top_ids", "top_log_p"))
    stale = config(target, made, tmp_path / "stale", f"data.store={tmp_path}/store-some")
    refused(lambda: setup.open_store(stale, build(stale.head, spec(target)), target, "train"), "data.teacher", "'supervised'", "'top16'")


def test_a_window_gives_the_head_of_the_whole_store(target, made, tmp_path, monkeypatch):
    for module in (data.capture, data.engine):
        monkeypatch.setattr(module, "prefill", live.prefill)
    monkeypatch.setattr(data.batch, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(data.capture, "POLL_SECONDS", 0.02)
    whole = config(target, made, tmp_path / "whole", f"data.store={tmp_path}/whole-store", STEPS, "data.teacher=top16")
    capture(whole, target)
    cfg = windowed(target, made, tmp_path, "data.teacher=top16")
    end = beside(lambda: capture(cfg, target))
    until(lambda: (tmp_path / "store" / "heldout" / "manifest.json").exists())
    inputs.require_inputs(cfg)
    found, expected = train(cfg, target), train(whole, target)
    end()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert not list((tmp_path / "store" / "train").glob("shard-*"))


def test_a_check_tells_a_wrong_teacher(target, tmp_path):
    maker = make_answers(target, tmp_path)
    cfg = config(target, maker, tmp_path / "run", f"data.store={tmp_path}/store", "data.teacher=top16")
    write_store(cfg, target, "top16", (0, 1))
    reference, answers = check.Reference(target), Answers(maker / "train.jsonl", LONGEST, None, "none", {})
    faults, figures, holds_ = check.check_store(tmp_path / "store" / "train", reference, maker / "train.jsonl", 3)
    assert {fault.cause for fault in faults} <= {"off-policy"}  # the answers are random
    assert figures["top"] < 1e-5 and figures["argmax"] == 1 and 0 < figures["tail"] < 1 and "top16" in holds_ and len(answers)
    about = json.loads((tmp_path / "store" / "train" / "manifest.json").read_text())
    about = {key: about[key] for key in ("target", "tokenizer_hash", "template_hash", "taps", "hidden_size", "last", "dtype", "engine")}
    for cause in ("slot", "norm", "top"):
        with StoreWriter(tmp_path / cause, about) as writer:
            for i, name in enumerate(answers.ids):
                ids_T, mask_T = answers.tokens(i)
                streams_TLD, last_TD = reference.states(ids_T)
                wrong = {"slot": last_TD.roll(1, 0), "norm": streams_TLD[:, -1], "top": torch.randn_like(last_TD)}[cause]
                top = likeliest(8 * wrong[label_rows(mask_T)] if cause == "top" else wrong[label_rows(mask_T)], reference.lm_head_VD, 16)
                writer.add(name, ids_T, mask_T, streams_TLD[:, :2].contiguous(), None, top)
        found, _, _ = check.check_store(tmp_path / cause, reference, maker / "train.jsonl", 3)
        assert cause in {fault.cause for fault in found}, (cause, found)
