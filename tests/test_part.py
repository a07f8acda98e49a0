"""Several engines that share a stage: who takes what, other numbers of them after a kill, and the same records in the end."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import live
import pytest
import torch
from conftest import refused, store_manifest
from live import LONGEST, config

import data.answers
import data.capture
import data.engine
from data.answers import Request, collect, read_answers
from data.engine_job import TORCHRUN, environment
from data.gather import finish_part
from data.identity import unfinished
from data.lock import alone
from data.part import WHOLE, Part
from data.store import Store, StoreWriter
from train.config import ROOT, TargetConfig

WHOLE_RUNS = [[Part(0, 2), Part(1, 2)], [Part(1, 2), Part(0, 2)], [Part(2, 3), Part(0, 3), Part(1, 3)]]


# --- who takes what


def test_the_parts_hold_each_record_once():
    records = [f"r{i}" for i in range(11)]
    for n in (1, 2, 3, 12):
        taken = [x for number in range(n) for x in Part(number, n).of(records)]
        assert sorted(taken) == sorted(records)


@pytest.mark.parametrize(
    ("environment", "word", "part"),
    [
        ({}, None, WHOLE),
        ({"RANK": "3", "WORLD_SIZE": "4"}, None, Part(3, 4)),
        ({"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_COUNT": "4"}, None, Part(2, 4)),
        (
            {"SLURM_ARRAY_TASK_ID": "9", "SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_STEP": "2", "SLURM_ARRAY_TASK_COUNT": "3"},
            None,
            Part(2, 3),
        ),
        ({"RANK": "3", "WORLD_SIZE": "4"}, "0/1", WHOLE),
        ({}, "1/3", Part(1, 3)),
    ],
)
def test_a_process_finds_its_part(environment, word, part):
    assert Part.of_process(environment, word) == part


@pytest.mark.parametrize("word", ["", "1", "3/3", "-1/2", "a/b", "1/0", "1/2/3"])
def test_a_part_that_is_none_is_refused(word):
    refused(lambda: Part.of_process({}, word), f"part={word}", "part=0/4")


def test_each_engine_of_a_torchrun_has_its_own_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for key, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}.items():
        monkeypatch.setenv(key, value)
    assert environment(2)["CUDA_VISIBLE_DEVICES"] == "6,7" and "LOCAL_RANK" not in environment(2)
    refused(lambda: environment(3), "2 engines", "target.tensor_parallel=3", "4,5,6,7")
    monkeypatch.delenv("LOCAL_RANK")
    assert environment(2)["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_parts_of_as_many_work_beside_each_other_and_nobody_else(tmp_path):
    with alone(tmp_path, "data.store", Part(0, 2)):
        with alone(tmp_path, "data.store", Part(1, 2)):
            refused(alone(tmp_path, "data.store", Part(1, 2)).__enter__, "another process")
            refused(alone(tmp_path, "data.store", Part(2, 3)).__enter__, "another process")
            refused(alone(tmp_path, "data.store").__enter__, "another process")
    with alone(tmp_path, "data.store"):
        refused(alone(tmp_path, "data.store", Part(0, 2)).__enter__, "another process")
    with alone(tmp_path, "data.store", Part(2, 3)):
        pass


# --- stores


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (data.capture, data.engine):
        monkeypatch.setattr(module, "prefill", live.prefill)


def states(folder: Path) -> dict[str, list[Any]]:
    """Id -> tokens, mask and states; fails where an id is there twice."""
    store = Store(folder, verify=True)
    assert len(set(store.ids)) == len(store.ids) and store.manifest["closed"]
    found = {name: store.get(i, (0, 1, 2)) for i, name in enumerate(store.ids)}
    return {name: [x.tolist() for x in item.values() if isinstance(x, torch.Tensor)] for name, item in found.items()}


@pytest.fixture(scope="module")
def whole_store(target: Path, made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[Any]]]:
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        for module in (data.capture, data.engine):
            patch.setattr(module, "prefill", live.prefill)
        live.capture(config(target, made, folder / "run", f"data.store={folder}"), target)
    return {split: states(folder / split) for split in ("train", "heldout")}


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("parts", WHOLE_RUNS)
def test_the_store_of_several_holds_what_that_of_one_does(parts, target, made, tmp_path, whole_store, capsys):
    cfg = config(target, made, tmp_path / "run", f"data.store={tmp_path}/store")
    for part in parts:
        assert not (tmp_path / "store/train/manifest.json").exists() or not Store(tmp_path / "store/train").manifest["closed"]
        live.capture(cfg, target, part)
    assert {split: states(tmp_path / "store" / split) for split in whole_store} == whole_store
    assert "sequences are still with other parts" in capsys.readouterr().out
    names = [shard["file"] for shard in Store(tmp_path / "store/train").manifest["shards"]]
    assert names == sorted(names)  # whoever ended first
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("shard-*")}
    live.capture(cfg, target)  # nothing more to do for one
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("shard-*")} == before
    assert {split: states(tmp_path / "store" / split) for split in whole_store} == whole_store


class Killed(BaseException):
    """What ends a run at once, as a kill does: nothing catches it."""


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("then", [[WHOLE], *WHOLE_RUNS])
def test_another_number_of_engines_goes_on_after_a_kill(then, target, made, tmp_path, whole_store, monkeypatch):
    cfg = config(target, made, tmp_path / "run", f"data.store={tmp_path}/store")
    flush, left = data.store.StoreWriter._flush, [0]

    def dies(writer: Any) -> None:
        flush(writer)
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    monkeypatch.setattr(data.store.StoreWriter, "_flush", dies)
    monkeypatch.setattr(data.engine.capture, "__kwdefaults__", {**data.engine.capture.__kwdefaults__, "shard_tokens": 60})
    for part, flushes in ((Part(0, 2), 1), (Part(1, 2), 1), (WHOLE, 1)):
        left[0] = flushes
        with pytest.raises(Killed):
            live.capture(cfg, target, part)
    assert 0 < len(Store(tmp_path / "store/train").ids) < len(whole_store["train"])
    left[0] = 0
    for part in then:
        live.capture(cfg, target, part)
    assert {split: states(tmp_path / "store" / split) for split in whole_store} == whole_store


@pytest.mark.usefixtures("stored")
def test_what_a_part_set_aside_is_set_aside_in_the_whole(target, made, tmp_path, monkeypatch):
    cfg = config(target, made, tmp_path / "run", f"data.store={tmp_path}/store")
    right = live.Forward.states

    def bad(self: Any, ids_T: torch.Tensor, **more: Any) -> Any:
        taps_TLD, last_TD = right(self, ids_T, **more)
        return (taps_TLD / 0 if len(ids_T) == LONGEST else taps_TLD), last_TD

    monkeypatch.setattr(live.Forward, "states", bad)
    for part in (Part(1, 2), Part(0, 2), WHOLE):
        live.capture(cfg, target, part)
    manifest = Store(tmp_path / "store/train").manifest
    lines = [json.loads(line) for line in (tmp_path / "store/train/quarantine.jsonl").read_text().splitlines()]
    assert manifest["closed"] and manifest["quarantined"] == len(lines) == 1 and "NaN" in lines[0]["reason"]


def test_a_window_is_for_one_engine(target, made, tmp_path):
    cfg = config(target, made, tmp_path / "run", f"data.store={tmp_path}/store", "data.window_gb=0.001")
    refused(lambda: live.capture(cfg, target, Part(0, 2)), "data.window_gb", "one of 2")


# --- answers


def request(folder: Path, part: Part = WHOLE, n: int = 7, samples: int = 2) -> Request:
    records = [{"id": f"r{i}", "messages": [], "meta": {}, "prompt_ids": [5] * (i % 20 + 1), "seed": 0} for i in range(n)]
    records[3]["prompt_ids"] = [5] * 40  # leaves no room
    cfg = TargetConfig(model="tiny", max_model_len=30)
    return Request(folder, cfg, records, folder / "train.jsonl", {"samples": samples}, 4, 0, {"target": "t"}, {}, part)


def answer_some(todo: list[dict[str, Any]], out: Path, most: int = 1000) -> dict[str, Any]:
    """As an engine: the answers in another order than asked, until it is killed."""
    with out.open("a") as f:
        for item in sorted(todo, key=lambda item: item["id"][::-1])[:most]:
            f.write(json.dumps({"id": item["id"], "prompt_ids": item["prompt_ids"], "response_ids": [1], "finish_reason": "stop"}) + "\n")
    if len(todo) > most:
        with out.open("a") as f:
            f.write('{"id": "cut sho')
        raise Killed
    return {"seconds": 1.0, "generated_tokens": len(todo)}


ASKED = [f"r{i}#{s}" for i in range(7) if i != 3 for s in range(2)]


@pytest.mark.parametrize("parts", WHOLE_RUNS)
def test_the_answers_of_several_are_those_of_one_in_the_order_of_the_records(parts, tmp_path, capsys):
    for part in parts:
        assert not (tmp_path / "train.jsonl").exists()
        collect(request(tmp_path, part), answer_some)
    assert [a["id"] for a in read_answers(tmp_path / "train.jsonl")[0]] == ASKED
    assert [json.loads(line)["id"] for line in (tmp_path / "train.quarantine.jsonl").read_text().splitlines()] == ["r3"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "train.jsonl",
        "train.meta.json",
        "train.asked.json",
        "train.quarantine.jsonl",
        ".turn",
    }
    assert "the last of the" in capsys.readouterr().out
    before = (tmp_path / "train.jsonl").read_bytes()
    collect(request(tmp_path), answer_some)
    assert (tmp_path / "train.jsonl").read_bytes() == before
    collect(request(tmp_path, Part(0, 2), n=9), answer_some)  # more is asked later
    collect(request(tmp_path, Part(1, 2), n=9), answer_some)
    assert [a["id"] for a in read_answers(tmp_path / "train.jsonl")[0]] == [*ASKED, "r7#0", "r7#1", "r8#0", "r8#1"]


@pytest.mark.parametrize("most", range(0, len(ASKED), 3))
def test_one_engine_leaves_the_same_bytes_wherever_it_was_killed(most, tmp_path, monkeypatch):
    collect(request(tmp_path / "whole"), answer_some)
    killed = tmp_path / "killed"
    with pytest.raises(Killed):
        collect(request(killed), lambda todo, out: answer_some(todo, out, most))
    with monkeypatch.context() as patch, pytest.raises(Killed):  # all answers are there, in the order in which they ended
        patch.setattr(data.answers, "join", lambda _: (_ for _ in ()).throw(Killed))
        collect(request(killed), answer_some)
    collect(request(killed), answer_some)
    assert (killed / "train.jsonl").read_bytes() == (tmp_path / "whole/train.jsonl").read_bytes()
    assert [a["id"] for a in read_answers(killed / "train.jsonl")[0]] == ASKED


@pytest.mark.parametrize("then", [[WHOLE], *WHOLE_RUNS])
def test_another_number_of_engines_samples_only_what_is_left(then, tmp_path):
    for part, most in ((WHOLE, 2), (Part(0, 2), 1), (Part(1, 2), 2)):
        with pytest.raises(Killed):
            collect(request(tmp_path, part), lambda todo, out, most=most: answer_some(todo, out, most))
    assert unfinished(tmp_path / "train.jsonl").exists()
    asked: list[str] = []

    def counted(todo: list[dict[str, Any]], out: Path) -> dict[str, Any]:
        asked.extend(item["id"] for item in todo)
        return answer_some(todo, out)

    for part in then:
        collect(request(tmp_path, part), counted)
    assert len(asked) == len(set(asked)) == len(ASKED) - 5
    assert sorted(a["id"] for a in read_answers(tmp_path / "train.jsonl")[0]) == ASKED
    assert not unfinished(tmp_path / "train.jsonl").exists() and not list(tmp_path.glob("*part*"))


def test_a_part_that_has_nothing_to_do_keeps_nobody_waiting(tmp_path):
    for number in (0, 1, 2):
        collect(request(tmp_path, Part(number, 3), n=5, samples=1), answer_some)
    collect(request(tmp_path, Part(0, 3), n=6, samples=1), answer_some)  # r5 is with the last one
    collect(request(tmp_path, Part(2, 3), n=6, samples=1), answer_some)
    assert [a["id"] for a in read_answers(tmp_path / "train.jsonl")[0]] == ["r0#0", "r1#0", "r2#0", "r4#0", "r5#0"]
    assert not unfinished(tmp_path / "train.jsonl").exists() and not list(tmp_path.glob("*part*"))
    few = tmp_path / "few"
    for number in (3, 0, 1, 2):
        collect(request(few, Part(number, 4), n=4, samples=1), answer_some)
    assert len(read_answers(few / "train.jsonl")[0]) == 3 and not list(few.glob("*part*"))


def _collect(folder: Path, part: Part) -> None:
    collect(request(folder, part, n=40), answer_some)


def test_parts_that_end_at_the_same_moment_leave_one_file(tmp_path):
    fork = multiprocessing.get_context("fork")
    for round_ in range(5):
        folder = tmp_path / str(round_)
        running = [fork.Process(target=_collect, args=(folder, Part(number, 4))) for number in range(4)]
        for process in running:
            process.start()
        for process in running:
            process.join()
        assert [process.exitcode for process in running] == [0] * 4
        assert len(read_answers(folder / "train.jsonl")[0]) == 78 and not list(folder.glob("*part*"))
        assert not unfinished(folder / "train.jsonl").exists()


def test_refusals_of_an_earlier_call_are_asked_for_again_and_nothing_is_lost(tmp_path):
    """Part 1 ends first: the old list says that r4#0 has no answer, but part 0 is at it."""
    collect(request(tmp_path, WHOLE, n=4, samples=1), answer_some)
    (tmp_path / "train.quarantine.jsonl").write_text('{"id": "r4#0", "reason": "refused"}\n')
    collect(request(tmp_path, Part(1, 2), n=7, samples=1), answer_some)
    assert unfinished(tmp_path / "train.jsonl").exists()
    collect(request(tmp_path, Part(0, 2), n=7, samples=1), answer_some)
    assert [a["id"] for a in read_answers(tmp_path / "train.jsonl")[0]] == ["r0#0", "r1#0", "r2#0", "r4#0", "r5#0", "r6#0"]


