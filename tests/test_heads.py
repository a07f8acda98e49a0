"""The head contract, for every file of conf/head/: nothing here names a head."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from conftest import SPEC, batch_of, document, head_confs, ready

from data.batch import share_out
from heads import build
from heads.base import Batch, DraftHead


@pytest.fixture
def head(conf) -> DraftHead:
    """In evaluation mode, where no head draws random numbers; `test_training_measures_what_evaluation_does` carries over to training."""
    return ready(conf).eval()


def copied(batch: Batch) -> Batch:
    return copy.deepcopy(batch)


def mean_loss(head: DraftHead, batch: Batch) -> torch.Tensor:
    return head.loss(batch, 1 / head.count(batch)).total


@pytest.mark.parametrize("name", sorted(head_confs()))
def test_builds_on_meta_for_a_70b_target(name):
    spec = dataclasses.replace(SPEC, hidden_size=8192, num_layers=80, vocab_size=128256, num_heads=64, num_kv_heads=8, head_dim=128)
    with torch.device("meta"):
        head = build(head_confs(small=False)[name], spec)
    assert all(p.device.type == "meta" for p in head.parameters()) and sum(p.numel() for p in head.parameters()) > 5e7


def test_shapes_counts_and_metrics(head):
    batch = batch_of(head)
    out = head.eval().loss(batch)
    assert out.loss_K.shape == (head.depths,) and torch.isfinite(out.loss_K).all() and (out.loss_K > 0).all()
    assert torch.equal(out.count_K, head.count(batch)) and len(head.depth_weights) == head.depths
    assert {"hit", "accept"} <= out.metrics.keys()
    for value, count in out.metrics.values():
        assert value.shape == count.shape == (head.depths,) and (value <= count).all()
    tokens, log_q = head.propose(batch, 4)
    assert tokens.shape == log_q.shape == (len(batch.token_ids_T), 4)
    assert tokens.max() < SPEC.vocab_size and (log_q <= 0).all()


def test_counts_follow_the_shifted_mask(head):
    """Depth k of row t is supervised iff x_{t+2+k} is, inside the document: the mask moves with the labels. For heads that count
    depths up to the first gap, x_{t+2}, .., x_{t+1+k} must be too."""
    batch = batch_of(head)
    batch.loss_mask_T[6] = False  # a gap in an answer
    expected = torch.zeros(head.depths, dtype=torch.long)
    for i in range(len(batch.offsets_S1) - 1):
        mask = document(batch, i).loss_mask_T
        for k in range(head.depths):
            for t in range(len(mask) - 2 - k):
                expected[k] += mask[t + 2 : t + 3 + k].all() if head.contiguous else mask[t + 2 + k]
    assert torch.equal(head.count(batch), expected) and torch.equal(head.loss(batch).count_K, expected)


@pytest.mark.parametrize("share", [2, 3])
def test_labels_can_be_shared_out_over_ranks(head, share):
    """Loss and gradient are the sum of those of the runs of labels, each with no more of its documents than comes before its last label."""
    if head.contiguous:
        pytest.skip("refused: its depths look at the labels around theirs")
    batch = batch_of(head)
    parts = [pack_share(batch, place, share) for place in range(share)]
    assert min(int(part.loss_mask_T.sum()) for part in parts) > 0
    whole, outs = head.loss(batch), [head.loss(part) for part in parts]
    assert torch.equal(sum(out.count_K for out in outs), whole.count_K)
    torch.testing.assert_close(sum(out.loss_K for out in outs), whole.loss_K, rtol=1e-5, atol=1e-5)
    gradients = [
        torch.autograd.grad(total, list(head.parameters()), allow_unused=True) for total in (whole.total, *(o.total for o in outs))
    ]
    for expected, *found in zip(*gradients, strict=True):
        if expected is not None:
            torch.testing.assert_close(sum(x for x in found if x is not None), expected, rtol=1e-4, atol=1e-5)


def pack_share(batch: Batch, place: int, share: int) -> Batch:
    names = {"token_ids": "token_ids_T", "loss_mask": "loss_mask_T", "taps": "taps_TLD", "last": "last_TD"}
    spans = list(zip(batch.offsets_S1[:-1].tolist(), batch.offsets_S1[1:].tolist(), strict=True))
    states = {key: getattr(batch, name) for key, name in names.items()}
    documents = [
        {key: None if x is None else x[start:end] for key, x in states.items()} | {"kv": [x[start:end] for x in batch.kv]}
        for start, end in spans
    ]
    kept = share_out(documents, place, share)
    offsets_S1 = torch.tensor([0, *(len(document["token_ids"]) for document in kept)]).cumsum(0)
    joined = {name: None if states[key] is None else torch.cat([document[key] for document in kept]) for key, name in names.items()}
    kv = [torch.cat(parts) for parts in zip(*(document["kv"] for document in kept), strict=True)]
    return Batch(offsets_S1=offsets_S1, kv=kv, **joined)


def test_training_measures_what_evaluation_does(head):
    """Loss and gradient are the same where training draws no random numbers; else the loss is in expectation, and it is a function of
    the seed."""
    batch = batch_of(head)
    expected = head.loss(batch)
    expected.total.backward()
    gradients = [p.grad for p in head.parameters()]

    def drawn(seed: int):
        torch.manual_seed(seed)
        return head.loss(batch)

    head.zero_grad()
    head.train()
    first = drawn(0)
    assert torch.equal(first.loss_K, drawn(0).loss_K) and torch.equal(first.count_K, expected.count_K)
    if torch.equal(first.loss_K, drawn(1).loss_K):
        assert torch.equal(first.loss_K, expected.loss_K)
        first.total.backward()
        assert all(torch.equal(p.grad, gradient) for p, gradient in zip(head.parameters(), gradients, strict=True))
        return
    with torch.no_grad():
        loss_NK = torch.stack([drawn(seed).loss_K for seed in range(200)])
    error_K = loss_NK.mean(0) - expected.loss_K
    assert (error_K.abs() <= 5 * loss_NK.std(0) / len(loss_NK) ** 0.5 + 1e-4).all()


def test_only_the_right_teachers_move_the_loss(head):
    """Perturb the teacher of each position: exactly those that predict a supervised token of this document matter."""
    if head.needs_last != "supervised":
        pytest.skip("the state is an input too: see test_causality; or is not read at all: batch_of gives none")
    batch = batch_of(head, (9, 7))
    before = head.loss(batch).loss_K.sum()
    for t in range(len(batch.token_ids_T)):
        last = batch.last_TD.clone()
        last[t] += torch.randn(SPEC.hidden_size, dtype=last.dtype)
        moved = not torch.equal(head.loss(dataclasses.replace(batch, last_TD=last)).loss_K.sum(), before)
        start, end = (0, 9) if t < 9 else (9, 16)
        assert moved == (t > start and t + 1 < end and bool(batch.loss_mask_T[t + 1]))


def test_causality(head):
    """Drafts of row t depend on tokens up to t+1 and states up to t of their own document, and on nothing else."""
    batch = batch_of(head, (8, 7))
    tokens, log_q = head.propose(batch, 3)
    for t in (2, 5, 10):
        changed = copied(batch)
        changed.token_ids_T[t + 2 : 8 if t < 8 else None] = 7
        for states in (changed.last_TD, changed.taps_TLD, *changed.kv):
            if states is not None:
                states[t + 1 : 8 if t < 8 else None] = 1.0
        other_tokens, other_log_q = head.propose(changed, 3)
        start = 0 if t < 8 else 8
        assert torch.equal(tokens[start : t + 1], other_tokens[start : t + 1])
        torch.testing.assert_close(log_q[start : t + 1], other_log_q[start : t + 1])
        assert not torch.equal(log_q[t + 1 :], other_log_q[t + 1 :])


@pytest.mark.parametrize("supervised", ["answers", "everything"])
def test_documents_are_isolated_and_packing_changes_nothing(head, supervised):
    """Also where the next document begins with a supervised token: its ends are a rule, not the luck that prompts come first."""
    batch = batch_of(head)
    if supervised == "everything":
        batch.loss_mask_T[:] = True
    parts = [head.eval().loss(document(batch, i)) for i in range(3)]
    out = head.loss(batch)
    torch.testing.assert_close(out.loss_K, torch.stack([part.loss_K for part in parts]).sum(0))
    assert torch.equal(out.count_K, sum(part.count_K for part in parts)) and torch.equal(out.count_K, head.count(batch))
    for name, pair in out.metrics.items():
        assert all(torch.equal(whole, sum(part.metrics[name][i] for part in parts)) for i, whole in enumerate(pair))


def test_unsupervised_documents_change_neither_loss_nor_count(head):
    """The mean is over supervised positions: what else lies in the pack, and how far it is padded for attention, does not matter."""
    batch = batch_of(head, (9, 30, 7))
    batch.loss_mask_T[9:39] = False
    alone = [head.loss(document(batch, i)) for i in (0, 2)]
    out = head.loss(batch)
    assert torch.equal(out.count_K, alone[0].count_K + alone[1].count_K)
    torch.testing.assert_close(out.loss_K, alone[0].loss_K + alone[1].loss_K)


def test_gradients_of_packed_and_split_batches_agree(head):
    batch = batch_of(head)
    head.loss(batch).total.backward()
    packed = [p.grad.clone() for p in head.parameters()]
    head.zero_grad()
    for i in range(3):
        head.loss(document(batch, i)).total.backward()
    for name, a, p in zip(dict(head.named_parameters()), packed, head.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, msg=lambda m, n=name: f"{n}: {m}", rtol=1e-5, atol=1e-5)


def test_every_parameter_learns_and_frozen_parts_do_not(head):
    frozen = head.frozen
    copies = [x.clone() for x in (frozen.embed_VD, frozen.lm_head_VD)]
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    mean_loss(head, batch_of(head)).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in head.parameters())
    optimizer.step()
    for before, after in zip(copies, (frozen.embed_VD, frozen.lm_head_VD), strict=True):
        assert torch.equal(before, after) and not after.requires_grad
    for name, value in head.state_dict().items():
        for part in (frozen.embed_VD, frozen.lm_head_VD):
            shared = value.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
            assert not shared and not torch.equal(value, part), f"{name} is the target's: that must not enter the head's state"


def test_a_depth_worked_out_again_has_the_same_gradient_and_keeps_less(head):
    """Bit for bit: the same operations in the same order."""
    if head.recompute is None:
        return
    batch, found, kept = batch_of(head), [], []

    def keep(x):
        kept[-1] += x.nbytes
        return x

    for again in (False, True):
        head.recompute = again
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            torch.manual_seed(0)
            out = head.train().loss(batch)
        found.append([out.loss_K, *torch.autograd.grad(out.total, list(head.parameters()), allow_unused=True)])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert kept[1] < kept[0] / 2


def test_gradient_is_that_of_the_loss(head):
    """Directional derivative against a finite difference, in float64: covers the hand-written backwards."""
    if head.self_labelled:
        pytest.skip("what its gradient takes as constants moves with the parameters: held against autograd in the head's own tests")
    batch = batch_of(head)
    torch.manual_seed(3)
    directions = [torch.randn_like(p) for p in head.parameters()]
    mean_loss(head, batch).backward()
    analytic = sum((p.grad * d).sum() for p, d in zip(head.parameters(), directions, strict=True))
    values, h = [], 3e-4  # the value is float32: smaller ones drown in its rounding
    for sign in (1, -1):
        with torch.no_grad():
            for p, d in zip(head.parameters(), directions, strict=True):
                p += sign * h * d
            values.append(mean_loss(head, batch).double())
            for p, d in zip(head.parameters(), directions, strict=True):
                p -= sign * h * d
    torch.testing.assert_close(analytic, (values[0] - values[1]) / (2 * h), rtol=5e-3, atol=1e-3)


def test_training_and_drafting_agree(head):
    """Where the text is the head's own drafts, the training pass must predict exactly what `propose` proposed."""
    t, K = 5, head.depths
    batch = batch_of(head, (t + 2 + K,))
    for k in range(K):  # write the drafts of row t into the text behind it
        drafts, _ = head.propose(batch, K)
        batch.token_ids_T[t + 2 + k] = drafts[t, k]
    head.eval()
    # A teacher that is certain of the drafted token, and the only label of depth k: row t must hit it.
    certain = torch.linalg.pinv(head.frozen.lm_head_VD)[:, drafts[t]].T * 50
    for k in range(K):
        one = copied(batch)
        one.loss_mask_T[:] = False
        one.loss_mask_T[t + 2 if head.contiguous else t + 2 + k : t + 3 + k] = True
        if one.last_TD is not None:  # else the text's own token is what must be hit
            one.last_TD[t + 1 + k] = certain[k]  # read as a teacher alone: row t and those before it see no later state
        value, count = head.loss(one).metrics["hit"]
        assert value[k] == count[k] == 1


