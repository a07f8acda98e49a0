"""A store of bounded size: the same head, the disk never over the window, each side killed and started again, and whom one waits for."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import refused
from live import LONGEST, capture, config, prefill, train

import data.batch
import data.capture
import data.engine
from data.batch import Batches
from data.engine_job import TORCHRUN
from data.identity import identity
from data.lock import held, hold
from data.online import Answers
from data.store import StoreWriter
from data.target import spec
from data.window import Sizes, Window, WindowWriter, last_micro, order_of, read_id, read_progress
from heads import build
from train import checkpoint, inputs, plan, setup
from train.config import ROOT, RunConfig, load

STEPS = "train.steps=18"  # three epochs
WINDOW = "data.window_gb=0.00055"


@pytest.fixture(scope="module")
def whole(target: Path, made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The head of a training that lacks nothing."""
    return train(config(target, made, tmp_path_factory.mktemp("whole"), "data.states=online", STEPS), target)


@pytest.fixture(autouse=True)
def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (data.capture, data.engine):
        monkeypatch.setattr(module, "prefill", prefill)
    for module in (data.batch, data.capture):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.02)


def windowed(target: Path, made: Path, folder: Path, *words: str) -> RunConfig:
    return config(target, made, folder / "run", f"data.store={folder}/store", WINDOW, STEPS, *words)


