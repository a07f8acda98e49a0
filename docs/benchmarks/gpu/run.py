"""What the training step does on one GPU: right against float64, then how fast and in how much memory. docs/benchmarks/gpu.md.

python docs/benchmarks/gpu/run.py [--out FOLDER] [--minutes 8] [--smoke]

Needs torch alone and no network: states and weights are random. Writes <device>-<date>.json and .md, and as .txt which kernels take the
time of the first row. Rows that run out of memory, or of minutes, say so. --smoke: tiny sizes on whatever device there is, in seconds.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from checks import correctness
from parts import DEVICE, DTYPE, LLAMA_8B, LLAMA_70B, TINY, batch_of, head_of
from torch import Tensor

from heads.attention import Documents, causal_diagonal_dense
from heads.base import Batch, TargetSpec
from heads.eagle3 import Eagle3
from heads.kernels import compile_passes

PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "MI300X": 1307e12, "A100": 312e12}  # dense bf16 FLOP/s, by the vendors


def published_loss(head: Eagle3, batch: Batch) -> Tensor:
    """The loss as SpecForge and speculators publish it for EAGLE-3: the target's softmax over the draft vocabulary for all tokens, whole
    logits and their log-softmax in float32 at every depth, kept for the backward. Attention by `causal_diagonal_dense`, whose score
    matrices end with the document, where theirs span the batch."""
    docs = Documents(batch.offsets_S1, DEVICE)
    labels = head.labels(batch, docs)
    with patch("heads.layers.causal_diagonal", causal_diagonal_dense):
        x_KRD = head.outputs(batch, docs, labels)
    p_LU = (batch.last_TD[labels.position_L] @ head.teacher_UD.T).float().softmax(-1)  # type: ignore[index]
    total = torch.zeros((), device=DEVICE)
    for k, x_RD in enumerate(x_KRD):
        there = labels.row_KL[k] >= 0
        log_q = (x_RD[labels.row_KL[k][there]] @ head.head_rows(k).T).float().log_softmax(-1)
        total = total - (p_LU[there] * log_q).sum()
    return total


@dataclass
class Case:
    size: str
    spec: TargetSpec
    U: int
    K: int
    T: int
    way: str  # ours, recompute (ours, each depth worked out again in the backward), compiled (ours, its element-wise passes), published

    def flops(self) -> float:
        """Products that a step needs: forward 1, backward 2, without what needs no gradient (taps, teacher, frozen lm_head's weights,
        embeddings); the embedding half of q, k and v once for all depths; causal attention, and one key per further depth. As
        docs/benchmarks/training_step/run.py."""
        s, lengths = self.spec, self.lengths()
        D, Q, KV = s.hidden_size, s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        fc, qkv, rest = 2 * 3 * D * D, 2 * 2 * D * (Q + 2 * KV), 2 * (Q * D + 3 * D * s.intermediate_size)
        layer = self.K * self.T * 3 * (qkv / 2 + rest) + self.T * qkv
        attention = 3 * sum(4 * Q * (n * (n + 1) / 2 + n * k) for k in range(self.K) for n in lengths)
        lm_head = sum(2 * 2 * (self.T - len(lengths) * (k + 2)) * D * self.U for k in range(self.K)) + 2 * self.T * D * self.U
        return 2 * fc * self.T + layer + attention + lm_head

    def lengths(self) -> list[int]:
        return [self.T // 2, self.T // 4, self.T // 8, self.T // 8]


def stepper(case: Case) -> Callable[[], None]:
    """Forward, backward and AdamW on float32 masters, as the engine trains in bfloat16."""
    head = head_of(case.spec, case.K, case.U, DTYPE)
    head.recompute = case.way == "recompute"
    torch.compiler.reset()  # each case is compiled for its own sizes
    compile_passes(on=case.way == "compiled")
    batch = batch_of(head, case.lengths(), DTYPE)
    parameters = [p for p in head.parameters() if p.requires_grad]
    masters = [p.detach().float().clone() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    scale = 1.0 / int(head.count(batch).sum())

    def step() -> None:
        loss = published_loss(head, batch) if case.way == "published" else head.loss(batch).total
        (loss * scale).backward()
        for p, master in zip(parameters, masters, strict=True):
            master.grad, p.grad = p.grad.float(), None  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(parameters, masters, strict=True):
                p.copy_(master)
                master.grad = None

    return step


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], object], rounds: int) -> float:
    """Median seconds."""
    times = []
    for _ in range(rounds):
        wait()
        began = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def best_product(size: int) -> float:
    """FLOP/s of the fastest of some square products in DTYPE."""
    a, b = (torch.randn(size, size, device=DEVICE, dtype=DTYPE) for _ in range(2))
    out, best = torch.empty_like(a), float("inf")
    for _ in range(12):
        best = min(best, timed(lambda: torch.mm(a, b, out=out), 1))
    return 2 * size**3 / best


def measure(case: Case, rounds: int) -> dict[str, Any]:
    row: dict[str, Any] = {"size": case.size, "vocabulary": case.U, "depths": case.K, "tokens": case.T, "way": case.way}
    try:
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        step = stepper(case)
        step()  # the optimizer's states, and what kernels set up at their first call
        step()
        seconds = timed(step, rounds)
    except RuntimeError as error:  # the other rows go on
        return row | {"note": "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error).splitlines()[0]}
    row |= {"seconds": seconds, "tokens_per_second": case.T / seconds, "flops_per_second": case.flops() / seconds}
    if DEVICE.type == "cuda":
        row["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return row


def kernels(case: Case) -> str:
    """Which operations take a step's time."""
    try:
        step = stepper(case)
        step()
        with torch.profiler.profile() as found:
            step()
            wait()
    except RuntimeError as error:
        return f"{case}: {error}"
    order = "self_device_time_total" if DEVICE.type == "cuda" else "self_cpu_time_total"
    return f"{case}\n\n" + found.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=90)


