"""One writer per folder."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from data.errors import UserError


def hold(folder: Path, key: str) -> IO[str]:
    """As `alone`, until what is returned is closed or this process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    f = (folder / ".lock").open("w")
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


def held(folder: Path) -> bool:
    """Whether another process, or another part of this one, is inside. On a file system that knows no locks: true."""
    if not (folder / ".lock").exists():
        return False
    with (folder / ".lock").open() as f:
        try:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


@contextmanager
def alone(folder: Path, key: str) -> Iterator[None]:
    """Inside, no other process of ours writes to `folder`, which is made; a kill releases it. key: what names the folder in a conf.

    UserError: another one is in it.
    """
    with hold(folder, key):
        yield
