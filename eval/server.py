"""vLLM's own server with a method, and its own client that measures it, each a process group that ends with what is done here."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from data.engine_job import ROOT, dead, environment
from data.errors import UserError

HOST = "127.0.0.1"
START_SECONDS = 3600  # within which a server must be there: the largest targets load for half an hour
END_SECONDS = 30  # that a server has to end by itself
CLIENT = "eval.vllm_plugin.bench"
SIZES = "eval.concurrency, eval.max_tokens"  # what the memory of a server goes by


def flags(settings: dict[str, Any]) -> list[str]:
    """Keyword arguments of vllm.LLM as the server's: max_num_seqs=2 -> --max-num-seqs 2, enforce_eager=False -> --no-enforce-eager."""
    words: list[str] = []
    for key, value in settings.items():
        name = key.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return words


@contextmanager
def serving(parts: list[list[str]], gpus: int, log: Path) -> Iterator[int]:
    """Inside, vLLM serves as the words of `parts` say (eval.methods.server), at the port that is returned. gpus: of the engine; log: for
    its output. UserError: it does not come up."""
    port = free_port()
    words = [word for part in parts for word in part][1:] + ["--host", HOST, "--port", str(port)]
    with _running(words, gpus, log) as process:
        _wait(process, port, log)
        try:
            yield port
        except UserError:  # of the client, whose requests fail where the server has died
            if code := process.poll():
                raise dead("latency", code, log, "server", SIZES) from None
            raise


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return found.getsockname()[1]


def bench(words: list[str], port: int, folder: Path) -> dict[str, Any]:
    """Runs vLLM's client on the server at `port` and returns what it saves. folder: for that and its output.

    UserError: it ended with an error, or a request failed."""
    log, result = folder / "client.log", folder / "result.json"
    result.unlink(missing_ok=True)
    saved = ["--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", result.name]
    with _running(["-m", CLIENT, "--host", HOST, "--port", str(port), *saved, *words], 1, log) as process:
        code = process.wait()
    if code or not result.is_file():
        raise dead("latency", code, log, "client", SIZES)
    return read_result(result)


def read_result(path: Path) -> dict[str, Any]:
    """What the client saved. UserError: a request failed."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["failed"]:
        error = next((text for text in found["errors"] if text), "").strip()
        raise UserError(f"latency: {found['failed']} requests failed, the first with: {error[-300:]}")
    return found


@contextmanager
def _running(words: list[str], gpus: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process with its output in `log`. It and all that it starts end when this is left, or this process is killed."""
    local = {"NO_PROXY": HOST, "no_proxy": HOST, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    command = [sys.executable, "-m", "data.engine_child", str(os.getpid()), *words]
    env = environment(gpus) | local
    env.pop("VLLM_API_KEY", None)  # the server would ask for it, and the client knows none; it listens on this machine alone
    with log.open("wb") as f:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=f, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its group, at once where it takes too long."""
    with suppress(ProcessLookupError):
        try:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
        finally:  # also where Ctrl-C comes again
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ask = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        with suppress(OSError), ask.open(f"http://{HOST}:{port}/health", timeout=5):
            if process.poll() is None:  # else another one's server answers
                return
        if (code := process.poll()) is not None:
            raise dead("latency", code, log, "server", SIZES)
        time.sleep(0.5)
    raise UserError(f"latency: the server was not there after {START_SECONDS} s; its last lines are in {log}")