def cases(smoke: bool) -> list[Case]:
    """The most telling first, in case the minutes do not suffice."""
    if smoke:
        return [Case("tiny", TINY, U, 3, 64, way) for U in (128, TINY.vocab_size) for way in ("ours", "recompute", "published")]
    shapes = [(7, 4096), (3, 4096), (7, 8192), (3, 8192)]
    found = []
    for K, T in shapes:
        for (size, spec), U in itertools.product((("8B", LLAMA_8B), ("70B", LLAMA_70B)), (32000, LLAMA_8B.vocab_size)):
            ways = ("ours", "published", "recompute") if K == 7 else ("ours", "published")
            found += [Case(size, spec, U, K, T, way) for way in ways]
    sizes = itertools.product((("8B", LLAMA_8B), ("70B", LLAMA_70B)), (32000, LLAMA_8B.vocab_size))
    return [*found, *(Case(size, spec, U, 7, 4096, "compiled") for (size, spec), U in sizes)]  # last, for compiling takes its time


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def verdict(check: dict[str, Any]) -> str:
    return "right" if check["ok"] else f"WRONG {check.get('note', '')}".strip()


def markdown(report: dict[str, Any]) -> str:
    machine = report["machine"]
    of = f"{machine['peak'] / 1e12:.0f} TFLOP/s" if machine["peak"] else "unknown"
    lines = [f"# The training step on one {machine['device']}", ""]
    lines += [f"{machine['date']}, torch {machine['torch']}, {machine['dtype']}; peak by the vendor {of}, best product of two matrices "]
    lines[-1] += f"{machine['best_product'] / 1e12:.3g} TFLOP/s. Written by docs/benchmarks/gpu/run.py; see docs/benchmarks/gpu.md."
    wrong = [c for c in report["correctness"] if not c["ok"]]
    lines += ["", f"{len(report['correctness'])} checks against float64 on the CPU, {len(wrong)} wrong.", ""]
    lines += ["| check | dtype | error | the CPU's own | |", "|---|---|---|---|---|"]
    lines += [
        f"| {c['what']} | {c['dtype']} | {number(c['error'])} | {number(c['on_cpu'])} | {verdict(c)} |" for c in report["correctness"]
    ]
    lines += ["", "| target | vocabulary | depths | tokens | way | tokens/s | MFU | of best product | peak GB |", "|" + "---|" * 9]
    for r in report["rows"]:
        start = f"| {r['size']} | {r['vocabulary']:,} | {r['depths']} | {r['tokens']:,} | {r['way']} |"
        if "note" in r:
            lines += [f"{start} {r['note']} | | | |"]
            continue
        mfu = f"{r['flops_per_second'] / machine['peak']:.1%}" if machine["peak"] else "-"
        memory = f"{r['peak_memory_gb']:.1f}" if "peak_memory_gb" in r else "-"
        lines += [f"{start} {r['tokens_per_second']:,.0f} | {mfu} | {r['flops_per_second'] / machine['best_product']:.1%} | {memory} |"]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    end, name = time.monotonic() + 60 * args.minutes, torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    machine = {"device": name, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "dtype": str(DTYPE).removeprefix("torch.")}
    machine |= {
        "peak": next((peak for key, peak in PEAKS.items() if key in name), None),
        "best_product": best_product(128 if args.smoke else 8192),
    }
    report: dict[str, Any] = {"machine": machine, "correctness": correctness(), "rows": []}
    path = args.out / f"{name.replace(' ', '_').replace('/', '_')}-{machine['date']}"
    args.out.mkdir(parents=True, exist_ok=True)
    every = cases(args.smoke)
    path.with_suffix(".txt").write_text(kernels(every[0]))
    for case in every:
        late = {"size": case.size, "vocabulary": case.U, "depths": case.K, "tokens": case.T, "way": case.way, "note": "no time left"}
        report["rows"].append(late if time.monotonic() > end else measure(case, 2 if args.smoke else 5))
        print(json.dumps(report["rows"][-1]), flush=True)
        path.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")  # after each row, in case the machine goes away
        path.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))
    return int(any(not check["ok"] for check in report["correctness"]))


if __name__ == "__main__":
    sys.exit(main())
