"""The offline chain against a simulated engine, at the ends of answers too, and from a store."""

import random

import pytest
import torch

from data.store import Store, StoreWriter
from eval.chain import chain, offline, unjudged
from heads.base import Batch, DraftHead

V, K = 5, 3


def next_token(prefix: list[int]) -> int:
    """A target: its next token is a fixed function of the last three."""
    return (prefix[-1] * 3 + prefix[-2] * 2 + prefix[-3] + len(prefix) // 7) % V


def drafts_for(prefix: list[int], k: int) -> list[int]:
    """A head that is often right: it errs where the length says so, and then goes on from its own draft."""
    text = list(prefix)
    for _ in range(k):
        text.append((next_token(text) + (len(prefix) * 7 + len(text)) % 3 // 2) % V)
    return text[len(prefix) :]


def write_on(prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
    return text


def simulate_engine(prompt: list[int], max_tokens: int, k: int) -> list[int]:
    """Decodes by drafting and verifying, pass by pass. Accepted drafts are counted before the output is cut at max_tokens."""
    text, accepted = write_on(prompt, 1), []
    while len(text) - len(prompt) < max_tokens:
        count = 0
        for draft in drafts_for(text, k):
            if draft != next_token(text):
                break
            text.append(draft)
            count += 1
        text.append(next_token(text))
        accepted.append(count)
    return accepted


def all_drafts(text: list[int], k: int) -> torch.Tensor:
    """Row t: drafts once x_0..x_{t+1} are known, as DraftHead.propose has it; the last row is meaningless."""
    rows = [drafts_for(text[: t + 2], k) if t else [V] * k for t in range(len(text) - 1)]  # the toy target needs three tokens
    return torch.tensor([*rows, [V] * k])


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 24, 60])
def test_chain_counts_what_the_engine_counts(k, max_tokens):
    for seed in range(6):
        prompt = [random.Random(seed).randrange(V) for _ in range(4 + seed)]
        text = write_on(prompt, max_tokens + k)
        end = len(prompt) + max_tokens
        found = chain(all_drafts(text[:end], k), text, len(prompt), end)
        assert found == simulate_engine(prompt, max_tokens, k)
        assert unjudged(found, k, len(prompt), len(text)) == 0, "the continuation is known, so every draft is judged"


@pytest.mark.parametrize("max_tokens", [2, 5, 9, 33])
def test_without_the_continuation_the_engine_lies_within_the_unjudged_drafts(max_tokens):
    doubtful = 0
    for seed in range(30):
        prompt = [random.Random(seed).randrange(V) for _ in range(4 + seed % 7)]
        text = write_on(prompt, max_tokens)
        found, engine = chain(all_drafts(text, K), text, len(prompt)), simulate_engine(prompt, max_tokens, K)
        unknown = unjudged(found, K, len(prompt), len(text))
        assert found[:-1] == engine[:-1]
        assert found[-1] <= engine[-1] <= found[-1] + unknown
        doubtful += unknown > 0
    assert 0 < doubtful < 30


def test_a_one_token_answer_has_no_pass():
    assert chain(torch.zeros(4, K, dtype=torch.long), [1, 2, 3, 4], start=3) == []


class Known(DraftHead):
    """Drafts known rows, whatever the states."""

    needs_last = "all"

    def propose(self, batch: Batch, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert batch.last_TD is not None and batch.last_TD.shape == (len(batch.token_ids_T), 4)
        drafts_Tk = all_drafts(batch.token_ids_T.tolist(), k)
        return drafts_Tk, torch.zeros(drafts_Tk.shape)


def test_offline_pools_over_answers_of_a_store(tmp_path):
    manifest = {
        "target": {"id": "toy", "revision": None, "fingerprint": "toy", "dtype": "float32"},
        "tokenizer_hash": "", "template_hash": "", "taps": [], "hidden_size": 4, "last": "all", "dtype": "float32",
        "engine": {"name": "toy", "version": "0"},
    }  # fmt: skip
    answers, expected = [], []
    with StoreWriter(tmp_path / "states", manifest) as writer:
        for i, max_tokens in enumerate((12, 30, 1, 7)):
            prompt = [random.Random(i).randrange(V) for _ in range(5 + i)]
            text = write_on(prompt, max_tokens + K)
            whole, end = torch.tensor(text), len(prompt) + max_tokens
            answers.append({"id": f"a{i}", "prompt_ids": prompt, "response_ids": text[len(prompt) : end], "tail_ids": text[end:]})
            mask = torch.arange(end) >= len(prompt)
            writer.add(f"a{i}", whole[:end], mask, None, torch.zeros(end, 4))
            expected += simulate_engine(prompt, max_tokens, K)
    found = offline(Known(), Store(tmp_path / "states"), list(reversed(answers)), K, torch.device("cpu"), torch.float32)
    assert found["accepted_per_position"] == [sum(a > i for a in expected) for i in range(K)]
    assert (found["drafts"], found["answers"], found["unjudged_drafts"]) == (len(expected), 4, 0)
    assert found["acceptance_length"] == pytest.approx(1 + sum(expected) / len(expected))
