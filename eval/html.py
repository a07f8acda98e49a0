"""report.html: one file, no network, readable on a phone. Bars are plain HTML, curves are inline SVG."""

from __future__ import annotations

import json
import math
from html import escape
from typing import Any

COLOURS = {"none": "#8a94a3", "ngram": "#d9822b", "head": "#1f6feb", "offline": "#14936b"}
DEPTH_COLOURS = ("#1f6feb", "#d9822b", "#14936b", "#a34bc4", "#c2334d", "#8a94a3")
NAMES = {"none": "plain", "ngram": "n-gram", "head": "head", "offline": "head, offline"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 230, 46, 22, 10, 38  # of a chart, in SVG units

STYLE = """
:root{--ink:#1b2430;--soft:#5b6675;--line:#dfe4ea;--card:#fff;--back:#f4f6f8}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1000px;margin:0 auto;padding:20px 14px 48px}
h1{font-size:1.05rem;color:var(--soft);font-weight:600;margin:0 0 6px;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:0 0 4px}
.lead{font-size:1.4rem;line-height:1.35;font-weight:600;margin:0 0 8px}
.note{color:var(--soft);font-size:.9rem;margin:0 0 12px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px;margin:14px 0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums;min-width:100%}
th,td{padding:6px 7px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap;vertical-align:top}
th{color:var(--soft);font-weight:600;white-space:normal;vertical-align:bottom;min-width:3.6rem}
th:first-child,td:first-child{text-align:left}
td small{display:block;color:var(--soft)}
td.wrap{white-space:normal;overflow-wrap:anywhere;text-align:left}
.key{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:.88rem;margin:0 0 10px}
.dot{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.4em}
.group{margin:0 0 10px}
.group>b{font-weight:600;font-size:.9rem;display:block}
.bar{display:grid;grid-template-columns:1fr 5.6rem;gap:8px;align-items:center;margin:2px 0}
.track{position:relative;background:#eef1f4;border-radius:3px;height:15px}
.fill{height:100%;border-radius:3px;min-width:1px}
.mark{position:absolute;top:-2px;bottom:-2px;width:2px;background:#1b2430}
.value{font-size:.88rem;font-variant-numeric:tabular-nums;white-space:nowrap}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(290px,1fr));gap:16px}
.charts h3{font-size:.95rem;margin:0 0 4px;font-weight:600}
svg{display:block;width:100%;height:auto}
pre{background:#f0f3f6;border:1px solid var(--line);border-radius:6px;padding:10px;font-size:.84rem;margin:6px 0}
pre{white-space:pre-wrap;overflow-wrap:anywhere}
details{margin-top:10px}summary{cursor:pointer;color:var(--soft)}
"""


def page(report: dict[str, Any], texts: dict[str, str], history: list[dict[str, Any]]) -> str:
    """The whole document. texts: `advice` and `comparison`; history: the lines of metrics.jsonl."""
    prompts, engine, target = report["prompts"], report["engine"], report["target"]
    about = f"{prompts['count']} prompts, up to {prompts['max_tokens']} new tokens, temperature 0, "
    about += f"concurrency {report['methods'][0]['concurrency']}; "
    about += f"{engine['name']} {engine['version']} on {engine['device']}; target {target['model']} in {target['dtype']}"
    if prompts["answers_cut"]:
        about += f"; {prompts['answers_cut']} answers end where the target's plain answer began to loop"
    if prompts["skipped_too_long"]:
        about += f"; {prompts['skipped_too_long']} prompts left out as too long"
    parts = [
        f"<h1>{escape(report['name'])}: a draft head for {escape(target['model'])}</h1>",
        f'<p class="lead">{escape(report["headline"]).replace("n-gram", "n&#8209;gram")}</p><p class="note">{escape(about)}.</p>',
        _section("Methods", _methods(report), "Every figure is pooled over all requests. " + METHOD_NOTE),
        _section("Speed", _speed(report), "Output tokens per second of the whole run."),
        _section("Acceptance by position", _positions(report), POSITION_NOTE),
        _section("By slice", _slices(report), "Tokens per target pass. The upright mark is plain decoding: 1."),
        _section("Offline against the engine", f"<p>{escape(texts['comparison'])}</p>", ""),
        _section("Training", _training(history), "") if history else "",
        _section("Losslessness", _lossless(report), ""),
        _section("How to serve", _serve(report, texts["advice"]), ""),
        _section("Provenance", _provenance(report), ""),
    ]
    title = escape(f"{report['name']}: acceptance and speed")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    head += f"<title>{title}</title><style>{STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{"".join(parts)}</main></body></html>\n'


METHOD_NOTE = (
    "Acceptance length is 1 + accepted drafts per drafting pass; tokens per pass counts all passes, also those without a draft "
    "(below it the 95 % interval over prompts). ITL: time between tokens; TTFT: time to the first one."
)


POSITION_NOTE = (
    "Share of drafting passes in which this draft and all before it were accepted. n-gram drafts only where it finds a match, "
    "the head in every pass."
)


def _section(title: str, body: str, note: str) -> str:
    explained = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{explained}{body}</section>"


def _table(header: list[str], rows: list[list[str]]) -> str:
    """Cells are text; what follows a line break in one is shown small below it."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _cell(text: str) -> str:
    first, _, below = text.partition("\n")
    return f"<td>{escape(first)}{f'<small>{escape(below)}</small>' if below else ''}</td>"


def _methods(report: dict[str, Any]) -> str:
    header = ["method", "speed against plain", "tokens per pass", "acceptance length", "drafts k", "drafts accepted", "tokens/s"]
    header += ["ITL, ms (median)", "TTFT, ms (median)", "equal to plain"]
    rows = []
    for m in report["methods"]:
        low, high = m["tokens_per_pass_interval"]
        row = [NAMES[m["method"]], f"{m['speedup']:.2f}x"]
        if m["drafts"]:
            row += [
                f"{m['tokens_per_pass']:.2f}\n{low:.2f}\u2013{high:.2f}",
                f"{m['acceptance_length']:.2f}",
                str(m["k"]),
                f"{m['acceptance_rate']:.0%}",
            ]
        else:
            row += [f"{m['tokens_per_pass']:.2f}", "-", str(m["k"] or "-"), "-"]
        rows.append(row + [f"{m['tokens_per_second']:.1f}", f"{m['itl_ms']:.1f}", f"{m['ttft_ms']:.0f}", f"{m['lossless']:.1%}"])
    return _table(header, rows)


def _key(kinds: list[str]) -> str:
    items = "".join(f'<span><span class="dot" style="background:{COLOURS[k]}"></span>{escape(NAMES[k])}</span>' for k in kinds)
    return f'<div class="key">{items}</div>'


def _bar(kind: str, value: float, most: float, text: str, mark: float | None = None) -> str:
    fill = f'<div class="fill" style="width:{100 * value / most:.1f}%;background:{COLOURS[kind]}"></div>'
    line = f'<div class="mark" style="left:calc({100 * mark / most:.1f}% - 1px)"></div>' if mark is not None else ""
    track = f'<div class="track">{fill}{line}</div><div class="value">{escape(text)}</div>'
    return f'<div class="bar" title="{escape(NAMES[kind])}: {escape(text)}">{track}</div>'


def _group(label: str, bars: list[str]) -> str:
    return f'<div class="group"><b>{escape(label)}</b>{"".join(bars)}</div>'


def _speed(report: dict[str, Any]) -> str:
    most = max(m["tokens_per_second"] for m in report["methods"])
    return "".join(
        _group(NAMES[m["method"]], [_bar(m["method"], m["tokens_per_second"], most, f"{m['tokens_per_second']:.1f} tok/s")])
        for m in report["methods"]
    )


def _positions(report: dict[str, Any]) -> str:
    series = {m["method"]: m["acceptance_per_position"] for m in report["methods"] if m["drafts"]}
    if "offline" in report:
        series["offline"] = report["offline"]["acceptance_per_position"]
    if not series:
        return "<p>No method drafted.</p>"
    longest = max(len(rates) for rates in series.values())
    groups = [
        _group(f"draft {i + 1}", [_bar(k, rates[i], 1.0, f"{rates[i]:.1%}") for k, rates in series.items() if i < len(rates)])
        for i in range(longest)
    ]
    return _key(list(series)) + "".join(groups)


def _slices(report: dict[str, Any]) -> str:
    drafting = [m for m in report["methods"] if m["k"]]
    if not drafting:
        return "<p>No method drafted.</p>"
    most = max(1.0, *(part["tokens_per_pass"] for m in drafting for part in m["slices"].values()))
    groups = []
    for name, count in sorted(report["prompts"]["slices"].items()):
        bars = [
            _bar(m["method"], m["slices"][name]["tokens_per_pass"], most, f"{m['slices'][name]['tokens_per_pass']:.2f}", 1.0)
            for m in drafting
        ]
        groups.append(_group(f"{name} ({count} {'prompt' if count == 1 else 'prompts'})", bars))
    return _key([m["method"] for m in drafting]) + "".join(groups)


def _training(history: list[dict[str, Any]]) -> str:
    loss = {
        name: [(r["step"], r["loss"]) for r in history if r["kind"] == kind] for kind, name in (("train", "training"), ("val", "held out"))
    }
    accept: dict[str, list[tuple[float, float]]] = {}
    for record in history:
        for k, value in enumerate(record.get("accept_k", [])):
            if record["kind"] == "val" and value is not None:
                accept.setdefault(f"draft {k + 1}", []).append((record["step"], value))
    charts = [("Loss (sum over depths, weighted)", loss, None), ("Held-out acceptance by position, teacher-forced", accept, 1.0)]
    shown = [f"<div><h3>{escape(title)}</h3>{_chart(series, most)}</div>" for title, series, most in charts if any(series.values())]
    return f'<div class="charts">{"".join(shown)}</div>'


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers within [low, high]."""
    raw = (high - low) / count or 1.0
    scale = 10 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _chart(series: dict[str, list[tuple[float, float]]], most: float | None) -> str:
    """Lines over steps, y from 0. A series of one point is drawn as a dot."""
    points = [point for line in series.values() for point in line]
    x_high, y_high = max(x for x, _ in points) or 1, most or max(y for _, y in points) * 1.05 or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / x_high, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(y, y_high) / y_high

    drawn = []
    for y in _ticks(0, y_high, 4):
        _, at = place(0, y)
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#dfe4ea"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in _ticks(0, x_high, 4):
        at, _ = place(x, 0)
        drawn.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    drawn.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">optimizer steps</text>')
    key = []
    for i, (name, line) in enumerate((n, line) for n, line in series.items() if line):
        colour = DEPTH_COLOURS[i % len(DEPTH_COLOURS)]
        placed = [place(x, y) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>')
        drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>' for x, y in placed] if len(placed) <= 20 else []
        key.append(f'<span><span class="dot" style="background:{colour}"></span>{escape(name)}</span>')
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="12" fill="#5b6675">{"".join(drawn)}</svg>'
    return f'<div class="key">{"".join(key)}</div>{svg}'


def _lossless(report: dict[str, Any]) -> str:
    dtype, parts = report["target"]["dtype"], []
    for m in (m for m in report["methods"] if m["k"]):
        gone = m["parted"]
        text = f"{NAMES[m['method']]}: {m['requests'] - len(gone)} of {m['requests']} answers equal the plain run's, token for token."
        if gone:
            rows = [[d["id"], str(d["position"]), _token(d["plain"]), _token(d["token"])] for d in gone]
            listed = _table(["prompt", "first differing token", "plain", NAMES[m["method"]]], rows)
            text += f"</p><details><summary>where the other {len(gone)} part</summary>{listed}</details><p>"
        parts.append(f"<p>{text}</p>".replace("<p></p>", ""))
    why = (
        "The verification keeps only what the target itself would have written. In float32 all answers are equal; in a shorter type "
        f"the engine rounds batches of other shapes differently, and a near-tie of two tokens can part two runs. This run was in {dtype}."
    )
    return "".join(parts) + f'<p class="note">{escape(why)}</p>'


def _token(token: int | None) -> str:
    return "ended" if token is None else f"token {token}"


def _serve(report: dict[str, Any], advice: str) -> str:
    commands = [f"<b>{escape(NAMES[m['method']])}</b><pre>{escape(m['command'])}</pre>" for m in report["methods"] if m["k"]]
    return f"<p>{escape(advice)}</p>{''.join(commands)}"


def _provenance(report: dict[str, Any]) -> str:
    rows = {"target": report["target"], "engine": report["engine"], **report["provenance"]}
    body = "".join(f'<tr><td>{escape(key)}</td><td class="wrap">{escape(_flat(value))}</td></tr>' for key, value in rows.items())
    return f'<div class="scroll"><table>{body}</table></div>'


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(inner)}" for key, inner in value.items() if inner is not None)
    return value if isinstance(value, str) else json.dumps(value)
