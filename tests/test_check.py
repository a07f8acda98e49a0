"""A store that is not what it says: each way of going wrong is put in on purpose, and recognised by name."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import refused

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


def damaged_store(folder, how):
    """Damages the store in `folder`. Returns the words that say it."""
    path, shards = folder / "manifest.json", sorted(folder.glob("shard-*"))
    manifest = json.loads(path.read_text())
    if how == "cut":
        shards[0].write_bytes(shards[0].read_bytes()[:-100])
        return [shards[0].name, "bytes, the manifest says", "launch/capture.py"]
    if how == "missing":
        shards[0].unlink()
        return [shards[0].name, "is missing", "launch/capture.py"]
    if how == "swapped":  # with another of as many bytes, as of another store
        data = shards[0].read_bytes()
        shards[0].write_bytes(data[:-8] + data[:8])
        return [shards[0].name, "checksum", "launch/capture.py"]
    if how == "newer":
        path.write_text(json.dumps(manifest | {"format_version": 2}))
        return ["manifest.json", "format version 2, this program reads 1", "newer version", "launch/capture.py"]
    if how == "cut manifest":
        path.write_text(path.read_text()[:-50])
        return ["manifest.json", "not a store manifest", "launch/capture.py"]
    path.unlink()
    return ["manifest.json", "no such file", "launch/capture.py"]


@pytest.mark.parametrize("how", ["cut", "missing", "swapped", "newer", "cut manifest", "no manifest"])
def test_a_damaged_store_is_told_in_one_line(target, sequences, tmp_path, how):
    write(tmp_path, target, sequences)
    words = damaged_store(tmp_path / "train", how)
    refused(lambda: check.check_store(tmp_path / "train", check.Reference(target), tmp_path / "none", 1), *words)


def test_a_shard_of_another_store_is_told_even_where_the_manifest_lists_it(target, sequences, tmp_path):
    """Its file and its line of the manifest both come from a store of another target: the checksum is right, the states are not."""
    write(tmp_path / "ours", target, sequences)
    write(tmp_path / "other", target, sequences, lambda name, **x: x | {"taps": torch.randn_like(x["taps"]), "last": x["last"].flip(0)})
    ours, other = tmp_path / "ours/train", tmp_path / "other/train"
    (ours / "shard-00000.safetensors").write_bytes((other / "shard-00000.safetensors").read_bytes())
    refused(lambda: check.check_store(ours, check.Reference(target), tmp_path / "none", 1), "shard-00000", "checksum")
    manifest = json.loads((ours / "manifest.json").read_text())
    (ours / "manifest.json").write_text(json.dumps(manifest | {"shards": json.loads((other / "manifest.json").read_text())["shards"]}))
    faults, _, _ = check.check_store(ours, check.Reference(target), tmp_path / "none", 4)
    assert {fault.cause for fault in faults} == {"tap", "last"}
