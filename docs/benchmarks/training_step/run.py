"""Ours and each peer, one optimizer step at a time in turn, so that whatever else the machine does hits all alike.

python run.py OUT_FOLDER [--rounds 5] [--rows 1x1024:3:8192,...] [--supervised 1,0.5] [--dtype auto]     (make bench)

Each contender is a process of its own (worker.py) with its packages from .bench/<name>, beside this environment's torch and
transformers. Rows too large for all at once are taken one contender after the other. Writes training_step.json and training_step.md.
`ratio`: the fastest peer's median time over ours, all as installed; `ratio_tuned`: the same with glibc told to keep large blocks, which
speeds the peers up; `peak_fraction`: necessary operations of our step per second over the best measured product of two matrices.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

import torch
from contender import THREADS, Contender, cpu_name

from train.dist import usual_dtype

PEERS = {
    "speculators": ["speculators==0.9.0", "hs-connectors==0.9.0"],
    "specforge": ["specforge==0.2.0"],
    "modelopt": ["nvidia-modelopt==0.47.0", "pulp", "scipy", "nvidia-ml-py"],
}
TUNED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "34359738368"}
SIDE_BY_SIDE = 1e8  # logits of a step over all depths, up to which all contenders are in memory at once
D, INTER, V, Q, KV = 576, 1536, 49152, 576, 192
ROWS = [f"{shape}:{k}:{u}" for u in (8192, V) for shape in ("1x1024", "4x512", "1x4096") for k in (3, 7)]


def install(name: str) -> Path:
    """The peer's own packages in .bench/<name>; what they share with this environment is used from there."""
    folder = ROOT / ".bench" / name
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(partial), *PEERS[name]], check=True)
        partial.rename(folder)
    return folder


def contender(name: str, settings: dict[str, Any], env: dict[str, str]) -> Contender | None:
    """None where it fails, which is said: its row goes on without it."""
    path = str(install(name)) if name in PEERS else ""
    try:
        return Contender(HERE / "worker.py", name, settings, env | {"PYTHONPATH": path})
    except RuntimeError as error:
        print(f"  {error}", flush=True)
        return None


def measure(settings: dict[str, Any], rounds: int, env: dict[str, str]) -> dict[str, dict[str, float]]:
    """Median seconds of a step and peak gigabytes above the idle process, by contender: all of them in turn, or, where their logits do not
    fit into memory side by side, one after the other."""
    size = settings["sequences"] * settings["length"] * settings["depths"] * settings["draft_vocab"]
    if size <= SIDE_BY_SIDE:
        return take_turns(("draftsmith", *PEERS), {**settings, "warm": 2}, rounds, env)
    found: dict[str, dict[str, float]] = {}
    for name in ("draftsmith", *PEERS):
        found |= take_turns((name,), {**settings, "warm": 1}, rounds, env)
    return found


def take_turns(names: tuple[str, ...], settings: dict[str, Any], rounds: int, env: dict[str, str]) -> dict[str, dict[str, float]]:
    """Without those that stop on the way, out of memory above all, which is said."""
    there = [one for name in names if (one := contender(name, settings, env)) is not None]
    answers: dict[str, list[dict[str, float]]] = {one.name: [] for one in there}
    for what in [*["step"] * rounds, "peak"]:
        for one in list(there):
            try:
                answers[one.name].append(one.ask(what))
            except RuntimeError as error:
                print(f"  {error}", flush=True)
                there.remove(one)
    found = {}
    for one in there:
        *steps, peak = answers[one.name]
        found[one.name] = {"seconds": statistics.median(x["wall"] for x in steps), "gb": peak["peak_gb"] - peak["idle_gb"]}
        one.close()
    return found


def states() -> Path:
    """What all train on; made where it is missing."""
    path = ROOT / ".bench" / "states.pt"
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        subprocess.run([sys.executable, str(HERE / "data.py"), str(path)], check=True)
    return path


def about(dtype: str) -> dict[str, Any]:
    """Of this machine."""
    return {"date": time.strftime("%Y-%m-%d"), "cpu": cpu_name(), "threads": THREADS, "torch": torch.__version__, "dtype": dtype}


def peak_flops(dtype: torch.dtype) -> float:
    """Best rate of products as large as the lm_head's, operations per second."""
    torch.set_num_threads(THREADS)
    x, w, best = torch.randn(1024, D).to(dtype), torch.randn(8192, D).to(dtype), float("inf")
    out = torch.empty(1024, 8192, dtype=dtype)
    for _ in range(20):
        began = time.perf_counter()
        torch.mm(x, w.T, out=out)
        best = min(best, time.perf_counter() - began)
    return 2 * 1024 * D * 8192 / best


