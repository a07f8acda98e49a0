"""Many runs of one command line: values parted by commas make every combination, each a process of its own; then one table of all."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

from data.errors import UserError
from data.manifest import replace_text
from eval.advice import reference

COMMA = re.compile(r",(?![^\[{]*[\]}])")  # not within a list or a mapping
SUFFIX = "_untrained"  # of the run that shows what the head's shape alone accepts


def combinations(argv: list[str]) -> list[list[str]]:
    """`a=1,2 b=3` -> [[a=1, b=3], [a=2, b=3]]. Values keep their commas inside brackets."""
    choices = []
    for word in argv:
        key, equals, values = word.partition("=")
        choices.append([f"{key}{equals}{value}" for value in COMMA.split(values)] if equals else [word])
    return [list(combination) for combination in itertools.product(*choices)]


def run_name(combination: list[str], varied: set[str]) -> str:
    """A run folder's name that tells the combination: the conf, then each key that the sweep varies."""
    values = dict(word.split("=", 1) for word in combination)
    parts = [values["conf"], *(f"{key.rpartition('.')[2]}_{values[key]}" for key in sorted(varied - {"conf"}))]
    return "sweep/" + re.sub(r"[^\w.-]", "_", "-".join(parts))


def plan(argv: list[str], untrained: bool) -> list[tuple[str, list[str]]]:
    """(run name, arguments of launch/run.py) of every run. UserError: no conf, or a name of one's own for many runs."""
    keys = [word.partition("=")[0] for word in argv]
    if "conf" not in keys or "name" in keys or "run_dir" in keys:
        raise UserError("a sweep wants conf=<name>[,<name>...] and names its runs itself: runs/sweep/<conf>-<key>_<value>")
    runs, found = [], combinations(argv)
    varied = {word.partition("=")[0] for word in argv if len(combinations([word])) > 1}
    for combination in found:
        name = run_name(combination, varied)
        runs.append((name, [*combination, f"name={name}"]))
        if untrained:
            barely = ["train.steps=1", "optim.lr=1e-12", "eval.methods=[none,head]", "eval.limit=8"]
            runs.append((name + SUFFIX, [*combination, f"name={name}{SUFFIX}", *barely]))
    return runs


def run_all(root: Path, runs: list[tuple[str, list[str]]]) -> list[str]:
    """Runs each; a run that is finished takes seconds. Returns the names of those that failed; the others go on."""
    failed = []
    for i, (name, words) in enumerate(runs, start=1):
        print(f"\n[{i}/{len(runs)}] {name}: python launch/run.py {shlex.join(words)}", flush=True)
        if subprocess.run([sys.executable, str(root / "launch" / "run.py"), *words], check=False).returncode:
            failed.append(name)
    return failed


def row(run_dir: Path) -> dict[str, Any]:
    """What a table says of one run: by its latest report, which may be of a temperature above 0."""
    path = max(run_dir.glob("eval*/report.json"), key=lambda path: path.stat().st_mtime)
    report = json.loads(path.read_text(encoding="utf-8"))
    head = next(m for m in reference(report) if m["method"] == "head")
    step = run_dir / (run_dir / "latest").read_text(encoding="utf-8").strip()
    with safe_open(step / "head.safetensors", "pt") as f:
        parameters = sum(math.prod(f.get_slice(name).get_shape()) for name in f.keys() if not name.endswith("_ids_U"))  # noqa: SIM118
    serving = json.loads((run_dir / "export" / "vllm" / "draftsmith.json").read_text(encoding="utf-8"))["serving"]
    return {
        "head": run_dir.name,
        "vllm_method": serving["method"],
        "parameters": parameters,
        "acceptance_length": head["acceptance_length"],
        "offline_acceptance_length": report["offline"]["acceptance_length"] if "offline" in report else "-",
        "tokens_per_pass": head["tokens_per_pass"],
        "speedup": head["speedup"],
        "lossless": "-" if head["lossless"] is None else head["lossless"],
    }


def table(runs_dir: Path, names: list[str], failed: list[str]) -> list[dict[str, Any]]:
    """One row a run, the untrained ones folded into those they belong to."""
    rows = []
    for name in names:
        if name.endswith(SUFFIX):
            continue
        if name in failed:
            rows.append({"head": Path(name).name, "note": "failed"})
            continue
        found = row(runs_dir / name)
        if name + SUFFIX in names and name + SUFFIX not in failed:
            found["random_acceptance_length"] = row(runs_dir / (name + SUFFIX))["acceptance_length"]
        rows.append(found | {"note": ""})
    return rows


def write(out: Path, rows: list[dict[str, Any]], command: str) -> str:
    """<out>.json and <out>.md; returns the text of the latter."""
    keys = list(dict.fromkeys(key for found in rows for key in found))
    titles = " | ".join(key.replace("_", " ") for key in keys)
    lines = [f"# {out.name}", "", f"`{command}`", "", f"| {titles} |", "|" + "---|" * len(keys)]
    lines += ["| " + " | ".join(_cell(found.get(key, "")) for key in keys) + " |" for found in rows]
    text = "\n".join(lines) + "\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out.with_suffix(".json"), json.dumps({"rows": rows}, indent=2) + "\n")
    replace_text(out.with_suffix(".md"), text)
    return text


def _cell(value: Any) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
