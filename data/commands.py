"""The commands that messages name: with the conf and the overrides of this command line, so that they can be pasted."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "launch"
GIVEN = "DRAFTSMITH_COMMAND"  # in the environment, by which the engine's process knows it too
ONCE = ("dry_run",)  # said of one call, not of the run


def remember(words: list[str]) -> None:
    """words: `key=value` as given to a launch script, without its own; paths of scripts are those from the present directory."""
    kept = [word for word in words if word.partition("=")[0] not in ONCE]
    os.environ[GIVEN] = json.dumps([os.path.relpath(SCRIPTS), kept])


def command(stage: str, *words: str) -> str:
    """`python launch/<stage>.py` with what was given, `words` in the place of those with the same keys; conf=<name> where nothing was."""
    if GIVEN not in os.environ:
        return " ".join(["python", f"launch/{stage}.py", "conf=<name>", *words])
    folder, given = json.loads(os.environ[GIVEN])
    changed = {word.partition("=")[0] for word in words}
    kept = [word for word in given if word.partition("=")[0] not in changed]
    return shlex.join(["python", f"{folder}/{stage}.py", *kept, *words])