def necessary_flops(B: int, S: int, K: int, U: int) -> float:
    """Products of one step with a trained lm_head, every token supervised: forward 1, backward 2, without what needs no gradient (the
    taps, the teacher, the embeddings); the embedding half of q, k, v once for all depths; causal attention, one key per further depth."""
    T = B * S
    fc, qkv, rest = 2 * 3 * D * D, 2 * 2 * D * (Q + 2 * KV), 2 * (Q * D + 3 * D * INTER)
    layer = K * T * 3 * (qkv / 2 + rest) + T * qkv
    attention = 3 * sum(B * 4 * Q * (S * (S + 1) / 2 + S * k) for k in range(K))
    lm_head = sum(3 * 2 * (T - B * (k + 2)) * D * U for k in range(K)) + 2 * T * D * U
    return 2 * fc * T + layer + attention + lm_head


def row(text: str, rounds: int, dtype: str, data: Path, supervised: float = 1.0) -> dict[str, Any]:
    shape, k, u = text.split(":")
    B, S, K, U = *map(int, shape.split("x")), int(k), int(u)
    settings = {"sequences": B, "length": S, "depths": K, "draft_vocab": U, "dtype": dtype, "supervised": supervised, "data": str(data)}
    plain, tuned = (measure(settings, rounds, env) for env in ({}, TUNED))
    ours, peers = plain["draftsmith"], {name: x for name, x in plain.items() if name != "draftsmith"}
    others = [x["seconds"] for name, x in tuned.items() if name != "draftsmith"]
    found = {
        "shape": shape, "depths": K, "draft_vocab": U, "supervised": supervised,
        "ours_tok_s": B * S / ours["seconds"],
        "peers": {name: B * S / x["seconds"] for name, x in peers.items()},
        "ratio": min(x["seconds"] for x in peers.values()) / ours["seconds"] if peers else None,
        "ratio_tuned": min(others) / tuned["draftsmith"]["seconds"] if others else None,
        "memory_ratio": ours["gb"] / min(x["gb"] for x in peers.values()) if peers else None,
        "flops": necessary_flops(B, S, K, U) / ours["seconds"] if supervised == 1 else None,
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    return found


def _figure(ratio: float | None, unit: str = "") -> str:
    """None: no peer was left to compare with."""
    return "-" if ratio is None else f"{ratio:.2f}{unit}"


def markdown(machine: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [
        "# One EAGLE-3 optimizer step on a CPU, beside three peers",
        "",
        f"{machine['date']}, {machine['cpu']}, {machine['threads']} threads, ",
    ]
    lines[-1] += f"torch {machine['torch']}, {machine['dtype']}, best product of two matrices {machine['peak_gflops']:.0f} GFLOP/s. "
    lines += ["Written by `make bench`; see docs/benchmarks/training_step/.", ""]
    names = list(PEERS)
    lines += [f"| shape | depths | vocabulary | supervised | ours, tokens/s | {' | '.join(names)} | ratio | tuned | memory | of peak |"]
    lines += ["|" + "---|" * (9 + len(names))]
    for r in rows:
        peers = " | ".join(f"{r['peers'][n]:,.0f}" if n in r["peers"] else "-" for n in names)
        share = f"{r['peak_fraction']:.0%}" if r["peak_fraction"] else "-"
        lines += [
            f"| {r['shape']} | {r['depths']} | {r['draft_vocab']:,} | {r['supervised']:.0%} | {r['ours_tok_s']:,.0f} | {peers} | "
            f"{_figure(r['ratio'], 'x')} | {_figure(r['ratio_tuned'], 'x')} | {_figure(r['memory_ratio'])} | {share} |"
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--supervised", default="1,0.5", help="shares of the tokens that have labels: each of the rows once for each")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    dtype = usual_dtype() if args.dtype == "auto" else args.dtype
    args.out.mkdir(parents=True, exist_ok=True)
    data, machine = states(), about(dtype)
    rows, peak = [], 0.0
    for share, text in itertools.product(map(float, args.supervised.split(",")), args.rows.split(",")):
        peak = max(peak, peak_flops(getattr(torch, dtype)))  # again and again: something else may run
        rows.append(row(text, args.rounds, dtype, data, share))
    for one in rows:
        flops = one.pop("flops")
        one["peak_fraction"] = flops / peak if flops else None
    machine["peak_gflops"] = peak / 1e9
    (args.out / "training_step.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    (args.out / "training_step.md").write_text(markdown(machine, rows))
    print(markdown(machine, rows))


if __name__ == "__main__":
    main()
