"""How fast batches come out of a store, beside what trains on them.

python docs/benchmarks/loader.py [FOLDER]      FOLDER: on the disk whose speed counts; else a temporary folder

Writes random states (EAGLE-3: three taps and the last) there for the while, reads them as the training does (data/batch.py: packed,
shuffled, read ahead), and takes a step of an EAGLE-3 head of the embedded target's size. Prints tokens/s and GB/s by the clock, and tokens
per second of CPU time, which other work on the machine hardly moves. What was just written is read from memory, not from the disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from data.batch import Batches
from data.store import Store, StoreWriter
from heads.base import Frozen, TargetSpec
from heads.eagle3 import Eagle3

TAPS, MICRO, STEPS = (2, 15, 27), 2048, 12
SMOLLM = TargetSpec(
    hidden_size=576, num_layers=30, vocab_size=8192, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536,
    rms_norm_eps=1e-5, rope_theta=1e5, max_positions=8192,
)  # fmt: skip


def make(folder: Path, D: int, tokens: int, length: int = 400) -> Store:
    manifest = {
        "target": {"id": "random", "revision": None, "fingerprint": "", "dtype": "bfloat16", "quantisation": None},
        "tokenizer_hash": "", "template_hash": "", "taps": list(TAPS), "hidden_size": D, "last": "supervised", "dtype": "bfloat16",
        "engine": {"name": "random", "version": "0"},
    }  # fmt: skip
    states = torch.randn(length, len(TAPS) + 1, D).bfloat16()
    with StoreWriter(folder, manifest) as writer:
        for i in range(tokens // length):
            writer.add(str(i), torch.randint(0, SMOLLM.vocab_size, (length,)), torch.arange(length) >= 100, states[:, :-1], states[:, -1])
    return Store(folder)


def rate(tokens: int, work: Callable[[], object]) -> tuple[float, float]:
    """Tokens per second by the clock, and per second of CPU time of all threads."""
    clock, cpu = time.perf_counter(), time.process_time()
    work()
    return tokens / (time.perf_counter() - clock), tokens / (time.process_time() - cpu)


def loader_rate(store: Store) -> tuple[float, float]:
    batches = Batches(store, TAPS, MICRO, 0, 0, 1, 4096)
    tokens = sum(int(batches.tokens(i, 1)) for i in range(STEPS))
    return rate(tokens, lambda: [None for _ in batches.prefetch(0, STEPS, 1)])


def trainer_rate(store: Store) -> tuple[float, float]:
    """Forward and backward of a step of the embedded target's head, 3 depths, in float32."""
    torch.manual_seed(0)
    head = Eagle3(target=SMOLLM, taps=list(TAPS), depths=3)
    head.attach(Frozen(*(torch.randn(SMOLLM.vocab_size, SMOLLM.hidden_size) * 0.05 for _ in range(2))))
    (batch,) = Batches(store, TAPS, MICRO, 0, 0, 1, 4096).step(0, 1)
    batch = batch.to("cpu", torch.float32)
    return rate(len(batch.token_ids_T), lambda: head.loss(batch).total.backward())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    with tempfile.TemporaryDirectory(dir=parser.parse_args().folder) as folder:
        for name, D in (("embedded target", SMOLLM.hidden_size), ("8B", 4096)):
            store = make(Path(folder) / name, D, MICRO * STEPS)
            loader_rate(store)  # maps the shards
            clock, cpu = loader_rate(store)
            per_token = 2 * D * (len(TAPS) + 1)
            print(f"{name}: {clock:,.0f} tokens/s, {clock * per_token / 1e9:.2f} GB/s; {cpu:,.0f} tokens per CPU second", flush=True)
            if D == SMOLLM.hidden_size:
                step_clock, step_cpu = trainer_rate(store)
                print(
                    f"  its head on this CPU: {step_clock:,.0f} tokens/s, {step_cpu:,.0f} per CPU second: {cpu / step_cpu:.0f} times slower"
                )


if __name__ == "__main__":
    main()