def test_without_the_mark_the_answers_of_parts_are_joined_all_the_same(tmp_path):
    """It may be deleted, as a message says, to make do with the answers there are."""
    collect(request(tmp_path, Part(0, 2), n=7, samples=1), answer_some)
    unfinished(tmp_path / "train.jsonl").unlink()
    collect(request(tmp_path, WHOLE, n=4, samples=1), answer_some)
    assert {a["id"] for a in read_answers(tmp_path / "train.jsonl")[0]} == {"r0#0", "r1#0", "r2#0", "r4#0", "r6#0"}


def test_what_a_part_is_still_writing_stays(tmp_path):
    """It was started with more prompts than the one that ends."""

    def slow(todo: list[dict[str, Any]], out: Path) -> dict[str, Any]:
        with out.open("a") as f:
            for item in todo:
                f.write(json.dumps({**item, "response_ids": [1], "finish_reason": "stop"}) + "\n")
                f.flush()
                collect(request(tmp_path, Part(1, 2), n=4, samples=1), answer_some)
        return {"seconds": 1.0, "generated_tokens": len(todo)}

    with alone(tmp_path, "data.responses", Part(0, 2)):
        collect(request(tmp_path, Part(0, 2), n=7, samples=1), slow)
    collect(request(tmp_path, WHOLE, n=7, samples=1), answer_some)
    assert len(read_answers(tmp_path / "train.jsonl")[0]) == 6


