"""Draft vocabularies hold the most frequent labels, exactly as many as asked for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import UserError
from data.store import Store, StoreWriter
from data.vocab import count_supervised, coverage, draft_vocab

MANIFEST = {
    "target": {"id": "t", "revision": None, "fingerprint": "f0", "dtype": "float32", "quantisation": None},
    "tokenizer_hash": "tok",
    "template_hash": "tpl",
    "taps": [],
    "hidden_size": 4,
    "last": "none",
    "dtype": "float32",
    "engine": {"name": "vllm", "version": "0.32.0"},
}


def store_of(folder, *documents):
    with StoreWriter(folder, MANIFEST) as writer:
        for i, (ids, mask) in enumerate(documents):
            writer.add(str(i), torch.tensor(ids), torch.tensor(mask, dtype=torch.bool))
    return Store(folder)


def test_only_labels_are_counted(tmp_path):
    """Token 7 is a prompt token, and the first of a document although its mask is set: neither is a label."""
    store = store_of(tmp_path, ([7, 7, 3, 3, 5], [0, 0, 1, 1, 1]), ([7, 3], [1, 1]), ([1, 2], [0, 0]))
    counts = count_supervised(store, 9)
    assert counts.tolist() == [0, 0, 0, 3, 0, 1, 0, 0, 0] and counts.sum() == store.manifest["supervised_tokens"]


def test_a_token_beyond_the_vocabulary_names_the_sequence(tmp_path):
    store = store_of(tmp_path, ([1, 2], [0, 1]), ([1, 9], [0, 1]))
    with pytest.raises(UserError, match=r"sequence 1 \(1\) holds token 9"):
        count_supervised(store, 9)


def test_most_counted_first_ties_by_id_and_sorted():
    counts = torch.tensor([0, 5, 2, 2, 9, 2, 0])
    assert draft_vocab(counts, 3).tolist() == [1, 2, 4]
    assert draft_vocab(counts, 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert draft_vocab(counts, 3, keep=[6, 0]).tolist() == [0, 4, 6]
    assert draft_vocab(counts, 7).tolist() == list(range(7))
    assert counts.tolist() == [0, 5, 2, 2, 9, 2, 0]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.data())
def test_no_left_out_token_is_counted_more_than_a_chosen_one(counts, data):
    size = data.draw(st.integers(1, len(counts)))
    keep = data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=size))
    ids = draft_vocab(torch.tensor(counts), size, keep).tolist()
    assert len(ids) == size and ids == sorted(set(ids)) and set(keep) <= set(ids)
    free = [(-counts[i], i) for i in set(ids) - set(keep)]
    out = [(-counts[i], i) for i in set(range(len(counts))) - set(ids)]
    assert not free or not out or max(free) < min(out)


@pytest.mark.parametrize(("size", "keep"), [(0, ()), (8, ()), (1, (2, 3)), (3, (7,)), (3, (-1,))])
def test_a_size_that_cannot_be_met_is_refused(size, keep):
    with pytest.raises(UserError, match="draft vocabulary"):
        draft_vocab(torch.ones(7), size, keep)


def test_coverage_is_the_share_of_labels():
    assert coverage(torch.tensor([6, 0, 3, 1]), torch.tensor([0, 3])) == pytest.approx(0.7)
    assert coverage(torch.zeros(4, dtype=torch.int64), torch.tensor([0])) == 0.0
