"""A store that is not what it says: each way of going wrong is put in on purpose, and recognised by name."""

from __future__ import annotations

import json

import pytest
import torch

from data import check
from data.builtin import build_tiny
from data.errors import UserError
from data.identity import identity
from data.store import StoreWriter
from train.config import TargetConfig

TAPS = (0, 1, 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("check") / "target")


@pytest.fixture(scope="module")
def sequences(target):
    """(id, token ids, prompt length, streams, last), answers sampled from the target itself at temperature 1."""
    reference = check.Reference(target)
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(4):
        ids = torch.randint(3, 500, (6,), generator=generator)
        for _ in range(30):
            _, last = reference.states(ids)
            ids = torch.cat([ids, torch.multinomial((last[-1] @ reference.lm_head_VD.T).softmax(-1), 1, generator=generator)])
        found.append((f"s{i}", ids, 6, *reference.states(ids)))
    return found


def write(folder, target, sequences, change=lambda name, **x: x, dtype="float32"):
    manifest = {**identity(target, TargetConfig(model=str(target), dtype="float32")), "taps": list(TAPS), "hidden_size": 64, "last": "all"}
    with StoreWriter(folder / "train", {**manifest, "dtype": dtype, "engine": {"name": "t", "version": "0"}}) as writer:
        for name, ids, start, streams, last in sequences:
            mask = torch.arange(len(ids)) >= start
            item = change(name, ids=ids, mask=mask, taps=streams[:, list(TAPS)], last=last, streams=streams)
            writer.add(name, item["ids"], item["mask"], item["taps"].contiguous(), item["last"].contiguous())
    answers = [
        {"id": n, "prompt_ids": x[:s].tolist(), "response_ids": x[s:].tolist(), "finish_reason": "length"} for n, x, s, *_ in sequences
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return check.check_store(folder / "train", check.Reference(target), folder / "train.jsonl", 3)


def test_a_sound_store_has_no_fault(target, sequences, tmp_path):
    faults, figures, holds = write(tmp_path, target, sequences)
    assert not faults and figures["argmax"] == 1 and abs(figures["surprise"]) < check.OFF_POLICY
    assert all(figures[f"tap {t}"] < 1e-5 for t in TAPS) and "4 sequences, 144 tokens, 120 supervised" in holds


def test_compact_taps_are_no_fault_and_their_loss_is_told(target, sequences, tmp_path):
    faults, figures, holds = write(tmp_path, target, sequences, dtype="fp8")
    assert not faults and all(0.02 < figures[f"tap {t}"] < 0.03 for t in TAPS) and figures["last"] < 0.005 and '"fp8"' in holds


WRONG = {
    "tap": lambda name, **x: x | {"taps": x["streams"][:, [0, 2, 2]]},
    "norm": lambda name, **x: x | {"last": x["streams"][:, -1]},
    "slot": lambda name, **x: x | {"last": x["last"].roll(1, 0)},
    "last": lambda name, **x: x | {"last": torch.randn_like(x["last"])},
    "mask": lambda name, **x: x | {"mask": x["mask"].roll(1)},
}


@pytest.mark.parametrize("cause", WRONG)
def test_each_fault_is_named(target, sequences, tmp_path, cause):
    faults, _, _ = write(tmp_path, target, sequences, WRONG[cause])
    assert {fault.cause for fault in faults} == {cause}, faults


@pytest.mark.parametrize(("change", "cause", "words"), [
    (lambda taps, streams: taps.roll(1, 0), "slot", "one token early"),
    (lambda taps, streams: taps.roll(-1, 0), "slot", "one token late"),
    (lambda taps, streams: streams[:, [1, 2, 0]], "tap", "layer "),
    (lambda taps, streams: torch.randn_like(taps), "tap", "nor is it any other layer's"),
])  # fmt: skip
def test_taps_are_told_by_what_they_are_instead(target, sequences, tmp_path, change, cause, words):
    faults, _, _ = write(tmp_path, target, sequences, lambda name, **x: x | {"taps": change(x["taps"], x["streams"])})
    assert [fault.cause for fault in faults] == [cause] * len(TAPS) and all(words in fault.text for fault in faults)


def test_a_text_of_another_hand_is_off_policy(target, sequences, tmp_path):
    generator, reference = torch.Generator().manual_seed(9), check.Reference(target)
    texts = []
    for name, ids, start, *_ in sequences:  # the target's least likely tokens
        for t in range(start, len(ids)):
            _, last = reference.states(ids[:t])
            worst = (last[-1] @ reference.lm_head_VD.T).topk(200, largest=False).indices
            ids = torch.cat([ids[:t], worst[torch.randint(200, (1,), generator=generator)], ids[t + 1 :]])
        texts.append((name, ids, start, *reference.states(ids)))
    faults, _, _ = write(tmp_path, target, texts)
    assert {fault.cause for fault in faults} == {"off-policy"}
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "train.meta.json").write_text('{"answers": "given"}')  # then it was meant
    assert not write(tmp_path / "given", target, texts)[0]


def test_another_template_and_other_weights_are_named(target, sequences, tmp_path):
    write(tmp_path, target, sequences)
    path = tmp_path / "train/manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"template_hash": "0"}))
    faults, _, _ = check.check_store(tmp_path / "train", check.Reference(target), tmp_path / "none", 1)
    assert {fault.cause for fault in faults} == {"template"}
    manifest["target"]["fingerprint"] = "0"
    path.write_text(json.dumps(manifest))
    faults, _, _ = check.check_store(tmp_path / "train", check.Reference(target), tmp_path / "none", 1)
    assert {fault.cause for fault in faults} == {"target"}


def test_a_changed_byte_is_found(target, sequences, tmp_path):
    write(tmp_path, target, sequences)
    shard = next((tmp_path / "train").glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(UserError, match=shard.name):
        check.check_store(tmp_path / "train", check.Reference(target), tmp_path / "none", 1)
