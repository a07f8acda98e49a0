"""Batches are a pure function of the step, hold every sequence once per epoch at any world size, and equal the store."""

import itertools
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import store_manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import Batches, pack
from data.errors import UserError
from data.store import Store, StoreWriter

TAPS, D, MICRO, LONG = (1, 3), 8, 64, 90
MANIFEST = store_manifest(TAPS, D)
SEQUENCES = 37


def make_store(folder, lengths, label_from=2):
    """Document i of n tokens: its first token is i, so that a batch tells which documents it holds."""
    generator = torch.Generator().manual_seed(0)
    with StoreWriter(folder, MANIFEST, shard_tokens=150) as writer:
        for i, n in enumerate(lengths):
            ids = torch.cat([torch.tensor([i]), torch.randint(1000, 2000, (n - 1,), generator=generator)])
            states = torch.randn(n, len(TAPS) + 1, D, generator=generator)
            writer.add(str(i), ids, torch.arange(n) >= label_from, states[:, :2], states[:, 2])
    return Store(folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(3)
    return make_store(tmp_path_factory.mktemp("store"), [*rng.integers(4, 40, SEQUENCES - 1).tolist(), LONG])


def batches(store, rank=0, world=1, seed=5, micro_tokens=MICRO, max_length=4096, taps=TAPS):
    return Batches(store, taps, micro_tokens, seed, rank, world, max_length)


def documents(batch):
    return batch.token_ids_T[batch.offsets_S1[:-1]].tolist()


def same(a, b):
    pairs = [(a.token_ids_T, b.token_ids_T), (a.loss_mask_T, b.loss_mask_T), (a.offsets_S1, b.offsets_S1)]
    return all(torch.equal(x, y) for x, y in [*pairs, (a.taps_TLD, b.taps_TLD), (a.last_TD, b.last_TD)])


def stream(store, world, accum, steps, seed=5):
    """The micro-batches of all ranks, in the order of the global row: number j of a step on rank j % world."""
    ranks = [batches(store, rank, world, seed) for rank in range(world)]
    for i in range(steps):
        parts = [rank.step(i, accum) for rank in ranks]
        assert all(len(part) == accum for part in parts)
        for j in range(world * accum):
            yield parts[j % world][j // world]


@pytest.mark.parametrize("share", [2, 3, 5])
def test_ranks_that_share_a_batch_split_its_labels_in_equal_runs(store, share):
    """Each with the documents of its labels up to the last of them; together they hold every label once."""
    accum, ranks = 2, [Batches(store, TAPS, MICRO, 5, rank, 2 * share, 4096, share) for rank in range(2 * share)]
    wholes = [batches(store, group, 2) for group in range(2)]
    for i in range(4):
        assert sum(rank.tokens(i, accum) for rank in ranks) == pytest.approx(sum(whole.tokens(i, accum) for whole in wholes))
        assert all(rank.sequences(i, accum) == wholes[0].sequences(i, accum) for rank in ranks)
        for group, whole in enumerate(wholes):
            for micro, batch in enumerate(whole.step(i, accum)):
                rows = {doc: (batch.offsets_S1[s], batch.offsets_S1[s + 1]) for s, doc in enumerate(documents(batch))}
                seen = torch.zeros_like(batch.loss_mask_T, dtype=torch.int64)
                parts = [rank.step(i, accum)[micro] for rank in ranks[group * share : (group + 1) * share]]
                counts = [int(part.loss_mask_T.sum()) for part in parts]
                assert max(counts) - min(counts) <= 1
                for part in parts:
                    ends = part.offsets_S1.tolist()
                    for doc, start, end in zip(documents(part), ends[:-1], ends[1:], strict=True):
                        first = int(rows[doc][0])
                        here = slice(first, first + end - start)
                        assert torch.equal(part.token_ids_T[start:end], batch.token_ids_T[here])
                        assert torch.equal(part.taps_TLD[start:end], batch.taps_TLD[here])
                        assert torch.equal(part.last_TD[start:end], batch.last_TD[here])
                        assert part.loss_mask_T[end - 1] or not any(part.loss_mask_T)
                        seen[here] += part.loss_mask_T[start:end]
                assert torch.equal(seen, batch.loss_mask_T.long())


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("accum", [1, 2])
def test_every_sequence_once_per_epoch_at_any_world_size(store, world, accum):
    epochs = 3
    steps = epochs * SEQUENCES // (world * accum) + 3  # at least: each micro-batch holds a sequence
    seen = itertools.chain.from_iterable(documents(batch) for batch in stream(store, world, accum, steps))
    orders = [list(itertools.islice(seen, SEQUENCES)) for _ in range(epochs)]
    assert all(sorted(order) == list(range(SEQUENCES)) for order in orders)
    assert len({tuple(order) for order in orders}) == epochs


def test_an_epoch_may_be_smaller_than_a_step(store):
    seen = [document for batch in stream(store, 3, 40, 1) for document in documents(batch)]
    whole = len(seen) // SEQUENCES
    assert whole >= 2 and all(sorted(seen[i * SEQUENCES :][:SEQUENCES]) == list(range(SEQUENCES)) for i in range(whole))


@pytest.mark.parametrize("start", [0, 7, 60])
def test_a_step_is_the_same_alone_and_after_those_before_it(store, start):
    walked = batches(store, rank=1, world=2)
    for i in range(start + 1):
        last = walked.step(i, 2)
    assert all(same(a, b) for a, b in zip(last, batches(store, rank=1, world=2).step(start, 2), strict=True))


@pytest.mark.parametrize(("world", "accum"), [(2, 1), (2, 2), (4, 1), (1, 4)])
def test_ranks_and_accumulation_split_the_same_row_of_micro_batches(store, world, accum):
    steps = 30
    alone = list(stream(store, 1, world * accum, steps))
    split = list(stream(store, world, accum, steps))
    assert len(alone) == len(split) and all(same(a, b) for a, b in zip(alone, split, strict=True))


def test_another_seed_gives_another_order(store):
    a, b = ([documents(batch) for batch in stream(store, 1, 1, 10, seed)] for seed in (5, 6))
    assert a != b


def test_a_batch_equals_the_store_document_by_document(store):
    for batch in stream(store, 1, 1, 40):
        assert batch.token_ids_T.dtype == torch.int64 and batch.loss_mask_T.dtype == torch.bool
        assert batch.offsets_S1.dtype == torch.int64 and batch.taps_TLD.dtype == batch.last_TD.dtype == torch.bfloat16
        for i, (a, b) in zip(documents(batch), itertools.pairwise(batch.offsets_S1.tolist()), strict=True):
            stored = store.get(i, TAPS)
            assert torch.equal(batch.token_ids_T[a:b], stored["token_ids"]) and torch.equal(batch.loss_mask_T[a:b], stored["loss_mask"])
            assert torch.equal(batch.taps_TLD[a:b], stored["taps"]) and torch.equal(batch.last_TD[a:b], stored["last"])


def test_micro_batches_keep_to_the_budget_and_only_a_single_long_document_exceeds_it(store):
    sizes = [(len(batch.token_ids_T), len(documents(batch))) for batch in stream(store, 1, 1, 60)]
    assert all(tokens <= MICRO or count == 1 for tokens, count in sizes)
    assert any(tokens == LONG for tokens, _ in sizes) and any(count > 2 for _, count in sizes)


def test_like_lengths_are_packed_together(tmp_path):
    store = make_store(tmp_path, [n for _ in range(20) for n in (5, 50)])
    plan = [batches(store, micro_tokens=100).step(i, 1)[0].offsets_S1.diff().tolist() for i in range(11)]
    assert sum(len(set(lengths)) > 1 for lengths in plan) <= 1


def test_long_documents_are_cut_counted_and_keep_their_first_tokens(store):
    cut = batches(store, max_length=20)
    assert cut.cut == int((store.lengths > 20).sum()) > 0 and cut.skipped == 0
    for batch in cut.validation():
        assert batch.offsets_S1.diff().max() <= 20
        for i, a, n in zip(documents(batch), batch.offsets_S1.tolist(), batch.offsets_S1.diff().tolist(), strict=False):
            stored = store.get(i, TAPS)
            assert n == min(20, int(store.lengths[i])) and torch.equal(batch.token_ids_T[a : a + n], stored["token_ids"][:n])
            assert torch.equal(batch.last_TD[a : a + n], stored["last"][:n])


def test_documents_without_a_label_are_left_out_and_counted(tmp_path):
    """Label positions start at 6: documents of 4 and 6 tokens have none; a cut at 6 leaves none at all."""
    store = make_store(tmp_path, [4, 10, 6, 12], label_from=6)
    some = batches(store)
    assert some.skipped == 2 and sorted(d for batch in some.validation() for d in documents(batch)) == [1, 3]
    with pytest.raises(UserError, match=r"none of its 4 sequences.*max_length=6.*launch/capture\.py"):
        batches(store, max_length=6)


def test_an_empty_store_is_refused(tmp_path):
    with pytest.raises(UserError, match="none of its 0 sequences"):
        batches(make_store(tmp_path, []))


def test_the_first_token_of_a_document_is_never_a_label(tmp_path):
    """Else the last state of the document before it in the pack would be trained to predict it."""
    store = make_store(tmp_path, [10, 12, 14], label_from=0)
    (batch,) = batches(store).step(0, 1)
    assert not batch.loss_mask_T[batch.offsets_S1[:-1]].any() and int(batch.loss_mask_T.sum()) == 9 + 11 + 13
    assert store.get(0, ())["loss_mask"][0]


def test_what_goes_to_a_gpu_lies_in_pinned_memory(store, monkeypatch):
    plain, empty, pinned = batches(store).step(0, 1)[0], torch.empty, []

    def recorded(*args, pin_memory=False, **kwargs):
        found = empty(*args, **kwargs)
        return pinned.append(found.data_ptr()) or found if pin_memory else found

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", recorded)
    batch = batches(store).step(0, 1)[0]
    assert same(batch, plain)
    assert all(x.data_ptr() in pinned for x in (batch.token_ids_T, batch.loss_mask_T, batch.taps_TLD, batch.last_TD))


def test_a_head_without_taps_gets_none(store):
    assert batches(store, taps=()).step(0, 1)[0].taps_TLD is None


@pytest.mark.parametrize("world", [1, 2, 3, 50])
def test_validation_holds_every_sequence_once_over_all_ranks(store, world):
    parts = [list(batches(store, rank, world).validation()) for rank in range(world)]
    seen = Counter(document for part in parts for batch in part for document in documents(batch))
    assert seen == Counter(range(SEQUENCES))
    assert sum(len(part) for part in parts) == len(list(batches(store).validation()))
    one = [documents(batch) for batch in batches(store).validation()]
    assert [document for run in one for document in run] == list(range(SEQUENCES))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 30), max_size=60), st.integers(1, 40))
