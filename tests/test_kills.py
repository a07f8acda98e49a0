"""Kills at random moments, of the engine's side, the writer and the training: what is there in the end is what an uninterrupted run leaves.

`python tests/test_kills.py 200` kills as often and counts aloud. The processes are forks of this one, so that a start costs no imports and
most kills hit work. In the engine's place are transformers, and answers that follow from their ids: tests/test_engine.py kills the engine.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import live  # which makes the repository importable
import pytest
import torch

import data.batch
import data.capture
import data.engine
from data.answers import Request, collect
from data.builtin import build_tiny
from data.part import WHOLE, Part
from data.prompts import write_jsonl_line
from train import checkpoint
from train.config import TargetConfig

FORK = multiprocessing.get_context("fork")
STEPS = "train.steps=18"


def quietly(work: Callable[[], object]) -> None:
    sys.stdout = sys.stderr = Path(os.devnull).open("w")
    torch.set_num_threads(1)
    data.capture.prefill = data.engine.prefill = live.prefill
    data.batch.POLL_SECONDS = data.capture.POLL_SECONDS = 0.02
    work()


def start(work: Callable[[], object]) -> Any:
    process = FORK.Process(target=quietly, args=(work,), daemon=True)
    process.start()
    return process


def run(works: list[Callable[[], object]]) -> float:
    """All of them side by side to their end. Returns seconds."""
    began, running = time.monotonic(), [start(work) for work in works]
    for process in running:
        process.join(900)
    assert [process.exitcode for process in running] == [0] * len(works)
    return time.monotonic() - began


def killed(works: list[Callable[[], object]], kills: int, seconds: float, rng: random.Random) -> int:
    """Runs them side by side to their end, and kills one at random up to `kills` times, each within `seconds` of the one before. Returns
    how many kills there were before all had ended."""
    running, count = [start(work) for work in works], 0
    while count < kills:
        time.sleep(seconds * rng.random())
        alive = [i for i, process in enumerate(running) if process.is_alive()]
        if not alive:
            break
        i = rng.choice(alive)
        running[i].kill()
        running[i].join()
        if running[i].exitcode != 0:  # else it had just ended
            count += 1
            running[i] = start(works[i])
    for process in running:
        process.join(900)
    assert [process.exitcode for process in running] == [0] * len(works)
    return count


def files(folder: Path) -> dict[str, bytes]:
    """All but locks, which hold nothing, and empty folders."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if not path.name.startswith((".lock", ".turn"))}


def sample(todo: list[dict[str, Any]], out: Path) -> dict[str, Any]:
    """Answers that follow from their ids, one after the other."""
    with out.open("a", encoding="utf-8") as f:
        for item in todo:
            answer = [len(item["id"]) + i for i in range(random.Random(item["id"]).randint(1, 200))]
            write_jsonl_line(f, {key: item[key] for key in ("id", "prompt_ids")} | {"response_ids": answer, "finish_reason": "stop"})
            time.sleep(0.002)
    return {"seconds": 1.0, "generated_tokens": 1}


def respond(folder: Path, part: Part = WHOLE) -> None:
    records = [{"id": f"r{i}", "messages": [], "meta": {}, "prompt_ids": [i], "seed": 0} for i in range(100)]
    target = TargetConfig(model="tiny", max_model_len=30)
    collect(Request(folder, target, records, folder / "train.jsonl", {"samples": 2}, 4, 0, {"target": "t"}, {}, part), sample)


class Case:
    """A kind of work in a folder, and what it leaves there."""

    def __init__(self, folder: Path) -> None:
        self.target = build_tiny(folder / "target")
        (folder / "made").mkdir()
        self.made = live.make_answers(self.target, folder / "made")

    def config(self, folder: Path, *words: str) -> Any:
        return live.config(self.target, self.made, folder / "run", f"data.store={folder}/store", *words)

    def respond(self, folder: Path) -> list[Callable[[], object]]:
        return [lambda: respond(folder)]

    def respond_in_parts(self, folder: Path) -> list[Callable[[], object]]:
        return [lambda part=part: respond(folder, part) for part in (Part(0, 2), Part(1, 2))]

    def capture(self, folder: Path) -> list[Callable[[], object]]:
        return [lambda: small_shards(lambda: live.capture(self.config(folder), self.target))]

    def capture_in_parts(self, folder: Path) -> list[Callable[[], object]]:
        works = (lambda part=part: live.capture(self.config(folder), self.target, part) for part in (Part(0, 2), Part(1, 2)))
        return [lambda work=work: small_shards(work) for work in works]

    def window(self, folder: Path) -> list[Callable[[], object]]:
        words = ("data.window_gb=0.00055", STEPS)
        return [
            lambda: live.capture(self.config(folder, *words), self.target),
            lambda: (wait_for(folder / "store/heldout/manifest.json"), live.train(self.config(folder, *words), self.target, pause=0.02)),
        ]


def small_shards(work: Callable[[], object]) -> None:
    defaults = data.engine.capture.__kwdefaults__
    defaults["shard_tokens"] = 60
    work()


def wait_for(manifest: Path) -> None:
    while not manifest.exists() or not json.loads(manifest.read_text())["closed"]:
        time.sleep(0.02)


def left(name: str, folder: Path) -> Any:
    if name == "window":
        assert not list((folder / "store/train").glob("shard-*"))
        return {key: x.tolist() for key, x in checkpoint.load_head(folder / "run/step-000018").items()}
    return files(folder)


def torment(case: Case, name: str, folder: Path, kills: int, seed: int) -> int:
    """Kills `name` so often, over as many whole runs as that takes. Returns the number of runs."""
    rng, count, runs = random.Random(seed), 0, 0
    (folder / "whole").mkdir(parents=True)
    works = getattr(case, name)
    seconds = run(works(folder / "whole"))
    expected = left(name, folder / "whole")
    while count < kills:
        runs += 1
        (folder / f"{runs}").mkdir()
        count += killed(works(folder / f"{runs}"), min(kills - count, 12), 0.5 * seconds, rng)
        assert left(name, folder / f"{runs}") == expected, f"{name}, run {runs}"
    return runs


KINDS = ("respond", "respond_in_parts", "capture", "capture_in_parts", "window")


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_what_is_left_is_what_an_uninterrupted_run_leaves(name, tmp_path):
    torment(Case(tmp_path), name, tmp_path / name, 10, 0)


def main() -> None:
    total = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        case = Case(Path(folder))
        for i, name in enumerate(KINDS):
            kills, began = total // len(KINDS), time.monotonic()
            runs = torment(case, name, Path(folder) / name, kills, i)
            print(f"{name}: {kills} kills over {runs} runs, {time.monotonic() - began:.0f} s, all as the uninterrupted run", flush=True)


if __name__ == "__main__":
    main()