def test_out_of_vocabulary_counts_as_rejected():
    conf = next(c for c in head_confs().values() if c.get("draft_vocab_size"))
    head = ready(conf).eval()
    batch = batch_of(head)
    odd = torch.linalg.pinv(head.frozen.lm_head_VD)[:, 1] * 100  # the target always says 1, which no draft id maps to
    batch.last_TD = odd.expand_as(batch.last_TD).contiguous()
    for value, count in head.loss(batch).metrics.values():
        assert value.sum() == 0 and count.sum() > 0


def test_export_names_every_parameter_once(head):
    export = head.export()
    engine_names = [*export.names.values(), *export.extra]
    assert len(set(engine_names)) == len(engine_names)
    assert set(export.names) == {n for n in head.state_dict() if n != "draft_ids_U"}
    head.target = dataclasses.replace(SPEC, head_dim=SPEC.hidden_size // SPEC.num_heads)  # no engine serves every shape of every head
    serving = head.serving(3)
    assert serving["method"] and serving["num_speculative_tokens"] == 3


def test_a_trained_lm_head_starts_as_the_targets_rows(head):
    head.start_from(head.frozen)
    own = getattr(head, "lm_head", None)
    if own is not None and own.in_features == SPEC.hidden_size:  # one of another width has room for no row of the target's
        assert torch.equal(head.lm_head.weight, head.teacher_UD)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_target_": "os.system"}, "must start with 'heads.'"),
        ({"_target_": "heads.nothing.Head"}, "does not exist"),
        ({"_target_": "heads.layers.MLP"}, "is not a DraftHead"),
        ({"num_heads": 3}, "unknown keys in head: num_heads"),
        ({"depths": 0}, "at least 1"),
        ({"taps": [3, 2, 1]}, "must ascend"),
        ({"taps": [1, 2, 9]}, "within 0..4"),
    ],
)
def test_bad_head_settings_say_what_is_known(change, words):
    with pytest.raises(ValueError, match=words):
        build(head_confs()["eagle3"] | change, SPEC)
