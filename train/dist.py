"""Rank, world and the few collectives the loop needs. Works under torchrun and in a single plain process.

Every reduction here runs on CPU tensors through gloo: the counts of a step come from masks that are still on the CPU, so
agreeing on them never waits for the device.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor

Result = TypeVar("Result")


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def keep_freed_memory() -> None:
    """glibc returns large blocks to the system when they are freed, and every step on a CPU would fault its own in anew: some 100 MB of
    pages, a twentieth of its time. The same as MALLOC_MMAP_MAX_=0 and MALLOC_TRIM_THRESHOLD_ in the environment."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        mmap_max, trim_threshold = -4, -1  # M_* of malloc.h
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)


def start(threads: int | None = None) -> None:
    """Joins the process group once. Without torchrun this process is a world of one, and no port is opened for it."""
    alone = "RANK" not in os.environ or os.environ.get("WORLD_SIZE") == "1"  # set so too by the process that began this one
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(key, value)
    if threads is not None:
        torch.set_num_threads(threads)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(device())
    else:
        keep_freed_memory()
    if not torch_dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if alone:
            torch_dist.init_process_group(backend, store=torch_dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
        else:
            torch_dist.init_process_group(backend)


def stop() -> None:
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def barrier() -> None:
    all_sum(torch.zeros(1))


def all_sum(x: Tensor) -> Tensor:
    """The sum of a CPU tensor over all ranks, in place."""
    torch_dist.all_reduce(x)
    return x


def broadcast(x: Tensor) -> Tensor:
    """Rank 0's CPU tensor on every rank, in place."""
    torch_dist.broadcast(x, src=0)
    return x


def rank0_first(work: Callable[[], Result]) -> Result:
    """Runs `work` on rank 0 alone, then on the others, which find what rank 0 left on disk."""
    if rank() == 0:
        result = work()
        barrier()
        return result
    barrier()
    return work()


def usual_dtype() -> str:
    """bfloat16 on a GPU and on a CPU with instructions for its products, else float32: emulated bfloat16 is five times slower than that."""
    able = torch.cpu.get_capabilities()
    return "bfloat16" if torch.cuda.is_available() or any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) else "float32"
