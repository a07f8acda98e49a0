"""Kills of real engines, of the commands that start them and of the training, at random moments: what is there in the end is what an
uninterrupted run leaves, byte for byte.

`python tests/test_kills_engine.py 200 7` kills 200 times with seed 7 and counts aloud. The launch scripts run as on a command line, and
vLLM in a process of its own under each, but as forks of a process that has imported all of it: a start takes seconds, and most kills hit
work. The last kind starts a new Python for each command and engine instead.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from forks import AT, LAUNCHING, STAGES, STARTING, WORKING, Command, import_all, process
from test_kills import FORK, files

from data.builtin import build_tiny
from train import checkpoint

PER_RUN, STEPS = 10, 30  # kills of a run at most, so that it may come to its end; steps of the training
WORDS = f"conf=tiny_eagle3 target.spec={{}} data.limit=160 data.heldout_limit=8 data.max_length=192 train.steps={STEPS} train.threads=1 "
WORDS += "train.save_every=3 train.val_every=15 train.log_every=1"


class Runs:
    """Commands side by side in a folder, their kills counted by what was killed and when."""

    def __init__(self, commands: list[Command], folder: Path, cold: bool) -> None:
        self.commands, self.folder, self.cold = commands, folder, cold
        self.processes, self.traces = [], [0.0] * len(commands)
        self.kills: Counter[tuple[str, str]] = Counter()
        for i in range(len(commands)):
            self.processes.append(self.start(i))

    def start(self, i: int) -> Any:
        self.traces[i] = self.trace(i)
        one = FORK.Process(target=process, args=(self.commands[i], self.folder / f"log-{i}", self.cold))
        one.start()
        return one

    def trace(self, i: int) -> float:
        """Another number when the command has written another answer, shard or line of its log."""
        kind = {"respond": "*/*.jsonl", "capture": "store/*/shard-*", "train": "run/*.jsonl"}[self.commands[i].script]
        stats = [path.stat() for path in self.folder.glob(kind) if path.exists()]
        return sum(stat.st_size + stat.st_mtime for stat in stats)

    def stage(self, i: int) -> int:
        if not self.cold:
            return AT[self.commands[i].place]
        return WORKING if self.trace(i) != self.traces[i] else LAUNCHING

    def finish(self) -> list[float]:
        """All of them to their end. Returns seconds of each stage, of all commands together."""
        spent, before = [0.0] * len(STAGES), time.monotonic()
        while any(one.is_alive() for one in self.processes):
            time.sleep(0.01)
            now = time.monotonic()
            for i, one in enumerate(self.processes):
                spent[self.stage(i)] += (now - before) * one.is_alive()
            before = now
        logs = [(self.folder / f"log-{i}").read_text()[-2000:] for i in range(len(self.processes))]
        assert [one.exitcode for one in self.processes] == [0] * len(logs), "\n".join(logs)
        return spent

    def wait(self, rng: random.Random, starting: float, working: float) -> None:
        """Until a moment of some command's start, or three times of four of its work."""
        i, deadline = rng.randrange(len(self.processes)), time.monotonic() + 120
        if rng.random() < 0.25:
            time.sleep(starting * rng.random())
            return
        while self.processes[i].is_alive() and self.stage(i) != WORKING and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(working * rng.random())

    def kill(self, rng: random.Random) -> bool:
        """One of those that run: a command, or the engine of one. False: none does, or it had just ended."""
        alive = [i for i, one in enumerate(self.processes) if one.is_alive()]
        if not alive:
            return False
        i = rng.choice(alive)
        one, stage, script = self.processes[i], self.stage(i), self.commands[i].script
        engines = psutil.Process(one.pid).children() if rng.random() < 0.5 else []
        with suppress(psutil.NoSuchProcess):  # it ended just now
            (engines[0] if engines else one).kill()
        one.join(900)
        if one.exitcode == 0:
            return False
        assert one.exitcode == (2 if engines else -9), (self.folder / f"log-{i}").read_text()[-2000:]
        self.kills[f"engine of {script}" if engines else script, STAGES[stage]] += 1
        self.processes[i] = self.start(i)
        return True

    def stop(self) -> None:
        for one in self.processes:
            one.kill()


