"""The parts of report.html that only a grid of k or concurrency has: its cells, speed against both, and the cost model beside what was
measured."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from eval.advice import Cell, Report, equal, prediction_text, reference
from eval.methods import label
from eval.widgets import Line, chart, charts, palette, table

SOFT = "#8a94a3"  # of lines that only guide the eye
SPEED_NOTE = (
    "Against k: speed-up over plain decoding at the same concurrency, measured (solid) and by the cost model (dashed); the grey line is "
    "plain decoding. Against concurrency: each method with the k that was fastest there. A speed-up is taken against the plain decoding "
    "that took turns with the method; tokens/s of two methods may be of times at which the machine was not equally fast."
)
MODEL_NOTE = (
    "A pass with k drafts costs 1 + fixed + k x draft plain passes, fitted to the measured times of each method at each concurrency, and "
    "emits 1 + the sum of the first k acceptances, taken from the largest k. Verifying: the part of a draft's cost that the target's wider "
    "pass takes, known where n-gram or suffix was measured too. Best k 0: better not to speculate."
)


def cells(report: Report) -> str:
    """Every cell, one a row, by concurrency."""
    header = ["method", "k", "in flight", "speed against plain", "tokens per pass", "acceptance length"]
    header += ["tokens/s", "ITL, ms (median)", "TTFT, ms (median)", "equal to plain"]
    return table(header, [_row(m) for m in sorted(report["methods"], key=lambda m: m["concurrency"])])


def with_interval(m: Cell, figure: str, unit: str = "") -> str:
    """A figure over its interval; alone for a method that never drafted."""
    low, high = m[f"{figure}_interval"]
    return f"{m[figure]:.2f}{unit}" + (f"\n{low:.2f}\u2013{high:.2f}" if m["drafts"] else "")


def _row(m: Cell) -> list[str]:
    row = [label(m["method"]), str(m["k"] or "-"), str(m["concurrency"]), with_interval(m, "speedup", "x")]
    row += [with_interval(m, "tokens_per_pass"), f"{m['acceptance_length']:.2f}" if m["drafts"] else "-"]
    return row + [f"{m['tokens_per_second']:.1f}", f"{m['itl_ms']:.1f}", f"{m['ttft_ms']:.0f}", equal(m)]


def speed(report: Report) -> str:
    """Charts of speed-up against k, one a concurrency, then of speed against concurrency."""
    colours, model = palette(m["method"] for m in report["methods"]), report["recommendation"]["model"]
    ks = sorted({m["k"] for m in report["methods"] if m["k"]})
    concurrencies = sorted({m["concurrency"] for m in report["methods"]})
    drawn = []
    if len(ks) > 1:
        most = 1.05 * max(1.0, *(m["speedup"] for m in report["methods"]))
        for concurrency in concurrencies:
            fits = [f for f in model if f["concurrency"] == concurrency]
            lines = [Line("plain", [(0, 1), (ks[-1], 1)], SOFT)]
            for fit in fits:
                name, colour, points = label(fit["method"]), colours[fit["method"]], fit["points"]
                lines += [Line(name, [(p["k"], p["measured"]) for p in points], colour)]
                lines += [Line(name, [(p["k"], p["predicted"]) for p in points], colour, "dashed")]
            places = [(float(k), str(k)) for k in ks]
            drawn.append((f"Against k, concurrency {concurrency}", chart(lines, "drafts per pass, k", most, places)))
    if len(concurrencies) > 1:
        places = [(math.log2(c), str(c)) for c in concurrencies]
        for title, figure in (("Tokens/s", "tokens_per_second"), ("Speed-up", "speedup")):
            lines = [Line(label(m), _fastest(report, m, figure), colours[m]) for m in dict.fromkeys(m["method"] for m in report["methods"])]
            drawn.append((f"{title} against concurrency", chart(lines, "requests in flight", None, places)))
    return charts(drawn)


def _fastest(report: Report, method: str, figure: str) -> list[tuple[float, float]]:
    """(log2 of the concurrency, the largest figure of the method there)."""
    best: dict[int, float] = {}
    for m in report["methods"]:
        if m["method"] == method:
            best[m["concurrency"]] = max(m[figure], best.get(m["concurrency"], 0.0))
    return [(math.log2(concurrency), value) for concurrency, value in sorted(best.items())]


def model(report: Report) -> str:
    """Predicted against measured, the costs, and the best k, also by slice."""
    fits = report["recommendation"]["model"]
    if not fits:
        return "<p>No method drafted.</p>"
    colours = palette(m["method"] for m in report["methods"])
    high = max(p[figure] for f in fits for p in f["points"] for figure in ("predicted", "measured"))
    lines = [Line("equal", [(0, 0), (high, high)], SOFT, "dashed")]
    for method in dict.fromkeys(f["method"] for f in fits):
        points = [(p["predicted"], p["measured"]) for f in fits if f["method"] == method for p in f["points"]]
        lines.append(Line(label(method), points, colours[method], "dots"))
    header = ["method", "concurrency", "fixed", "one draft", "of it verifying", "best k", "predicted", "model off by at most"]
    costs = table(header, [_costs(f) for f in fits])
    drawn = charts([("Measured speed-up (up) against the model's", chart(lines, "speed-up by the model"))])
    held = f"<p>{escape(text)}</p>" if (text := prediction_text(report)) else ""
    return held + drawn + costs + _by_slice(report, fits)


def _costs(fit: dict[str, Any]) -> list[str]:
    off = max(abs(p["predicted"] / p["measured"] - 1) for p in fit["points"])
    verify = "-" if fit["verify_per_draft"] is None else f"{fit['verify_per_draft']:.3f}"
    row = [label(fit["method"]), str(fit["concurrency"]), f"{fit['fixed']:.3f}", f"{fit['per_draft']:.3f}", verify]
    return row + [str(fit["best_k"]), f"{fit['best_speedup']:.2f}x", f"{off:.0%}"]


def _by_slice(report: Report, fits: list[dict[str, Any]]) -> str:
    first = [f for f in fits if f["concurrency"] == reference(report)[0]["concurrency"]]
    rows = [
        [name, *(f"k={f['slices'][name]['best_k']}\n{f['slices'][name]['best_speedup']:.2f}x" for f in first)]
        for name in sorted(report["prompts"]["slices"])
    ]
    return table([f"best k by slice, concurrency {first[0]['concurrency']}", *(label(f["method"]) for f in first)], rows) if first else ""
