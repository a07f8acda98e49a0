"""P-EAGLE against an independent float64 program that drafts as the engine does, one anchor at a time: the accepted prefix, then mask
rows at the positions behind it, one plain causal pass. Training's drops against loops over what they keep."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import SPEC, batch_of, document, ready
from test_parallel import kept
from test_recurrence import eagle3_forward, fused

from heads import build
from heads.attention import Documents
from heads.kernels import rounded

PEAGLE = {"_target_": "heads.peagle.PEagle", "taps": [1, 2, 3], "mask_token_id": 7, "depths": 4, "num_layers": 2}
CASES = {
    "two_layers": PEAGLE,
    "one_layer_norms_reduced": PEAGLE | {"num_layers": 1, "fc_norm": True, "draft_vocab_size": 40},
    "three_layers_one_tap_own_rows": PEAGLE
    | {"num_layers": 3, "taps": [4], "norm_before_fc": True, "norm_before_residual": True, "train_lm_head": True},
}


@pytest.fixture(params=CASES)
def pair(request):
    head = ready(CASES[request.param]).eval()
    return head, batch_of(head, (9, 7))


def draft_logits(head, w, single, t, k):
    """Logits [k, U] of anchor t."""
    masks = k - 1
    tokens = [*single.token_ids_T[1 : t + 2].tolist(), *[head.mask_token_id] * masks]
    mask_state = fused(w, w["mask_hidden"].view(1, len(head.taps), -1))
    state = torch.cat([fused(w, single.taps_TLD[: t + 1]), mask_state.expand(masks, -1)])
    y, _ = eagle3_forward(head, w, head.frozen.embed_VD[torch.tensor(tokens)], state)
    return F.linear(y[t:], w.get("lm_head.weight", head.teacher_UD))


def naive_loss(head, w, batch, weight):
    """Sums per depth; weight(place of the anchor in the pack, depth)."""
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(head.depths)]
    for i in range(len(batch.offsets_S1) - 1):
        single, start = document(batch, i), int(batch.offsets_S1[i])
        n = len(single.token_ids_T)
        for t in range(n - 2):
            logits = draft_logits(head, w, single, t, head.depths)
            for k in range(head.depths):
                if t + 2 + k < n and single.loss_mask_T[t + 2 + k]:
                    log_p = F.linear(single.last_TD[t + 1 + k], head.teacher_UD).log_softmax(-1)
                    row = (log_p.exp() * (log_p - logits[k].log_softmax(-1))).sum()
                    sums[k] = sums[k] + weight(start + t, k) * row
    return torch.stack(sums)


def test_drafts_equal_an_engine_like_pass(pair):
    head, batch = pair
    drafts, log_q = head.propose(batch, 5)  # more than it has depths: a mask row is a mask row
    for i, start in ((0, 0), (1, 9)):
        single = document(batch, i)
        for t in range(len(single.token_ids_T) - 1):
            best, choice = draft_logits(head, head.state_dict(), single, t, 5).log_softmax(-1).max(-1)
            assert torch.equal(choice if head.draft_ids_U is None else head.draft_ids_U[choice], drafts[start + t])
            torch.testing.assert_close(best.float(), log_q[start + t], rtol=1e-4, atol=1e-4)


def test_loss_equals_a_naive_loop(pair):
    head, batch = pair
    expected = naive_loss(head, head.state_dict(), batch, lambda t, k: 1.0)
    torch.testing.assert_close(head.loss(batch).loss_K.double(), expected, rtol=1e-5, atol=1e-5)


def test_dropped_loss_and_gradient_equal_a_naive_loop(pair):
    """What is kept reads the same rows as without drops."""
    head, batch = pair
    head.train()
    weights = kept(head, batch, seed=11)
    w = dict(head.named_parameters())
    expected = naive_loss(head, w, batch, lambda t, k: weights.get((k, t), 0.0))
    gradients = torch.autograd.grad(expected @ torch.arange(1.0, 5.0).double(), list(w.values()))
    torch.manual_seed(11)
    out = head.loss(batch, torch.arange(1.0, 5.0))
    torch.testing.assert_close(out.loss_K.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(out.count_K, head.count(batch))
    out.total.backward()
    for name, gradient in zip(w, gradients, strict=True):
        torch.testing.assert_close(w[name].grad, gradient, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_only_rows_that_a_kept_label_needs_are_worked_out():
    """A kept label needs its own row and its parents, which are the mask rows of its anchor at every depth before it."""
    head = ready(PEAGLE | {"depths": 6, "keep": 0.6, "keep_min": 0.3})
    batch = batch_of(head, (60, 50))
    batch.loss_mask_T[30:40] = False  # a user's turn in between
    rows = [set() for _ in range(6)]
    for k, t in kept(head, batch, seed=2):
        for depth in range(k + 1):
            rows[depth].add(t)
    docs = Documents(batch.offsets_S1, torch.device("cpu"))
    torch.manual_seed(2)
    x_KRD = head.outputs(batch, docs, head.labels(batch, docs))
    assert [len(x) for x in x_KRD[1:]] == [min(rounded(len(found)), len(x)) for found, x in zip(rows[1:], x_KRD, strict=False)]
    assert len(x_KRD[5]) < 0.5 * len(x_KRD[0])


def test_a_share_of_one_drops_nothing():
    head = ready(PEAGLE | {"keep": 1.0})
    batch = batch_of(head)
    trained = head.loss(batch).loss_K
    torch.testing.assert_close(trained, head.eval().loss(batch).loss_K)


def test_documents_too_short_for_a_depth_train_the_others():
    head = ready(PEAGLE)
    batch = batch_of(head, (3, 1, 4))
    out = head.loss(batch)
    assert out.count_K.tolist() == head.count(batch).tolist() and out.count_K[3] == 0
    out.total.backward()
    assert all(torch.isfinite(p.grad).all() for p in head.parameters())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask_token_id": SPEC.vocab_size}, "head.mask_token_id .* not 101"),
        ({"mask_token_id": -1}, "head.mask_token_id"),
        ({"keep": 0.0}, "head.keep "),
        ({"keep_min": 1.5}, "head.keep_min"),
        ({"taps": []}, "head.taps must name at least one"),
        ({"num_layers": 0}, "head.num_layers"),
        ({"mask_token_id": 1.5}, "head.mask_token_id=1.5: must be int"),
    ],
)
def test_bad_settings_say_what_is_allowed(change, words):
    with pytest.raises(ValueError, match=words):
        build(PEAGLE | change, SPEC)
