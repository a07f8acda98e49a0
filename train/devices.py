"""What a plan reckons with: memory, speed and bandwidth of the devices that are usual, and of this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from data.errors import UserError


@dataclass(frozen=True)
class Device:
    """memory: bytes; flops: peak per second of products in the training's dtype; bandwidth: bytes per second of its memory. shared: one
    memory and one set of cores for all ranks."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    shared: bool = False


# As their makers state them: dense bf16.
GPUS = {
    "h100": Device("H100", 80e9, 989e12, 3.35e12),
    "h200": Device("H200", 141e9, 989e12, 4.8e12),
    "mi300x": Device("MI300X", 192e9, 1307e12, 5.3e12),
}
CGROUP = Path("/sys/fs/cgroup/memory.max")  # what a container may use


def choose(word: str | None, gpus: bool) -> Device:
    """By a word of the command line, else what is here; where no GPU is and some are asked for, an H100. UserError: an unknown word."""
    if word == "cpu":
        return this_cpu()
    if word is not None:
        if word not in GPUS:
            raise UserError(f"device={word}: must be one of {', '.join(GPUS)}, cpu")
        return GPUS[word]
    return GPUS["h100"] if gpus and not torch.cuda.is_available() else here()


def here() -> Device:
    """A GPU that is not listed has the memory that it says, and an H100's speed for want of a better guess."""
    if not torch.cuda.is_available():
        return this_cpu()
    name = torch.cuda.get_device_name()
    known = next((device for word, device in GPUS.items() if word in name.lower()), GPUS["h100"])
    return Device(name, torch.cuda.get_device_properties(0).total_memory, known.flops, known.bandwidth)


def this_cpu() -> Device:
    """Its memory (of the container, where there is one), and what a product of matrices and a copy reach: a tenth of a second."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP.read_text().strip() if CGROUP.is_file() else "max"
    x, y = torch.randn(1024, 1024), torch.empty(2**23)
    product, copy = _seconds(lambda: x @ x), _seconds(lambda: y.clone())
    memory = min(memory, int(limit)) if limit.isdigit() else memory
    return Device("this CPU", memory, 2 * 1024**3 / product, 2 * 4 * 2**23 / copy, shared=True)


def _seconds(work: Callable[[], object]) -> float:
    """The best of three, by the processors' own time, so that what else runs here is not counted."""
    found = []
    for _ in range(3):
        began = time.process_time()
        work()
        found.append((time.process_time() - began) / torch.get_num_threads())
    return min(found)
