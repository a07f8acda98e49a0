"""EAGLE-1's loss against loops in float64 that decode like an engine, and its layer against the MTP module without norms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import SPEC, batch_of, document, ready
from test_recurrence import mtp_forward

from heads import build
from heads.attention import Documents

EAGLE = {"_target_": "heads.eagle.Eagle"}
CASES = {
    "as_published": EAGLE | {"depths": 1},
    "three_depths": EAGLE,
    "heavier_features": EAGLE | {"feature_weight": 7.0, "loss": "kl"},
    "no_features": EAGLE | {"feature_weight": 0.0},
    "norms": EAGLE | {"norms": True},
}


def outputs(head, single, t):
    """r of anchor t at every depth, from a growing sequence with the true tokens and the head's own states."""
    w, x = head.state_dict(), single.token_ids_T.tolist()
    state, found = single.last_TD[: t + 1], []
    for k in range(head.depths):
        tokens = [x[min(i, len(x) - 1)] for i in range(1, t + 2 + k)]
        y, fed_back = mtp_forward(head, w, head.frozen.embed_VD[torch.tensor(tokens)], state)
        found.append(y[-1])
        state = torch.cat([state, fed_back[-1:]])
    return found


def smooth_l1(a, b):
    total = 0.0
    for d in (a - b).abs().tolist():
        total += d * d / 2 if d < 1 else d - 0.5
    return total / len(a)


@pytest.mark.parametrize("name", CASES)
def test_loss_equals_a_naive_loop(name):
    head = ready(CASES[name])
    batch = batch_of(head, (8, 6))
    expected = torch.zeros(head.depths, dtype=torch.float64)
    for i in range(2):
        single = document(batch, i)
        n = len(single.token_ids_T)
        for t in range(n - 2):
            for k, r in enumerate(outputs(head, single, t)):
                if t + 2 + k < n and single.loss_mask_T[t + 2 + k]:
                    log_p = F.linear(single.last_TD[t + 1 + k], head.teacher_UD).log_softmax(-1)
                    log_q = F.linear(r, head.teacher_UD).log_softmax(-1)
                    expected[k] += head.mixture["kl"] * (log_p.exp() * (log_p - log_q)).sum()
                    expected[k] += head.feature_weight * smooth_l1(r, single.last_TD[t + 1 + k])
    out = head.loss(batch, torch.arange(1.0, 1.0 + head.depths))
    torch.testing.assert_close(out.loss_K.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.total.double(), (expected * torch.arange(1, 1 + head.depths)).sum(), rtol=1e-5, atol=1e-5)


def test_without_features_it_is_the_mtp_module_without_norms():
    head, module = ready(EAGLE | {"feature_weight": 0.0, "loss": "kl"}), ready({"_target_": "heads.mtp.MTP", "norms": False})
    module.load_state_dict(head.state_dict())
    batch = batch_of(head)
    assert torch.equal(head.loss(batch).loss_K, module.loss(batch).loss_K)
    assert head.export().config == module.export().config and head.serving(3) == module.serving(3)


def test_exact_states_cost_nothing():
    """Where r is the target's next state, as EAGLE wants it, the feature loss is zero: the state of the label's own position."""
    head = ready(EAGLE)
    batch = batch_of(head, (9, 5))
    labels = head.labels(batch, Documents(batch.offsets_S1, torch.device("cpu")))
    x_KRD = [batch.last_TD.roll(-1 - k, 0) for k in range(head.depths)]
    assert torch.equal(head.more_loss(x_KRD, batch, labels), torch.zeros(head.depths))
    assert (head.more_loss([x.roll(1, 0) for x in x_KRD], batch, labels) > 0).all()


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_bad_feature_weight_is_refused(weight):
    with pytest.raises(ValueError, match="head.feature_weight"):
        build(EAGLE | {"feature_weight": weight}, SPEC)