def test_a_part_with_nothing_of_its_own_leaves_no_folder(tmp_path):
    about = store_manifest((), 4)
    for number in (0, 1):
        with StoreWriter(tmp_path / Part(number, 2).name, about | {"last": "none"}) as writer:
            if number == 0:
                writer.add("a", torch.arange(3), torch.arange(3) > 0)
    for number in (0, 1):
        assert finish_part(tmp_path, Part(number, 2).name, about | {"last": "none"}, {"a"}) == {"a"}
    assert [path.name for path in tmp_path.glob("part-*")] == ["part-0-of-2"] and Store(tmp_path).ids == ["a"]


def test_a_part_that_is_at_the_next_split_keeps_nobody_waiting(tmp_path):
    with alone(tmp_path, "data.responses", Part(0, 2)):  # as it does until its last split
        collect(request(tmp_path, Part(0, 2)), answer_some)
        with alone(tmp_path, "data.responses", Part(1, 2)):
            collect(request(tmp_path, Part(1, 2)), answer_some)
    assert [a["id"] for a in read_answers(tmp_path / "train.jsonl")[0]] == ASKED
    assert not unfinished(tmp_path / "train.jsonl").exists() and not list(tmp_path.glob("*part-*.jsonl"))


@pytest.mark.parametrize("first", [0, 1])
def test_prompts_without_an_answer_stay_listed_where_two_end_at_once(first, tmp_path):
    """The other has written its last answer, but not ended, when this one joins all; r3 is of part 1."""

    def last(todo: list[dict[str, Any]], out: Path) -> dict[str, Any]:
        done = answer_some(todo, out)
        collect(request(tmp_path, Part(first, 2)), answer_some)
        return done

    with alone(tmp_path, "data.responses", Part(1 - first, 2)):
        collect(request(tmp_path, Part(1 - first, 2)), last)
    assert [a["id"] for a in read_answers(tmp_path / "train.jsonl")[0]] == ASKED
    assert [json.loads(line)["id"] for line in (tmp_path / "train.quarantine.jsonl").read_text().splitlines()] == ["r3"]
    assert not unfinished(tmp_path / "train.jsonl").exists() and not list(tmp_path.glob("*part-*.jsonl"))


