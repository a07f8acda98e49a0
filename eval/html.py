"""report.html: one file, no network, readable on a phone. Bars are plain HTML, curves are inline SVG."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from eval import grid
from eval.advice import commands, equal, is_grid, reference
from eval.methods import label
from eval.widgets import SERIES, Line, bar, chart, charts, group, key, palette, section, table

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
.charts>div{max-width:480px}.scroll+.scroll,.charts+.scroll{margin-top:16px}
.charts h3{font-size:.95rem;margin:0 0 4px;font-weight:600}
svg{display:block;width:100%;height:auto}
pre{background:#f0f3f6;border:1px solid var(--line);border-radius:6px;padding:10px;font-size:.84rem;margin:6px 0}
pre{white-space:pre-wrap;overflow-wrap:anywhere}
details{margin-top:10px}summary{cursor:pointer;color:var(--soft)}
"""


def page(report: dict[str, Any], texts: dict[str, str], history: list[dict[str, Any]], latency: dict[str, Any] | None = None) -> str:
    """The whole document. texts: `advice` and `comparison`; history: the lines of metrics.jsonl; latency: what latency.json holds."""
    prompts, engine, target = report["prompts"], report["engine"], report["target"]
    about = f"{prompts['count']} prompts, up to {prompts['max_tokens']} new tokens, temperature {prompts['temperature']:g}, "
    about += f"concurrency {', '.join(str(c) for c in sorted({m['concurrency'] for m in report['methods']}))}; "
    about += f"{engine['name']} {engine['version']} on {engine['device']}; target {target['model']} in {target['dtype']}"
    if prompts["answers_cut"]:
        about += f"; {prompts['answers_cut']} answers end where the target's plain answer began to loop"
    if prompts["skipped_too_long"]:
        about += f"; {prompts['skipped_too_long']} prompts left out as too long"
    drafting = [m for m in reference(report) if m["k"]]
    where = f" With k={drafting[0]['k']} at concurrency {drafting[0]['concurrency']}." if is_grid(report) and drafting else ""
    parts = [
        f"<h1>{escape(report['name'])}: a draft head for {escape(target['model'])}</h1>",
        f'<p class="lead">{escape(report["headline"]).replace("n-gram", "n&#8209;gram")}</p><p class="note">{escape(about)}.</p>',
        *(_grid_sections(report) if is_grid(report) else _single_sections(report)),
        section("Through vLLM's server", _latency(latency), f"{latency['prompts']['count']} prompts. {LATENCY_NOTE}") if latency else "",
        section("Acceptance by position", _positions(report), POSITION_NOTE + where),
        section("By slice", _slices(report), "Tokens per target pass. The upright mark is plain decoding: 1." + where),
        section("Offline against the engine", f"<p>{escape(texts['comparison'])}</p>", ""),
        section("Training", _training(history), "") if history else "",
        section("Losslessness", _lossless(report), ""),
        section("How to serve", _serve(report, texts["advice"]), ""),
        section("Provenance", _provenance(report), ""),
    ]
    title = escape(f"{report['name']}: acceptance and speed")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    head += f"<title>{title}</title><style>{STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{"".join(parts)}</main></body></html>\n'


def _single_sections(report: dict[str, Any]) -> list[str]:
    return [
        section("Methods", _methods(report), "Every figure is pooled over all requests. " + METHOD_NOTE),
        section("Speed", _speed(report), "Output tokens per second of the whole run."),
    ]


def _grid_sections(report: dict[str, Any]) -> list[str]:
    return [
        section("Speed against k and concurrency", grid.speed(report), grid.SPEED_NOTE),
        section("Cost model", grid.model(report), grid.MODEL_NOTE),
        section("All cells", grid.cells(report), "Every figure is pooled over all requests. " + METHOD_NOTE),
    ]


METHOD_NOTE = (
    "Acceptance length is 1 + accepted drafts per drafting pass; tokens per pass counts all passes, also those without a draft. "
    "Below a figure: its 95 % interval over prompts. ITL: time between tokens; TTFT: time to the first one."
)


