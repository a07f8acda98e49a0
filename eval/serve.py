"""The engine run: the same prompts, the same lengths, through vLLM with every method, and the report made of it.

`none` decodes plainly; `ngram` looks the last tokens up in the text so far; `head` is the export. All at temperature 0. Every
figure is pooled."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from data.chat import all_prompt_ids, load_tokenizer, loop_start
from data.engine import engine_identity, generate
from data.errors import UserError
from data.prompts import ChatRecord, write_jsonl_line
from data.target import spec
from eval.accept import Counts, bootstrap, figures
from eval.export import check_fingerprint, read_export, validate_export
from eval.quantize import check_device
from eval.speedup import best_k, cost_per_draft

if TYPE_CHECKING:
    from train.config import RunConfig

METHODS = ("none", "ngram", "head")
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
MIN_TOKENS = 8  # shortest answer that is measured
LOOK_AHEAD = 16  # requests at a time in the run that only finds where the answers begin to loop, which is not timed
WORTH = 1.02  # a smaller measured speed-up is taken for noise

Result = dict[str, Any]  # what data.engine.generate returns
Request = dict[str, Any]  # {"id", "prompt_ids", "max_tokens"}


def speculation(method: str, k: int, export_dir: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """(--speculative-config, --hf-overrides of the target) of a method."""
    if method == "none":
        return None, {}
    if method == "ngram":
        return {**NGRAM, "num_speculative_tokens": k}, {}
    serving = read_export(export_dir)["serving"] | {"num_speculative_tokens": k}
    overrides = serving.pop("target_hf_overrides", {})
    return {**serving, "model": str(export_dir)}, overrides


def command(target_dir: Path, speculative: dict[str, Any] | None, overrides: dict[str, Any]) -> str:
    """The shell command that serves the target with a method."""
    parts = [f"vllm serve {shlex.quote(str(target_dir))}"]
    parts += [f"--speculative-config {shlex.quote(json.dumps(speculative))}"] if speculative else []
    parts += [f"--hf-overrides {shlex.quote(json.dumps(overrides))}"] if overrides else []
    return " \\\n  ".join(parts)


def make_requests(encoded: dict[str, list[int]], max_tokens: int, max_model_len: int, k: int) -> tuple[list[Request], int]:
    """Requests with room for their answer and one whole pass beyond it (nearer to max_model_len the engine shortens its
    drafts), and how many prompts were too long for that. encoded: id -> prompt token ids."""
    requests, skipped = [], 0
    for name, ids in encoded.items():
        room = max_model_len - len(ids) - k - 1
        if room < MIN_TOKENS:
            skipped += 1
            continue
        requests.append({"id": name, "prompt_ids": ids, "max_tokens": min(max_tokens, room)})
    if not requests:
        raise UserError(
            f"no evaluation prompt leaves room for an answer in target.max_model_len={max_model_len}: raise it, or use shorter prompts"
        )
    return requests, skipped


def cut_at_loops(requests: list[Request], plain: Result, ngram: int) -> tuple[list[Request], int]:
    """The requests with max_tokens at the place where their plain answer begins to loop (at least MIN_TOKENS), and how many
    were cut."""
    cut, count = [], 0
    for request in requests:
        start = loop_start(plain["outputs"][request["id"]]["token_ids"], ngram)
        limit = request["max_tokens"] if start is None else min(request["max_tokens"], max(MIN_TOKENS, start))
        count += limit < request["max_tokens"]
        cut.append({**request, "max_tokens": limit})
    return cut, count


def parted(result: Result, plain: Result) -> list[dict[str, Any]]:
    """Answers that differ from the plain run's: id, first differing position, and the two tokens there (None: one had
    ended)."""
    differing = []
    for name, output in result["outputs"].items():
        mine, theirs = output["token_ids"], plain["outputs"][name]["token_ids"]
        if mine != theirs:
            same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
            pick: Callable[[list[int]], int | None] = lambda ids, at=same: ids[at] if at < len(ids) else None  # noqa: E731
            differing.append({"id": name, "position": same, "plain": pick(theirs), "token": pick(mine)})
    return differing


def pooled(result: Result, names: list[str]) -> dict[str, Any]:
    """Pooled figures of the named requests."""
    counts = Counts()
    for name in names:
        output = result["outputs"][name]
        counts.add(len(output["token_ids"]), output["drafts"], output["draft_tokens"], output["accepted_per_position"])
    return figures(counts)


def entry(method: str, result: Result, plain: Result, slices: dict[str, list[str]]) -> dict[str, Any]:
    """One method of the report. slices: name -> request ids."""
    names = [name for part in slices.values() for name in part]
    differing = parted(result, plain)
    gone = {difference["id"] for difference in differing}
    speed, plain_speed = (r["output_tokens"] / r["seconds"] for r in (result, plain))
    pairs = [(len(o["token_ids"]), sum(o["accepted_per_position"])) for o in result["outputs"].values()]
    return {
        "method": method,
        **pooled(result, names),
        "tokens_per_pass_interval": bootstrap(pairs),
        "seconds": result["seconds"],
        "tokens_per_second": speed,
        "itl_ms": median(result["itl_ms"]),
        "ttft_ms": median(result["ttft_ms"]),
        "speedup": speed / plain_speed,
        "lossless": 1 - len(gone) / len(names),
        "parted": differing,
        "slices": {name: {**pooled(result, part), "lossless": 1 - len(gone & set(part)) / len(part)} for name, part in slices.items()},
    }


def recommend(methods: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest measured method, or none, and the number of drafts at which the cost model puts the head's optimum.

    The model: a pass with k drafts costs 1 + k * cost plain passes (cost measured at this k and concurrency) and emits 1 +
    the sum of the first k acceptances. It says nothing about more drafts than were measured."""
    best = max(methods, key=lambda m: m["speedup"])
    chosen = best if best["speedup"] >= WORTH else next(m for m in methods if m["method"] == "none")
    advice = {"method": chosen["method"], "k": chosen["k"], "speedup": chosen["speedup"]}
    head = next((m for m in methods if m["method"] == "head"), None)
    if head is None or not head["drafts"]:
        return advice
    cost = cost_per_draft(head["output_tokens"] / head["passes"], head["speedup"], head["k"])
    k, speedup = best_k(head["acceptance_per_position"], cost)
    return {**advice, "head_k": k, "head_speedup_predicted": speedup, "cost_per_draft": cost, "at_limit": k == head["k"]}


