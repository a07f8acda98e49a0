"""The table of heads in docs/heads.md, from conf/head/ and the heads. `make docs` writes it; a test holds the page against it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from eval.vllm_plugin import DRAFTS
from heads import build
from heads.base import DraftHead, Frozen, TargetSpec

ROOT = Path(__file__).resolve().parent.parent
CONF, PAGE = ROOT / "conf", ROOT / "docs" / "heads.md"
BEGIN, END = "<!-- the table, from eval/catalogue.py: make docs -->\n", "<!-- its end -->\n"
COLUMNS = ("conf", "reads", "depths", "loss", "parameters at 8B", "at 70B", "vLLM method", "acceptance length")


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def target(name: str) -> TargetSpec:
    """The dimensions of conf/target/<name>.yaml, as of a target that ships a module of its own, which one of the heads asks for, and whose
    keys and values another reads: in the shapes of Gemma 4."""
    plain = {"layer": 0, "num_kv_heads": 1, "rope_theta": 1e4, "rope_scaling": None}
    kinds = {"sliding_attention": plain | {"head_dim": 256, "window": 512}, "full_attention": plain | {"head_dim": 512, "window": None}}
    return replace(TargetSpec(**read(CONF / "target" / f"{name}.yaml")["spec"]), architecture="MiMoForCausalLM", kinds=kinds)


def on_meta(conf: dict[str, Any], spec: TargetSpec) -> DraftHead:
    """A head without weights. What its conf leaves to the run (???) is what engines assume, or the first token."""
    L = spec.num_layers
    of_the_run = {"taps": [2, L // 2, L - 3], "mask_token_id": 0}
    with torch.device("meta"):
        head = build({key: of_the_run[key] if value == "???" else value for key, value in conf.items()}, spec)
        parts = torch.empty(2, spec.vocab_size, spec.hidden_size)
    if head.draft_vocab_size is not None:  # an export works with these ids
        head.load_state_dict({"draft_ids_U": torch.arange(head.draft_vocab_size)}, strict=False, assign=True)
    head.attach(Frozen(parts[0], parts[1]))
    return head


def reads(head: DraftHead) -> str:
    """Of the target, beside the tokens."""
    parts = [f"{len(head.taps)} tap{'s' if len(head.taps) > 1 else ''}"] if head.taps else []
    parts += ["the last state"] if head.needs_last == "all" else []
    parts += [f"keys and values of {len(head.kv_layers)} layers"] if head.kv_layers else []
    return " and ".join(parts) or "tokens alone"


def method(head: DraftHead) -> str:
    serving = head.serving(1)
    parallel = " with `parallel_drafting`" if serving.get("parallel_drafting") else ""
    plugin = ", our plug-in" if head.export().config["architectures"][0] in DRAFTS else ""
    return f"`{serving['method']}`{parallel}{plugin}"


def measured(folder: Path) -> dict[str, float]:
    """Head conf -> acceptance length on the embedded target, of the sweep over all heads where one is recorded."""
    path, found = folder / "heads.json", {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []:
        run = read(CONF / "conf" / f"{row['head'].partition('-')[0]}.yaml")["defaults"]
        if "acceptance_length" in row:
            found[next(group["override /head"] for group in run if "override /head" in group)] = row["acceptance_length"]
    return found


def table(benchmarks: Path = ROOT / "docs" / "benchmarks") -> str:
    """Markdown, a row for each file of conf/head/."""
    small, large, lengths = target("llama8b"), target("llama70b"), measured(benchmarks)
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for path in sorted((CONF / "head").glob("*.yaml")):
        conf = read(path)
        head, big = on_meta(conf, small), on_meta(conf, large)
        sizes = [f"{sum(p.numel() for p in h.parameters()) / 1e6:,.0f} M" for h in (head, big)]
        length = f"{lengths[path.stem]:.3f}" if path.stem in lengths else "-"
        row = [f"`head={path.stem}`", reads(head), str(head.depths), f"`{conf['loss']}`", *sizes, method(head), length]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def page(text: str, rows: str) -> str:
    """The page with `rows` between its two marks."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + rows + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
