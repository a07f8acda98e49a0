"""Latency through vLLM's server: what the client saves becomes the report's figures, and no process stays behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from conftest import refused
from rich.console import Console
from test_report import made

from data.builtin import build_tiny
from data.errors import UserError
from data.record import ChatRecord
from eval import latency, server
from eval.methods import command
from eval.report import write
from train.config import RunConfig, load

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ["Why is the sky blue?", "Name three rivers of Europe, with the seas they flow into.", "Bana bir masal anlat.", "Write a haiku."]
# Serves /health at the port that it is given last, and starts a process of its own, whose id and whose own go into a file.
SERVER = """
import os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
child = subprocess.Popen(["sleep", "1000"])
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
HTTPServer(("127.0.0.1", int(sys.argv[-1])), Health).serve_forever()
"""
INSIDE = f"""
import sys, time
from pathlib import Path
from eval.server import serving
with serving([["python", "-c", {SERVER!r}, sys.argv[1]]], 1, Path(sys.argv[1] + ".log")):
    time.sleep(1000)
"""


def saved(**more: Any) -> dict[str, Any]:
    """What the client saves of 4 requests."""
    counts = {"completed": 4, "failed": 0, "total_output_tokens": 40, "duration": 2.0, "request_throughput": 2.0, "output_throughput": 20.0}
    times = {f"{which}_{name}_ms": i + j for i, which in enumerate(("mean", "median", "p99")) for j, name in enumerate(latency.TIMES)}
    return {**counts, **times, **more}


DRAFTS = {"spec_decode_num_drafts": 10, "spec_decode_draft_tokens": 30, "spec_decode_accepted_tokens": 12}
DRAFTS_AT = {"spec_decode_per_position_acceptance_rates": [0.7, 0.4, 0.1]}


def report() -> dict[str, Any]:
    cells = [
        ("none", 0, {}),
        ("ngram", 3, DRAFTS | DRAFTS_AT),
        ("draft_model", 3, DRAFTS | {"p99_ttft_ms": 9876.5, "median_ttft_ms": 1234.5}),
    ]
    methods = [{"method": m, "k": k, "concurrency": c, **latency.figures(saved(**d))} for c in (1, 16) for m, k, d in cells]
    return {
        "name": "a",
        "prompts": {"count": 4},
        "methods": methods,
        "settings": {"fingerprint": "f", "export": None, "prompts": "p", "folders": {}},
    }


def test_figures_are_the_clients_and_counts_the_servers():
    plain, drafted = latency.figures(saved()), latency.figures(saved(**DRAFTS, **DRAFTS_AT))
    assert plain["ttft_ms"] == {"mean": 0, "median": 1, "p99": 2} and plain["tpot_ms"]["p99"] == 3 and plain["itl_ms"]["mean"] == 2
    assert (plain["requests"], plain["output_tokens"], plain["requests_per_second"], plain["tokens_per_second"]) == (4, 40, 2.0, 20.0)
    assert (plain["drafts"], plain["acceptance_length"], plain["acceptance_per_position"]) == (0, 1.0, [])
    assert (drafted["drafts"], drafted["draft_tokens"], drafted["accepted_tokens"]) == (10, 30, 12)
    assert drafted["acceptance_length"] == 2.2 and drafted["acceptance_per_position"] == [0.7, 0.4, 0.1]


def test_the_table_has_every_cell_in_80_columns():
    out = StringIO()
    Console(file=out, width=80).print(latency.table(report()))
    text = out.getvalue()
    assert text.count("plain") == text.count("n-gram") == text.count("draft model") == 2 and "\u2026" not in text, text
    assert "1234/9876" in text, text
    assert text.count("2.20") == 4 and text.count("1.00x") == 6


def test_the_page_shows_the_latency_of_the_same_head_alone(tmp_path):
    folder = tmp_path / "eval"
    folder.mkdir()
    (folder / "latency.json").write_text(json.dumps(report()))
    write(made() | {"settings": report()["settings"]}, folder)
    assert "Through vLLM&#x27;s server" in (folder / "report.html").read_text()
    for other in ({"fingerprint": "of another target"}, {"prompts": "others"}):
        write(made() | {"settings": report()["settings"] | other}, folder)
        assert "Through vLLM&#x27;s server" not in (folder / "report.html").read_text()


def test_the_server_is_the_reports_command_with_the_engines_sizes(target):
    cfg = config(target, target, "eval.concurrency=[1,2]", "eval.k=2", "eval.methods=[none,ngram]")
    requests = [{"id": "a", "prompt_ids": [1] * 10, "max_tokens": 20}]
    parts = latency.served(cfg, target, requests, "ngram", 2)
    words = [word for part in parts for word in part]
    assert latency.shell(parts).startswith(command(target, "float32", json.loads(words[words.index("--speculative-config") + 1]), {}))
    assert words[words.index("--max-num-seqs") + 1] == "2" and words[words.index("--max-model-len") + 1] == "256"
    assert (
        "--no-enable-prefix-caching" in words
        and "--no-trust-remote-code" in words
        and words.count("--model") == words.count("--dtype") == 1
    )
    assert server.flags({"max_num_seqs": 2, "enforce_eager": True, "a_b": False}) == ["--max-num-seqs", "2", "--enforce-eager", "--no-a-b"]


def test_sampled_answers_are_refused(target, tmp_path):
    refused(
        lambda: latency.latency(config(target, tmp_path, "eval.temperature=1"), target, records()), "eval.temperature=1", "temperature 0"
    )


def test_failed_requests_are_no_figures(tmp_path):
    (tmp_path / "result.json").write_text(json.dumps(saved(failed=2, errors=["", "Bad Request"])))
    refused(lambda: server.read_result(tmp_path / "result.json"), "2 requests failed", "Bad Request")


def test_a_server_or_client_that_dies_shows_its_last_lines(tmp_path, monkeypatch):
    def serve() -> None:
        with server.serving([["python", "-m", "not_a_module"]], 1, tmp_path / "server.log"):
            raise AssertionError("there is no server")

    for run in (serve, lambda: server.bench([], 1, tmp_path)):
        monkeypatch.setattr(server, "CLIENT", "not_a_module")
        with pytest.raises(UserError) as error:
            run()
        assert "exit code 1" in str(error.value) and "No module named not_a_module" in str(error.value)


def test_nothing_is_left_of_a_server_after_an_interrupt(tmp_path):
    with suppress(KeyboardInterrupt), server.serving([["python", "-c", SERVER, str(tmp_path / "ids")]], 1, tmp_path / "log"):
        ids = [int(number) for number in (tmp_path / "ids").read_text().split()]
        assert all(map(alive, ids))
        raise KeyboardInterrupt
    wait_for(lambda: not any(map(alive, ids)))


def test_a_server_ends_with_a_parent_that_is_killed(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", INSIDE, str(tmp_path / "ids")], cwd=ROOT)
    wait_for(lambda: (tmp_path / "ids").exists() and len((tmp_path / "ids").read_text().split()) == 2)
    ids = [int(number) for number in (tmp_path / "ids").read_text().split()]
    parent.kill()
    parent.wait()
    try:
        wait_for(lambda: not alive(ids[0]))  # it is asked to end, as vLLM's is, which then ends its own
    finally:
        os.kill(ids[1], signal.SIGKILL)


def alive(pid: int) -> bool:
    """Running, and no zombie that nobody has waited for."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for(there: Any) -> None:
    until = time.monotonic() + 60
    while not there():
        assert time.monotonic() < until
        time.sleep(0.05)


