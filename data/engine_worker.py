"""The engine's side of data/engine.py: runs one task in vLLM and writes its result, in a process of its own (data/engine_child.py).

Progress goes to stdout, one marked JSON line at a time; everything else there is the engine's own log.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.sample import rejection_sampler

from data.engine_job import MARK, LoopWatch, cache_bytes, request_seed
from data.errors import UserError
from data.prompts import write_jsonl_line
from data.window import Waiting


class Ask(NamedTuple):
    """One request of the engine."""

    name: str
    prompt_ids: list[int]
    params: SamplingParams


def report(done: int, note: str) -> None:
    print(MARK + json.dumps({"done": done, "note": note}), flush=True)


def expand_batch_to_tokens(x: torch.Tensor, cu: torch.Tensor, n: int, replace_from: int = 0, replace_to: int = 0) -> torch.Tensor:
    """vLLM's function of this name in plain torch: its CPU kernel (0.32) leaves the result unwritten, so any temperature is noise."""
    counts = torch.diff(cu, prepend=cu.new_zeros(1)).long()
    return torch.repeat_interleave(torch.where(x == replace_from, torch.full_like(x, replace_to), x), counts, output_size=n)


def start(job: dict[str, Any], **more: Any) -> LLM:
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    settings = {**job["llm"], **more, "kv_cache_memory_bytes": cache_bytes(job)}
    return LLM(skip_tokenizer_init=True, generation_config="vllm", disable_log_stats=False, seed=0, **settings)


def drive(llm: LLM, asks: Iterator[Ask], in_flight: int, on_output: Callable[[RequestOutput], bool]) -> None:
    """Keeps up to `in_flight` requests running until `asks` is empty. `on_output` sees each output; True ends that request early."""
    engine, running = llm.llm_engine, 0
    while True:
        while running < in_flight and (ask := next(asks, None)) is not None:
            engine.add_request(ask.name, {"prompt_token_ids": ask.prompt_ids}, ask.params)
            running += 1
        if running == 0:
            return
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            ended = on_output(output)
            if ended and not output.finished:
                engine.abort_request([output.request_id])
            running -= ended or output.finished


def items(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with Path(job["items"]).open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def respond(job: dict[str, Any]) -> dict[str, Any]:
    """Appends each answer to job["out"] when it is finished. Items: id, messages, meta, prompt_ids, seed."""
    llm = start(job)
    sampling, cut_loops = job["sampling"], job["cut_loops"]
    waiting: dict[str, dict[str, Any]] = {}
    answers: dict[str, list[int]] = {}
    watches: dict[str, LoopWatch] = {}
    began, told, done, tokens = time.monotonic(), 0.0, 0, 0

    def asks() -> Iterator[Ask]:
        for item in items(job):
            name = item["id"]
            waiting[name], answers[name], watches[name] = item, [], LoopWatch(cut_loops)
            yield Ask(
                name,
                item["prompt_ids"],
                SamplingParams(
                    temperature=0.0 if sampling["greedy"] and name.endswith("#0") else sampling["temperature"],
                    top_p=sampling["top_p"],
                    top_k=sampling["top_k"],
                    max_tokens=sampling["max_tokens"],
                    seed=request_seed(name, item["seed"]),
                    stop_token_ids=job["stop_ids"],
                    detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                ),
            )

    with Path(job["out"]).open("a", encoding="utf-8") as out:

        def on_output(output: RequestOutput) -> bool:
            nonlocal told, done, tokens
            name, part = output.request_id, output.outputs[0]
            ids = answers[name]
            ids.extend(part.token_ids)
            tokens += len(part.token_ids)
            cut = watches[name].cut(ids) if cut_loops else None
            if output.finished or cut is not None:
                item = waiting.pop(name)
                reason = part.finish_reason if cut is None else "loop"
                record = {key: item[key] for key in ("id", "messages", "meta", "prompt_ids")}
                write_jsonl_line(out, {**record, "response_ids": answers.pop(name)[:cut], "finish_reason": reason, "sampling": sampling})
                del watches[name]
                done += 1
            if time.monotonic() - told > 0.5 or not waiting:
                told = time.monotonic()
                report(done, f"{tokens / (told - began):.0f} tokens/s")
            return cut is not None

        report(0, "engine started")
        drive(llm, asks(), job["llm"]["max_num_seqs"], on_output)
    return {"seconds": time.monotonic() - began, "generated_tokens": tokens}


def capture(job: dict[str, Any]) -> dict[str, Any]:
    """Prefills each item (id, token_ids, spans); the connector stores the states."""
    llm, began = start_capture(job), time.monotonic()
    report(0, "engine started")
    take_states(llm, job, items(job))
    return {"seconds": time.monotonic() - began}


def start_capture(job: dict[str, Any]) -> LLM:
    """The engine with our connector. vLLM's layer ids are layers applied."""
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    method["draft_model_config"] = {"hf_config": {"eagle_aux_hidden_state_layer_ids": job["connector"]["layer_ids"]}}
    transfer = {"kv_connector": "StoreConnector", "kv_connector_module_path": "data.vllm_connector", "kv_role": "kv_producer"}
    transfer["kv_connector_extra_config"] = job["connector"]
    return start(job, speculative_config=method, kv_transfer_config=transfer)


def take_states(llm: LLM, job: dict[str, Any], wanted: Iterable[dict[str, Any]]) -> None:
    """Returns when the states of all of them are on disk."""
    from data.vllm_connector import close_store, has_room

    folder, window = Path(job["connector"]["store_dir"]), job["connector"]["window"]
    waiting = Waiting(lambda text: report(tokens, text))
    lengths: dict[str, int] = {}
    began, told, tokens = time.monotonic(), 0.0, 0

    def asks() -> Iterator[Ask]:
        for item in wanted:
            while window and not all(llm.collective_rpc(has_room)):
                waiting.on("the window is full", folder / "reader", "train")
                time.sleep(1)
            waiting.over()
            lengths[item["id"]] = len(item["token_ids"])
            about = {"record_id": item["id"], "spans": item["spans"]}
            params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
            params.extra_args = {"kv_transfer_params": about}
            yield Ask(item["id"], item["token_ids"], params)

    def on_output(output: RequestOutput) -> bool:
        nonlocal told, tokens
        tokens += lengths.pop(output.request_id)
        if time.monotonic() - told > 0.5 or not lengths:
            told = time.monotonic()
            report(tokens, f"{tokens / (told - began):.0f} tokens/s")
        return False

    drive(llm, asks(), job["llm"]["max_num_seqs"], on_output)
    core = llm.llm_engine.engine_core
    assert isinstance(core, InprocClient)
    while core.engine_core.scheduler.has_requests():  # the last sequences are handed over one engine step after they finish
        core.get_output()
    llm.collective_rpc(close_store)


def work(job_path: str) -> None:
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    tasks: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"respond": respond, "capture": capture}
    if job["task"] == "generate":  # here: it imports more of vLLM's inside, without which answers and states can still be had
        from data.engine_measure import generate

        tasks["generate"] = generate
    try:
        result = tasks[job["task"]](job)
    except UserError as error:
        result = {"error": str(error)}
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")
