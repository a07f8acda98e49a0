"""A grid of k and concurrency: the cost model found again from made-up times, the choice at each concurrency, and what a reader gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_report import written

from data.turns import Measured
from eval.advice import advice, find, is_grid, recommend, reference
from eval.methods import command
from eval.report import headline, write
from eval.serve import entry
from eval.speedup import Costs, expected_tokens

TOKENS, PASS = 2001, 0.01  # of an answer; seconds of a plain pass
KS, CONCURRENCIES = (1, 2, 4), (1, 4, 16)
SLICES = {"chat": [f"c{i}" for i in range(14)], "turkish": [f"t{i}" for i in range(7)]}
RATES = {  # accepted at each position, by method and slice
    "head": {"chat": [0.8, 0.6, 0.4, 0.3], "turkish": [0.6, 0.3, 0.1, 0.05]},
    "ngram": {"chat": [0.2, 0.1, 0.05, 0.0], "turkish": [0.1, 0.0, 0.0, 0.0]},
}
COSTS = {  # by method and concurrency
    "head": {1: Costs(0.05, 0.04), 4: Costs(0.05, 0.15), 16: Costs(0.1, 0.7)},
    "ngram": {1: Costs(0.0, 0.01), 4: Costs(0.0, 0.1), 16: Costs(0.0, 0.5)},
}


def result(method: str, k: int, concurrency: int) -> dict[str, Any]:
    """What the engine would return: each answer takes as many passes as its acceptance says, each pass as long as its costs say."""
    outputs, passes, itl = {}, 0, []
    time = COSTS[method][concurrency].of_pass(k) if k else 1.0
    for slice_name, names in SLICES.items():
        rates = RATES[method][slice_name] if k else []
        drafts = round((TOKENS - 1) / expected_tokens(rates, k))
        accepted = [round(drafts * rate) for rate in rates[:k]]
        spent = {"drafts": drafts, "draft_tokens": k * drafts} if k else {"drafts": 0, "draft_tokens": 0}
        for name in names:
            outputs[name] = {"token_ids": list(range(TOKENS)), "finish_reason": "length", **spent, "accepted_per_position": accepted}
            passes += 1 + drafts
            itl.append(time * PASS * 1e3 * drafts / (TOKENS - 1))
    seconds = passes * time * PASS / concurrency
    total = len(outputs) * TOKENS
    return {"outputs": outputs, "seconds": seconds, "output_tokens": total, "itl_ms": itl, "ttft_ms": [5.0] * len(outputs)}


def grid(methods: tuple[str, ...] = ("none", "ngram", "head"), ks=KS, concurrencies=CONCURRENCIES) -> dict[str, Any]:
    found = []
    for method in methods:
        for k in (0,) if method == "none" else ks:
            for concurrency in concurrencies:
                told = {"method": method, "num_speculative_tokens": k} if k else None
                setting = {
                    "k": k,
                    "draft_sample_method": "greedy",
                    "temperature": 0.0,
                    "concurrency": concurrency,
                    "command": command(Path("/models/it's <here>"), "float32", told, {}),
                }
                plain = result("none", 0, concurrency)
                found.append(
                    entry(method, Measured(result(method, k, concurrency), plain, 4) if k else Measured(plain, None, 4), SLICES, False)
                    | setting
                )
    prompts = {
        "count": 21,
        "slices": {"chat": 14, "turkish": 7},
        "skipped_too_long": 0,
        "max_tokens": TOKENS,
        "answers_cut": 0,
        "temperature": 0.0,
    }
    report = {"name": "g", "target": {"model": "m", "dtype": "float32"}, "engine": {"name": "vllm", "version": "0", "device": "CPU"}}
    return report | {"prompts": prompts, "methods": found, "recommendation": recommend(found)}


def fits(report: dict[str, Any], method: str) -> dict[int, dict[str, Any]]:
    return {f["concurrency"]: f for f in report["recommendation"]["model"] if f["method"] == method}


@pytest.mark.parametrize("method", ["head", "ngram"])
def test_the_costs_behind_the_times_are_found_again(method):
    for concurrency, fit in fits(grid(), method).items():
        costs = COSTS[method][concurrency]
        assert (fit["fixed"], fit["per_draft"]) == (pytest.approx(costs.fixed, abs=0.01), pytest.approx(costs.per_draft, abs=0.01))
        assert all(p["predicted"] == pytest.approx(p["measured"], rel=0.01) for p in fit["points"])
        assert [p["k"] for p in fit["points"]] == list(KS)


def test_verification_is_told_from_drafting_by_the_methods_that_draft_for_nothing():
    for concurrency, fit in fits(grid(), "head").items():
        assert fit["verify_per_draft"] == pytest.approx(COSTS["ngram"][concurrency].per_draft, abs=0.01)
    assert all(f["verify_per_draft"] is None for f in fits(grid(("none", "head")), "head").values())


def test_a_method_that_drafts_in_few_passes_is_modelled_by_all_its_passes():
    """N-gram finds a draft in a tenth of the passes: its speed-up is that of all of them."""
    report = grid(("none", "ngram"), concurrencies=(1,))
    for m in report["methods"][1:]:
        m["drafts"], m["draft_tokens"] = m["drafts"] // 10, m["draft_tokens"] // 10
    fit = recommend(report["methods"])["model"][0]
    assert all(p["predicted"] == pytest.approx(p["measured"], rel=0.01) for p in fit["points"])


def test_best_k_falls_with_concurrency_and_differs_by_slice():
    model = fits(grid(), "head")
    assert [model[c]["best_k"] for c in CONCURRENCIES] == [4, 3, 0], "k=3 was not measured, but lies between those that were"
    assert model[1]["at_limit"] and not model[4]["at_limit"]
    assert model[1]["slices"]["chat"]["best_k"] > model[1]["slices"]["turkish"]["best_k"] > 0


def test_predictions_are_held_against_what_was_measured():
    report = grid(concurrencies=(1, 4))
    assert [(p["concurrency"], p["cells"], p["within"]) for p in report["recommendation"]["prediction"]] == [(1, 6, 6), (4, 6, 6)]
    for m in report["methods"]:  # one cell of six, whose neighbours pull the fit a little its way
        if (m["method"], m["k"], m["concurrency"]) == ("head", 2, 1):
            m["speedup"] *= 1.5
    report["recommendation"] = recommend(report["methods"])
    one, four = report["recommendation"]["prediction"]
    assert one["within"] < 6 and 0.15 < one["largest"] < 0.5 and four["largest"] < 0.01 and one["median"] < one["largest"]
    assert f"at most {one['largest']:.1%} at concurrency 1, {one['within']} of 6 cells by less than 15%; by " in advice(report)
    assert not recommend(grid(ks=(2,))["methods"])["prediction"], "one or two k say nothing of two costs that are fitted to them"


def test_advice_says_what_to_use_where_and_when_to_switch_off():
    report = grid()
    assert [(c["method"], c["k"]) for c in report["recommendation"]["choices"]] == [("head", 4), ("head", 2), ("none", 0)]
    text = advice(report)
    assert text.startswith("At concurrency 1 use head with k=4: ") and "; at 4 use head with k=2: " in text
    assert "; at 16 switch speculation off: the fastest, head with k=1, reaches 0." in text
    assert "plain decoding and the others took turns, up to 4 times." in text
    assert "is k=4 (" in text and "none at 16" in text and "larger k was not measured" in text
    assert "slice turkish accepts 50% fewer drafts than chat (1.05 against 2.10 a pass): train on more text like it." in text
    first, (low, high) = (report["recommendation"]["choices"][0][key] for key in ("speedup", "speedup_interval"))
    assert f"{first:.2f}x ({low:.2f} to {high:.2f}) the speed of plain decoding" in headline(report)
    report["prompts"] |= {"count": 4}
    assert advice(report).startswith("No advice: 4 prompts") and "No advice" in headline(report)


def test_neighbouring_concurrencies_with_one_choice_share_a_clause():
    report = grid(("none", "head"), ks=(2, 4), concurrencies=(1,))
    again = [m | {"concurrency": 2} for m in report["methods"]]
    text = advice(report | {"methods": report["methods"] + again, "recommendation": recommend(report["methods"] + again)})
    assert text.startswith("At concurrency 1 and 2 use head with k=4: ")


def test_small_or_thin_differences_of_slices_are_not_worth_a_sentence():
    report = grid()
    for m in report["methods"]:
        m["slices"]["turkish"] |= {"drafts": 20}
    assert "slice turkish" not in advice(report)
    for m in report["methods"]:
        m["slices"]["turkish"] = m["slices"]["chat"]
    assert "fewer drafts" not in advice(report)


def test_comparisons_by_position_take_the_most_drafts_at_the_lowest_concurrency():
    report = grid()
    assert [(m["method"], m["k"], m["concurrency"]) for m in reference(report)] == [("none", 0, 1), ("ngram", 4, 1), ("head", 4, 1)]
    head = find(report, "head")
    assert head is not None and head["k"] == 4 and find(report, "suffix") is None
    assert is_grid(report) and not is_grid(grid(ks=(3,), concurrencies=(4,)))


@pytest.mark.parametrize(
    ("methods", "ks", "concurrencies"),
    [
        (("none", "ngram", "head"), KS, CONCURRENCIES),
        (("none", "head"), KS, (1,)),
        (("none", "head"), (2,), (1, 4)),
        (("none",), (1,), (1, 4)),
    ],
)
def test_any_grid_makes_a_page(methods, ks, concurrencies, tmp_path):
    report = grid(methods, ks, concurrencies)
    _, html = written(report, tmp_path)
    assert ("Against k, concurrency 1" in html) == (len(ks) > 1)
    assert ("Tokens/s against concurrency" in html) == (len(concurrencies) > 1)
    assert ("best k by slice" in html) == (len(methods) > 1) and "In every cell all answers equal" in html
    assert html.count("openai.api_server") == len({(c["method"], c["k"]) for c in report["recommendation"]["choices"]})


def test_published_heads_have_names_and_colours_of_their_own(tmp_path):
    report = grid(("none", "head"), concurrencies=(1,))
    others = [m | {"method": f"/models/{name}"} for name in ("first <head>", "second") for m in report["methods"] if m["k"]]
    report["methods"] += others
    _, html = written(report | {"recommendation": recommend(report["methods"])}, tmp_path)
    assert "first &lt;head&gt;" in html and "#c2334d" in html and "#0b8f9c" in html
    assert "/models/second" not in html.split("How to serve")[0]


def test_terminal_shows_each_cell_and_commands_to_paste_in_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    write(grid(), tmp_path / "eval")
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    rows = [line for line in lines if line.strip().startswith(("plain ", "n-gram ", "head ")) and "%" in line]
    assert len(rows) == 21 and "…" not in shown and max(map(len, rows)) <= 80
    assert "# head, k=4" in lines and "# without speculation" in lines and sum("openai.api_server" in line for line in lines) == 3
