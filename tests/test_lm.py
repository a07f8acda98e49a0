"""The small language models against an independent float64 program: masks cell by cell, plain attention, loops, no packing; what is
dropped in training; their exports, and stores that hold no states."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import SPEC, batch_of, document, ready
from safetensors.torch import load_file, save_file
from test_parallel import kept
from transformers import AutoModelForCausalLM

from data.batch import Batches
from data.builtin import build_tiny
from data.errors import UserError
from data.manifest import check_compatible
from data.store import Store
from data.target import fingerprint, frozen, spec
from eval.chain import capture_answers, offline
from eval.export import export_head, validate_export
from heads import build
from heads.attention import Documents
from heads.base import Frozen
from heads.losses import fused_loss
from train import plan
from train.config import load

SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 40}
DRAFT_LM = {"_target_": "heads.draft_lm.DraftLM", **SIZES}
PARD = {"_target_": "heads.pard.Pard", **SIZES, "mask_token_id": 7, "depths": 4, "keep": 0.6, "keep_min": 0.3}
CASES = {
    "draft_lm": DRAFT_LM,
    "draft_lm_untied_kl": DRAFT_LM | {"tie_embeddings": False, "loss": "kl", "num_layers": 1},
    "pard": PARD,
    "pard_untied_mixture": PARD | {"tie_embeddings": False, "loss": "0.5*ce + 2*kl", "num_layers": 1},
}
LENGTHS = (9, 7)


@pytest.fixture(params=sorted(CASES))
def head(request):
    return ready(CASES[request.param])


def rms(x, w):
    return x / (x.pow(2).mean(-1, keepdim=True) + SPEC.rms_norm_eps).sqrt() * w


def rope(x, positions):
    """Rotation as complex multiplication. x [n, heads, H]."""
    half = x.shape[-1] // 2
    frequency = SPEC.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(len(positions), half, dtype=torch.float64), positions[:, None].double() * frequency)
    z = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn[:, None]
    return torch.cat([z.real, z.imag], -1)


def forward(head, tokens, positions, sees):
    """Logits [n, V] of a plain Llama; sees [n, n]: which row may look at which."""
    w = dict(head.named_parameters())
    n, size = len(tokens), SIZES["hidden_size"] // SIZES["num_heads"]
    h = w["embed_tokens.weight"][tokens]
    for i in range(len(head.layers)):
        name = f"layers.{i}"
        y = rms(h, w[f"{name}.input_layernorm.weight"])
        q, k, v = (F.linear(y, w[f"{name}.self_attn.{c}_proj.weight"]).view(n, -1, size) for c in "qkv")
        q, k = rope(q, positions), rope(k, positions)
        k, v = (z.repeat_interleave(SIZES["num_heads"] // SIZES["num_kv_heads"], 1) for z in (k, v))
        scores = (torch.einsum("qnh,knh->nqk", q, k) / size**0.5).masked_fill(~sees, float("-inf"))
        mixed = torch.einsum("nqk,knh->qnh", scores.softmax(-1), v).flatten(1)
        h = h + F.linear(mixed, w[f"{name}.self_attn.o_proj.weight"])
        y = rms(h, w[f"{name}.post_attention_layernorm.weight"])
        gate, up, down = (w[f"{name}.mlp.{c}_proj.weight"] for c in ("gate", "up", "down"))
        h = h + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)
    return F.linear(rms(h, w["norm.weight"]), w.get("lm_head.weight", w["embed_tokens.weight"]))


def test_drafts_equal_an_engine_like_decode(head):
    """The engine's text, then what it appends: its drafts one by one, or mask tokens; all causal. The contract's row t knows x_{t+1}."""
    batch = batch_of(head, LENGTHS)
    drafts, log_q = head.propose(batch, 3)
    for i, start in enumerate((0, LENGTHS[0])):
        x = document(batch, i).token_ids_T.tolist()
        for t in range(len(x) - 1):
            row = drafts[start + t].tolist()
            text = x[: t + 2] + ([7, 7] if hasattr(head, "mask_token_id") else row[:2])
            causal = torch.ones(len(text), len(text)).tril().bool()
            best, choice = forward(head, torch.tensor(text), torch.arange(len(text)), causal)[-3:].log_softmax(-1).max(-1)
            assert choice.tolist() == row
            torch.testing.assert_close(best.float(), log_q[start + t], rtol=1e-4, atol=1e-4)


def grid(x, groups):
    """All groups of a text as one sequence, by PARD's own rules: (tokens, positions, mask, [(group, position)])."""
    cells = [(i, t) for i in range(groups) for t in range(i, len(x))]
    sees = torch.zeros(len(cells), len(cells), dtype=torch.bool)
    for row, (i, t) in enumerate(cells):
        for column, (j, s) in enumerate(cells):
            real = j == 0 and s <= t - i
            chain = any((j, s) == (i - d, t - d) for d in range(i + 1))
            sees[row, column] = real or chain
    tokens = torch.tensor([int(x[t]) if i == 0 else 7 for i, t in cells])
    return tokens, torch.tensor([t for _, t in cells]), sees, cells


