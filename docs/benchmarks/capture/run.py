"""Capture beside what it cannot be faster than, and beside other ways to the same states, in turn, so that whatever else the machine does
hits all alike.

python run.py OUT_FOLDER [--rounds 5] [--sequences 200] [--batches 1,4,16]     (make bench-capture)
A quick look whether it runs at all: --conf tiny_eagle3 --taps 0,1 --rounds 1 --sequences 8

The same tokens for all: prompts of data/promptset, each followed by as many tokens of other prompts as an answer has. Contenders, each a
process of its own (worker.py), the engine with the settings of a capture in all of them: `capture`, ours, from the engine to shards on disk
(the taps, last where supervised); `prefill`, the engine alone, one token generated, nothing kept; `stock`, the engine with vLLM's example
connector, a file per sequence, which speculators 0.9 extracts with; `transformers`, a forward pass with output_hidden_states at its best
batch size. speculators' own command asks a vLLM server whose connector copies on CUDA streams: on a CPU `stock` stands in for it.

Writes capture.json and capture.md: medians over the rounds. `ratio`: prefill's time over ours.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

import torch
from contender import THREADS, Contender, cpu_name

from data.chat import all_prompt_ids, load_tokenizer
from data.engine import capture_job, engine_identity
from data.manifest import plan_bytes
from data.prompts import read_prompts, select
from data.target import resolve, spec
from train.config import load

ANSWER = 75  # tokens
QUIET = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
QUIET["OMP_WAIT_POLICY"] = "passive"  # all of them: as our engines have it, and vLLM is no slower with
NOTE = "its command asks a vLLM server whose connector copies on CUDA streams, which a CPU has not; see stock_tok_s"


def contender(name: str, settings: dict[str, Any]) -> Contender:
    return Contender(HERE / "worker.py", name, settings, QUIET | {"PYTHONPATH": f"{ROOT}:{HERE}"})


def sequences(target_dir: Path, count: int) -> list[dict[str, Any]]:
    """{id, token_ids, spans}: a prompt, and an answer of other prompts' tokens, which cost the same."""
    prompts = select(read_prompts(["data/promptset"], ROOT), "train", count)
    encoded = list(all_prompt_ids(load_tokenizer(target_dir, False), prompts).values())
    text, found = [token for ids in encoded for token in ids], []
    for i, ids in enumerate(encoded):
        answer = text[i * ANSWER % len(text) :][:ANSWER]
        found.append({"id": f"s{i}", "token_ids": ids + answer, "spans": [[len(ids), len(ids) + len(answer)]]})
    return found


def best_batch(settings: dict[str, Any], batches: list[int]) -> int:
    """Of transformers: the batch size of its fastest pass."""
    seconds = {}
    for batch in batches:
        one = contender("transformers", {**settings, "batch": batch})
        seconds[batch] = one.ask()["seconds"]
        one.close()
        print(f"transformers, batch {batch}: {seconds[batch]:.1f} s", flush=True)
    return min(seconds, key=seconds.__getitem__)


