"""What the benchmarks of this folder share that time several programs in turn: one process for each, asked when its turn comes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

LOGS = Path(__file__).resolve().parents[2] / ".bench"
THREADS = os.cpu_count() or 1
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # what idle threads do: as OpenMP has it, unless a benchmark says otherwise


class Contender:
    """A worker.py, told its settings, name and threads. It answers each line of its input with a line of JSON, and says one when it is
    ready. Its other output goes to .bench/<name>.log. RuntimeError: it stopped."""

    def __init__(self, worker: Path, name: str, settings: dict[str, Any], env: dict[str, str]) -> None:
        usual = {key: value for key, value in os.environ.items() if key not in WAITING}
        env = {**usual, "OMP_NUM_THREADS": str(THREADS), **env}
        command = [sys.executable, str(worker), json.dumps({**settings, "name": name, "threads": THREADS})]
        LOGS.mkdir(exist_ok=True)
        self.name, self.log = name, LOGS / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            last = self.log.read_text().strip().splitlines()[-1:]
            raise RuntimeError(f"{self.name} stopped: {' '.join(last)} (whole log: {self.log})")
        return json.loads(line)

    def ask(self, what: str = "") -> dict[str, Any]:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has stopped: its log says why
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def cpu_name() -> str:
    """The processor's model, where the system says it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "") or platform.machine()
