"""The store gives back what was put in, survives a kill at any moment, and refuses what does not fit."""

import json
import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from conftest import store_manifest
from safetensors.torch import load_file

from data.errors import UserError
from data.store import Store, StoreWriter, check_compatible, check_disk, label_rows, plan_bytes

D = 64
TAPS = (2, 5, 9)


def manifest(**changes):
    return store_manifest(TAPS, D) | changes


def sequence(i, last="supervised", dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(i)
    n = 5 + int(torch.randint(0, 60, (1,), generator=generator))
    mask = torch.rand(n, generator=generator) < 0.6
    mask[0] = False
    states = torch.randn(n, len(TAPS) + 1, D, generator=generator).to(dtype)
    ids = torch.randint(0, 1000, (n,), generator=generator)
    return f"chat-{i:04d}#0", ids, mask, states[:, : len(TAPS)], None if last == "none" else states[:, -1]


def write(folder, indices, shard_tokens=200, **changes):
    with StoreWriter(folder, manifest(**changes), shard_tokens=shard_tokens) as writer:
        for i in indices:
            if (item := sequence(i, changes.get("last", "supervised")))[0] not in writer.done:
                writer.add(*item)
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("last", ["none", "supervised", "all"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_round_trip_is_bitwise(tmp_path, last, dtype):
    kind = getattr(torch, dtype)
    with StoreWriter(tmp_path, manifest(last=last, dtype=dtype), shard_tokens=150) as writer:
        for i in range(20):
            writer.add(*sequence(i, last, kind))
    store = Store(tmp_path, verify=True)
    assert len(store.manifest["shards"]) > 2 and len(store) == 20
    for i in reversed(range(20)):
        name, ids, mask, taps, states = sequence(i, last, kind)
        got = store.get(i, TAPS)
        assert store.ids[i] == name and store.lengths[i] == len(ids)
        assert torch.equal(got["token_ids"], ids) and torch.equal(got["loss_mask"], mask) and got["loss_mask"].dtype == torch.bool
        assert torch.equal(got["taps"], taps) and got["taps"].dtype == kind
        if last == "none":
            assert got["last"] is None
        else:
            rows = label_rows(mask) if last == "supervised" else torch.ones_like(mask)
            assert torch.equal(got["last"], torch.where(rows[:, None], states, torch.zeros((), dtype=kind)))


def test_taps_come_in_the_order_asked_for_and_reads_stop_where_told(tmp_path):
    store = Store(write(tmp_path, range(8)))
    for i in range(8):
        _, ids, mask, taps, states = sequence(i)
        got = store.get(i, (9, 2), stop=4)
        assert torch.equal(got["taps"], taps[:4, [2, 0]]) and torch.equal(got["token_ids"], ids[:4])
        assert torch.equal(got["last"], torch.where(label_rows(mask)[:4, None], states[:4], torch.zeros((), dtype=torch.bfloat16)))
        assert store.get(i, ())["taps"] is None


def test_a_mask_that_starts_supervised_or_ends_unsupervised_keeps_rows_with_their_own_sequence(tmp_path):
    masks = [[True, False, False], [True, True, False], [False, False, True], [True], [False, True, True]]
    with StoreWriter(tmp_path, manifest()) as writer:
        for i, mask in enumerate(masks):
            states = torch.full((len(mask), D), float(i + 1))
            writer.add(str(i), torch.arange(len(mask)), torch.tensor(mask), torch.zeros(len(mask), 3, D), states)
    store = Store(tmp_path)
    for i, mask in enumerate(masks):
        rows = store.get(i, ())["last"][:, 0].tolist()
        assert rows == [float(i + 1) if t + 1 < len(mask) and mask[t + 1] else 0.0 for t in range(len(mask))]
    assert store.manifest["supervised_tokens"] == 0 + 1 + 1 + 0 + 2
    assert store.first_labels.tolist() == [3, 1, 2, 1, 1]


def test_the_writer_keeps_no_view_of_a_buffer_that_is_used_again(tmp_path):
    buffer = torch.ones(4, 3, D, dtype=torch.bfloat16)
    with StoreWriter(tmp_path, manifest(last="none")) as writer:
        writer.add("a", torch.arange(4), torch.ones(4, dtype=torch.bool), buffer)
        buffer.zero_()
    assert Store(tmp_path).get(0, TAPS)["taps"].eq(1).all()


def test_same_input_gives_the_same_bytes(tmp_path):
    assert contents(write(tmp_path / "a", range(20))) == contents(write(tmp_path / "b", range(20)))


@pytest.mark.parametrize("last", ["none", "supervised", "all"])
def test_bytes_on_disk_are_the_planned_bytes_within_one_percent(tmp_path, last):
    store = Store(write(tmp_path, range(60), shard_tokens=1000, last=last))
    plan = plan_bytes(store.manifest["tokens"], store.manifest["supervised_tokens"], len(TAPS), D, last, "bfloat16")
    disk = sum(path.stat().st_size for path in tmp_path.glob("shard-*"))
    assert plan <= disk <= 1.01 * plan


def test_whoever_may_read_the_manifest_may_read_the_shards(tmp_path):
    write(tmp_path, range(3))
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_no_padding_is_stored(tmp_path):
    write(tmp_path, range(10), shard_tokens=10**6)
    tensors = load_file(tmp_path / "shard-00000.safetensors")
    n = sum(len(sequence(i)[1]) for i in range(10))
    assert tensors["taps"].shape == (n, len(TAPS), D) and tensors["offsets"][-1] == n and tensors["token_ids"].dtype == torch.int32


class Killed(BaseException):
    pass


def dies_at_rename(monkeypatch, moment, folder):
    """Writes the store until rename number `moment`, which does not happen. Whether it came to that."""
    real, calls = Path.replace, 0

    def replace(self, target):
        nonlocal calls
        calls += 1
        if calls == moment:
            raise Killed
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        try:
            write(folder, range(20))
        except Killed:
            return True
    return False


def test_killed_before_any_rename_the_store_is_valid_and_a_second_run_completes_it(tmp_path, monkeypatch):
    """Renames alternate between shards and manifests; before each of them the folder must hold what its manifest lists."""
    whole = contents(write(tmp_path / "whole", range(20)))
    folder, moment = tmp_path / "1", 1
    while dies_at_rename(monkeypatch, moment, folder):
        if moment > 1:  # before the first there is no manifest yet
            before = Store(folder, verify=True)
            assert not before.manifest["closed"] and before.ids == [sequence(i)[0] for i in range(len(before))]
            assert all(torch.equal(before.get(i, TAPS)["taps"], sequence(i)[3]) for i in range(len(before)))
        assert contents(write(folder, range(20))) == whole
        moment += 1
        folder = tmp_path / str(moment)
    assert moment == 2 * len(list((tmp_path / "whole").glob("shard-*"))) + 3  # it died before each one


def test_a_killed_process_leaves_a_valid_store(tmp_path):
    killed = tmp_path / "killed"
    child = multiprocessing.get_context("fork").Process(target=write, args=(killed, range(10**6)))
    child.start()
    while len(list(killed.glob("shard-*.safetensors"))) < 3:
        assert child.is_alive()
        time.sleep(0.001)
    child.kill()
    child.join()
    n = len(Store(killed, verify=True))
    assert contents(write(killed, range(n + 5))) == contents(write(tmp_path / "whole", range(n + 5)))


def test_leftovers_of_a_killed_run_are_not_read_and_are_removed(tmp_path):
    whole = contents(write(tmp_path, range(10)))
    (tmp_path / "shard-00099.safetensors").write_bytes(b"complete, but never listed")
    (tmp_path / "writing").mkdir()
    (tmp_path / "writing" / ".tmpAb12Cd").write_bytes(b"half, under the name that safetensors chose")
    (tmp_path / "manifest.json.tmp").write_bytes(b'{"half')
    assert len(Store(tmp_path, verify=True)) == 10
    assert contents(write(tmp_path, range(10))) == whole


def test_an_older_manifest_counts_and_the_rest_is_captured_again(tmp_path):
    whole = contents(write(tmp_path, range(20)))
    old = json.loads(whole["manifest.json"])
    old["shards"] = old["shards"][:2]
    (tmp_path / "manifest.json").write_text(json.dumps(old))
    assert len(Store(tmp_path)) == sum(shard["sequences"] for shard in old["shards"])
    assert contents(write(tmp_path, range(20))) == whole


@pytest.mark.parametrize("damage", [lambda p: p.write_bytes(p.read_bytes()[:-7]), lambda p: p.write_bytes(b""), lambda p: p.unlink()])
def test_a_cut_or_missing_shard_is_refused_by_name_and_captured_again(tmp_path, damage):
    write(tmp_path, range(20))
    shard = tmp_path / "shard-00001.safetensors"
    damage(shard)
    with pytest.raises(UserError, match=r"shard-00001\.safetensors.*python launch/capture\.py conf=<name>"):
        Store(tmp_path)
    store = Store(write(tmp_path, range(20)), verify=True)
    assert sorted(store.ids) == [sequence(i)[0] for i in range(20)] and store.manifest["closed"]
    for i, name in enumerate(store.ids):
        assert torch.equal(store.get(i, TAPS)["taps"], sequence(int(name[5:9]))[3])


def test_an_altered_byte_is_found_by_verify(tmp_path):
    write(tmp_path, range(10))
    shard = tmp_path / "shard-00000.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    Store(tmp_path)
    with pytest.raises(UserError, match="shard-00000.*checksum"):
        Store(tmp_path, verify=True)


@pytest.mark.parametrize("fill", [0, 255])
def test_an_unreadable_shard_is_named_with_its_sequence_not_replaced(tmp_path, fill):
    write(tmp_path, range(20))
    shard = tmp_path / "shard-00001.safetensors"
    shard.write_bytes(bytes([fill]) * shard.stat().st_size)
    store = Store(tmp_path)
    i = store.manifest["shards"][0]["sequences"]
    store.get(i - 1, TAPS)
    with pytest.raises(UserError, match=rf"shard-00001\.safetensors: cannot read sequence {i} \(chat-{i:04d}#0\)"):
        store.get(i, TAPS)


def test_a_shard_that_shrinks_after_opening_is_refused(tmp_path):
    store = Store(write(tmp_path, range(5)))
    shard = tmp_path / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(UserError, match="shard-00000"):
        store.get(0, TAPS)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target": manifest()["target"] | {"fingerprint": "f1"}}, "target.fingerprint: the store has 'f0', this run 'f1'"),
        ({"target": manifest()["target"] | {"quantisation": "fp8"}}, "target.quantisation"),
        ({"template_hash": "other"}, "template_hash"),
        ({"taps": [2, 5]}, "taps"),
        ({"last": "all"}, "last: the store has 'supervised', this run 'all'"),
        ({"dtype": "float16"}, "dtype"),
        ({"engine": {"name": "vllm", "version": "0.33.0"}}, "engine.version"),
    ],
)
def test_another_capture_is_not_continued(tmp_path, changes, named):
    before = contents(write(tmp_path, range(5)))
    with pytest.raises(UserError, match="holds another capture") as caught:
        StoreWriter(tmp_path, manifest(**changes))
    assert named in str(caught.value) and "launch/capture.py" in str(caught.value)
    assert contents(tmp_path) == before


def test_resume_knows_what_is_done(tmp_path):
    write(tmp_path, range(6))
    writer = StoreWriter(tmp_path, manifest())
    assert writer.done == {sequence(i)[0] for i in range(6)}
    with pytest.raises(AssertionError):
        writer.add(*sequence(3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["taps", "last"])
def test_non_finite_states_are_quarantined_counted_and_named(tmp_path, bad, where):
    writer = StoreWriter(tmp_path, manifest())
    name, ids, mask, taps, last = sequence(1)
    row = int(label_rows(mask).nonzero()[0])
    (taps if where == "taps" else last)[row, ..., 3] = bad
    assert not writer.add(name, ids, mask, taps, last)
    assert writer.add(*sequence(2))
    again = StoreWriter(tmp_path, manifest())  # as after a kill: the note is on the disk already
    assert name in again.done
    again.add(*sequence(2))
    again.close()
    store = Store(tmp_path)
    assert store.ids == [sequence(2)[0]] and store.manifest["quarantined"] == 1
    assert json.loads((tmp_path / "quarantine.jsonl").read_text()) == {"id": name, "reason": f"NaN or Inf in {where}"}


def test_a_value_too_large_for_the_storage_dtype_is_quarantined(tmp_path):
    with StoreWriter(tmp_path, manifest(dtype="float16", last="none")) as writer:
        assert not writer.add("a", torch.arange(3), torch.ones(3, dtype=torch.bool), torch.full((3, 3, D), 1e6))


def test_a_quarantine_line_cut_short_is_dropped(tmp_path):
    write(tmp_path, range(2))
    (tmp_path / "quarantine.jsonl").write_text('{"id": "x", "reason": "r"}\n{"id": "y", "rea')
    assert "x" in (done := StoreWriter(tmp_path, manifest()).done) and "y" not in done
    assert (tmp_path / "quarantine.jsonl").read_text() == '{"id": "x", "reason": "r"}\n'


def test_a_failed_capture_does_not_close_the_store(tmp_path):
    with pytest.raises(RuntimeError), StoreWriter(tmp_path, manifest(), shard_tokens=50) as writer:
        for i in range(5):
            writer.add(*sequence(i))
        raise RuntimeError
    assert not Store(tmp_path, verify=True).manifest["closed"]


def fits(stored, **changes):
    run = {"fingerprint": "f0", "taps": TAPS, "needs_last": "supervised", "tokenizer_hash": "tok", "template_hash": "tpl"}
    check_compatible(stored, **{**run, **changes})


def test_a_store_that_holds_more_than_needed_fits(tmp_path):
    stored = Store(write(tmp_path, range(3), last="all")).manifest
    for changes in ({}, {"taps": (9,)}, {"taps": ()}, {"needs_last": "none"}, {"needs_last": "all"}):
        fits(stored, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fingerprint": "f1"}, "f1"),
        ({"tokenizer_hash": "other"}, "another tokenizer"),
        ({"template_hash": "other"}, "another template"),
        ({"taps": (2, 7, 11)}, r"lacks \[7, 11\]"),
        ({"needs_last": "all"}, "the head needs 'all', the store holds 'supervised'"),
    ],
)
def test_a_store_that_lacks_something_is_refused_with_the_difference(tmp_path, changes, named):
    stored = Store(write(tmp_path, range(3))).manifest
    with pytest.raises(UserError, match=named) as caught:
        fits(stored, **changes)
    assert "python launch/capture.py conf=<name>" in str(caught.value)


def test_an_unfinished_store_is_not_trained_on_silently(tmp_path):
    StoreWriter(tmp_path, manifest())
    with pytest.raises(UserError, match="stopped after 0 sequences"):
        fits(Store(tmp_path).manifest)


def test_a_folder_without_a_readable_manifest_is_refused(tmp_path):
    for text in (None, "{", '{"shards": []}', '{"format_version": 99}'):
        if text is not None:
            (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(UserError, match="launch/capture.py"):
            Store(tmp_path)


def test_an_unknown_storage_dtype_is_refused(tmp_path):
    with pytest.raises(UserError, match="data.states_dtype='int8'.*bfloat16"):
        StoreWriter(tmp_path, manifest(dtype="int8"))


def test_the_disk_is_checked_before_the_start(tmp_path):
    folder = tmp_path / "not" / "yet" / "made"
    check_disk(folder, 10**6, cap_gb=1)
    with pytest.raises(UserError, match="2.00 GB, over the cap data.max_store_gb=1"):
        check_disk(folder, 2 * 10**9, cap_gb=1)
    with pytest.raises(UserError, match="are free"):
        check_disk(folder, 10**17, cap_gb=1e12)
    assert not folder.exists()


def test_a_disk_that_fills_up_stops_the_writer_with_one_sentence(tmp_path, monkeypatch):
    writer = StoreWriter(tmp_path, manifest())
    writer.add(*sequence(0))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(UserError, match="are free"):
        writer.close()
