"""torch's launcher, as `.venv/bin/torchrun`: the same command, but where every failed rank ended with status 2, having said in
one line what the user can mend, it ends with status 2 as well instead of adding a traceback of its own."""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as run

MENDABLE = 2
STOPPED = -15  # a rank that the launcher ended because another one had failed


def main() -> None:
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # repeats each exit status
    try:
        run()
    except ChildFailedError as error:
        if {failure.exitcode for failure in error.failures.values()} <= {MENDABLE, STOPPED}:
            sys.exit(MENDABLE)
        raise
