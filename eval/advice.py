"""From measured cells to what to do: the cost model fitted to them, the choice at each concurrency, and both in plain sentences.

A cell is one entry of the report's `methods`: one method with one k at one concurrency.
"""

from __future__ import annotations

from itertools import groupby
from statistics import median
from typing import Any

from eval.methods import LOOKUPS, label
from eval.speedup import Costs, best_k, expected_tokens, fit_costs, predicted_speedup

WORTH = 1.02  # a smaller measured speed-up is taken for noise
APART = 0.1  # relative difference of two slices that is worth a sentence
FEWEST = 16  # prompts below which a speed-up is more chance than measurement
WITHIN = 0.15  # of a measured speed-up: what a prediction is to keep to
ENOUGH = 50  # drafting passes of a slice from which its acceptance is more than noise

Cell = dict[str, Any]
Report = dict[str, Any]


def is_grid(report: Report) -> bool:
    """Whether more than one k or more than one concurrency was measured."""
    return len({m["concurrency"] for m in report["methods"]}) > 1 or len({m["k"] for m in report["methods"] if m["k"]}) > 1


def reference(report: Report) -> list[Cell]:
    """Of each method its cell with the most drafts at the lowest concurrency: where methods are compared position by position."""
    first = min((m["concurrency"] for m in report["methods"]), default=None)
    lowest = [m for m in report["methods"] if m["concurrency"] == first]
    most = {m["method"]: m["k"] for m in sorted(lowest, key=lambda m: m["k"])}
    return [m for m in lowest if m["k"] == most[m["method"]]]


def equal(cell: Cell) -> str:
    """The share of answers equal to the plain ones, where there is one."""
    return "-" if cell["lossless"] is None else f"{cell['lossless']:.1%}"


def find(report: Report, method: str) -> Cell | None:
    return next((m for m in reference(report) if m["method"] == method), None)


def rates(figures: dict[str, Any]) -> list[float]:
    """Drafts accepted at each position, per pass of decoding (not per drafting pass: n-gram and suffix do not always draft)."""
    passes = max(1, figures["passes"] - figures["requests"])  # without the prefills
    return [count / passes for count in figures["accepted_per_position"]]


def pass_time(cell: Cell) -> float:
    """Duration of a pass, in plain passes at the same concurrency."""
    found = rates(cell)
    return expected_tokens(found, len(found)) / cell["speedup"]


def cost_model(cells: list[Cell]) -> list[dict[str, Any]]:
    """One fit for each method that drafted and each concurrency. Costs are in plain passes.

    verify_per_draft: the part of per_draft that goes to the wider pass of the target, as methods show that find their drafts at next to
    no cost; None where none of them was measured. slices: the best k for each."""
    found = []
    for concurrency in sorted({m["concurrency"] for m in cells}):
        drafting = [m for m in cells if m["concurrency"] == concurrency and m["drafts"]]
        widths = [(m["draft_tokens"] / max(1, m["passes"] - m["requests"]), pass_time(m)) for m in drafting if m["method"] in LOOKUPS]
        verify = fit_costs(widths).per_draft if widths else None
        for method in dict.fromkeys(m["method"] for m in drafting):
            fit = _fit([m for m in drafting if m["method"] == method])
            part = None if verify is None else min(verify, fit["per_draft"])
            found.append({"method": method, "concurrency": concurrency, **fit, "verify_per_draft": part})
    return found


def _fit(cells: list[Cell]) -> dict[str, Any]:
    """Acceptance is that of the cell with the most drafts, costs are fitted to all. Says nothing about more drafts than were measured."""
    costs, most = fit_costs([(m["k"], pass_time(m)) for m in cells]), max(cells, key=lambda m: m["k"])
    k, speedup = best_k(rates(most), costs)
    return {
        "fixed": costs.fixed,
        "per_draft": costs.per_draft,
        "points": [{"k": m["k"], "measured": m["speedup"], "predicted": predicted_speedup(rates(most), m["k"], costs)} for m in cells],
        "best_k": k,
        "best_speedup": speedup,
        "at_limit": k == most["k"],
        "slices": {name: _best(figures, costs) for name, figures in most["slices"].items()},
    }


