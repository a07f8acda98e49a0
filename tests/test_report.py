"""report.json holds the agreed keys, report.html is one sound file, and both survive the odd cases."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eval.advice import advice, recommend
from eval.methods import command
from eval.report import comparison, headline, history, write
from eval.serve import entry

SLICES = {"chat": ["c0", "c1"], "turkish": ["t0"]}
METHOD_KEYS = (
    "method k temperature concurrency requests output_tokens drafts draft_tokens accepted_tokens accepted_per_position acceptance_rate "
    "acceptance_length tokens_per_pass tokens_per_second itl_ms ttft_ms speedup lossless slices"
).split()


def result(seconds: float, per_position: list[int], drafts: int, tokens: int = 20) -> dict[str, Any]:
    one = {"finish_reason": "length", "drafts": drafts, "draft_tokens": 3 * drafts, "accepted_per_position": per_position}
    outputs = {name: {"token_ids": list(range(tokens)), **one} for part in SLICES.values() for name in part}
    return {"outputs": outputs, "seconds": seconds, "output_tokens": 3 * tokens, "itl_ms": [1.0, 2.0, 9.0], "ttft_ms": [5.0]}


def made(head_seconds: float = 6.0, methods: tuple[str, ...] = ("none", "ngram", "head")) -> dict[str, Any]:
    plain = result(10.0, [], 0)
    results = {"none": plain, "ngram": result(9.0, [2, 1, 1], 3), "head": result(head_seconds, [6, 3, 1], 9)}
    found = []
    for method in methods:
        extra = {"k": 0 if method == "none" else 3, "temperature": 0.0, "concurrency": 1}
        extra["command"] = command(Path("/models/it's <here>"), None if method == "none" else {"method": method}, {})
        found.append(entry(method, results[method], plain, SLICES) | extra)
    prompts = {"count": 3, "slices": {"chat": 2, "turkish": 1}, "skipped_too_long": 1, "max_tokens": 20, "answers_cut": 1}
    report = {"name": "a <b>", "target": {"model": "m", "dtype": "float32"}, "engine": {"name": "vllm", "version": "0", "device": "CPU"}}
    return report | {"prompts": prompts, "methods": found, "recommendation": recommend(found)}


def with_offline(report: dict[str, Any], length: float, unjudged: int = 0) -> dict[str, Any]:
    rates = {"acceptance_per_position": [0.6, 0.3, 0.1], "accepted_per_position": [6, 3, 1], "drafts": 10}
    return report | {"offline": {"acceptance_length": length, "unjudged_drafts": unjudged, **rates}}


class Balance(HTMLParser):
    """Every tag that is opened is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[Any]) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[Any]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def written(report: dict[str, Any], run_dir: Path) -> tuple[dict[str, Any], str]:
    write(report, run_dir)
    html = (run_dir / "eval" / "report.html").read_text()
    Balance(html)
    assert not re.search(r"https?:|<script|<link|<img|url\(", html), "the page must need nothing from outside"
    return json.loads((run_dir / "eval" / "report.json").read_text()), html


def test_report_has_the_agreed_keys_and_figures(tmp_path):
    report, _ = written(with_offline(made(), 2.1), tmp_path)
    assert {"target", "engine", "prompts", "methods", "offline", "recommendation"} <= set(report)
    assert all(set(METHOD_KEYS) <= set(m) for m in report["methods"])
    head = report["methods"][2]
    assert (head["requests"], head["output_tokens"], head["drafts"], head["draft_tokens"]) == (3, 60, 27, 81)
    assert head["accepted_per_position"] == [18, 9, 3] and head["accepted_tokens"] == 30
    assert head["acceptance_length"] == pytest.approx(1 + 30 / 27) and head["acceptance_rate"] == pytest.approx(30 / 81)
    assert head["tokens_per_pass"] == pytest.approx(2) and head["speedup"] == pytest.approx(10 / 6)
    assert (head["itl_ms"], head["ttft_ms"], head["lossless"]) == (2.0, 5.0, 1.0)
    assert head["slices"]["turkish"]["drafts"] == 9 and head["slices"]["chat"]["output_tokens"] == 40


def test_page_begins_with_the_result_and_shows_every_part(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "train", "step": 10, "loss": 5.0}\n{"kind": "val", "step": 10, "loss": 4.0, "accept_k": [0.5, null, 0.1]}\n{"kind": "tr'
    )
    (tmp_path / "provenance.json").write_text('{"command": "torchrun launch/train.py", "git": {"commit": "abc", "dirty": true}}')
    report, html = written(with_offline(made(), 2.1), tmp_path)
    assert html.index("The head accepts 1.11 of 3 drafts per pass: 2.00 tokens per target pass, 1.67x") < html.index("<section>")
    for part in ("openai.api_server", "turkish (1 prompt)", "chat (2 prompts)", "draft 3", "optimizer steps", "commit abc", "tok/s"):
        assert part in html, part
    assert "a &lt;b&gt;" in html and "<b>here" not in html
    assert report["provenance"]["git"]["commit"] == "abc"


@pytest.mark.parametrize("methods", [("none",), ("none", "ngram"), ("none", "head")])
def test_any_choice_of_methods_makes_a_page(methods, tmp_path):
    report, html = written(made(methods=methods), tmp_path)
    assert report["headline"].split(" ")[0] in html and "offline" not in report


def test_a_head_that_never_drafted_makes_a_page(tmp_path):
    report = made()
    plain = report["methods"][0]
    report["methods"][2] |= {key: plain[key] for key in ("drafts", "acceptance_per_position", "tokens_per_pass", "acceptance_length")}
    written(report, tmp_path)


def test_a_run_without_training_has_no_curves(tmp_path):
    assert history(tmp_path) == []
    assert "optimizer steps" not in written(made(), tmp_path)[1]


def test_slow_head_is_said_to_be_slow():
    report = made(head_seconds=14.0)
    assert "0.71x the speed of plain decoding" in headline(report)
    assert report["recommendation"]["choices"][0]["method"] == "ngram" and "Serve with n-gram" in advice(report)
    assert "without speculation" in advice(made(head_seconds=14.0, methods=("none", "head")))


def test_advice_does_not_claim_more_drafts_than_were_measured():
    report = made(head_seconds=4.0)
    fit = next(f for f in report["recommendation"]["model"] if f["method"] == "head")
    assert fit["best_k"] <= 3 and ("larger k was not measured" in advice(report)) == (fit["best_k"] == 3)


@pytest.mark.parametrize(("offline", "unjudged", "agree"), [(2.1, 0, True), (2.0, 0, False), (2.0, 1, True), (2.3, 3, False)])
def test_offline_and_engine_agree_within_rounding_and_unjudged_drafts(offline, unjudged, agree):
    assert ("They agree" in comparison(with_offline(made(), offline, unjudged))) == agree


def test_a_comparison_along_other_texts_says_so():
    report = with_offline(made(), 2.1)
    assert "part from" not in comparison(report)
    next(method for method in report["methods"] if method["method"] == "head")["lossless"] = 0.25
    assert "75% of the engine's answers part from the plain ones" in comparison(report)


def test_terminal_table_fits_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    write(made(), tmp_path)
    shown = capsys.readouterr().out
    assert "…" not in shown and max(map(len, shown.splitlines()[:-1])) <= 80
    for word in ("plain", "n-gram", "head", "1.67x", ".67 .33 .11"):
        assert word in shown