def beside(call: Callable[[], None]) -> Callable[[], None]:
    """Runs it in a thread; what is returned waits for its end and raises what it raised."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def end() -> None:
        thread.join(60)
        assert not thread.is_alive()
        if errors:
            raise errors[0]

    return end


def until(ok: Callable[[], bool], seconds: float = 900.0) -> None:
    deadline = time.monotonic() + seconds
    while not ok():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def test_the_head_is_that_of_the_whole_store_and_the_disk_stays_within_the_window(target, made, whole, tmp_path, monkeypatch, capsys):
    cfg, sizes = windowed(target, made, tmp_path), []
    flush = WindowWriter._flush

    def measured(writer: WindowWriter) -> None:
        flush(writer)
        sizes.append(sum(path.stat().st_size for path in writer.folder.rglob("*.safetensors")))

    monkeypatch.setattr(WindowWriter, "_flush", measured)
    full = []
    room = WindowWriter.has_room
    monkeypatch.setattr(WindowWriter, "has_room", lambda writer, sizes: room(writer, sizes) or bool(full.append(1)))
    end = beside(lambda: capture(cfg, target))
    until(lambda: (tmp_path / "store" / "heldout" / "manifest.json").exists())
    inputs.require_inputs(cfg)
    head = train(cfg, target)
    end()
    assert all(torch.equal(head[key], whole[key]) for key in whole)
    assert max(sizes) <= cfg.data.window_gb * 1e9 and full, "the capture had to wait"
    assert not list((tmp_path / "store" / "train").glob("shard-*")) and sum(sizes) > cfg.data.window_gb * 1e9
    said = capsys.readouterr().out
    assert "a window of 550.00 kB, 1,029 bytes a token at most" in said and "of the disk are free" in said
    assert "waiting for the training: it says which states it needs; none is running, start it with `python launch/train.py" in said
    assert "waiting for the capture: the states of train" in said and "; it is running" in said


@pytest.mark.slow
def test_both_sides_killed_again_and_again_give_the_same_head(target, made, whole, tmp_path):
    """SIGKILL, a little after a state of the disk that is the same each time."""
    words = [str(target), str(made), str(tmp_path / "run"), f"data.store={tmp_path}/store", WINDOW, STEPS]
    store, latest, moments = tmp_path / "store" / "train", tmp_path / "run" / "latest", random.Random(0)
    environment = {key: value for key, value in os.environ.items() if key not in TORCHRUN}  # this process has joined a group of its own
    logs = {what: (tmp_path / what).open("wb") for what in ("capture", "train")}

    def start(what: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(ROOT / "tests" / "live.py"), what, *words]
        return subprocess.Popen(command, env=environment, stdout=logs[what], stderr=logs[what])

    def shards() -> list[dict[str, Any]]:
        path = store / "manifest.json"
        return json.loads(path.read_text())["shards"] if path.exists() else []

    def step() -> int:
        return int(latest.read_text().strip()[-6:]) if latest.exists() else 0

    moments_of = {
        "capture": [lambda: len(shards()) >= 2, lambda: bool(shards()) and last_micro(shards()[-1]["ids"]) >= 12],
        "train": [lambda: bool(shards()), lambda: step() >= 6],
    }
    running = {"capture": start("capture")}
    try:
        until(lambda: inputs.missing_inputs(config(*(Path(word) for word in words[:3]), *words[3:])) == [])
        running["train"] = start("train")
        for i in range(2):
            for what in ("train", "capture"):
                until(lambda what=what, i=i: running[what].poll() is not None or moments_of[what][i]())
                time.sleep(0.3 * moments.random())
                assert running[what].poll() is None, (tmp_path / what).read_text()
                running[what].kill()
                running[what].wait()
                running[what] = start(what)
        assert {what: process.wait(timeout=900) for what, process in running.items()} == {"capture": 0, "train": 0}
    finally:
        for process in running.values():
            process.kill()
    head = checkpoint.load_head(tmp_path / "run" / "step-000018")
    assert all(torch.equal(head[key], whole[key]) for key in whole)
    assert not list(store.glob("shard-*"))


@pytest.mark.slow
def test_two_ranks_share_a_window(target, made, tmp_path):
    words = ["train.steps=9", f"data.store={tmp_path}/store", "data.window_gb=0.0008"]
    one = train(config(target, made, tmp_path / "one", "train.steps=9", "train.accum=2", "data.states=online"), target)
    end = beside(lambda: capture(config(target, made, tmp_path / "run", *words), target))
    until(lambda: (tmp_path / "store" / "heldout" / "manifest.json").exists())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = [str(ROOT / "tests" / "live.py"), "train", str(target), str(made), str(tmp_path / "run"), *words]
    done = subprocess.run([*torchrun, *script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    end()
    two = checkpoint.load_head(tmp_path / "run" / "step-000009")
    assert all(torch.allclose(one[key], two[key], rtol=1e-4, atol=1e-5) for key in one)


def reader(cfg: RunConfig, target: Path, said: list[str], leader: bool = True) -> Window:
    head = build(cfg.head, spec(target))
    about = {"folder": Path(cfg.data.store) / "train", "order": (cfg.train.seed, cfg.train.micro_tokens), "taps": head.taps}
    answers = Path(cfg.data.responses) / "train.jsonl"
    maker = identity(target, cfg.target)
    return Window(answers, LONGEST, maker, **about, last=head.needs_last, say=said.append, leader=leader)


def writer(cfg: RunConfig, target: Path, reads: list[tuple[int, int]], shard_tokens: int = 30) -> WindowWriter:
    """A window that holds these reads, of zero states."""
    maker = identity(target, cfg.target)
    answers = Answers(Path(cfg.data.responses) / "train.jsonl", LONGEST, None, "none", maker)
    about = {"taps": [0, 1, 2], "hidden_size": 64, "last": "supervised", "dtype": "float32", "engine": {"name": "t", "version": "0"}}
    about["window"] = order_of(answers, cfg.train.seed, cfg.train.micro_tokens, LONGEST)
    found = WindowWriter(Path(cfg.data.store) / "train", {**maker, **about}, shard_tokens)
    for micro, i in reads:
        ids_T, mask_T = answers.tokens(i)
        found.add(read_id(micro, answers.ids[i]), ids_T, mask_T, torch.zeros(len(ids_T), 3, 64), torch.zeros(len(ids_T), 64))
    return found


def test_a_reader_says_once_for_whom_it_waits_and_again_when_that_one_comes(target, made, tmp_path):
    cfg, said = windowed(target, made, tmp_path), []
    window = reader(cfg, target, said)
    assert not window.ready([(0, 3)]) and not window.ready([(0, 3)])
    with hold(tmp_path / "store", "data.store"):
        assert not window.ready([(0, 3)])
    assert len(said) == 2 and "train3#0, micro-batch 0" in said[0]
    assert "none is running, start it with `python launch/capture.py" in said[0] and said[1].endswith("it is running")
    writer(cfg, target, [(0, 3)]).close()
    assert window.ready([(0, 3)]) and len(window.get(3, (0, 1), micro=0)["taps"]) == window.lengths[3]
    assert not window.ready([(1, 3)]) and len(said) == 3  # the same sequence for another micro-batch is another read
    refused(lambda: reader(cfg, target, said), "another process")
    assert held(tmp_path / "store" / "train" / "reader")


def test_a_training_that_ends_while_it_waits_does_not_hang(target, made, tmp_path):
    cfg, said = windowed(target, made, tmp_path), []
    batches = Batches(reader(cfg, target, said), (0, 1, 2), 60, 0, 0, 1, LONGEST)
    stream = batches.prefetch(0, 10, 1)
    end = beside(lambda: next(stream, None))
    until(lambda: bool(said))
    writer(cfg, target, list(batches.reads(0, 1))).close()
    end()
    stream.close()  # while its thread waits for the next
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_what_the_training_is_past_is_deleted_and_only_that(target, made, tmp_path):
    cfg = windowed(target, made, tmp_path)
    window = reader(cfg, target, [])
    reads = list(Batches(window, (), 60, 0, 0, 1, LONGEST).reads(0, 8))
    found = writer(cfg, target, reads)
    assert len(found.manifest["shards"]) > 4 and found.next == 0
    window.saved(3, 18)
    assert read_progress(found.folder) == (3, 18)
    left = found.drop_past()
    kept = {name for shard in found.manifest["shards"] for name in shard["ids"]}
    assert {read_id(m, window.ids[i]) for m, i in reads if m >= 3} - {name for name, _ in found._pending} <= kept
    assert all(last_micro(shard["ids"]) >= 3 for shard in found.manifest["shards"])
    assert left == sum(path.stat().st_size for path in found.folder.glob("shard-*"))
    window.saved(18, 18)
    assert found.drop_past() == 0 and not list(found.folder.glob("shard-*"))
    window.saved(3, 18)
    refused(found.drop_past, "went back to micro-batch 3", "launch/capture.py")


def test_a_training_that_begins_anew_is_captured_for_from_there(target, made, tmp_path):
    """What lies ahead of it would take the room of what it needs."""
    cfg = windowed(target, made, tmp_path)
    window = reader(cfg, target, [])
    reads = list(Batches(window, (), 60, 0, 0, 1, LONGEST).reads(5, 9))
    writer(cfg, target, reads).close()
    again = writer(cfg, target, [])
    again.begin_at(read_id(m, window.ids[i]) for m, i in reads[:1])
    assert again.manifest["shards"]
    again.begin_at([read_id(0, window.ids[0])])
    assert not again.manifest["shards"] and not again.done and not list(again.folder.glob("shard-*"))


def test_another_order_is_refused_on_both_sides(target, made, tmp_path):
    cfg = windowed(target, made, tmp_path)
    writer(cfg, target, [(0, 1)]).close()
    other = windowed(target, made, tmp_path, "train.seed=1")
    refused(lambda: reader(other, target, []), "another order", "window.seed: the store has 0, this run 1")
    refused(lambda: writer(other, target, []), "another capture", "window.seed", "data.store")
    head = build(cfg.head, spec(target))
    refused(lambda: setup.open_store(cfg, head, target, "train"), "a window of states", "data.window_gb")
    plain = {key: value for key, value in writer(cfg, target, []).manifest.items() if key != "window"}
    StoreWriter(tmp_path / "plain" / "train", plain).close()
    refused(lambda: reader(windowed(target, made, tmp_path, f"data.store={tmp_path}/plain"), target, []), "another order")


def test_states_that_are_not_finite_end_the_capture(target, made, tmp_path):
    found = writer(windowed(target, made, tmp_path), target, [])
    ids_T = torch.arange(5)
    states = torch.full((5, 3, 64), torch.nan)
    refused(lambda: found.add("0/train1#0", ids_T, ids_T > 2, states, torch.zeros(5, 64)), "NaN or Inf in taps of train1#0", "answers")


def test_a_window_too_small_for_what_lies_between_checkpoints_is_refused_with_what_would_do(target, made, tmp_path):
    cfg = windowed(target, made, tmp_path, "data.window_gb=0.0005")
    head = build(cfg.head, spec(target))
    refused(lambda: plan.window_sizes(cfg, head), "data.window_gb=0.0005", "train.save_every=2 or less", "on 1 GPU,")
    cfg.train.save_every = 2
    assert plan.window_sizes(cfg, head, 1) is not None
    refused(lambda: plan.plan(cfg, spec(target), 2), "train.save_every=1 or less")
    cfg.data.window_gb = 0.001
    assert plan.window_sizes(cfg, head, 2) is not None


def test_sizes_leave_room_for_a_training_to_reach_its_next_checkpoint():
    for window_gb, token, longest in ((200, 32768, 4096), (1, 8192, 2048), (5000, 100_000, 100)):
        sizes = Sizes.of(window_gb, token, longest)
        assert longest <= sizes.shard <= 65536 and 1 <= sizes.in_flight * longest <= sizes.shard
        assert sizes.window * 0.7 < sizes.usable < sizes.window - sizes.room


def test_settings_that_do_not_go_together_are_refused(target, made, tmp_path):
    refused(lambda: load(["conf=tiny_mtp", "data.window_gb=2"]), "data.window_gb=2", "data.max_store_gb=1")
    refused(lambda: load(["conf=tiny_mtp", "data.window_gb=0"]), "data.window_gb=0")
    refused(lambda: load(["conf=tiny_mtp", "data.window_gb=0.5", "data.states=online"]), "data.window_gb=0.5", "null with data.states")
    cfg = load(["conf=tiny_pard", "data.window_gb=0.5"])
    refused(lambda: plan.window_sizes(cfg, build(cfg.head, spec(target))), "data.window_gb=0.5", "reads no states")
    refused(lambda: inputs.stages(windowed(target, made, tmp_path)), "side by side", "launch/capture.py")
    more = "data.limit=48"  # than are answered so far
    bare = windowed(target, made, tmp_path, more)
    refused(lambda: inputs.require_inputs(bare), "store/heldout (hidden states)", "launch/capture.py")
    whole = plan.plan(config(target, made, tmp_path / "run", f"data.store={tmp_path}/store", more), spec(target), 1).store_bytes
    bare.data.window_gb, bare.train.save_every = 0.0004, 1
    bounded = plan.plan(bare, spec(target), 1).store_bytes
    assert whole and bounded and 4e5 < bounded < whole


def test_the_draft_vocabulary_needs_no_states(target, made, tmp_path):
    cfg = windowed(target, made, tmp_path, "head.draft_vocab_size=50")
    window = reader(cfg, target, [])
    assert int(setup.count_supervised(window, 512).sum()) == window.manifest["supervised_tokens"]
