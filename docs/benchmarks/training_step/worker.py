"""Takes steps of one contender on command: `python worker.py '<json>'`, then a line on stdin per step; answers in JSON lines.

Answers {"ready": ...} once built and warm, then {"wall", "cpu"} seconds of each step, and on the line "peak" {"peak_gb", "idle_gb"}:
the most resident memory since it was ready, and what it was before the contender was built.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ["HF_HUB_OFFLINE"] = "1"
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever a package prints goes to stderr

import torch

sys.path.insert(0, str(Path(__file__).parent))
import contenders


def memory_gb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 2**20
    raise KeyError(field)


def answer(**values: object) -> None:
    print(json.dumps(values), file=answers, flush=True)


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings.pop("threads"))
    name, warm = settings.pop("name"), settings.pop("warm")
    settings["data"] = torch.load(settings["data"], weights_only=True)
    settings["dtype"] = getattr(torch, settings["dtype"])
    job, idle = contenders.Job(**settings), memory_gb("VmRSS")
    step = getattr(contenders, f"build_{name}")(job)
    for _ in range(warm):
        step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    answer(ready=True)
    for line in sys.stdin:
        if line.strip() == "peak":
            answer(peak_gb=memory_gb("VmHWM"), idle_gb=idle)
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        answer(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)


if __name__ == "__main__":
    main()
