"""One of several engines that share a stage: each takes every n-th record, and a shared folder is all that joins them.

The number of engines may change from one start to the next: what any of them finished before is not done again, and whichever ends last
finds all of it there. Stores: data.store.gather; answers: data.answers.join.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from data.errors import UserError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Part:
    number: int = 0
    count: int = 1

    @property
    def name(self) -> str:
        """Of the part's files; empty where there is only one."""
        return f"part-{self.number}-of-{self.count}" if self.count > 1 else ""

    def of(self, items: list[Item]) -> list[Item]:
        """This engine's: every count-th, from its own number on."""
        return items[self.number :: self.count]

    def beside(self, path: Path) -> Path:
        """The part's own `<stem>.<part>.<suffixes>` beside a file; the file itself where there is only one."""
        stem, _, suffixes = path.name.partition(".")
        return path.with_name(f"{stem}.{self.name}.{suffixes}") if self.name else path

    @staticmethod
    def of_process(environment: Mapping[str, str], word: str | None = None) -> Part:
        """word: `<number>/<count>`; else as torchrun says, or a Slurm array (its tasks in ascending order). UserError: no such part."""
        if word is not None:
            number, _, count = word.partition("/")
            if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
                raise UserError(f"part={word}: must be <number>/<count>, with numbers from 0 on, as part=0/4 and part=3/4")
            return Part(int(number), int(count))
        if "WORLD_SIZE" in environment:
            return Part(int(environment["RANK"]), int(environment["WORLD_SIZE"]))
        if "SLURM_ARRAY_TASK_COUNT" in environment:
            first, step = int(environment["SLURM_ARRAY_TASK_MIN"]), int(environment.get("SLURM_ARRAY_TASK_STEP", "1"))
            return Part((int(environment["SLURM_ARRAY_TASK_ID"]) - first) // step, int(environment["SLURM_ARRAY_TASK_COUNT"]))
        return Part()


WHOLE = Part()


def part_files(path: Path) -> list[Path]:
    """What Part.beside made of this path, whatever the number of engines."""
    stem, _, suffixes = path.name.partition(".")
    return sorted(path.parent.glob(f"{stem}.part-*-of-*[0-9].{suffixes}"))