def test_packing_keeps_order_drops_nothing_and_opens_no_batch_early(lengths, budget):
    runs = pack(range(len(lengths)), np.array(lengths, dtype=np.int64), budget)
    assert [i for run in runs for i in run] == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in run) for run in runs]
    assert all(run and (total <= budget or len(run) == 1) for run, total in zip(runs, totals, strict=True))
    assert all(total + lengths[run[0]] > budget for total, run in zip(totals, runs[1:], strict=False))


class Stub:
    """Only lengths: the plan needs nothing else of a store."""

    def __init__(self, lengths, first_labels):
        self.folder, self.lengths, self.first_labels = "stub", np.array(lengths), np.array(first_labels)

    def __len__(self):
        return len(self.lengths)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(2, 3000), min_size=1, max_size=80), st.integers(1, 4000), st.integers(0, 2**31), st.integers(0, 5))
def test_a_plan_holds_each_sequence_once_for_any_lengths_and_budget(lengths, budget, seed, epoch):
    plan = Batches(Stub(lengths, [1] * len(lengths)), (), budget, seed, 0, 1, 2048)._plan_epoch(epoch)
    assert sorted(i for run in plan for i in run) == list(range(len(lengths)))
    assert all(sum(min(lengths[i], 2048) for i in run) <= budget or len(run) == 1 for run in plan)