class Case:
    """Kinds of work, and what they leave."""

    def __init__(self, folder: Path) -> None:
        self.target = build_tiny(folder / "target")
        self.answers = folder / "answers"

    def commands(self, kind: str, folder: Path) -> list[Command]:
        words = [*WORDS.split(), f"target.model={self.target}", f"data.store={folder}/store", f"run_dir={folder}/run"]
        if kind.startswith("respond"):
            words.append(f"data.responses={folder}/answers")
        else:
            words.append(f"data.responses={self.answers}")
        script = kind.split()[0]
        if kind.endswith("in parts"):
            return [Command(script, [*words, f"part={i}/2"], i) for i in range(2)]
        if kind == "window":
            words.append("data.window_gb=0.004")
            closed = folder / "store/heldout/manifest.json"
            return [Command("capture", words), Command("train", [*words, "plan=false"], 1, closed)]
        return [Command(script, words)]

    def left(self, kind: str, folder: Path) -> dict[str, Any]:
        if kind != "window":
            return files(folder / ("answers" if kind.startswith("respond") else "store"))
        assert not list((folder / "store/train").glob("shard-*"))
        return {key: x.tolist() for key, x in checkpoint.load_head(folder / f"run/step-{STEPS:06d}").items()}


def torment(case: Case, kind: str, folder: Path, kills: int, seed: int) -> Counter[tuple[str, str]]:
    """Kills so often, over as many whole runs as that takes, and compares what each leaves."""
    rng, count, runs, began = random.Random(seed), Counter(), 0, time.monotonic()
    cold, kind = kind.startswith("cold "), kind.removeprefix("cold ")
    (folder / "whole").mkdir(parents=True)
    spent = Runs(case.commands(kind, folder / "whole"), folder / "whole", False).finish()
    expected = case.left(kind, folder / "whole")
    if kind == "respond" and not case.answers.exists():
        (folder / "whole/answers").rename(case.answers)
    print(f"{kind}: {', '.join(f'{s:.1f} s {name}' for s, name in zip(spent, STAGES, strict=True))}", flush=True)
    starting, working = 15.0 if cold else spent[LAUNCHING] + spent[STARTING], 0.5 * spent[WORKING]
    while count.total() < kills:
        runs += 1
        (folder / f"{runs}").mkdir()
        running = Runs(case.commands(kind, folder / f"{runs}"), folder / f"{runs}", cold)
        try:
            while running.kills.total() < min(kills - count.total(), PER_RUN) and any(one.is_alive() for one in running.processes):
                running.wait(rng, starting, working)
                running.kill(rng)
            running.finish()
        finally:
            running.stop()
        found = case.left(kind, folder / f"{runs}")
        other = [key for key in {**expected, **found} if found.get(key) != expected.get(key)]
        assert not other, f"{kind}, run {runs} in {folder}: {sorted(other)} are not those of the uninterrupted run"
        count += running.kills
    working_kills = sum(n for (_, stage), n in count.items() if stage == STAGES[WORKING])
    whole = f"{kills} kills over {runs} runs in {time.monotonic() - began:.0f} s, {working_kills} at work, all as uninterrupted"
    print(f"{'cold ' * cold}{kind}: {whole}: {dict(sorted(count.items()))}", flush=True)
    return count


KINDS = {"respond": 0.2, "capture": 0.2, "window": 0.25, "respond in parts": 0.15, "capture in parts": 0.15, "cold window": 0.05}


@pytest.mark.slow
def test_killed_engines_leave_what_uninterrupted_ones_leave(tmp_path):
    """In a process of its own: of this one vLLM must not be a part, nor must what it patches."""
    child = FORK.Process(target=main, args=(["6", "0", str(tmp_path)],))
    child.start()
    child.join(900)
    assert child.exitcode == 0


def main(words: list[str]) -> None:
    total, seed, *folders = words
    import_all()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder, count, faults = Path(folders[0] if folders else temporary), Counter(), []
        case = Case(folder)
        for i, (kind, share) in enumerate(KINDS.items()):
            kills, place = max(1, round(int(total) * share)), folder / kind.replace(" ", "-")
            try:
                count += torment(case, kind, place, kills, int(seed) * 100 + i)
            except AssertionError as fault:
                faults.append(str(fault))
                print(f"{kind}: {fault}", flush=True)
        print(f"seed {seed}: {count.total()} kills, {len(faults)} faults: {dict(sorted(count.items()))}")
    assert not faults, "\n".join(faults)


if __name__ == "__main__":
    main(sys.argv[1:])
