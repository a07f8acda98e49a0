"""What a run is worth, said three times: report.json for programs, a table for the terminal, report.html for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from data.commands import command
from data.files import bytes_text
from data.manifest import replace_text
from eval.advice import advice, choices_text, commands, equal, find, is_grid, reasons
from eval.html import page
from eval.methods import label

REPORT_VERSION = 3  # a report of another is measured anew


def headline(report: dict[str, Any]) -> str:
    """The result in one sentence, best news or not."""
    if is_grid(report):
        return f"{choices_text(report)} Measured on {report['engine']['device']}."
    head, ngram = find(report, "head"), find(report, "ngram")
    count = report["prompts"]["count"]
    where = f"over {count} prompt{'s' * (count != 1)} at concurrency {report['methods'][0]['concurrency']} on {report['engine']['device']}"
    rival = "" if ngram is None else f"n-gram: {ngram['tokens_per_pass']:.2f} tokens per pass, {ngram['speedup']:.2f}x"
    if head is None:
        return f"No head was measured. {rival} ({where})." if rival else f"Only plain decoding was measured ({where})."
    return (
        f"The head accepts {head['acceptance_length'] - 1:.2f} of {head['k']} drafts per pass: "
        f"{head['tokens_per_pass']:.2f} tokens per target pass, "
        f"{head['speedup']:.2f}x the speed of plain decoding {where}{'; ' + rival if rival else ''}."
    )


def comparison(report: dict[str, Any]) -> str:
    """Offline chain against the engine's counters: they agree, or training and serving differ somewhere."""
    offline, head = report.get("offline"), find(report, "head")
    if head is not None and head["draft_sample_method"] != "greedy":
        return f"The offline chain drafts greedily: it says nothing of probabilistic drafts (`{command('trees')}` has chains of those)."
    if offline is None or head is None:
        return "The offline chain was not run."
    here, there = offline["acceptance_length"], head["acceptance_length"]
    if said := report.get("quantization"):
        return (
            f"Acceptance length {here:.3f} with the training module, {there:.3f} in the engine with {said['scheme']} weights: "
            f"rounding costs {here - there:.3f}. The export has {bytes_text(said['bytes'])} instead of {bytes_text(said['bytes_without'])}."
        )
    most = here + offline["unjudged_drafts"] / max(1, offline["drafts"])
    text = f"Acceptance length {here:.3f} with the training module, {there:.3f} in the engine"
    if offline["unjudged_drafts"]:
        text += f" (offline up to {most:.3f}: {offline['unjudged_drafts']} drafts lie beyond the ends of the answers, "
        text += "where only the engine can judge)"
    tolerance = 0.05
    if head["lossless"] is None:
        low, high = head["tokens_per_pass_interval"]
        tolerance = max(tolerance, high - low)
        text += f". Answers are sampled, so these are of other texts: up to {tolerance:.2f} apart is chance"
    elif head["lossless"] < 1:
        text += f". {1 - head['lossless']:.0%} of the engine's answers part from the plain ones, along which the module walks"
    if here - tolerance <= there <= most + tolerance:
        return text + ". They agree."
    found = f"They differ by more than {tolerance:.2f}: training and serving do not compute the same. Look at the dtype first"
    return f"{text}. {found} (eval.dtype=float32 in both), then at the captured states, then at the export."


def history(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line that a kill cut short is left out."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines if line]


def read_report(path: Path) -> dict[str, Any] | None:
    """The report in a file; None where there is none, or one that was cut short or edited, to be measured again."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError:
        return None


def finished(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The report that an earlier measurement with exactly these settings left in a file, or None."""
    report = read_report(path)
    return report if report and report.get("settings") == json.loads(json.dumps(settings)) else None


def table(report: dict[str, Any]) -> Table:
    """At most 80 columns wide, without a grid for k up to 3. A grid has all its cells, without acceptance at each position."""
    grid = is_grid(report)
    drawn = Table(
        title=f"{report['name']}: {report['prompts']['count']} prompts, temperature {report['prompts']['temperature']:g}",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    single = ["", "k", "acceptance\nlength", "tokens\nper pass", "accepted at\nposition", "tokens/s", "ITL\nms", "speed", "equal\nto plain"]
    several = ["", "in\nflight", "k", "accept\nlength", "tokens\nper pass", "tokens\n/s", "ITL\nms", "TTFT\nms", "speed", "equal\nplain"]
    for column in several if grid else single:
        drawn.add_column(column, justify="right" if column else "left", no_wrap=bool(column) or not grid)
    last = None
    for m in sorted(report["methods"], key=lambda m: m["concurrency"]):
        if last not in (None, m["concurrency"]):
            drawn.add_section()
        last = m["concurrency"]
        drawn.add_row(*(_grid_row(m) if grid else _row(m)))
    return drawn


def _row(m: dict[str, Any]) -> list[str]:
    positions = " ".join(f"{rate:.2f}"[1:] if rate < 1 else "1.0" for rate in m["acceptance_per_position"])
    row = [label(m["method"]), str(m["k"]) if m["k"] else "-", f"{m['acceptance_length']:.2f}" if m["drafts"] else "-"]
    row += [f"{m['tokens_per_pass']:.2f}", positions if m["drafts"] else "-", f"{m['tokens_per_second']:.1f}", f"{m['itl_ms']:.1f}"]
    return [*row, f"{m['speedup']:.2f}x", equal(m)]


def _grid_row(m: dict[str, Any]) -> list[str]:
    name, k, length, per_pass, _, *speeds = _row(m)
    return [name, str(m["concurrency"]), k, length, per_pass, *speeds[:2], f"{m['ttft_ms']:.0f}", *speeds[2:]]


def write(report: dict[str, Any], folder: Path) -> None:
    """Writes report.json and report.html, each atomically, into a folder of the run folder, and prints headline and table."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.parent / "provenance.json"
    provenance = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    report = report | {"headline": headline(report), "provenance": provenance}
    replace_text(folder / "report.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    _draw(report, folder)
    show(report, folder)


def draw(folder: Path) -> None:
    """Writes report.html of the report.json in `folder`, if there is one of this version."""
    report = read_report(folder / "report.json")
    if report and report["settings"]["report"] == REPORT_VERSION:
        _draw(report, folder)


def _draw(report: dict[str, Any], folder: Path) -> None:
    """With what latency.json says of the same head, target and prompts."""
    latency, settings = read_report(folder / "latency.json"), report.get("settings", {})
    texts = {"advice": advice(report), "comparison": comparison(report)}
    if latency and any(latency["settings"][key] != settings.get(key) for key in ("fingerprint", "export", "folders", "prompts")):
        latency = None
    replace_text(folder / "report.html", page(report, texts, history(folder.parent), latency))


def show(report: dict[str, Any], folder: Path) -> None:
    """Headline, table, comparison, advice with its commands, and the path of report.html, on the terminal. The headline of a grid is
    the first part of its advice."""
    console = Console()
    console.print(headline(report), markup=False)
    console.print(table(report))
    console.print(f"{comparison(report)}\n{reasons(report) if is_grid(report) else advice(report)}", markup=False)
    for name, serving in commands(report).items():
        console.print(f"# {name}\n{serving}", markup=False, soft_wrap=True)
    console.print(f"{folder / 'report.html'}", markup=False)
