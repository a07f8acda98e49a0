"""The pieces of report.html: tables, bars, and line charts as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Literal

from eval.methods import label

COLOURS = {
    "none": "#8a94a3",
    "ngram": "#d9822b",
    "head": "#1f6feb",
    "offline": "#14936b",
    "suffix": "#b8a10c",
    "draft_model": "#a34bc4",
}
OTHERS = ("#c2334d", "#0b8f9c", "#7a5230", "#5b6675")  # published heads, in their order
SERIES = ("#1f6feb", "#d9822b", "#14936b", "#a34bc4", "#c2334d", "#8a94a3")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 230, 46, 22, 10, 38  # of a chart, in SVG units


def palette(methods: Iterable[str]) -> dict[str, str]:
    """A colour for each method."""
    published = [method for method in dict.fromkeys(methods) if method not in COLOURS]
    return COLOURS | {method: OTHERS[i % len(OTHERS)] for i, method in enumerate(published)}


def section(title: str, body: str, note: str) -> str:
    explained = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{explained}{body}</section>"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Cells are text; what follows a line break in one is shown small below it."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _cell(text: str) -> str:
    first, _, below = text.partition("\n")
    return f"<td>{escape(first)}{f'<small>{escape(below)}</small>' if below else ''}</td>"


def key(colours: dict[str, str]) -> str:
    """Colours by the name that is shown."""
    items = "".join(f'<span><span class="dot" style="background:{colour}"></span>{escape(name)}</span>' for name, colour in colours.items())
    return f'<div class="key">{items}</div>'


def bar(method: str, colour: str, value: float, most: float, text: str, mark: float | None = None) -> str:
    fill = f'<div class="fill" style="width:{100 * value / most:.1f}%;background:{colour}"></div>'
    line = f'<div class="mark" style="left:calc({100 * mark / most:.1f}% - 1px)"></div>' if mark is not None else ""
    track = f'<div class="track">{fill}{line}</div><div class="value">{escape(text)}</div>'
    return f'<div class="bar" title="{escape(label(method))}: {escape(text)}">{track}</div>'


def group(name: str, bars: list[str]) -> str:
    return f'<div class="group"><b>{escape(name)}</b>{"".join(bars)}</div>'


def charts(drawn: list[tuple[str, str]]) -> str:
    """Titles and charts, beside each other where there is room."""
    return f'<div class="charts">{"".join(f"<div><h3>{escape(title)}</h3>{svg}</div>" for title, svg in drawn)}</div>'


@dataclass(frozen=True)
class Line:
    """One series of a chart. A dashed one is not named in the key: it belongs to another of its colour, or is explained in words."""

    name: str
    points: list[tuple[float, float]]
    colour: str
    style: Literal["line", "dashed", "dots"] = "line"


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers within [low, high]."""
    raw = (high - low) / count or 1.0
    scale = 10 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def chart(lines: list[Line], x_label: str, most: float | None = None, x_ticks: list[tuple[float, str]] | None = None) -> str:
    """Lines from (0, 0) on; most: the top of the y axis; x_ticks: places and what is written there. Each point is marked where there are
    few."""
    lines = [line for line in lines if line.points]
    points = [point for line in lines for point in line.points]
    x_high, y_high = max(x for x, _ in points) or 1, most or max(y for _, y in points) * 1.05 or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / x_high, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(y, y_high) / y_high

    drawn = []
    for y in ticks(0, y_high, 4):
        _, at = place(0, y)
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#dfe4ea"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x, text in x_ticks or [(x, f"{x:g}") for x in ticks(0, x_high, 4)]:
        at, _ = place(x, 0)
        drawn.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{text}</text>')
    drawn.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    for line in lines:
        placed = [place(x, y) for x, y in line.points]
        stroke = f'stroke="{line.colour}" stroke-width="1.8" stroke-linejoin="round"'
        stroke += ' stroke-dasharray="5 4"' if line.style == "dashed" else ""
        if line.style != "dots":
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            drawn.append(f'<polyline points="{path}" fill="none" {stroke}/>')
        if line.style != "dashed" and len(placed) <= 20:
            drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{line.colour}"/>' for x, y in placed]
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="12" fill="#5b6675">{"".join(drawn)}</svg>'
    return f"{key({line.name: line.colour for line in lines if line.style != 'dashed'})}{svg}"