# --- with the engine


@pytest.fixture(scope="module")
def engines(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], Path]]:
    folder = tmp_path_factory.mktemp("engines")
    words = [
        "conf=tiny_eagle3",
        f"target.model={target}",
        "target.spec={}",
        f"data.responses={folder}/answers",
        f"data.store={folder}/store",
    ]
    yield [*words, "data.limit=9", "data.heldout_limit=3", "data.sampling.max_tokens=12", "data.max_length=460"], folder


@pytest.mark.slow
def test_two_engines_under_torchrun_make_what_one_makes(engines):
    words, folder = engines
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {key: value for key, value in os.environ.items() if key not in TORCHRUN}
    for stage in ("respond", "capture"):
        done = subprocess.run(
            [*torchrun, f"launch/{stage}.py", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    two = {split: states(folder / "store" / split) for split in ("train", "heldout")}
    assert len(two["train"]) == 9 and len(two["heldout"]) == 3 and list((folder / "store/train").glob("part-1-of-2/shard-*"))
    alone_words = [*words, f"data.responses={folder}/one", f"data.store={folder}/one-store"]
    for stage in ("respond", "capture"):
        done = subprocess.run([sys.executable, f"launch/{stage}.py", *alone_words], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    for split, found in two.items():
        one = states(folder / "one-store" / split)
        assert found.keys() == one.keys()
        for name, (ids, mask, *kept) in found.items():
            assert [ids, mask] == one[name][:2]
            for mine, theirs in zip(kept, one[name][2:], strict=True):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-4, atol=1e-4)
