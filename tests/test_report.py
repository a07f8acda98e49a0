"""report.json holds the agreed keys, report.html is one sound file, and both survive the odd cases."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from data.turns import Measured
from eval.advice import FEWEST, advice, commands, recommend
from eval.methods import command
from eval.report import comparison, headline, history, write
from eval.serve import entry

SLICES = {"chat": [f"c{i}" for i in range(14)], "turkish": [f"t{i}" for i in range(7)]}
COUNT = 21
METHOD_KEYS = (
    "method k temperature concurrency requests output_tokens drafts draft_tokens accepted_tokens accepted_per_position acceptance_rate "
    "acceptance_length tokens_per_pass tokens_per_second itl_ms ttft_ms speedup lossless slices"
).split()


def result(seconds: float, per_position: list[int], drafts: int, tokens: int = 20) -> dict[str, Any]:
    one = {"finish_reason": "length", "drafts": drafts, "draft_tokens": 3 * drafts, "accepted_per_position": per_position}
    outputs = {name: {"token_ids": list(range(tokens)), **one} for part in SLICES.values() for name in part}
    times = {"itl_ms": [seconds / 10 * itl for itl in (1.0, 2.0, 9.0)] * (COUNT // 3), "ttft_ms": [5.0] * COUNT}
    return {"outputs": outputs, "seconds": seconds, "output_tokens": COUNT * tokens, **times}


def made(
    head_seconds: float = 6.0, methods: tuple[str, ...] = ("none", "ngram", "head"), temperature: float = 0.0, drafts: str = "greedy"
) -> dict[str, Any]:
    plain = result(10.0, [], 0)
    results = {"none": plain, "ngram": result(9.0, [2, 1, 1], 3), "head": result(head_seconds, [6, 3, 1], 9)}
    found = []
    for method in methods:
        extra = {"k": 0 if method == "none" else 3, "temperature": temperature, "concurrency": 1, "draft_sample_method": drafts}
        extra["command"] = command(Path("/models/it's <here>"), "float32", None if method == "none" else {"method": method}, {})
        found.append(entry(method, Measured(results[method], plain, 1), SLICES, temperature > 0) | extra)
    prompts = {"count": COUNT, "slices": {"chat": 14, "turkish": 7}, "skipped_too_long": 1, "max_tokens": 20, "answers_cut": 1}
    prompts["temperature"] = temperature
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
    write(report, run_dir / "eval")
    html = (run_dir / "eval" / "report.html").read_text()
    Balance(html)
    assert not re.search(r"https?:|<script|<link|<img|url\(", html), "the page must need nothing from outside"
    return json.loads((run_dir / "eval" / "report.json").read_text()), html


def test_report_has_the_agreed_keys_and_figures(tmp_path):
    report, _ = written(with_offline(made(), 2.1), tmp_path)
    assert {"target", "engine", "prompts", "methods", "offline", "recommendation"} <= set(report)
    assert all(set(METHOD_KEYS) <= set(m) for m in report["methods"])
    head = report["methods"][2]
    assert (head["requests"], head["output_tokens"], head["drafts"], head["draft_tokens"]) == (21, 420, 189, 567)
    assert head["accepted_per_position"] == [126, 63, 21] and head["accepted_tokens"] == 210
    assert head["acceptance_length"] == pytest.approx(1 + 30 / 27) and head["acceptance_rate"] == pytest.approx(30 / 81)
    assert head["tokens_per_pass"] == pytest.approx(2) and head["speedup"] == pytest.approx(10 / 6)
    assert (head["itl_ms"], head["ttft_ms"], head["lossless"]) == (pytest.approx(1.2), 5.0, 1.0)
    assert head["slices"]["turkish"]["drafts"] == 63 and head["slices"]["chat"]["output_tokens"] == 280


def test_page_begins_with_the_result_and_shows_every_part(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "train", "step": 10, "loss": 5.0}\n{"kind": "val", "step": 10, "loss": 4.0, "accept_k": [0.5, null, 0.1]}\n{"kind": "tr'
    )
    (tmp_path / "provenance.json").write_text('{"command": "torchrun launch/train.py", "git": {"commit": "abc", "dirty": true}}')
    report, html = written(with_offline(made(), 2.1), tmp_path)
    assert html.index("The head accepts 1.11 of 3 drafts per pass: 2.00 tokens per target pass, 1.67x") < html.index("<section>")
    for part in ("openai.api_server", "turkish (7 prompts)", "chat (14 prompts)", "draft 3", "optimizer steps", "commit abc", "tok/s"):
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
    report = made(head_seconds=14.0, methods=("none", "head"))
    assert "without speculation" in advice(report) and "head, k=3, reaches 0.71x (" in advice(report)
    assert [*commands(report)] == ["without speculation", "to try it: head, k=3"], "users want to try it all the same"


def test_advice_says_from_how_many_prompts_and_with_what_spread():
    report = made()
    low, high = report["methods"][2]["speedup_interval"]
    assert low < report["methods"][2]["speedup"] < high
    assert f"1.67x ({low:.2f} to {high:.2f}) the speed" in advice(report) and "95 % intervals over the 21 prompts" in advice(report)


def test_a_gain_that_may_be_chance_is_not_advised():
    report = made()
    report["methods"] = [m | {"speedup_interval": [0.98, 2.5]} if m["k"] else m for m in report["methods"]]
    text = advice(report | {"recommendation": recommend(report["methods"])})
    assert (
        text.startswith("Serve without speculation: nothing measured was surely faster")
        and "head, k=3, reaches 1.67x (0.98 to 2.50)" in text
    )


@pytest.mark.parametrize("count", [1, 4, FEWEST - 1, FEWEST])
def test_too_few_prompts_make_no_advice(count, tmp_path):
    report = made()
    report["prompts"] |= {"count": count}
    text, few = advice(report), count < FEWEST
    assert text.startswith("No advice: ") == few and ("draft costs" in text) != few
    assert few == ("The fastest here was head, k=3, 1.67x (" in text) and (f"{count} prompt" in text)
    assert [*commands(report)] == ["to try it: head, k=3" if few else "head, k=3"]
    assert f"{count} prompt" in headline(report) and written(report, tmp_path)


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
    write(made(), tmp_path / "eval")
    shown = capsys.readouterr().out
    assert "…" not in shown and max(map(len, shown.partition("\n# ")[0].splitlines())) <= 80  # below it: commands to paste
    for word in ("plain", "n-gram", "head", "1.67x", ".67 .33 .11"):
        assert word in shown


def test_sampled_answers_are_compared_by_acceptance_and_never_by_text(tmp_path):
    """Two runs at a temperature write other texts, whatever the verification does."""
    report = made(temperature=0.7)
    report["methods"][2]["parted"] = []
    assert all(m["lossless"] is None and m["slices"]["chat"]["lossless"] is None for m in report["methods"])
    text, html = written(with_offline(report, 1.4), tmp_path)
    assert "temperature 0.7" in html and "Answers are sampled" in html and "equal the plain" not in html
    assert "up to 0." in comparison(with_offline(report, 1.4))


def test_probabilistic_drafts_are_not_held_against_the_greedy_offline_chain(tmp_path):
    assert "says nothing of probabilistic drafts" in comparison(made(temperature=1.0, drafts="probabilistic"))