LATENCY_NOTE = (
    "As a client sees it, by vLLM's own benchmark: milliseconds, the median, below it mean and 99th percentile. TTFT: to the first token. "
    "TPOT: per token after it. ITL: between two arrivals, each of which brings all tokens of a pass."
)


POSITION_NOTE = (
    "Share of drafting passes in which this draft and all before it were accepted. n-gram drafts only where it finds a match, "
    "the head in every pass."
)


def _methods(report: dict[str, Any]) -> str:
    header = ["method", "speed against plain", "tokens per pass", "acceptance length", "drafts k", "drafts accepted", "tokens/s"]
    header += ["ITL, ms (median)", "TTFT, ms (median)", "equal to plain"]
    rows = []
    for m in report["methods"]:
        row = [label(m["method"]), grid.with_interval(m, "speedup", "x")]
        if m["drafts"]:
            row += [
                grid.with_interval(m, "tokens_per_pass"),
                f"{m['acceptance_length']:.2f}",
                str(m["k"]),
                f"{m['acceptance_rate']:.0%}",
            ]
        else:
            row += [f"{m['tokens_per_pass']:.2f}", "-", str(m["k"] or "-"), "-"]
        rows.append(row + [f"{m['tokens_per_second']:.1f}", f"{m['itl_ms']:.1f}", f"{m['ttft_ms']:.0f}", equal(m)])
    return table(header, rows)


def _latency(latency: dict[str, Any]) -> str:
    header = ["method", "k", "in flight", "requests/s", "tokens/s", "acceptance length", "TTFT", "TPOT", "ITL"]
    rows = []
    for m in sorted(latency["methods"], key=lambda m: m["concurrency"]):
        row = [label(m["method"]), str(m["k"] or "-"), str(m["concurrency"]), f"{m['requests_per_second']:.2f}"]
        row += [f"{m['tokens_per_second']:.1f}", f"{m['acceptance_length']:.2f}" if m["drafts"] else "-"]
        times = [m[name] for name in ("ttft_ms", "tpot_ms", "itl_ms")]
        rows.append(row + [f"{t['median']:.1f}\n{t['mean']:.1f}, {t['p99']:.1f}" for t in times])
    return table(header, rows)


def _speed(report: dict[str, Any]) -> str:
    most, colours = max(m["tokens_per_second"] for m in report["methods"]), palette(m["method"] for m in report["methods"])
    bars = [(m["method"], m["tokens_per_second"]) for m in report["methods"]]
    return "".join(group(label(m), [bar(m, colours[m], speed, most, f"{speed:.1f} tok/s")]) for m, speed in bars)


def _positions(report: dict[str, Any]) -> str:
    series = {m["method"]: m["acceptance_per_position"] for m in reference(report) if m["drafts"]}
    if "offline" in report:
        series["offline"] = report["offline"]["acceptance_per_position"]
    if not series:
        return "<p>No method drafted.</p>"
    colours, longest = palette(series), max(len(rates) for rates in series.values())
    groups = [
        group(f"draft {i + 1}", [bar(m, colours[m], rates[i], 1.0, f"{rates[i]:.1%}") for m, rates in series.items() if i < len(rates)])
        for i in range(longest)
    ]
    return key({label(m): colours[m] for m in series}) + "".join(groups)


def _slices(report: dict[str, Any]) -> str:
    drafting = [m for m in reference(report) if m["k"]]
    if not drafting:
        return "<p>No method drafted.</p>"
    most = max(1.0, *(part["tokens_per_pass"] for m in drafting for part in m["slices"].values()))
    colours, groups = palette(m["method"] for m in drafting), []
    for name, count in sorted(report["prompts"]["slices"].items()):
        found = [(m["method"], m["slices"][name]["tokens_per_pass"]) for m in drafting]
        bars = [bar(m, colours[m], tokens, most, f"{tokens:.2f}", 1.0) for m, tokens in found]
        groups.append(group(f"{name} ({count} {'prompt' if count == 1 else 'prompts'})", bars))
    return key({label(m["method"]): colours[m["method"]] for m in drafting}) + "".join(groups)


