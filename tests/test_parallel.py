"""What training leaves out of heads that draft in one pass: which labels are kept, and what they weigh."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import batch_of, document, ready

from heads.attention import Documents
from heads.parallel import drop

SHARES = {"mask_token_id": 7, "depths": 4, "keep": 0.6, "keep_min": 0.3}
PARD = {"_target_": "heads.pard.Pard", **SHARES, "num_layers": 1, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
PEAGLE = {"_target_": "heads.peagle.PEagle", **SHARES, "taps": [1, 3], "num_layers": 1}


@pytest.fixture(params=[PARD, PEAGLE], ids=["pard", "peagle"])
def head(request):
    return ready(request.param).train()


def kept(head, batch, seed):
    """(depth, place of the row in the pack) -> weight of every label that training with this seed keeps."""
    torch.manual_seed(seed)
    docs = Documents(batch.offsets_S1, torch.device("cpu"))
    labels = head.labels(batch, docs)
    drop(labels, docs, batch.token_ids_T, head.shares)
    found = {}
    for k in range(head.depths):
        for row, weight in zip(labels.row_KL[k].tolist(), labels.weight_KL[k].tolist(), strict=True):
            if row >= 0:
                found[k, row] = weight
    return found


def test_drops_are_nested_exact_in_number_and_unbiased(head):
    batch = batch_of(head, (30, 17))
    batch.loss_mask_T[:] = True
    spans = ((1 - head.ahead, 28), (31 - head.ahead, 15))  # first row that has a label, and how many do: those of x_2 and all behind it
    everything = {(k, start + i) for start, anchors in spans for k in range(4) for i in range(anchors - k)}
    totals, draws = dict.fromkeys(everything, 0.0), 400
    for seed in range(draws):
        weights = kept(head, batch, seed)
        assert weights.keys() <= everything
        for start, anchors in spans:
            for k in range(4):
                share = math.ceil(max(0.6**k, 0.3) * anchors)
                mine = {a for depth, a in weights if depth == k and start <= a < start + anchors}
                assert len(mine) <= share and len(mine) >= share - k, "at most k of them lie too near the end for a label"
                assert all(weights[k, a] == pytest.approx(anchors / share) for a in mine)
                assert all((k - 1, a) in weights for a in mine) or k == 0, "a parent was dropped"
        for key, weight in weights.items():
            totals[key] += weight / draws
    assert all(abs(mean - 1) < 0.5 for mean in totals.values()) and abs(sum(totals.values()) / len(totals) - 1) < 0.02
    assert kept(head, batch, 1) != kept(head, batch, 2) and kept(head, batch, 1) == kept(head, batch, 1)


def test_drops_depend_on_the_document_not_on_the_pack(head):
    batch = batch_of(head, (12, 9, 15))
    out, parts = head.loss(batch), [head.loss(document(batch, i)) for i in range(3)]
    torch.testing.assert_close(out.loss_K, torch.stack([part.loss_K for part in parts]).sum(0))