def test_a_plan_of_several_windows_holds_each_sequence_once():
    lengths = np.random.default_rng(0).integers(2, 500, 5000)
    plan = Batches(Stub(lengths, np.ones_like(lengths)), (), 4096, 0, 0, 1, 2048)._plan_epoch(0)
    assert sorted(i for run in plan for i in run) == list(range(5000))
    assert lengths.sum() / (4096 * len(plan)) > 0.9  # micro-batches are well filled


def test_prefetch_gives_the_steps_in_order_and_measures_the_wait(store):
    source = batches(store)
    for i, got in zip(range(4, 9), source.prefetch(4, 9, 2), strict=True):
        assert all(same(a, b) for a, b in zip(got, source.step(i, 2), strict=True))
    assert source.waited > 0


def test_prefetch_raises_the_error_of_its_thread_at_the_step_it_belongs_to(tmp_path):
    store = make_store(tmp_path, [10] * 30)
    source = batches(store, micro_tokens=10)
    plan = [source._micro(i)[0] for i in range(30)]
    broken = store.manifest["shards"][-1]["file"]
    first_bad = next(i for i, member in enumerate(plan) if member >= 30 - store.manifest["shards"][-1]["sequences"])
    path = tmp_path / broken
    path.write_bytes(b"\0" * path.stat().st_size)
    steps = source.prefetch(0, 30, 1)
    for _ in range(first_bad):
        next(steps)
    with pytest.raises(UserError, match=rf"{broken}: cannot read sequence {plan[first_bad]} "):
        next(steps)


def test_prefetch_reads_ahead_two_steps_and_its_thread_ends_with_the_consumer(store):
    source, calls = batches(store), []
    step = source.step
    source.step = lambda i, accum: calls.append(i) or step(i, accum)
    steps = source.prefetch(0, 1000, 1)
    next(steps)
    time.sleep(0.3)
    assert calls[-1] <= 3  # one taken, two queued, one in hand
    steps.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_on_a_cpu_the_reading_thread_starts_no_others_and_leaves_the_training_its_own(store, monkeypatch):
    """More OpenMP threads than cores would keep those of the training from spinning, in which a fifth of its speed lies."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        source = batches(store)
        monkeypatch.setattr(source, "step", lambda i, accum: found.append(torch.get_num_threads()) or [])
        assert len(list(source.prefetch(0, 3, 1))) == 3
        assert found == [1, 1, 1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
