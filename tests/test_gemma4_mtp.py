"""Gemma 4's drafter: against loops in float64 that ask one query at a time, and over a tiny Gemma 4: what the target hands over, training
from it, and what is refused. tests/test_gemma4_parity.py holds it against vLLM's and transformers' classes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import SPEC, batch_of, document, head_confs, ready, refused
from live import config, make_answers, train
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from data.builtin import build_tiny_gemma4
from data.forward import Forward
from data.online import Answers
from data.target import frozen, spec
from eval.export import export_head, validate_export
from heads import build
from train import plan, setup

NAME = "gemma4_mtp"
HEAD = head_confs()[NAME]
KINDS = {"sliding_attention", "full_attention"}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return build_tiny_gemma4(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def made(target, tmp_path_factory) -> Path:
    return make_answers(target, tmp_path_factory.mktemp("made"))


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def rms(x, w):
    return x / (x.pow(2).mean(-1, keepdim=True) + SPEC.rms_norm_eps).sqrt() * w


def turned(q, position, kind):
    """Rotation, pair by pair. Of `proportional` rope the first pairs turn alone, by angles of the whole head."""
    half, scaling, out = len(q) // 2, kind["rope_scaling"] or {}, q.clone()
    for i in range(int(half * scaling.get("partial_rotary_factor", 1.0))):
        angle = position * kind["rope_theta"] ** (-i / half)
        out[i] = q[i] * math.cos(angle) - q[i + half] * math.sin(angle)
        out[i + half] = q[i + half] * math.cos(angle) + q[i] * math.sin(angle)
    return out


def attended(w, prefix, x, t, kind, kv):
    """One query of position t, head by head, over positions seen one by one."""
    N, M, H = HEAD["num_heads"], kind["num_kv_heads"], kind["head_dim"]
    mixed = []
    for n, q in enumerate(F.linear(x, w[f"{prefix}.q_proj.weight"]).view(N, H)):
        query, m = turned(rms(q, w[f"{prefix}.q_norm.weight"]), t, kind), n // (N // M)
        seen = [s for s in range(t + 1) if kind["window"] is None or t - s < kind["window"]]
        score = torch.stack([dot(query, kv[s, 0, m]) for s in seen]).softmax(0)
        mixed.append(sum(p * kv[s, 1, m] for p, s in zip(score, seen, strict=True)))
    return F.linear(torch.cat(mixed), w[f"{prefix}.o_proj.weight"])


def forward(head, w, token, state, t, kv):
    """(input of the lm_head, next state) of one row."""
    x = F.linear(torch.cat([head.frozen.embed_VD[token] * head.target.embed_scale, state]), w["pre_projection.weight"])
    for i, name in enumerate(HEAD["layers"]):
        p, kind = f"layers.{i}", SPEC.kinds[name]
        keys_values = kv[head.kv_layers.index(kind["layer"])]
        a = attended(w, f"{p}.self_attn", rms(x, w[f"{p}.input_layernorm.weight"]), t, kind, keys_values)
        x = x + rms(a, w[f"{p}.post_attention_layernorm.weight"])
        y = rms(x, w[f"{p}.pre_feedforward_layernorm.weight"])
        gate = F.gelu(F.linear(y, w[f"{p}.mlp.gate_proj.weight"]), approximate="tanh")
        y = F.linear(gate * F.linear(y, w[f"{p}.mlp.up_proj.weight"]), w[f"{p}.mlp.down_proj.weight"])
        x = (x + rms(y, w[f"{p}.post_feedforward_layernorm.weight"])) * w[f"{p}.layer_scalar"]
    y = rms(x, w["norm.weight"])
    return y, F.linear(y, w["post_projection.weight"])


def decode(head, single, t, chain):
    """Logits of each depth of anchor t; chain: the tokens read at depths 1, 2, ..."""
    w, state, logits = head.state_dict(), single.last_TD[t], []
    for token in [int(single.token_ids_T[t + 1]), *chain]:
        y, state = forward(head, w, token, state, t, single.kv)
        logits.append(F.linear(y, w["lm_head.weight"]))
    return torch.stack(logits)


@pytest.fixture
def pair():
    head = ready(HEAD)
    head.target = dataclasses.replace(SPEC, embed_scale=3.0)
    for layer in head.layers:
        layer.layer_scalar.fill_(0.7)
    return head, batch_of(head, (9, 7))


def test_drafts_equal_loops(pair):
    head, batch = pair
    drafts, log_q = head.propose(batch, 3)
    for i, start in ((0, 0), (1, 9)):
        single = document(batch, i)
        for t in range(len(single.token_ids_T) - 1):
            expected = decode(head, single, t, drafts[start + t, :-1].tolist()).log_softmax(-1)
            assert torch.equal(expected.argmax(-1), drafts[start + t])
            torch.testing.assert_close(expected.amax(-1).float(), log_q[start + t], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_loss_equals_loops(pair, cap):
    """cap: of the target's logits, which is no cap of the head's."""
    head, batch = pair
    head.target = dataclasses.replace(head.target, logit_softcap=cap)
    expected = torch.zeros(head.depths, dtype=torch.float64)
    for i in range(2):
        single = document(batch, i)
        x, n = single.token_ids_T, len(single.token_ids_T)
        for t in range(n - 2):
            logits = decode(head, single, t, [int(x[min(t + 2 + k, n - 1)]) for k in range(head.depths - 1)])
            for k in range(head.depths):
                if t + 2 + k < n and single.loss_mask_T[t + 2 + k]:
                    z = F.linear(single.last_TD[t + 1 + k], head.teacher_UD)
                    log_p = (z if cap is None else cap * (z / cap).tanh()).log_softmax(-1)
                    expected[k] += (log_p.exp() * (log_p - logits[k].log_softmax(-1))).sum()
    torch.testing.assert_close(head.loss(batch).loss_K.double(), expected, rtol=1e-5, atol=1e-5)


def test_long_documents_are_cut_into_queries_without_a_seam(pair, monkeypatch):
    head, _ = pair
    batch = batch_of(head, (40, 3, 21))
    expected = head.loss(batch).loss_K
    monkeypatch.setattr("heads.gemma4_mtp.QUERIES", 7)
    torch.testing.assert_close(head.loss(batch).loss_K, expected)


def test_a_tree_of_one_path_is_the_chain(pair):
    """Levels repeat one row: its nodes all ask from the same position."""
    head, batch = pair
    single = document(batch, 0)
    drafts, _ = head.propose(single, 3)
    row, levels = len(single.token_ids_T) - 2, head.levels(single)
    log_q = next(levels)
    for k in range(3):
        token = log_q[-1].argmax(-1)
        assert token == drafts[row, k]
        other = log_q[-1].argmin(-1)
        log_q = levels.send((torch.tensor([len(log_q) - 1] * 2), torch.stack([other, token])))


# The target's side: a tiny Gemma 4 of both kinds of attention.


def trained_conf() -> dict:
    return HEAD | {"layers": ["sliding_attention", "full_attention"], "hidden_size": 64}


def random_head(target: Path):
    torch.manual_seed(0)
    head = build(trained_conf(), spec(target))
    for p in head.parameters():
        torch.nn.init.normal_(p, mean=0.0 if p.dim() > 1 else 1.0, std=0.15)
    head.attach(frozen(target, torch.float32, "cpu"))
    return head.eval()


def test_the_targets_keys_and_values_are_transformers_own(target):
    """Also beyond the sliding window, and reading them changes no state."""
    ids, dims = torch.arange(5, 60), spec(target)
    own = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = own.model(ids[None], return_shared_kv_states=True, use_cache=False)
    layers = [dims.kinds[name]["layer"] for name in sorted(KINDS)]
    _, last, kv = Forward(target, (), torch.float32, "cpu").states_and_kv(ids, layers)
    torch.testing.assert_close(last, expected.last_hidden_state[0])
    for name, found in zip(sorted(KINDS), kv, strict=True):
        k, v = (x[0].transpose(0, 1) for x in expected.shared_kv_states[name])
        assert torch.equal(found, torch.stack([k, v], 1)) and len(found) == len(ids) > dims.kinds["sliding_attention"]["window"]


def test_it_trains_from_the_target_itself_and_resumes(target, made, tmp_path):
    words = ("data.states=online", "head.hidden_size=32")
    live = train(config(target, made, tmp_path / "live", *words, conf=f"tiny_{NAME}"), target)
    again = config(target, made, tmp_path / "again", *words, conf=f"tiny_{NAME}")
    with pytest.raises(RuntimeError, match="went away"):
        train(again, target, stop_before=4)
    resumed = train(again, target)
    assert all(torch.equal(live[key], resumed[key]) for key in live)


def test_the_batches_are_packed_with_their_keys_and_values(target, made, tmp_path):
    cfg = config(target, made, tmp_path / "run", conf=f"tiny_{NAME}")
    head = build(cfg.head, spec(target))
    sequences = setup.open_states(cfg, head, target)[0]
    assert isinstance(sequences, Answers)
    (batch,) = setup.open_batches(cfg, head, sequences).step(0, 1)
    a, b = batch.offsets_S1[1:3].tolist()
    _, last, kv = Forward(target, (), torch.float32, "cpu").states_and_kv(batch.token_ids_T[a:b], head.kv_layers)
    torch.testing.assert_close(batch.last_TD[a:b], last)
    for found, expected in zip(batch.kv, kv, strict=True):
        torch.testing.assert_close(found[a:b], expected)
    half = batch.to("cpu", torch.bfloat16)
    assert [x.dtype for x in half.kv] == [torch.bfloat16] * 2 and half.token_ids_T.dtype == torch.int64


def test_what_it_cannot_do_is_refused(target, made, tmp_path):
    cfg = config(target, made, tmp_path / "run", "data.states=store", conf=f"tiny_{NAME}")
    refused(lambda: plan.build_on_meta(cfg, spec(target)), "data.states=store", "keys and values", "data.states=online")
    for change, words in (
        ({"layers": ["full_attention", "sliding_attention"]}, "the last full_attention"),
        ({"layers": ["chunked", "full_attention"]}, "kinds of the target's attention"),
        ({"num_heads": 3}, "cannot share the target's 2 heads of full_attention"),
        ({"depths": 1}, "at least 2"),
    ):
        with pytest.raises(ValueError, match=words):
            build(HEAD | change, SPEC)
    with pytest.raises(ValueError, match="keys and values of a Gemma 4.*head=mtp"):
        build(HEAD, dataclasses.replace(SPEC, kinds=None))
    with pytest.raises(ValueError, match="unscaled.*scales its embedding by 8 and caps its logits at 30"):
        build({"_target_": "heads.mtp.MTP"}, spec(target))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c, _: c["text_config"].pop("layer_types"), "layer_types is not set"),
        (lambda c, _: c.update(use_ordered_embeddings=True), "use_ordered_embeddings is True"),
        (lambda c, _: c["text_config"].update(sliding_window=8), "sliding_window 8, the target 16"),
        (lambda c, _: c["text_config"]["rope_parameters"]["full_attention"].pop("partial_rotary_factor"), "partial_rotary_factor None"),
        (lambda c, _: c["text_config"].update(final_logit_softcapping=30.0), "trained without"),
        (lambda _, t: t.pop("model.layers.1.layer_scalar"), "missing tensor model.layers.1.layer_scalar"),
        (lambda _, t: t.update({"masked_embedding.centroids.weight": torch.zeros(2, 2)}), "masked_embedding.centroids.weight has no place"),
    ],
)
def test_a_broken_export_is_refused(target, tmp_path, change, words):
    head = random_head(target)
    about = {"head_cfg": trained_conf(), "k": 3, "provenance": {"checkpoint": "step-000001"}}
    out = export_head(head, head.frozen, target, tmp_path / "out", dtype=torch.float32, **about)
    stored, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    change(stored, tensors)
    (out / "config.json").write_text(json.dumps(stored))
    save_file(tensors, out / "model.safetensors")
    refused(lambda: validate_export(out, spec(target)), words)
