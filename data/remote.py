"""The target's answers from a server that speaks OpenAI's protocol, for a target that runs elsewhere. The key: OPENAI_API_KEY.

vLLM takes and gives token ids, so its answers are those of our own engine. Any other server is asked for a chat, and its words become
tokens again by the target's own chat template (`retokenised` in the record): where the two disagree, the head learns what was not said.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import openai

from data.answers import Request, collect, runs, set_aside, spans_of
from data.chat import loop_start, offpolicy
from data.engine_job import request_seed, stop_ids
from data.errors import UserError
from data.progress import Progress
from data.prompts import write_jsonl_line
from data.record import ChatRecord, Unusable, asked, record_of

RETRIES = 8  # with growing pauses, 40 s in all, or as the server's Retry-After says: for 408, 409, 429, 5xx and lost connections
SECONDS = 600.0  # for one answer
REFUSED = (400, 413, 422)  # of one prompt; any other status is the run's
NO_SUCH = (404, 405, 501)  # of a server that can chat, but not complete token ids
ENDS = {"stop": "stop", "tool_calls": "stop", "length": "length"}


def respond(request: Request, url: str, tokenizer: Any) -> dict[str, Any]:
    """As data.engine.respond, with up to `batch_size` requests at once to the server at `url`. Prompts that it refuses are listed beside
    the answers. UserError: it cannot be reached, wants a key, serves other models, or refuses every prompt."""
    target_dir, target_cfg, sampling = request.target_dir, request.target_cfg, request.sampling

    def sample(todo: list[dict[str, Any]], out: Path) -> dict[str, Any]:
        options = {"api_key": os.environ.get("OPENAI_API_KEY", "none"), "max_retries": RETRIES, "timeout": SECONDS}
        pool = ThreadPoolExecutor(request.batch_size)
        with pool, openai.OpenAI(base_url=url, **options) as client:  # closed first, which ends retries
            server = Server(client, url, target_cfg.model, todo[0]["prompt_ids"][:1])  # short, for no prompt to be refused as such
            if not server.gives_ids:
                print(f"respond: {url} gives no token ids; its words are tokenised again by the target's chat template", flush=True)

            def answer(item: dict[str, Any]) -> dict[str, Any]:
                greedy = sampling["greedy"] and item["id"].endswith("#0")
                how = {"temperature": 0.0 if greedy else sampling["temperature"], "top_p": sampling["top_p"]}
                how |= {"max_tokens": min(sampling["max_tokens"], target_cfg.max_model_len - len(item["prompt_ids"]))}
                how |= {"seed": request_seed(item["id"], item["seed"])}
                told = server.by_ids if server.gives_ids else server.by_chat
                found = told(item, how, sampling["top_k"], stop_ids(target_dir) if server.gives_ids else tokenizer)
                record = {key: item[key] for key in ("id", "messages", "meta", "prompt_ids")} | found | {"sampling": sampling}
                return cut_loop(record, request.cut_loops) if request.cut_loops else record

            return _drive(answer, todo, out, pool)

    return collect(request, sample)


class Server:
    """One server and the model asked there: the target by its name, or the only one. gives_ids: it takes and gives token ids."""

    def __init__(self, client: openai.OpenAI, url: str, target: str, probe: list[int]) -> None:
        self.client, self.url = client, url
        names = [model.id for model in self._ask(lambda: client.models.list().data)]
        if target not in names and len(names) != 1:
            raise UserError(f"data.server={url} serves {', '.join(names) or 'nothing'}, not target.model={target}: serve it by this name")
        self.model = target if target in names else names[0]
        try:
            self.gives_ids = bool(self._complete(probe, {"max_tokens": 1}, {}, NO_SUCH)[0])
        except Unusable:
            self.gives_ids = False

    def by_ids(self, item: dict[str, Any], how: dict[str, Any], top_k: int, stops: list[int]) -> dict[str, Any]:
        """response_ids and finish_reason. The server's own defaults for sampling (of generation_config.json) are set aside."""
        more = {"top_k": top_k, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": stops}
        ids, reason = self._complete(item["prompt_ids"], how, more, ())
        if not ids:
            raise UserError(f"data.server={self.url}: the answer to {item['id']} has no token ids; the same command goes on")
        return {"response_ids": ids, "finish_reason": reason}

    def by_chat(self, item: dict[str, Any], how: dict[str, Any], top_k: int, tokenizer: Any) -> dict[str, Any]:
        """As by_ids, with spans. Unusable: the template does not render the answer behind the prompt, or there is none."""
        record = ChatRecord(item["id"], item["messages"], item["meta"], item["tools"])
        more = {"tools": record.tools} if record.tools else {}
        options = {**how, **more, "extra_body": {"top_k": top_k} if top_k else {}}
        turns: Any = [_openai_turn(turn) for turn in asked(record)]
        reply = self._ask(lambda: self.client.chat.completions.create(model=self.model, messages=turns, **options)).choices[0]
        if reply.finish_reason not in ENDS:
            raise Unusable(f"the server ended it with {reply.finish_reason!r}")
        turn = {**reply.message.model_dump(exclude_none=True), "role": "assistant"}
        whole = record_of({"id": record.id, "messages": [*asked(record), turn], "tools": record.tools}, self.url)
        try:
            ids, mask = offpolicy(tokenizer, whole)
        except UserError as why:
            raise Unusable(str(why)) from why
        start = len(item["prompt_ids"])
        spans = [span for span in runs(mask) if span[0] >= start]
        if ids[:start] != item["prompt_ids"] or not spans:
            raise Unusable("the target's chat template does not render this answer behind the prompt")
        end = spans[-1][1]
        if reply.finish_reason == "length" and ids[end - 1] in tokenizer.all_special_ids:
            end -= 1  # the end of the turn is the template's, not the target's
        answer = {"prompt_ids": item["prompt_ids"], "response_ids": ids[start:end], "spans": spans}
        spans = spans_of(answer, end)
        return {"response_ids": ids[start:end], "spans": spans, "finish_reason": ENDS[reply.finish_reason], "retokenised": True}

    def _complete(self, prompt: list[int], how: dict[str, Any], more: dict[str, Any], refused: tuple[int, ...]) -> tuple[list[int], str]:
        extra = {**more, "return_token_ids": True}
        call = partial(self.client.completions.create, model=self.model, prompt=prompt, extra_body=extra, **how)
        choice = self._ask(call, refused).choices[0]
        return (choice.model_extra or {}).get("token_ids") or [], choice.finish_reason

    def _ask(self, call: Callable[[], Any], refused: tuple[int, ...] = ()) -> Any:
        """The client's answer. Unusable: this prompt is refused (or the status is of `refused`). UserError: the server fails."""
        try:
            return call()
        except openai.APIStatusError as error:
            text = " ".join(error.message.split())
            if error.status_code in (*REFUSED, *refused):
                raise Unusable(f"the server refuses it: {text}") from error
            mends = {401: "set OPENAI_API_KEY", 403: "set OPENAI_API_KEY", 404: "the address ends in /v1 at most servers"}
            mend = mends.get(error.status_code, "the same command goes on")
            raise UserError(f"data.server={self.url}: {text}; {mend}") from error
        except openai.APIError as error:  # no connection, no answer in time, or no JSON
            raise UserError(f"data.server={self.url}: {' '.join(str(error).split())}; is it up? The same command goes on") from error


def _openai_turn(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn as the protocol has it: the arguments of tool calls as a text."""
    if "tool_calls" not in turn:
        return turn
    functions = [call["function"] for call in turn["tool_calls"]]
    texts = [{**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)} for function in functions]
    return {**turn, "tool_calls": [{**call, "function": text} for call, text in zip(turn["tool_calls"], texts, strict=True)]}


def cut_loop(record: dict[str, Any], n: int) -> dict[str, Any]:
    """The record, ended where an n-gram of its response begins for the second time."""
    cut = loop_start(record["response_ids"], n)
    if cut is None:
        return record
    ended = {**record, "response_ids": record["response_ids"][:cut], "finish_reason": "loop"}
    return ended | ({"spans": spans_of(record, len(record["prompt_ids"]) + cut)} if "spans" in record else {})


def _drive(
    answer: Callable[[dict[str, Any]], dict[str, Any]], todo: list[dict[str, Any]], out_path: Path, pool: ThreadPoolExecutor
) -> dict[str, Any]:
    """Appends the answers to out_path as they come. After an error nothing more is asked."""
    began, tokens, refused = time.monotonic(), 0, []
    try:
        with out_path.open("a", encoding="utf-8") as out, Progress("respond", len(todo), "answers") as progress:
            futures = {pool.submit(answer, item): item["id"] for item in todo}
            for done, future in enumerate(as_completed(futures), 1):
                try:
                    record = future.result()
                    tokens += len(record["response_ids"])
                    write_jsonl_line(out, record)
                except Unusable as why:
                    refused.append({"id": futures[future], "reason": str(why)})
                progress.update(done, f"{tokens / (time.monotonic() - began):.0f} tokens/s")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if refused:
        first = f"the first, {refused[0]['id']}: {refused[0]['reason']}"
        set_aside(out_path, refused, anew=False)
        if len(refused) == len(todo) and not out_path.stat().st_size:
            raise UserError(f"none of {len(todo)} prompts was answered; {first}")
        print(f"respond: {len(refused)} of {len(todo)} prompts have no answer; {first}", flush=True)
    return {"seconds": time.monotonic() - began, "generated_tokens": tokens}
