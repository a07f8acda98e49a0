"""The sizes, heads and batches of the GPU benchmark: all random, on the device."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from heads.base import Batch, Frozen, TargetSpec
from heads.eagle3 import Eagle3

LLAMA_8B = TargetSpec(
    hidden_size=4096, num_layers=32, vocab_size=128256, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=14336,
    rms_norm_eps=1e-5, rope_theta=500000.0, max_positions=131072,
)  # fmt: skip
LLAMA_70B = replace(LLAMA_8B, hidden_size=8192, num_layers=80, num_heads=64, intermediate_size=28672)
TINY = replace(
    LLAMA_8B,
    hidden_size=64,
    num_layers=4,
    vocab_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    max_positions=128,
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


def head_of(spec: TargetSpec, K: int, U: int, dtype: torch.dtype, chunk: int = 1024) -> Eagle3:
    torch.manual_seed(0)
    size, taps = spec.hidden_size, [2, spec.num_layers // 2, spec.num_layers - 3]
    with torch.device(DEVICE):
        head = Eagle3(target=spec, taps=sorted(set(taps)), depths=K, draft_vocab_size=U if U < spec.vocab_size else None, loss_chunk=chunk)
        if U < spec.vocab_size:
            head.set_draft_vocab(torch.arange(U) * (spec.vocab_size // U))
        head = head.to(dtype)
        head.attach(Frozen(*(torch.randn(spec.vocab_size, size, dtype=dtype) * size**-0.5 for _ in range(2))))
    return head


def batch_of(head: Eagle3, lengths: list[int], dtype: torch.dtype) -> Batch:
    """Random documents, every token supervised but the first."""
    T, D = sum(lengths), head.target.hidden_size
    with torch.device(DEVICE):
        tokens, mask = torch.randint(0, head.target.vocab_size, (T,)), torch.ones(T, dtype=torch.bool)
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], device="cpu")
        mask[offsets[:-1].to(DEVICE)] = False
        return Batch(tokens, mask, offsets, torch.randn(T, len(head.taps), D, dtype=dtype), torch.randn(T, D, dtype=dtype))
