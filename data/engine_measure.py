"""Measured decoding in vLLM: engines that take turns over the same prompts, and what each turn took. The engine's side of
data.engine.generate_each; the order of the turns is data/turns.py's.

Several engines are forks of this process, which has imported vLLM once and started none: each has memory, counters and an end of
its own, and sleeps while another works.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.metrics.reader import Counter, Vector
from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

from data.engine_child import end_with_parent
from data.engine_job import request_seed
from data.engine_worker import Ask, drive, items, report, start
from data.errors import UserError
from data.turns import Turn

WARM_UPS, WARM_UP_TOKENS = 2, 16  # requests, and tokens of each, that count nowhere


def spec_counters(llm: LLM) -> dict[str, Any]:
    """vLLM's own global counts since it started."""
    prefix = "vllm:spec_decode_num_"
    counts: dict[str, Any] = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0, "accepted_tokens_per_pos": []}
    for metric in llm.get_metrics():
        key = metric.name.removeprefix(prefix)
        if metric.name.startswith(prefix) and key in counts:
            assert isinstance(metric, Counter | Vector)
            counts[key] = metric.value if isinstance(metric, Counter) else metric.values
    counts["accepted_per_position"] = counts.pop("accepted_tokens_per_pos")
    return counts


def spec_of(output: RequestOutput) -> dict[str, Any]:
    """One request's drafts (passes that drafted), drafted tokens, and drafts accepted at each position (unconditional counts)."""
    metrics = output.outputs[0].spec_decode_metrics
    if metrics is None:
        return {"drafts": 0, "draft_tokens": 0, "accepted_per_position": []}
    at_least = [sum(metrics.histogram[i + 1 :]) for i in range(metrics.num_spec_tokens)]
    return {"drafts": sum(metrics.histogram), "draft_tokens": metrics.num_draft_tokens, "accepted_per_position": at_least}


def pooled(outputs: list[dict[str, Any]], k: int) -> dict[str, Any]:
    """Sums over requests of what spec_of gives, in the form of spec_counters."""
    positions = [sum(o["accepted_per_position"][i] for o in outputs if o["accepted_per_position"]) for i in range(k)]
    sums = {key: sum(o[key] for o in outputs) for key in ("drafts", "draft_tokens")}
    return {**sums, "accepted_tokens": sum(positions), "accepted_per_position": positions}


def narrow(worker: Any, k: int) -> None:
    """In the engine's worker: suffix decoding asserts the k that it was made with, and drafts up to its own."""
    drafter = worker.model_runner.drafter
    if isinstance(drafter, SuffixDecodingProposer):
        drafter.num_speculative_tokens = k


class Engine:
    """vLLM with one of job["engines"], warm, for turns over `wanted` (id, prompt_ids, max_tokens)."""

    def __init__(self, job: dict[str, Any], engine: dict[str, Any], wanted: list[dict[str, Any]]) -> None:
        self.job, self.wanted, self.ks = job, wanted, engine["ks"]
        speculative = engine["speculative"]
        if len(self.ks) > 1:  # vLLM's own schedule of drafts by batch size, which `draft` rewrites
            sizes = [[1, engine["llm"]["max_num_seqs"], max(self.ks)]]
            speculative = {**speculative, "num_speculative_tokens_per_batch_size": sizes}
        count = "summary" if speculative else "none"
        more = {"hf_overrides": engine["hf_overrides"] or {}, "per_request_spec_decode_metrics": count}
        self.llm = start({**job, **engine}, speculative_config=speculative, **more)
        first = generate_asks(job, wanted[:WARM_UPS], WARM_UP_TOKENS, "warm-up ")
        drive(self.llm, first, engine["llm"]["max_num_seqs"], lambda _: False)

    def draft(self, k: int) -> None:
        """k drafts a pass from now on, at every batch size. Greedy answers and all counts are those of an engine started with this k
        (tests/test_turns.py)."""
        core = self.llm.llm_engine.engine_core
        assert isinstance(core, InprocClient) and isinstance(core.engine_core.scheduler, Scheduler)
        scheduler = core.engine_core.scheduler
        assert scheduler.dynamic_sd_lookup is not None
        scheduler.dynamic_sd_lookup = [k] * len(scheduler.dynamic_sd_lookup)
        self.llm.collective_rpc(narrow, args=(k,))

    def take(self, turn: Turn, done: int) -> dict[str, Any]:
        """The figures of a turn. done: answers of earlier ones, for the progress."""
        if len(self.ks) > 1:
            self.draft(turn.k)
        wanted = [self.wanted[i] for i in turn.items]
        finished: dict[str, RequestOutput] = {}
        before, began = spec_counters(self.llm), time.monotonic()

        def on_output(output: RequestOutput) -> bool:
            finished[output.request_id] = output
            report(done + len(finished), "")
            return False

        drive(self.llm, generate_asks(self.job, wanted, 2**31, ""), turn.concurrency, on_output)
        seconds, after = time.monotonic() - began, spec_counters(self.llm)
        result = of_requests([finished[item["id"]] for item in wanted])
        ahead, behind = after.pop("accepted_per_position"), before.pop("accepted_per_position")
        counters = {key: after[key] - before[key] for key in after}
        counters["accepted_per_position"] = [a - b for a, b in zip(ahead, behind, strict=True)]
        sums = pooled(list(result["outputs"].values()), len(ahead))
        assert sums == counters, f"per-request counts {sums} are not vLLM's own {counters}"
        for counts in (counters, *result["outputs"].values()):
            assert not any(counts["accepted_per_position"][turn.k :]), f"more than {turn.k} drafts were made"
            counts["accepted_per_position"] = counts["accepted_per_position"][: turn.k]
        return {**result, "seconds": seconds, "counters": counters}


