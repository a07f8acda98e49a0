"""One writer per folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.errors import UserError


@contextmanager
def alone(folder: Path, key: str) -> Iterator[None]:
    """Inside, no other process of ours writes to `folder`, which is made; a kill releases it. key: what names the folder in a conf.

    UserError: another one is in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{folder}: another process is writing here; wait for its end, or set {key} to another folder") from error
        except OSError:  # a file system that knows no locks
            pass
        yield
