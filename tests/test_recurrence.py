"""EAGLE-3 and MTP against an independent float64 program that decodes like an engine: one anchor at a time, a growing sequence,
plain causal attention, no packing, no merged softmax, no shared code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import SPEC, batch_of, document, ready

EAGLE3 = {"_target_": "heads.eagle3.Eagle3", "taps": [1, 2, 3]}
MTP = {"_target_": "heads.mtp.MTP"}
CASES = {
    "eagle3": EAGLE3,
    "eagle3_reduced": EAGLE3 | {"draft_vocab_size": 40},
    "eagle3_trained_lm_head": EAGLE3 | {"draft_vocab_size": 40, "train_lm_head": True},
    "eagle3_fc_norm": EAGLE3 | {"fc_norm": True},
    "eagle3_norm_output": EAGLE3 | {"norm_output": True},
    "eagle3_norm_before_fc": EAGLE3 | {"norm_before_fc": True},
    "eagle3_norm_before_residual": EAGLE3 | {"norm_before_residual": True},
    "eagle3_two_layers": EAGLE3 | {"num_layers": 2},
    "eagle3_one_tap": EAGLE3 | {"taps": [4]},
    "eagle3_no_taps": EAGLE3 | {"taps": []},
    "mtp": MTP,
    "mtp_without_norms": MTP | {"norms": False},
}


def rms(x, w):
    return x / (x.pow(2).mean(-1, keepdim=True) + SPEC.rms_norm_eps).sqrt() * w


def rope(x, positions):
    """Rotation as complex multiplication. x [n, heads, H]."""
    half = SPEC.head_dim // 2
    frequency = SPEC.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(len(positions), half, dtype=torch.float64), positions[:, None].double() * frequency)
    z = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn[:, None]
    return torch.cat([z.real, z.imag], -1)


def attend(w, prefix, x):
    n, size = len(x), SPEC.head_dim
    q, k, v = (F.linear(x, w[f"{prefix}.self_attn.{c}_proj.weight"]).view(n, -1, size) for c in "qkv")
    q, k = rope(q, torch.arange(n)), rope(k, torch.arange(n))
    k, v = (y.repeat_interleave(SPEC.num_heads // SPEC.num_kv_heads, 1) for y in (k, v))
    scores = torch.einsum("qnh,knh->nqk", q, k) / size**0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    mixed = torch.einsum("nqk,knh->qnh", scores.softmax(-1), v).flatten(1)
    return F.linear(mixed, w[f"{prefix}.self_attn.o_proj.weight"])


def mlp(w, prefix, x):
    gate, up, down = (w[f"{prefix}.mlp.{c}_proj.weight"] for c in ("gate", "up", "down"))
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def block(w, prefix, x, input_norm=True):
    y = rms(x, w[f"{prefix}.input_layernorm.weight"]) if input_norm else x
    x = x + attend(w, prefix, y)
    return x + mlp(w, prefix, rms(x, w[f"{prefix}.post_attention_layernorm.weight"]))


def eagle3_forward(head, w, embed, state):
    normed = rms(state, w["first.hidden_norm.weight"])
    h = normed if head.norm_before_residual else state
    h = h + attend(w, "first", torch.cat([rms(embed, w["first.input_layernorm.weight"]), normed], -1))
    h = h + mlp(w, "first", rms(h, w["first.post_attention_layernorm.weight"]))
    for i in range(len(head.rest)):
        h = block(w, f"rest.{i}", h)
    y = rms(h, w["norm.weight"])
    return y, (y if head.norm_output else h)


def mtp_forward(head, w, embed, state):
    if not head.norms:
        x = block(w, "block", F.linear(torch.cat([embed, state], -1), w["input_proj.weight"]), input_norm=False)
        return x, x
    embed = torch.cat([torch.zeros_like(embed[:1]), embed[1:]])
    pair = torch.cat([rms(state, w["hidden_layernorm.weight"]), rms(embed, w["token_layernorm.weight"])], -1)
    y = rms(block(w, "block", F.linear(pair, w["input_proj.weight"])), w["final_layernorm.weight"])
    return y, y


def fused(w, taps):
    parts = taps.unbind(1)
    if "fc_norm.0.weight" in w:
        parts = [rms(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)]
    joined = torch.cat(list(parts), -1)
    return F.linear(rms(joined, w["input_norm.weight"]) if "input_norm.weight" in w else joined, w["fc.weight"])


def decode(head, batch, t, chain):
    """Logits over the draft vocabulary at each depth of anchor t; `chain`: the tokens fed at depths 1, 2, ..."""
    w = head.state_dict()
    state = (fused(w, batch.taps_TLD) if getattr(head, "fc", None) is not None else batch.last_TD)[: t + 1]
    tokens = batch.token_ids_T[1 : t + 2].tolist()
    forward = eagle3_forward if "norm.weight" in w else mtp_forward
    lm_head = w.get("lm_head.weight", head.teacher_UD)
    logits = []
    for token in chain:
        y, fed_back = forward(head, w, head.frozen.embed_VD[torch.tensor(tokens)], state)
        logits.append(F.linear(y[-1], lm_head))
        state, tokens = torch.cat([state, fed_back[-1:]]), [*tokens, token]
    return torch.stack(logits)


@pytest.fixture(params=sorted(CASES))
def pair(request):
    head = ready(CASES[request.param])
    return head, batch_of(head, (9, 7))


def test_drafts_equal_an_engine_like_decode(pair):
    head, batch = pair
    drafts, log_q = head.propose(batch, 3)
    for i, start in ((0, 0), (1, 9)):
        single = document(batch, i)
        for t in range(len(single.token_ids_T) - 1):
            expected = decode(head, single, t, drafts[start + t].tolist()).log_softmax(-1)
            best, choice = expected.max(-1)
            ids = choice if head.draft_ids_U is None else head.draft_ids_U[choice]
            assert torch.equal(ids, drafts[start + t])
            torch.testing.assert_close(best.float(), log_q[start + t], rtol=1e-4, atol=1e-4)


def test_loss_equals_a_naive_loop(pair):
    head, batch = pair
    expected = torch.zeros(head.depths, dtype=torch.float64)
    for i in range(2):
        single = document(batch, i)
        x, n = single.token_ids_T, len(single.token_ids_T)
        for t in range(n - 2):
            logits = decode(head, single, t, [int(x[min(t + 2 + k, n - 1)]) for k in range(head.depths)])
            for k in range(head.depths):
                if t + 2 + k < n and single.loss_mask_T[t + 2 + k]:
                    log_p = F.linear(single.last_TD[t + 1 + k], head.teacher_UD).log_softmax(-1)
                    expected[k] += (log_p.exp() * (log_p - logits[k].log_softmax(-1))).sum()
    torch.testing.assert_close(head.loss(batch).loss_K.double(), expected, rtol=1e-5, atol=1e-5)
