"""The first lines of the engine's process: `python -m data.engine_child <parent's pid> <job.json>`, or, for a server or its
client, `... <parent's pid> -m <module> <words>`.

A parent that is killed must leave no engine behind, nor a second writer of its files; and importing vLLM takes long enough to lose
it meanwhile. So this comes first, and imports vLLM last.
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int, sign: signal.Signals) -> None:
    """This process gets `sign` when the one with the id `parent`, its own, is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, sign)
    if os.getppid() != parent:
        sys.exit("the parent is gone")


def main() -> None:
    parent, job, *words = sys.argv[1:]
    end_with_parent(int(parent), signal.SIGTERM if words else signal.SIGKILL)  # a server ends its engine's process itself
    if words:
        os.execv(sys.executable, [sys.executable, job, *words])  # which keeps what prctl set
    try:
        from data.engine_worker import work
    except ImportError as error:
        result = Path(json.loads(Path(job).read_text(encoding="utf-8"))["result"])
        result.write_text(json.dumps({"error": f"vLLM cannot be imported ({error}); install it anew: make setup"}), encoding="utf-8")
        return
    work(job)


if __name__ == "__main__":
    main()