def prediction(model: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How far the fits are from what was measured, at each concurrency, in shares of it: of the cells of methods with more of them than the
    two costs that were fitted to them, how many there are, how many are less than WITHIN off, the median and the largest."""
    found = []
    for concurrency in sorted({f["concurrency"] for f in model}):
        fits = [f for f in model if f["concurrency"] == concurrency and len(f["points"]) > 2]
        off = [abs(p["predicted"] / p["measured"] - 1) for f in fits for p in f["points"]]
        if off:
            within = sum(value < WITHIN for value in off)
            found.append({"concurrency": concurrency, "cells": len(off), "within": within, "median": median(off), "largest": max(off)})
    return found


def prediction_text(report: Report) -> str:
    """One sentence a concurrency; empty where too little was measured to be predicted."""
    parts = [
        f"{p['median']:.1%} (median) and at most {p['largest']:.1%} at concurrency {p['concurrency']}, {p['within']} of {p['cells']} cells "
        f"by less than {WITHIN:.0%}"
        for p in report["recommendation"]["prediction"]
    ]
    return f"The model is off by {'; by '.join(parts)}." if parts else ""


def _best(figures: dict[str, Any], costs: Costs) -> dict[str, Any]:
    k, speedup = best_k(rates(figures), costs)
    return {"best_k": k, "best_speedup": speedup}


def recommend(cells: list[Cell]) -> dict[str, Any]:
    """choices: at each concurrency the fastest measured cell, or plain decoding where that may be chance, and the fastest that drafts.
    model: cost_model. prediction: how well it holds."""
    choices = []
    for concurrency in sorted({m["concurrency"] for m in cells}):
        here = [m for m in cells if m["concurrency"] == concurrency]
        best = max(here, key=lambda m: m["speedup"])
        gains = best["speedup"] >= WORTH and best["speedup_interval"][0] > 1
        chosen = best if gains else next(m for m in here if m["method"] == "none")
        rival = max((m for m in here if m["k"]), key=lambda m: m["speedup"], default=None)
        figures = ("method", "k", "speedup", "speedup_interval")
        choice = {key: chosen[key] for key in ("concurrency", *figures, "command")}
        choices.append(choice | {"fastest_drafting": rival and {key: rival[key] for key in figures}})
    model = cost_model(cells)
    return {"choices": choices, "model": model, "prediction": prediction(model)}


def commands(report: Report) -> dict[str, str]:
    """What to serve with -> the command, each once: what was chosen, and the head where it was not, for those who want to try it."""
    found, head = {}, find(report, "head")
    for choice in [] if too_few(report) else report["recommendation"]["choices"]:
        found[_named(choice) if choice["k"] else "without speculation"] = choice["command"]
    if head and head["command"] not in found.values():
        found[f"to try it: {_named(head)}"] = head["command"]
    return found


def _named(cell: dict[str, Any]) -> str:
    return f"{label(cell['method'])}, k={cell['k']}"


def too_few(report: Report) -> str:
    """Why there is no advice; empty where there is."""
    count = report["prompts"]["count"]
    if count >= FEWEST:
        return ""
    prompts = "1 prompt is" if count == 1 else f"{count} prompts are"
    text = f"No advice: {prompts} too few to tell a gain from chance, it takes {FEWEST} or more (eval.limit, data.heldout_limit)."
    rivals = [c["fastest_drafting"] for c in report["recommendation"]["choices"] if c["fastest_drafting"]]
    best = max(rivals, key=lambda r: r["speedup"], default=None)
    return f"{text} The fastest here was {_named(best)}, {_speed(best)}." if best else text


def _speed(cell: dict[str, Any]) -> str:
    low, high = cell["speedup_interval"]
    return f"{cell['speedup']:.2f}x ({low:.2f} to {high:.2f})"


def _basis(report: Report) -> str:
    """Of the cells at the lowest concurrency, which have the most rounds."""
    rounds = max((m["rounds"] for m in report["methods"] if m["k"]), default=1)
    how = f"plain decoding and the others took turns, up to {rounds} times" if rounds > 1 else "each method ran once"
    return f"In brackets: 95 % intervals over the {report['prompts']['count']} prompts; {how}."


def advice(report: Report) -> str:
    """What to serve with, why, and which slice lags, in a few sentences that hold numbers of this report only; or why there is none."""
    return f"{choices_text(report) if is_grid(report) else _choice_text(report)} {reasons(report)}".strip()


def reasons(report: Report) -> str:
    """The cost model's part of the advice, and the slices'."""
    if too_few(report):
        return ""
    parts = [_grid_model(report) if is_grid(report) else _model(report), _slices(report)]
    return " ".join(part for part in parts if part)


def _choice_text(report: Report) -> str:
    if few := too_few(report):
        return few
    found = report["recommendation"]["choices"][0]
    if found["method"] != "none":
        text = f"Serve with {label(found['method'])}, {found['k']} drafts: {_speed(found)} the speed of plain decoding."
    elif rival := found["fastest_drafting"]:
        text = f"Serve without speculation: nothing measured was surely faster than plain decoding; the fastest, {_named(rival)}, "
        text += f"reaches {_speed(rival)}."
    else:
        return "Serve without speculation: only plain decoding was measured."
    return f"{text} {_basis(report)}"


def _model(report: Report) -> str:
    fit = next((f for f in report["recommendation"]["model"] if f["method"] == "head"), None)
    if fit is None:
        return ""
    cost = f"one draft costs {fit['per_draft']:.2f} of a plain pass here"
    if fit["best_k"] == 0:
        return f"For the head, {cost}: more than it earns at any number of drafts."
    text = f"For the head the cost model ({cost}) is best at {fit['best_k']} drafts, {fit['best_speedup']:.2f}x"
    return text + ("; a larger k was not measured and may be better still." if fit["at_limit"] else ".")


def choices_text(report: Report) -> str:
    """The choice at each concurrency, those that agree together; or why there is none."""
    if few := too_few(report):
        return few
    clauses = []
    for (method, k), group in groupby(report["recommendation"]["choices"], lambda c: (c["method"], c["k"])):
        same = list(group)
        where = f"at {'' if clauses else 'concurrency '}{_listed([str(c['concurrency']) for c in same])}"
        rival = max((c["fastest_drafting"] for c in same if c["fastest_drafting"]), key=lambda r: r["speedup"], default=None)
        speeds = _listed([_speed(c) for c in same]) + ("" if clauses else " the speed of plain decoding")
        if method != "none":
            clauses.append(f"{where} use {label(method)} with k={k}: {speeds}")
        elif rival:
            fastest = f"{label(rival['method'])} with k={rival['k']}, reaches {_speed(rival)}"
            clauses.append(f"{where} switch speculation off: the fastest, {fastest}")
        else:
            clauses.append(f"{where} only plain decoding was measured")
    text = "; ".join(clauses)
    return f"{text[0].upper()}{text[1:]}. {_basis(report)}"


def _grid_model(report: Report) -> str:
    """For the head, or without one for the method that was chosen first."""
    wanted = "head" if find(report, "head") else report["recommendation"]["choices"][0]["method"]
    fits = [f for f in report["recommendation"]["model"] if f["method"] == wanted]
    if not fits:
        return ""
    best = [f"k={f['best_k']} ({f['best_speedup']:.2f}x)" if f["best_k"] else "none" for f in fits]
    at = _listed([f"{k} at {'' if i else 'concurrency '}{f['concurrency']}" for i, (k, f) in enumerate(zip(best, fits, strict=True))])
    costs = _listed([f"{f['per_draft']:.2f}" for f in fits])
    text = f"By the cost model the best number of drafts of {label(wanted)} is {at}; each draft costs {costs} of a plain pass."
    text += " A larger k was not measured and may be better still." if any(f["at_limit"] for f in fits) else ""
    return f"{text} {prediction_text(report)}".strip()


def _slices(report: Report) -> str:
    """Which slice accepts least, where the difference is large and rests on enough passes."""
    choice = report["recommendation"]["choices"][0]
    wanted = choice if choice["k"] else find(report, "head")
    if wanted is None:
        return ""
    cells = [m for m in report["methods"] if m["method"] == wanted["method"] and m["concurrency"] == report["methods"][0]["concurrency"]]
    parts = next(m for m in cells if m["k"] == wanted["k"])["slices"]
    accepted = {name: part["acceptance_length"] - 1 for name, part in parts.items() if part["drafts"] >= ENOUGH}
    if len(accepted) < 2:
        return ""
    worst, best = min(accepted, key=lambda name: accepted[name]), max(accepted, key=lambda name: accepted[name])
    gap = 1 - accepted[worst] / accepted[best] if accepted[best] else 0.0
    if gap < APART:
        return ""
    text = f"With {label(wanted['method'])}, slice {worst} accepts {gap:.0%} fewer drafts than {best} "
    text += f"({accepted[worst]:.2f} against {accepted[best]:.2f} a pass)"
    return text + (": train on more text like it." if wanted["method"] == "head" else ".")


def _listed(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