def cell_losses(head, single):
    """(group, anchor) -> the loss there, of every supervised label: cell (i, t) predicts x_{t+1}, from anchors t - i >= 1."""
    x = single.token_ids_T
    tokens, positions, sees, cells = grid(x, head.depths)
    log_q = forward(head, tokens, positions, sees).log_softmax(-1)
    losses = {}
    for row, (i, t) in enumerate(cells):
        if t + 1 < len(x) and single.loss_mask_T[t + 1] and t - i >= 1:
            value = head.mixture.get("ce", 0.0) * -log_q[row, x[t + 1]]
            if "kl" in head.mixture:
                log_p = F.linear(single.last_TD[t], head.frozen.lm_head_VD).log_softmax(-1)
                value = value + head.mixture["kl"] * (log_p.exp() * (log_p - log_q[row])).sum()
            losses[i, t - i] = value
    return losses


def gradients(head, value):
    return torch.autograd.grad(value, list(head.parameters()))


def test_loss_and_gradients_equal_a_naive_loop(head):
    head.eval()
    batch = batch_of(head, LENGTHS)
    batch.loss_mask_T[LENGTHS[0] + 3] = False  # a gap, as between two turns of a chat
    expected = torch.zeros(head.depths, dtype=torch.float64)
    for i in range(2):
        for (k, _), value in cell_losses(head, document(batch, i)).items():
            expected = expected + value * F.one_hot(torch.tensor(k), head.depths)
    out = head.loss(batch)
    torch.testing.assert_close(out.loss_K.double(), expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients(head, out.total), gradients(head, expected.sum()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["pard", "pard_untied_mixture"])
def test_with_drops_loss_and_gradients_equal_a_naive_loop_over_what_is_kept(name):
    head = ready(CASES[name]).train()
    batch = batch_of(head, LENGTHS)
    weights = kept(head, batch, seed=3)
    expected = torch.zeros(head.depths, dtype=torch.float64)
    for i, start in enumerate((0, LENGTHS[0])):
        for (k, a), value in cell_losses(head, document(batch, i)).items():
            expected = expected + weights.get((k, start + a), 0.0) * value * F.one_hot(torch.tensor(k), head.depths)
    torch.manual_seed(3)
    out = head.loss(batch)
    torch.testing.assert_close(out.loss_K.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(out.count_K, head.count(batch)), "weights make up for what is dropped, so the count is that of all labels"
    for a, b in zip(gradients(head, out.total), gradients(head, expected.sum()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_nothing_kept_and_nothing_supervised_still_makes_a_loss():
    head = ready(PARD | {"depths": 6}).train()
    batch = batch_of(head, (4, 3))
    for mask in (batch.loss_mask_T, torch.zeros_like(batch.loss_mask_T)):
        out = head.loss(dataclasses.replace(batch, loss_mask_T=mask))
        out.total.backward()
        assert out.count_K[5] == 0 and out.loss_K[5] == 0
    assert all(p.grad.isfinite().all() for p in head.parameters())


def test_without_a_teacher_the_loss_is_the_same_cross_entropy():
    head = ready(DRAFT_LM).eval()
    batch = batch_of(head, LENGTHS)
    docs = Documents(batch.offsets_S1, torch.device("cpu"))
    labels = head.labels(batch, docs)
    (x,) = head.outputs(batch, docs, labels)
    labels.token_L[0] = -1  # as one that a draft vocabulary lacks
    last, weight, lm_head = torch.randn(16, 64, dtype=torch.float64), torch.tensor([0.7]), head.frozen.lm_head_VD
    results = []
    for states in (last, None):
        total, loss_K = fused_loss([x], head.head_rows(0), lm_head, states, labels, weight, {"ce": 0.3}, 4)
        results.append([total, loss_K, *torch.autograd.grad(total, [x, head.embed_tokens.weight], retain_graph=True)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_hits_are_the_texts_own_tokens_where_no_state_is_read():
    head = ready(PARD).eval()
    batch = batch_of(head, (8,))
    drafts, _ = head.propose(batch, 4)
    x, mask = batch.token_ids_T.tolist(), batch.loss_mask_T.tolist()
    hit, accept = ([[drafts[t, k] == x[t + 2 + k] for t in range(6 - k) if mask[t + 2 + k]] for k in range(4)], [])
    for k in range(4):
        anchors = [t for t in range(6 - k) if mask[t + 1] and all(mask[t + 2 + j] for j in range(k + 1))]
        accept.append([all(drafts[t, j] == x[t + 2 + j] for j in range(k + 1)) for t in anchors])
    for name, expected in (("hit", hit), ("accept", accept)):
        for states in (None, torch.randn(8, 64, dtype=torch.float64)):  # a store may hold more than is asked for
            value, count = head.loss(dataclasses.replace(batch, last_TD=states)).metrics[name]
            assert count.tolist() == [len(e) for e in expected] and value.tolist() == [sum(e) for e in expected]


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_of_the_targets_width_begin_as_the_targets(tied):
    for width in (64, 32):
        head = build(DRAFT_LM | {"hidden_size": width, "tie_embeddings": tied}, SPEC)
        parts = Frozen(torch.randn(101, 64), torch.randn(101, 64))
        head.start_from(parts)
        own = {"embed_tokens": parts.embed_VD} | ({} if tied else {"lm_head": parts.lm_head_VD})
        for name, value in own.items():
            assert torch.equal(head.get_submodule(name).weight, value) == (width == 64)
            assert head.get_submodule(name).weight.data_ptr() != value.data_ptr()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask_token_id": 101}, "head.mask_token_id must be a row of the embedding, 0..100, not 101"),
        ({"mask_token_id": -1}, "head.mask_token_id .* not -1"),
        ({"keep": 0.0}, r"head.keep must be in \(0, 1\], not 0.0"),
        ({"keep_min": 1.5}, r"head.keep_min must be in \(0, 1\], not 1.5"),
        ({"depths": 0}, "head.depths must be at least 1"),
        ({"num_layers": 0}, "head.num_layers must be at least 1"),
        ({"hidden_size": 30}, "head.hidden_size must be head.num_heads=4 heads of an even size, not 30"),
        ({"num_kv_heads": 3}, "head.num_kv_heads must divide head.num_heads=4, not 3"),
        ({"loss": "mse"}, "head.loss=mse"),
        ({"loss_chunk": 0}, "head.loss_chunk must be at least 1"),
    ],
)
def test_bad_settings_name_the_key(change, words):
    with pytest.raises(ValueError, match=words):
        build(PARD | change, SPEC)


def test_parameters_are_counted_once_where_the_embedding_is_the_lm_head():
    found = {}
    for tied in (True, False):
        cfg = load(["conf=smollm_draft_lm", f"head.tie_embeddings={str(tied).lower()}"])
        found[tied] = plan.plan(cfg, plan.TargetSpec(**cfg.target.spec), 1)
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
    assert found[True].head_parameters == 49152 * 576 + 2 * layer + 576
    assert found[False].head_parameters == found[True].head_parameters + 49152 * 576
    assert found[True].flops == found[False].flops, "the same products either way"
    assert found[True].memory["hidden states of a batch"] == 0 and found[True].store_bytes is not None


# ---- exports


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("target") / "tiny")


def exported(conf: dict[str, Any], target_dir: Path, out: Path) -> tuple[Any, Path]:
    torch.manual_seed(0)
    head = build(conf, spec(target_dir))
    about = {"dtype": torch.float32, "head_cfg": conf, "k": 3, "provenance": {"checkpoint": "step-000001"}}
    return head, export_head(head, frozen(target_dir, torch.float32, "cpu"), target_dir, out, **about)


@pytest.mark.parametrize("name", sorted(CASES))
def test_an_export_is_an_ordinary_llama(name, target_dir, tmp_path):
    head, out = exported(CASES[name], target_dir, tmp_path / "out")
    stored = load_file(out / "model.safetensors")
    assert len(stored) == len(list(head.parameters())) and ("lm_head.weight" in stored) != head.shape.tied_embeddings
    for ours, theirs in head.export().names.items():
        assert torch.equal(stored[theirs], head.state_dict()[ours]), theirs
    serving = json.loads((out / "draftsmith.json").read_text())["serving"]
    parallel = {"parallel_drafting": True} if "pard" in name else {}
    assert serving == {"method": "draft_model", "num_speculative_tokens": 3} | parallel
    model, x = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval(), torch.arange(3, 14)
    docs = Documents(torch.tensor([0, 11]), torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(head.run(x, docs, head.caches()) @ head.head_rows(0).T, model(x[None]).logits[0], rtol=1e-4, atol=1e-5)


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str | None, str]] = {
    "embedding lost": (DRAFT_LM, {}, "model.embed_tokens.weight", "missing tensor model.embed_tokens.weight"),
    "final norm lost": (DRAFT_LM, {}, "model.norm.weight", "missing tensor model.norm.weight"),
    "tied in name alone": (CASES["draft_lm_untied_kl"], {"tie_word_embeddings": True}, None, "lm_head.weight has no place"),
    "untied in name alone": (DRAFT_LM, {"tie_word_embeddings": False}, None, "missing tensor lm_head.weight"),
    "another vocabulary": (DRAFT_LM, {"vocab_size": 500}, None, "vocab_size is 500, it must be 512"),
    "heads of another size": (DRAFT_LM, {"head_dim": 16}, None, "q_proj.weight has shape"),
    "mask token lost": (PARD, {"pard_token": None}, None, "parallel_drafting True and the config no mask token"),
    "mask token without a row": (PARD, {"pard_token": 512}, None, "pard_token is 512, no row of the embedding"),
    "another mask token that comes first": (PARD, {"mask_token_id": 3}, None, "mask_token_id and pard_token"),
    "mask token where none belongs": (DRAFT_LM, {"pard_token": 3}, None, "parallel_drafting False and the config pard_token"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_engine_would_swallow_is_refused(fault, target_dir, tmp_path):
    conf, change, lost, message = FAULTS[fault]
    _, out = exported(conf, target_dir, tmp_path / "out")
    config, tensors = json.loads((out / "config.json").read_text()) | change, load_file(out / "model.safetensors")
    tensors.pop(lost, None)
    (out / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(UserError, match=message):
        validate_export(out, spec(target_dir))


# ---- stores without states


def test_tokens_alone_are_captured_without_an_engine_trained_on_and_walked(target_dir, tmp_path, monkeypatch):
    """What the target's answers hold is all that such a head reads; drafts of the offline chain are those of `propose`."""
    monkeypatch.setattr("data.engine.run_child", lambda *_: pytest.fail("an engine was started"))
    cfg = load(["conf=tiny_pard", f"target.model={target_dir}", "target.spec={}"])
    head = build(cfg.head, spec(target_dir)).eval()
    head.attach(frozen(target_dir, torch.float32, "cpu"))
    generator = torch.Generator().manual_seed(0)
    answers = []
    for i, (prompt, response) in enumerate(((5, 9), (8, 4))):
        ids = torch.randint(512, (prompt + response,), generator=generator).tolist()
        answers.append({"id": f"a{i}", "prompt_ids": ids[:prompt], "response_ids": ids[prompt:], "finish_reason": "stop"})
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    store = capture_answers(cfg, target_dir, head, path, tmp_path / "states")
    about = {"tokenizer_hash": store.manifest["tokenizer_hash"], "template_hash": store.manifest["template_hash"]}
    check_compatible(store.manifest, fingerprint=fingerprint(target_dir), taps=head.taps, needs_last=head.needs_last, **about)
    assert sum(shard["bytes"] for shard in store.manifest["shards"]) < 1000 and Store(store.folder, verify=True).manifest["closed"]
    (batch,) = Batches(store, head.taps, 512, 0, 0, 1, 512).step(0, 1)
    batch = batch.to("cpu", torch.float32)
    assert batch.taps_TLD is None and batch.last_TD is None and head.count(batch).tolist() == [13, 13, 13]
    assert head.loss(batch).loss_K.isfinite().all()
    found = offline(head, store, answers, 2, torch.device("cpu"), torch.float32)
    assert found["answers"] == 2 and found["drafts"] >= 2 and found["accepted_per_position"][0] <= found["drafts"]