def _training(history: list[dict[str, Any]]) -> str:
    loss = {
        name: [(r["step"], r["loss"]) for r in history if r["kind"] == kind] for kind, name in (("train", "training"), ("val", "held out"))
    }
    accept: dict[str, list[tuple[float, float]]] = {}
    for record in history:
        for k, value in enumerate(record.get("accept_k", [])):
            if record["kind"] == "val" and value is not None:
                accept.setdefault(f"draft {k + 1}", []).append((record["step"], value))
    drawn = [("Loss (sum over depths, weighted)", loss, None), ("Held-out acceptance by position, teacher-forced", accept, 1.0)]
    drawn += _chain_curves([record for record in history if "chain_acceptance_length" in record])
    return charts([(title, _curves(series, most)) for title, series, most in drawn if any(series.values())])


def _chain_curves(history: list[dict[str, Any]]) -> list[tuple[str, dict[str, list[tuple[float, float]]], float | None]]:
    """history: lines with a chain's figures. A run that went on with another eval.k has others of them."""
    if not history:
        return []
    named = {"teacher-forced": "acceptance_length", "chain": "chain_acceptance_length"}
    lengths = {name: [(r["step"], r[key]) for r in history if key in r] for name, key in named.items()}
    length = {f"{name}, last {points[-1][1]:.2f}": points for name, points in lengths.items() if points}
    accept, rates = {}, [(r["step"], r["chain_acceptance_per_position"]) for r in history]
    for i, last in enumerate(rates[-1][1]):
        accept[f"draft {i + 1}, last {last:.2f}"] = [(step, rate[i]) for step, rate in rates if i < len(rate)]
    return [("Held-out acceptance by position, offline chain", accept, 1.0), ("Held-out acceptance length", length, None)]


def _curves(series: dict[str, list[tuple[float, float]]], most: float | None) -> str:
    named = [(name, points) for name, points in series.items() if points]
    return chart([Line(name, points, SERIES[i % len(SERIES)]) for i, (name, points) in enumerate(named)], "optimizer steps", most)


def _lossless(report: dict[str, Any]) -> str:
    """Which answers differ from the plain run's; of a grid only the cells that have some."""
    if report["prompts"]["temperature"]:
        return "<p>Answers are sampled, so no two runs give the same text: what is kept is the target's distribution.</p>"
    dtype, parts = report["target"]["dtype"], []
    drafting, several = [m for m in report["methods"] if m["k"]], is_grid(report)
    if several and not any(m["parted"] for m in drafting):
        parts.append("<p>In every cell all answers equal the plain run's, token for token.</p>")
    for m in drafting if not several else [m for m in drafting if m["parted"]]:
        gone = m["parted"]
        name = f"{label(m['method'])}, k={m['k']}, concurrency {m['concurrency']}" if several else label(m["method"])
        text = f"{escape(name)}: {m['requests'] - len(gone)} of {m['requests']} answers equal the plain run's, token for token."
        if gone:
            rows = [[d["id"], str(d["position"]), _token(d["plain"]), _token(d["token"])] for d in gone]
            listed = table(["prompt", "first differing token", "plain", label(m["method"])], rows)
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
    """The commands of the methods; of a grid those of the cells that were chosen."""
    of_methods = {label(m["method"]): m["command"] for m in report["methods"] if m["k"]}
    found = commands(report) if is_grid(report) else of_methods
    return f"<p>{escape(advice)}</p>" + "".join(f"<b>{escape(name)}</b><pre>{escape(text)}</pre>" for name, text in found.items())


def _provenance(report: dict[str, Any]) -> str:
    rows = {"target": report["target"], "engine": report["engine"], **report["provenance"]}
    body = "".join(f'<tr><td>{escape(key)}</td><td class="wrap">{escape(_flat(value))}</td></tr>' for key, value in rows.items())
    return f'<div class="scroll"><table>{body}</table></div>'


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(inner)}" for key, inner in value.items() if inner is not None)
    return value if isinstance(value, str) else json.dumps(value)
