"""Progress of long work on the console: a bar on a terminal, a plain line every ten seconds elsewhere (logs, batch jobs)."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

PLAIN_COLUMNS = 110  # of a table where there is no terminal: rich would cut it at 80
PLAIN_SECONDS = 10.0  # between two lines where there is no terminal


def table_console() -> Console:
    """For tables, on stdout."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_COLUMNS, highlight=False)


class Progress:
    """`with Progress("respond", total=90, unit="answers") as bar: bar.update(done, "430 tokens/s")`. Writes to stderr."""

    def __init__(self, label: str, total: int, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        console = Console(stderr=True)
        name, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
        columns = (name, BarColumn(), MofNCompleteColumn(), note, TimeRemainingColumn())
        self.bar = RichProgress(*columns, console=console) if console.is_terminal else None
        self.task = self.bar.add_task(f"{label} ({unit})", total=total, note="") if self.bar else None
        self.began: float | None = None  # when work was first reported: starting an engine is not work
        self.base = 0
        self.printed = 0.0

    def __enter__(self) -> Progress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()

    def update(self, done: int, note: str) -> None:
        """`done` of `total` units so far."""
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=done, note=note)
            return
        now = time.monotonic()
        if self.began is None:
            self.began, self.base = now, done
        if now - self.printed < PLAIN_SECONDS and done < self.total:
            return
        self.printed = now
        rate = (done - self.base) / max(now - self.began, 1e-9)
        left = f", {(self.total - done) / rate:.0f} s left" if rate > 0 and done < self.total else ""
        print(f"{self.label}: {done}/{self.total} {self.unit}{note and f', {note}'}{left}", file=sys.stderr, flush=True)