def write_answers(path: Path, prompts: list[ChatRecord], requests: list[Request], plain: Result, longer: Result) -> None:
    """The plain answers as response records, for the offline chain. tail_ids: what the target wrote beyond the answer in
    `longer`, where the two agree so far."""
    records = {record.id: record for record in prompts}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as f:
        for request in requests:
            name = request["id"]
            output, more = plain["outputs"][name], longer["outputs"][name]["token_ids"]
            ids = output["token_ids"]
            line = {"id": name, "messages": records[name].messages, "meta": records[name].meta, "prompt_ids": request["prompt_ids"]}
            line |= {"response_ids": ids, "finish_reason": output["finish_reason"], "sampling": {"temperature": 0.0}}
            write_jsonl_line(f, {**line, "tail_ids": more[len(ids) :] if more[: len(ids)] == ids else []})


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"


def check_methods(methods: list[str]) -> None:
    unknown = [m for m in methods if m not in METHODS]
    if unknown or "none" not in methods:
        problem = f"unknown {', '.join(unknown)}" if unknown else "`none` is missing, against which speed-up and losslessness are measured"
        raise UserError(f"eval.methods={methods}: {problem}; known: {', '.join(METHODS)}")


def evaluate(cfg: RunConfig, target_dir: Path, export_dir: Path, prompts: list[ChatRecord], answers_path: Path) -> dict[str, Any]:
    """Runs every method of cfg.eval.methods over the prompts and returns the report (docs: report.json), without `offline`.

    Leaves the plain answers at answers_path. Slices are the prompts' categories.
    """
    check_methods(cfg.eval.methods)
    if "head" in cfg.eval.methods:
        validate_export(export_dir, spec(target_dir))
        check_fingerprint(read_export(export_dir)["target_fingerprint"], target_dir)
        if quantization := read_export(export_dir).get("quantization"):
            check_device(quantization["scheme"], torch.cuda.is_available(), torch.backends.cpu.get_cpu_capability())
    tokenizer = load_tokenizer(target_dir, cfg.target.trust_remote_code)
    encoded = all_prompt_ids(tokenizer, prompts)
    requests, skipped = make_requests(encoded, cfg.eval.max_tokens, cfg.target.max_model_len, cfg.eval.k)
    longer, loops = None, 0
    if cfg.eval.cut_loops:
        longer = run_method(cfg, target_dir, export_dir, "none", requests, max(LOOK_AHEAD, cfg.eval.concurrency))
        requests, loops = cut_at_loops(requests, longer, cfg.data.loop_ngram)
    plain = run_method(cfg, target_dir, export_dir, "none", requests, cfg.eval.concurrency)
    write_answers(answers_path, prompts, requests, plain, longer or plain)
    asked = {request["id"] for request in requests}
    slices: dict[str, list[str]] = {}
    for record in prompts:
        if record.id in asked:
            slices.setdefault(str(record.meta.get("category", "other")), []).append(record.id)
    methods = []
    for method in cfg.eval.methods:
        result = plain if method == "none" else run_method(cfg, target_dir, export_dir, method, requests, cfg.eval.concurrency)
        methods.append(entry(method, result, plain, slices) | setting(cfg, target_dir, export_dir, method))
    return {
        "name": cfg.name,
        "target": {"model": cfg.target.model, "revision": cfg.target.revision, "dtype": cfg.eval.dtype or cfg.target.dtype},
        "engine": {**engine_identity(), "device": device_name()},
        "prompts": {
            "count": len(requests),
            "slices": {name: len(part) for name, part in slices.items()},
            "skipped_too_long": skipped,
            "max_tokens": cfg.eval.max_tokens,
            "cut_loops": cfg.eval.cut_loops,
            "answers_cut": loops,
        },
        "methods": methods,
        "recommendation": recommend(methods),
    }


def run_method(cfg: RunConfig, target_dir: Path, export_dir: Path, method: str, requests: list[Request], concurrency: int) -> Result:
    speculative, overrides = speculation(method, cfg.eval.k, export_dir)
    print(f"evaluate: {method}, {len(requests)} prompts", flush=True)
    return generate(
        target_dir=target_dir,
        target_cfg=cfg.target,
        prompts=requests,
        speculative=speculative,
        hf_overrides=overrides,
        dtype=cfg.eval.dtype or cfg.target.dtype,
        concurrency=concurrency,
        max_model_len=cfg.target.max_model_len,
    )


def setting(cfg: RunConfig, target_dir: Path, export_dir: Path, method: str) -> dict[str, Any]:
    """How a method was run, and the command that serves it. Drafts are greedy, so a draft is kept with the probability that
    the target gives it."""
    speculative, overrides = speculation(method, cfg.eval.k, export_dir)
    return {
        "k": 0 if method == "none" else cfg.eval.k,
        "temperature": 0.0,
        "concurrency": cfg.eval.concurrency,
        "speculative_config": speculative,
        "draft_sample_method": "greedy",
        "command": command(target_dir, speculative, overrides),
    }