def config(target: Path, run_dir: Path, *words: str) -> RunConfig:
    return load(
        ["conf=tiny_eagle3", f"target.model={target}", "target.max_model_len=256", f"run_dir={run_dir}", "eval.max_tokens=12", *words]
    )


def records() -> list[ChatRecord]:
    return [
        ChatRecord(f"p{i}", [{"role": "user", "content": text}], {"category": "chat", "language": "en"}) for i, text in enumerate(PROMPTS)
    ]


@pytest.mark.slow
def test_vllms_server_and_its_client_measure_plain_decoding(tmp_path, monkeypatch):
    target = build_tiny(tmp_path / "target")
    cfg = config(target, tmp_path / "run", "eval.methods=[none]", "eval.concurrency=[1,2]")
    latency.latency(cfg, target, records())
    found = json.loads((tmp_path / "run" / "eval" / "latency.json").read_text())
    assert [(m["method"], m["concurrency"]) for m in found["methods"]] == [("none", 1), ("none", 2)]
    for m in found["methods"]:
        assert (m["requests"], m["drafts"]) == (4, 0) and 4 <= m["output_tokens"] <= 4 * 12
        assert m["requests_per_second"] == pytest.approx(4 / m["seconds"])
        assert all(0 < m[f"{name}_ms"]["median"] <= m[f"{name}_ms"]["p99"] for name in latency.TIMES)
        assert m["ttft_ms"]["mean"] < m["e2el_ms"]["mean"]
    with monkeypatch.context() as no_server:
        no_server.setattr(latency, "serving", None)
        latency.latency(cfg, target, records())  # all of it is there

    with socket.socket() as other:
        other.bind((server.HOST, 0))
        other.listen()
        monkeypatch.setattr(server, "free_port", lambda: other.getsockname()[1])
        cfg.eval.max_tokens = 10
        with pytest.raises(UserError, match="ddress already in use"):
            latency.latency(cfg, target, records())
