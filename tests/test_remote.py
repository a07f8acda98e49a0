"""Answers from a server: what is asked and kept, by ids and by words; busy, failing and refusing servers; a resume; vLLM's own server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from conftest import refused
from test_chat import CHATML, QWEN3, tokenizer_for

from data import engine, remote
from data.answers import Request, read_answers, spans_of
from data.builtin import build_tiny
from data.chat import loop_start, prompt_ids
from data.record import ChatRecord
from train.config import TargetConfig

SAMPLING = {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "max_tokens": 20, "samples": 2, "greedy": True}
TOKENIZER = tokenizer_for(QWEN3)
Reply = tuple[int, dict[str, Any] | None]  # status and body; no body: the connection is cut


class Fake:
    """A server in a thread. `complete` and `chat` answer a request's body; `first` are replies given once each before that."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.first: list[Reply] = []
        self.models = ["tiny"]
        self.complete: Callable[[dict[str, Any]], Reply] = lambda body: (200, completion([7, 8, len(body["prompt"])]))
        self.chat: Callable[[dict[str, Any]], Reply] = lambda body: (200, chat_reply({"content": "blue light"}))
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                fake.keys.add(self.headers["Authorization"])
                self.reply(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in fake.models]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if body.get("max_tokens") != 1:  # the probe is no request of ours
                    fake.asked.append(body)
                    if fake.first:
                        return self.reply(*fake.first.pop())
                self.reply(*(fake.chat if self.path.endswith("/chat/completions") else fake.complete)(body))

            def reply(self, status: int, body: dict[str, Any] | None) -> None:
                if body is None:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.send_header("retry-after-ms", "1")
                self.end_headers()
                self.wfile.write(raw)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


def completion(ids: list[int] | None, reason: str = "stop") -> dict[str, Any]:
    choice = {"index": 0, "text": "x", "finish_reason": reason, "logprobs": None} | ({} if ids is None else {"token_ids": ids})
    return {"id": "c", "object": "text_completion", "created": 0, "model": "tiny", "choices": [choice]}


def chat_reply(message: dict[str, Any], reason: str = "stop") -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    return {"id": "c", "object": "chat.completion", "created": 0, "model": "tiny", "choices": [choice]}


def error(status: int, message: str = "no") -> Reply:
    return status, {"error": {"message": message, "type": "x", "code": status}}


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake()
    yield server
    server.server.shutdown()
    server.server.server_close()


def prompts(n: int, tokenizer: Any = TOKENIZER) -> list[dict[str, Any]]:
    found = []
    for i in range(n):
        messages = [{"role": "user", "content": "blue " * (i + 1)}]
        ids = prompt_ids(tokenizer, ChatRecord(f"r{i}", messages, {}))
        found.append({"id": f"r{i}", "messages": messages, "meta": {}, "tools": None, "prompt_ids": ids, "seed": 0})
    return found


def ask(fake: Fake, out: Path, n: int = 4, tokenizer: Any = TOKENIZER, cut_loops: int = 0, **sampling: Any) -> dict[str, dict[str, Any]]:
    (out.parent / "config.json").write_text('{"eos_token_id": 2}')
    request = {"target_dir": out.parent, "target_cfg": TargetConfig(model="tiny", max_model_len=60), "records": prompts(n, tokenizer)}
    request |= {"out_path": out, "sampling": SAMPLING | sampling, "batch_size": 3, "cut_loops": cut_loops, "meta": {"target": "tiny"}}
    remote.respond(Request(**request, asks={}), fake.url, tokenizer)
    return {a["id"]: a for a in read_answers(out)[0]}