def generate_asks(job: dict[str, Any], chosen: list[dict[str, Any]], limit: int, prefix: str) -> Iterator[Ask]:
    for item in chosen:
        params = SamplingParams(
            temperature=job["temperature"],
            max_tokens=min(item["max_tokens"], limit),
            seed=request_seed(item["id"], 0),
            stop_token_ids=job["stop_ids"],
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        yield Ask(prefix + item["id"], item["prompt_ids"], params)


def of_requests(finished: list[RequestOutput]) -> dict[str, Any]:
    """Token ids, drafts and times of each request. itl: mean milliseconds between the tokens of one answer."""
    outputs, ttft_ms, itl_ms = {}, [], []
    for output in finished:
        answer, stats = output.outputs[0], output.metrics
        assert stats is not None
        ids = list(answer.token_ids)
        outputs[output.request_id] = {"token_ids": ids, "finish_reason": answer.finish_reason, **spec_of(output)}
        ttft_ms.append(stats.first_token_latency * 1e3)
        itl_ms.append((stats.last_token_ts - stats.first_token_ts) * 1e3 / max(len(ids) - 1, 1))
    total = sum(len(o["token_ids"]) for o in outputs.values())
    return {"outputs": outputs, "ttft_ms": ttft_ms, "itl_ms": itl_ms, "output_tokens": total}


class Forked:
    """An Engine in a fork, which is ready when this returns."""

    def __init__(self, *made_of: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.ours, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, os.getpid(), *made_of), daemon=True)  # which ends with this one
        self.process.start()
        theirs.close()
        self._answer()

    def take(self, turn: Turn, done: int) -> dict[str, Any]:
        self.ours.send((turn, done))
        return self._answer()

    def _answer(self) -> Any:
        """UserError: what the engine says is wrong. Where it died this process ends as it did: the last lines of the log are its."""
        try:
            answer = self.ours.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode or 1
            if code < 0:
                os.kill(os.getpid(), -code)
            sys.exit(code)
        if isinstance(answer, UserError):
            raise answer
        return answer


def serve(theirs: Connection, parent: int, *made_of: Any) -> None:
    """The life of a fork: starts its engine, then takes turns for as long as the parent lives."""
    end_with_parent(parent, signal.SIGKILL)
    try:
        engine = Engine(*made_of)
    except UserError as error:
        theirs.send(error)
        return
    theirs.send(None)
    while True:
        theirs.send(engine.take(*theirs.recv()))


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Runs job["turns"] in their order over the job's items (id, prompt_ids, max_tokens): one result each. A single engine runs in this
    process: a fork of one that has looked for a GPU cannot use it."""
    wanted = list(items(job))
    kind = Engine if len(job["engines"]) == 1 else Forked
    engines = [kind(job, engine, wanted) for engine in job["engines"]]
    results, done = [], 0
    for turn in (Turn(*turn) for turn in job["turns"]):
        results.append(engines[turn.engine].take(turn, done))
        done += len(turn.items)
    return {"results": results}