def measure(settings: dict[str, Any], rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    contenders = [contender(name, settings) for name in ("capture", "prefill", "stock", "transformers")]
    times: dict[str, list[dict[str, float]]] = {one.name: [] for one in contenders}
    for number in range(rounds):
        for one in contenders[number % 2 :] + contenders[: number % 2]:
            times[one.name].append(one.ask())
        print(" ".join(f"{name} {tokens / passes[-1]['seconds']:.0f}" for name, passes in times.items()), "tokens/s", flush=True)
    for one in contenders:
        one.close()
    return {name: {key: statistics.median(p[key] for p in passes) for key in ("seconds", "cpu")} for name, passes in times.items()}


def markdown(found: dict[str, Any]) -> str:
    m = found["machine"]
    rows = [("vLLM, prefill alone, nothing kept", "prefill"), (f"**capture**: {m['taps']} taps and last, in shards on disk", "capture")]
    rows += [("vLLM's example connector, a file per sequence (speculators' way)", "stock")]
    rows += [(f"transformers, output_hidden_states, batch {m['transformers_batch']}, nothing kept", "transformers")]
    lines = [
        "# Capture on a CPU, beside the engine alone",
        "",
        f"{m['date']}, {m['cpu']}, {m['threads']} threads, torch {m['torch']}, vLLM {m['vllm']}, {m['dtype']}. {m['sequences']} sequences, "
        f"{m['tokens']:,} tokens, medians of {m['rounds']} rounds in turn. Written by `make bench-capture`; see docs/benchmarks/capture/.",
        "",
        "| | tokens/s | tokens per CPU second | of prefill |",
        "|---|---|---|---|",
    ]
    for text, key in rows:
        wall, cpu = found[f"{key}_tok_s"], found[f"{key}_tok_cpu_s"]
        lines += [f"| {text} | {wall:,.0f} | {cpu:,.0f} | {wall / found['prefill_tok_s']:.2f} |"]
    b = found["bytes_per_token"]
    lines += ["", f"speculators 0.9 itself was not run: {NOTE}.", ""]
    lines += [
        f"Bytes per token of these sequences: {b['float32']:,.0f} in float32, {b['bfloat16']:,.0f} in bfloat16, {b['fp8']:,.0f} in fp8."
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=200)
    parser.add_argument("--batches", default="1,4,16", help="of transformers, of which the best is taken")
    parser.add_argument("--conf", default="smollm_eagle3", help="whose target runs")
    parser.add_argument("--taps", default="2,15,27")
    args = parser.parse_args()
    cfg, taps = load([f"conf={args.conf}"]), [int(tap) for tap in args.taps.split(",")]
    target_dir = resolve(cfg.target, ROOT)
    D = spec(target_dir).hidden_size
    folder, todo = Path(tempfile.mkdtemp(prefix="draftsmith-")), sequences(target_dir, args.sequences)
    (folder / "sequences.jsonl").write_text("".join(json.dumps(s) + "\n" for s in todo))
    manifest = {"target": {}, "tokenizer_hash": "", "template_hash": "", "taps": taps, "hidden_size": D, "last": "supervised"}
    manifest |= {"dtype": "bfloat16", "engine": engine_identity()}
    plan = {"store_dir": str(folder / "store"), "manifest": manifest, "taps": taps, "last": "supervised", "shard_tokens": 65536}
    job = capture_job(target_dir, cfg.target, todo, plan, 32)
    job["weight_bytes"] = sum(path.stat().st_size for path in target_dir.glob("*.safetensors"))
    settings = {"job": job, "dtype": cfg.target.dtype, "batch": 1, "folder": str(folder)}
    tokens, supervised = sum(len(s["token_ids"]) for s in todo), sum(b - a for s in todo for a, b in s["spans"])
    try:
        settings["batch"] = best_batch(settings, [int(n) for n in args.batches.split(",")])
        medians = measure(settings, args.rounds, tokens)
    finally:
        shutil.rmtree(folder)
    machine = {"date": time.strftime("%Y-%m-%d"), "cpu": cpu_name(), "threads": THREADS, "torch": torch.__version__}
    machine |= {"vllm": engine_identity()["version"], "dtype": cfg.target.dtype, "sequences": len(todo), "tokens": tokens}
    machine |= {"rounds": args.rounds, "taps": len(taps), "transformers_batch": settings["batch"]}
    found: dict[str, Any] = {"machine": machine}
    found |= {f"{name}_tok_s": tokens / m["seconds"] for name, m in medians.items()}
    found |= {f"{name}_tok_cpu_s": tokens / m["cpu"] for name, m in medians.items()}
    found |= {"speculators_tok_s": None, "speculators": NOTE, "ratio": found["capture_tok_s"] / found["prefill_tok_s"]}
    sizes = {kind: plan_bytes(tokens, supervised, len(taps), D, "supervised", kind) / tokens for kind in ("float32", "bfloat16", "fp8")}
    found["bytes_per_token"] = sizes
    (args.out / "capture.json").write_text(json.dumps(found, indent=2) + "\n")
    (args.out / "capture.md").write_text(markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()