def test_token_ids_are_taken_as_the_server_gives_them(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    answers = ask(fake, tmp_path / "train.jsonl")
    assert set(answers) == {f"r{i}#{s}" for i in range(4) for s in range(2)} and fake.keys == {"Bearer secret"}
    by_prompt = {len(r["prompt_ids"]): r for r in prompts(4)}
    assert len(fake.asked) == 8
    for body in fake.asked:
        assert body["prompt"] == by_prompt[len(body["prompt"])]["prompt_ids"] and body["return_token_ids"]
        assert body["max_tokens"] == min(20, 60 - len(body["prompt"])) and body["stop_token_ids"] == [2]
        assert body["top_k"] == 5 and body["repetition_penalty"] == 1.0  # the server's own defaults are not the run's
    assert sorted(body["temperature"] for body in fake.asked) == [0.0] * 4 + [0.8] * 4 and len({b["seed"] for b in fake.asked}) == 8
    for a in answers.values():
        assert a["response_ids"] == [7, 8, len(a["prompt_ids"])] and a["finish_reason"] == "stop"
        assert "spans" not in a and "retokenised" not in a and a["sampling"]["top_k"] == 5
    assert "secret" not in (tmp_path / "train.jsonl").read_text() + (tmp_path / "train.meta.json").read_text()


def test_busy_failing_and_cut_connections_are_asked_again(fake, tmp_path):
    fake.first = [error(429), error(500), (200, None), error(503), error(429)]
    answers = ask(fake, tmp_path / "train.jsonl")
    assert len(answers) == 8 and len(fake.asked) == 13
    assert not (tmp_path / "train.quarantine.jsonl").exists() and not (tmp_path / "train.unfinished").exists()


def test_a_server_that_goes_down_ends_the_run_and_the_next_goes_on_by_id(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "RETRIES", 1)
    good, out = fake.complete, tmp_path / "train.jsonl"
    fake.complete = lambda body: good(body) if len(fake.asked) <= 5 else error(500, "down")
    refused(lambda: ask(fake, out), "data.server=http://127.0.0.1", "down", "the same command goes on")
    assert (tmp_path / "train.unfinished").exists()
    out.write_bytes(out.read_bytes() + b'{"id": "r3#')  # killed in a line
    had, fake.asked, fake.complete = set(json.loads(line)["id"] for line in out.read_text().splitlines()[:-1]), [], good
    assert 0 < len(had) < 8
    assert len(ask(fake, out)) == 8 and len(fake.asked) == 8 - len(had)  # none lost, none twice
    assert not (tmp_path / "train.unfinished").exists()
    ask(fake, out)
    assert len(fake.asked) == 8 - len(had)  # nothing left to ask: no server is needed


def test_prompts_that_the_server_refuses_are_listed(fake, tmp_path, capsys):
    good, third = fake.complete, prompts(3)[2]["prompt_ids"]
    fake.complete = lambda body: error(400, "too long") if body["prompt"] == third else good(body)
    assert len(ask(fake, tmp_path / "train.jsonl")) == 6
    listed = [json.loads(line) for line in (tmp_path / "train.quarantine.jsonl").read_text().splitlines()]
    assert {line["id"] for line in listed} == {"r2#0", "r2#1"} and "too long" in listed[0]["reason"]
    assert "2 of 8 prompts have no answer" in capsys.readouterr().out
    fake.complete = lambda body: error(400, "too long") if body["max_tokens"] > 1 else good(body)
    refused(lambda: ask(fake, tmp_path / "none.jsonl"), "none of 8 prompts was answered", "too long")


def test_what_the_user_can_mend_is_named(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "RETRIES", 0)
    good, out = fake.complete, tmp_path / "train.jsonl"
    fake.models = ["llama", "qwen"]
    refused(lambda: ask(fake, out), "llama, qwen", "target.model=tiny")
    fake.models = ["some name"]  # the only one
    fake.complete = lambda body: error(401, "bad key") if body["max_tokens"] > 1 else good(body)
    refused(lambda: ask(fake, out), "bad key", "OPENAI_API_KEY")
    fake.server.shutdown()
    fake.server.server_close()
    refused(lambda: ask(fake, out), fake.url, "is it up?")


def test_words_become_the_tokens_that_the_template_gives_them(fake, tmp_path, capsys):
    fake.complete = lambda body: error(404)
    words = {"blue": {"content": "blue light"}, "blue blue": {"content": "Blue.", "reasoning": "Day."}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    words["blue blue blue"] = {"content": None, "tool_calls": [call]}
    fake.chat = lambda body: (
        200,
        chat_reply(words[body["messages"][0]["content"].strip()], "tool_calls" if "e blue b" in str(body) else "stop"),
    )
    answers = ask(fake, tmp_path / "train.jsonl", n=3, samples=1)
    assert "its words are tokenised again" in capsys.readouterr().out
    said = []
    for i in range(3):
        a = answers[f"r{i}#0"]
        ids = a["prompt_ids"] + a["response_ids"]
        said.append([TOKENIZER.decode(ids[x:y]) for x, y in spans_of(a, 1000)])
        assert a["retokenised"] and a["finish_reason"] == "stop" and a["prompt_ids"] == prompts(3)[i]["prompt_ids"]
    assert said == [["blue light<|im_end|>"], ["Day.\n</think>\n\nBlue.<|im_end|>"], ["\n<tool_call>\nlook\n</tool_call><|im_end|>"]]
    fake.chat = lambda body: (200, chat_reply({"content": "blue light"}, "length"))
    cut = ask(fake, tmp_path / "cut.jsonl", n=1, tokenizer=tokenizer_for(CHATML))["r0#0"]
    assert TOKENIZER.decode(cut["response_ids"]) == "blue light" and cut["finish_reason"] == "length"  # no end that the target never wrote
    fake.chat = lambda body: (200, chat_reply({"content": "x"}, "content_filter"))
    refused(lambda: ask(fake, tmp_path / "none.jsonl"), "none of 8", "content_filter")


def test_answers_are_cut_at_their_loops(fake, tmp_path):
    fake.complete = lambda body: (200, completion([1, 2, 3, 9, 1, 2, 3, 4], "length"))
    for a in ask(fake, tmp_path / "train.jsonl", n=1, cut_loops=3).values():
        assert a["response_ids"] == [1, 2, 3, 9] and a["finish_reason"] == "loop"
    record = {"prompt_ids": [0] * 5, "response_ids": [1, 2, 1, 2], "spans": [[6, 7], [8, 9]], "finish_reason": "stop"}
    assert remote.cut_loop(record, 2)["spans"] == [[6, 7]] and remote.cut_loop(record, 3) is record


@pytest.mark.slow
def test_vllms_own_server_gives_the_answers_of_our_engine(tmp_path):
    target = build_tiny(tmp_path / "tiny")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"-m vllm.entrypoints.openai.api_server --port {port} --host 127.0.0.1 --served-model-name tiny --dtype float32 --enforce-eager"
    words = [*words.split(), "--max-model-len", "256", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "16000000", "--model", str(target)]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, env=environment)
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        deadline = time.monotonic() + 600
        while True:
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
                time.sleep(1)
        records = [{**r, "prompt_ids": [20 + (7 * i + j * j) % 400 for j in range(12 + i)]} for i, r in enumerate(prompts(6))]
        settings = {
            "target_dir": target,
            "target_cfg": TargetConfig(model="tiny", dtype="float32", max_model_len=250),
            "records": records,
            "cut_loops": 4,
        }
        settings |= {"sampling": SAMPLING | {"top_p": 1.0}, "batch_size": 4, "meta": {}, "asks": {}}
        remote.respond(Request(out_path=tmp_path / "server.jsonl", **settings), f"http://127.0.0.1:{port}/v1", None)
        engine.respond(Request(out_path=tmp_path / "engine.jsonl", **settings))
    finally:
        process.terminate()
        process.wait()
    there, here = ({a["id"]: a for a in read_answers(tmp_path / name)[0]} for name in ("server.jsonl", "engine.jsonl"))
    assert there == here and len(here) == 12 and all(loop_start(a["response_ids"], 4) is None for a in here.values())
