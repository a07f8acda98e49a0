"""A report as what trackers of runs take: numbers by name, and tables of plain rows."""

from __future__ import annotations

from typing import Any

from eval.advice import Cell, Report, find
from eval.methods import label

Table = tuple[list[str], list[list[Any]]]  # names of the columns, rows

FIGURES = ("acceptance_length", "tokens_per_pass", "speedup")
MORE = ("tokens_per_second", "itl_ms", "ttft_ms", "acceptance_rate", "lossless", "requests", "output_tokens")


def _shown(cell: Cell, figure: str) -> Any:
    """None where it says nothing: the acceptance of what never drafted."""
    return None if figure in ("acceptance_length", "acceptance_rate") and not cell["drafts"] else cell[figure]


def points(report: Report, prefix: str) -> dict[str, float]:
    """<prefix>/acceptance_length, tokens_per_pass and speedup of the head where methods are compared (eval.advice.reference), to hold runs
    against each other; <prefix>/<method>-k<k>-c<concurrency>/... of every cell that has them; <prefix>/offline/acceptance_length."""
    found: dict[str, Any] = {}
    if head := find(report, "head"):
        found |= {f"{prefix}/{figure}": _shown(head, figure) for figure in FIGURES}
    for cell in report["methods"]:
        name = f"{prefix}/{label(cell['method'])}-k{cell['k']}-c{cell['concurrency']}"
        found |= {f"{name}/{figure}": _shown(cell, figure) for figure in FIGURES}
    if "offline" in report:
        found[f"{prefix}/offline/acceptance_length"] = report["offline"]["acceptance_length"]
    return {name: value for name, value in found.items() if value is not None}


def tables(report: Report, prefix: str) -> dict[str, Table]:
    """<prefix>/methods, acceptance_per_position and slices; each row begins with method, k and concurrency."""
    keys = ["method", "k", "concurrency"]
    methods: Table = ([*keys, *FIGURES, *MORE], [])
    positions: Table = ([*keys, "position", "acceptance"], [])
    slices: Table = ([*keys, "slice", "requests", *FIGURES[:2]], [])
    for cell in report["methods"]:
        name = [label(cell["method"]), cell["k"], cell["concurrency"]]
        methods[1].append([*name, *(_shown(cell, figure) for figure in (*FIGURES, *MORE))])
        if cell["drafts"]:
            positions[1].extend([*name, i, rate] for i, rate in enumerate(cell["acceptance_per_position"], start=1))
        for part, of in cell["slices"].items():
            slices[1].append([*name, part, of["requests"], *(_shown(of, figure) for figure in FIGURES[:2])])
    named = {"methods": methods, "acceptance_per_position": positions, "slices": slices}
    return {f"{prefix}/{key}": table for key, table in named.items()}
