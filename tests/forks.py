"""Launch scripts and their engines as processes that start in seconds: forks of one that has imported all of it, for tests that kill them.

`python tests/forks.py <script> <manifest or ""> <words>` is such a command as a new Python, whose engine is one too.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from test_kills import FORK, wait_for

import data.batch
import data.capture
import data.engine
from data import engine_child, engine_job
from train.config import ROOT

SHARD_TOKENS, PAUSE = 1000, 0.1  # of the stores; seconds before each step of the training
LAUNCHING, STARTING, WORKING, ENDING = range(4)
STAGES = ("starting", "engine starting", "at work", "ending")
AT = FORK.RawArray("i", 2)  # where each command is, of those side by side
PLACE = [0]  # of this process's command, in AT


class Command(NamedTuple):
    script: str
    words: list[str]
    place: int = 0  # in AT
    waits_for: Path | None = None  # a manifest, that it is closed


class Forked:
    """In the place of subprocess.Popen for `python -m data.engine_child`: its lines in a fork of the command's process."""

    def __init__(self, command: list[str], *, env: dict[str, str], **_: Any) -> None:
        ours, theirs = os.pipe()
        self.pid, self.code = os.fork(), None
        if self.pid == 0:
            for number in (1, 2):
                os.dup2(theirs, number)
            os.closerange(3, 1024)  # as Popen does: locks among them
            code = 1
            try:
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                AT[PLACE[0]] = STARTING
                os.environ.update(env)
                sys.argv = command[2:]
                engine_child.main()
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        os.close(theirs)
        self.stdout = os.fdopen(ours, encoding="utf-8", errors="replace")

    def wait(self) -> int:
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            AT[PLACE[0]] = ENDING
        return self.code

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, 9)
            self.wait()


def import_all() -> None:
    """What the commands and the engine import, and where they tell how far they are."""
    import torch

    os.environ.update(engine_job.environment(1))
    torch.set_num_threads(1)
    import data.ask
    import data.engine_worker as worker
    import data.vllm_connector
    import train.engine
    import train.loop  # noqa: F401

    report, step = worker.report, data.batch.Batches.step

    def told(done: int, note: str) -> None:
        AT[PLACE[0]] = WORKING
        report(done, note)

    def stepped(self: Any, i: int, accum: int) -> Any:
        AT[PLACE[0]] = WORKING
        return step(self, i, accum)

    worker.report, data.batch.Batches.step = told, stepped


def small() -> None:
    """Shards small enough that a kill finds some, a training slow enough to be killed."""
    data.batch.POLL_SECONDS = data.capture.POLL_SECONDS = 0.02
    data.engine.capture.__kwdefaults__["shard_tokens"] = SHARD_TOKENS
    step = data.batch.Batches.step

    def slowly(self: Any, i: int, accum: int) -> Any:
        time.sleep(PAUSE)
        return step(self, i, accum)

    data.batch.Batches.step = slowly


def go(command: Command) -> None:
    """The launch script in this process, as on a command line."""
    if command.waits_for:
        wait_for(command.waits_for)
    small()
    sys.argv = [f"launch/{command.script}.py", *command.words]
    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")


def process(command: Command, log: Path, cold: bool) -> None:
    """The target of a fork. cold: it becomes a new Python."""
    with log.open("a") as f:
        os.dup2(f.fileno(), 1)
        os.dup2(f.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    PLACE[0] = command.place
    AT[PLACE[0]] = LAUNCHING
    if cold:
        waits = str(command.waits_for or "")
        os.execv(sys.executable, [sys.executable, __file__, command.script, waits, *command.words])
    vars(engine_job)["subprocess"] = SimpleNamespace(Popen=Forked, PIPE=None, STDOUT=None)  # of this module alone
    go(command)


if __name__ == "__main__":
    script, waits, *words = sys.argv[1:]
    go(Command(script, words, 0, Path(waits) if waits else None))
