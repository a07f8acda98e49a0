"""Block heads against an independent float64 program that takes one anchor at a time: no packing, no masks, no shared code. Its loss goes
through autograd, which the hand-written gradients are held against."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import SPEC, batch_of, document, ready
from test_recurrence import mlp, rms, rope

from heads import block_attention, build
from heads.base import Batch, DraftHead

BOTH = {"taps": [1, 3], "mask_token_id": 100, "block_size": 4, "gamma": 2.0}
DFLASH = {"_target_": "heads.dflash.DFlash", **BOTH}
DSPARK = {"_target_": "heads.dspark.DSpark", **BOTH, "markov_rank": 5}
CASES = {
    "dflash": DFLASH,
    "dflash_causal_three_layers": DFLASH | {"causal": True, "num_layers": 3},
    "dflash_dpace": DFLASH | {"weights": "dpace", "loss": "ce", "num_layers": 1},
    "dspark": DSPARK,
    "dspark_from_anchor": DSPARK | {"sample_from_anchor": True, "block_size": 3, "causal": True},
    "dspark_kl_without_confidence": DSPARK | {"confidence_weight": 0.0, "loss": "kl"},
}
LENGTHS = (9, 7)


def heads_of(x, weight):
    return F.linear(x, weight).view(len(x), -1, SPEC.head_dim)


def layer(w, prefix, x, context, a, causal):
    """One decoder layer of one block, anchored at position a. x [W, D]; context [a, D]: everything before the anchor."""
    width, p = len(x), f"{prefix}.self_attn"
    normed = rms(x, w[f"{prefix}.input_layernorm.weight"])
    positions = torch.arange(a, a + width)
    q = rope(rms(heads_of(normed, w[f"{p}.q_proj.weight"]), w[f"{p}.q_norm.weight"]), positions)
    seen = torch.cat([context, normed])
    k = rope(rms(heads_of(seen, w[f"{p}.k_proj.weight"]), w[f"{p}.k_norm.weight"]), torch.arange(a + width))
    v = heads_of(seen, w[f"{p}.v_proj.weight"])
    mixed = torch.zeros(width, SPEC.num_heads, SPEC.head_dim, dtype=x.dtype)
    for slot in range(width):
        last = a + slot + 1 if causal else a + width
        for h in range(SPEC.num_heads):
            g = h // (SPEC.num_heads // SPEC.num_kv_heads)
            score = k[:last, g] @ q[slot, h] / SPEC.head_dim**0.5
            mixed[slot, h] = score.softmax(0) @ v[:last, g]
    x = x + F.linear(mixed.flatten(1), w[f"{p}.o_proj.weight"])
    return x + mlp(w, prefix, rms(x, w[f"{prefix}.post_attention_layernorm.weight"]))


def outputs(head, w, doc: Batch, a: int, token: int, depths: int):
    """Normed outputs [depths, D] of the block whose anchor is `token` at position a."""
    context = rms(F.linear(doc.taps_TLD[:a].flatten(1), w["fc.weight"]), w["hidden_norm.weight"])
    width = depths if head.sample_from_anchor else depths + 1
    x = head.frozen.embed_VD[torch.tensor([token] + [head.mask_token_id] * (width - 1))]
    for i in range(len(head.layers)):
        x = layer(w, f"layers.{i}", x, context, a, head.causal)
    return rms(x, w["norm.weight"])[width - depths :]


def logits_of(head, w, y, previous: int):
    logits = F.linear(y, head.frozen.lm_head_VD)
    if "markov_w1.weight" in w:
        logits = logits + w["markov_w2.weight"] @ w["markov_w1.weight"][previous]
    return logits


def row_loss(name: str, p, log_q, y: int):
    q = log_q.exp()
    return {"ce": -log_q[y], "tv": (p - q).abs().sum() / 2, "kl": (p * (p.log() - log_q)).sum()}[name]


def naive_loss(head, w, batch: Batch, weight_K, chosen=None):
    """(total, sums per depth, counts). chosen: numbers of the anchors taken, of all in the pack in order."""
    K, number = head.depths, 0
    sums, counts = [torch.zeros((), dtype=torch.float64) for _ in range(K)], torch.zeros(K, dtype=torch.long)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(batch.offsets_S1) - 1):
        doc = document(batch, i)
        x, n = doc.token_ids_T.tolist(), len(doc.token_ids_T)
        for a in range(1, n):
            depths = 0
            while depths < K and a + 1 + depths < n and doc.loss_mask_T[a + 1 + depths]:
                depths += 1
            counts[:depths] += 1
            if depths == 0:
                continue
            number += 1
            if chosen is not None and number - 1 not in chosen:
                continue
            y = outputs(head, w, doc, a, x[a], K)
            log_q = [logits_of(head, w, y[k], x[a + k]).log_softmax(-1) for k in range(depths)]
            weights = [1.0] * depths
            if head.self_labelled and "markov_w1.weight" not in w:  # D-PACE
                chance = [0.5 * float(log_q[k][x[a + 1 + k]].exp()) + 0.5 for k in range(depths)]
                weights = [sum(math.prod(chance[: m + 1]) for m in range(j, depths)) for j in range(depths)]
            for k in range(depths):
                p = F.linear(doc.last_TD[a + k], head.frozen.lm_head_VD).softmax(-1)
                value = sum(c * row_loss(name, p, log_q[k], x[a + 1 + k]) for name, c in head.mixture.items())
                if "confidence.weight" in w:
                    accepted = float(torch.minimum(p, log_q[k].exp()).sum())
                    features = torch.cat([y[k], w["markov_w1.weight"][x[a + k]]])
                    c = torch.sigmoid(F.linear(features, w["confidence.weight"], w["confidence.bias"])[0])
                    value = value - head.confidence_weight * (accepted * c.log() + (1 - accepted) * (1 - c).log())
                sums[k] = sums[k] + weights[k] * value
    total = sum((weight_K[k] * sums[k] for k in range(K)), total)
    return total, torch.stack(sums), counts


@pytest.fixture(params=sorted(CASES))
def pair(request) -> tuple[DraftHead, Batch]:
    head = ready(CASES[request.param])
    return head, batch_of(head, LENGTHS)


@pytest.mark.parametrize("k", [2, 3])
def test_drafts_equal_a_decode_of_one_anchor_at_a_time(pair, k):
    head, batch = pair
    drafts, log_q = head.propose(batch, k)
    w = head.state_dict()
    for i, start in enumerate((0, LENGTHS[0])):
        doc = document(batch, i)
        for t in range(len(doc.token_ids_T) - 1):
            previous = int(doc.token_ids_T[t + 1])
            y = outputs(head, w, doc, t + 1, previous, k)
            for j in range(k):
                expected = logits_of(head, w, y[j], previous).log_softmax(-1)
                previous = int(expected.argmax())
                assert drafts[start + t, j] == previous
                torch.testing.assert_close(expected.max().float(), log_q[start + t, j], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("drawn", ["all", "some"])
def test_loss_and_gradient_equal_a_naive_loop(pair, drawn):
    """`some`: 4 of the anchors, drawn from the global generator; the sums are scaled to all of them, the counts are those of all."""
    head, batch = pair
    batch.loss_mask_T[5] = False  # a gap, at which blocks end
    weight_K = torch.tensor([0.7, 1.3, 0.4], dtype=torch.float64)
    every = int(head.count(batch)[0])
    chosen, share = None, 1.0
    if drawn == "some":
        head.anchors = 4
        torch.manual_seed(11)
        chosen, share = set(torch.randperm(every)[:4].tolist()), every / 4
    w = {name: value.clone().requires_grad_() for name, value in head.named_parameters()}
    total, sums, counts = naive_loss(head, w, batch, weight_K * share, chosen)
    gradients = torch.autograd.grad(total, list(w.values()), allow_unused=True)
    torch.manual_seed(11)
    out = head.loss(batch, weight_K)
    out.total.backward()
    assert torch.equal(out.count_K, counts) and torch.equal(head.count(batch), counts)
    torch.testing.assert_close(out.loss_K.double(), sums.detach() * share, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.total.double(), total.detach(), rtol=1e-5, atol=1e-5)
    for (name, p), g in zip(head.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, torch.zeros_like(p) if g is None else g, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_metrics_count_the_drawn_anchors_up_to_the_first_miss(pair):
    head, batch = pair
    head.eval()
    batch.last_TD = batch.last_TD * 0.02
    drafts, _ = head.propose(batch, head.depths)
    batch.token_ids_T[3:6] = drafts[1]  # behind the anchor x_2, so that its drafts and its training pass agree
    for k, right in enumerate((True, False, True)):
        wanted = drafts[1, k] if right else (drafts[1, k] + 1) % 100
        batch.last_TD[2 + k] = torch.linalg.pinv(head.frozen.lm_head_VD)[:, wanted] * 50
    batch.loss_mask_T[:] = False
    batch.loss_mask_T[3:6] = True  # x_2 is no generated token: an engine never drafts from it
    hit, accept = (head.loss(batch).metrics[name] for name in ("hit", "accept"))
    assert hit[1][2] == 1 and hit[0][2] == 1 and accept[1].tolist() == [2, 1, 0]
    batch.loss_mask_T[2] = True
    hit, accept = (head.loss(batch).metrics[name] for name in ("hit", "accept"))
    assert accept[1].tolist() == [3, 2, 1] and accept[0][2] == 0 and accept[0][0] >= 1 and hit[1].tolist() == [4, 3, 2]


def test_blocks_of_one_call_do_not_see_each_other(pair, monkeypatch):
    """Attention asked in calls of one block each is the same as in calls of many."""
    head, batch = pair
    whole = head.loss(batch).loss_K, head.propose(batch, 3)
    monkeypatch.setattr(block_attention, "QUERIES", 1)
    torch.testing.assert_close(head.loss(batch).loss_K, whole[0])
    drafts, log_q = head.propose(batch, 3)
    assert torch.equal(drafts, whole[1][0])
    torch.testing.assert_close(log_q, whole[1][1])


def test_the_mask_of_a_call_is_that_of_each_anchor():
    place, start, width = torch.tensor([2, 3, 9, 12]), torch.tensor([0, 0, 7, 7]), 3
    for causal in (False, True):
        blocks = block_attention.Blocks(place, start, width, causal)
        assert [part[2:] for part in blocks.parts] == [(0, 2), (2, 4)]
        for part in blocks.parts:
            first, end, b0, b1 = part
            mask = blocks.mask(part)
            for b in range(b0, b1):
                for slot in range(width):
                    seen = [first <= t < place[b] for t in range(first, end)]
                    seen += [c == b and (s <= slot or not causal) for c in range(b0, b1) for s in range(width)]
                    assert mask[(b - b0) * width + slot].tolist() == seen


def test_a_batch_without_an_anchor_gives_every_parameter_a_zero_gradient(pair):
    """On one rank of several: a missing gradient would stop the others."""
    head, batch = pair
    batch.loss_mask_T[:] = False
    out = head.loss(batch)
    out.total.backward()
    assert not out.count_K.any() and not out.loss_K.any()
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


def test_the_draw_follows_the_global_seed_alone(pair):
    head, batch = pair
    head.anchors = 3

    def drawn(seed):
        torch.manual_seed(seed)
        return head.loss(batch).loss_K

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
    head.eval()
    assert torch.equal(drawn(1), drawn(2))  # all anchors


def test_the_slot_convention_is_exported_and_moves_the_slots():
    """The same weights under the other convention are another head, and say so."""
    one, other = (ready(DSPARK | {"sample_from_anchor": flag, "block_size": size}) for flag, size in ((False, 4), (True, 3)))
    other.load_state_dict(one.state_dict())
    assert one.depths == other.depths == 3
    batch = batch_of(one, LENGTHS)
    assert not torch.equal(one.propose(batch, 3)[1], other.propose(batch, 3)[1])
    for head, flag in ((one, False), (other, True)):
        config = head.export().config
        assert config["sample_from_anchor"] is flag and "sample_from_anchor" not in config["dflash_config"]  # vLLM refuses true there
    assert ready(DFLASH).export().config["sample_from_anchor"] is False


def test_the_mask_token_is_read_from_the_targets_own_embedding(pair):
    head, batch = pair
    before = head.propose(batch, 3)[1]
    embed = head.frozen.embed_VD.clone()
    embed[head.mask_token_id] += 1.0
    head.attach(dataclasses.replace(head.frozen, embed_VD=embed))
    assert not torch.equal(head.propose(batch, 3)[1], before)


@pytest.mark.parametrize("conf", [DFLASH, DSPARK], ids=["dflash", "dspark"])
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("mask_token_id", 101, "0..100"),
        ("mask_token_id", -1, "0..100"),
        ("block_size", 1, "slot that predicts"),
        ("num_layers", 6, "1..5"),
        ("anchors", 0, "at least 1"),
        ("gamma", 0.0, "positive"),
        ("gamma", math.nan, "positive"),
        ("taps", [], "at least one"),
        ("taps", [3, 1], "ascending"),
        ("taps", [5], "0..4"),
        ("loss", "mse", "must be one of"),
    ],
)
def test_bad_settings_are_refused(conf, key, value, words):
    with pytest.raises(ValueError, match=f"head.*{key}.*{words}"):
        build(conf | {key: value}, SPEC)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (DFLASH | {"weights": "linear"}, "head.weights=linear.*decay or dpace"),
        (DSPARK | {"markov_rank": 0}, "head.markov_rank.*at least 1"),
        (DSPARK | {"confidence_weight": -1.0}, "head.confidence_weight"),
        (DSPARK | {"plugin": True, "sample_from_anchor": True}, "head.plugin=true.*sample_from_anchor"),
    ],
)
def test_bad_settings_of_one_head_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        build(change, SPEC)


def test_more_drafts_than_the_block_holds_are_refused(pair):
    head, _ = pair
    assert head.serving(3)["num_speculative_tokens"] == 3
    with pytest.raises(ValueError, match="head.block_size=.*3 tokens at most, not 4"):
        head.serving(4)
