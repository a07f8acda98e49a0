"""One writer per folder, or several that know of each other."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO

from data.errors import UserError
from data.part import WHOLE, Part


def hold(folder: Path, key: str, name: str = ".lock") -> IO[str]:
    """As `alone`, until what is returned is closed or this process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    f = (folder / name).open("w")
    for attempts_left in (2, 1, 0):
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if not attempts_left:
                f.close()
                raise UserError(f"{folder}: another process is writing here; wait for its end, or set {key} to another folder") from error
            time.sleep(0.05)  # it may be somebody who only looks whether it is held
        except OSError:  # a file system that knows no locks
            break
    return f


def held(folder: Path, name: str = ".lock") -> bool:
    """Whether another process, or another part of this one, is inside. On a file system that knows no locks: true."""
    if not (folder / name).exists():
        return False
    with (folder / name).open() as f:
        try:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


@contextmanager
def alone(folder: Path, key: str, part: Part = WHOLE) -> Iterator[None]:
    """Inside, no other process of ours writes to `folder`, which is made; a kill releases it. key: what names the folder in a conf. part:
    beside other parts of as many, but for this one.

    UserError: another one is in it.
    """
    mine, partners = (f".lock-{part.name}", f"-of-{part.count}") if part.name else (".lock", ".lock")
    with hold(folder, key, mine):
        for path in folder.glob(".lock*"):
            if not path.name.endswith(partners):
                hold(folder, key, path.name).close()
        yield


@contextmanager
def at_work(path: Path) -> Iterator[None]:
    """Inside, `held(path.parent, path.name)` is true for all others: the file, which is made, may still grow. Waits its turn."""
    with path.open("a") as f:
        with suppress(OSError):  # a file system that knows no locks
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


def turn(folder: Path, name: str = ".turn") -> AbstractContextManager[None]:
    """Inside, no other process of ours is inside this for `folder`, which exists; waits until it is left."""
    return at_work(folder / name)
