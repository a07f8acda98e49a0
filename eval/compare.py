"""Chains, trees and references side by side, offline: acceptance length at equal numbers of verified drafts. vLLM serves chains alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.box import SIMPLE
from rich.table import Table

from data.chat import all_prompt_ids, load_tokenizer
from data.check import Reference
from data.engine_job import stop_ids
from data.errors import UserError
from data.manifest import replace_text
from data.progress import table_console
from data.record import ChatRecord
from eval.accept import Counts, block_verify, figures, rejection_sample
from eval.decode import Answer, Drafter, Reader, Verify, decode, greedily, no_drafts, of_head, sampled
from eval.methods import check_draft_model
from eval.serve import Request, cut_at_loops, make_requests
from eval.tree import Tree, best_paths, chain_paths, comb_paths, dynamic_tree, sampled_chain, static_tree
from heads.base import DraftHead
from heads.chain import Levels
from heads.last_state import LastStateHead
from heads.recurrent import RecurrentHead

if TYPE_CHECKING:
    from train.config import RunConfig

WIDTH = 10  # children of a node, and nodes of a level that get children: EAGLE-2's top-k
DEEPEST = 8  # levels of a tree
SHAPED_ON = 4  # training prompts whose answers say how often each rank is right, which shapes the static trees
RULES = {"sampled chain": rejection_sample, "sampled chain, as a block": block_verify}


@dataclass(frozen=True)
class Method:
    drafter: str
    shape: str
    grow: Callable[[Levels], Tree]
    verify: Verify = greedily
    temperature: float = 0.0


class Bench:
    """Decodes answers to prompts by any method, with one target and the drafters of a run."""

    def __init__(self, cfg: RunConfig, head: RecurrentHead | LastStateHead, target_dir: Path, device: str) -> None:
        self.cfg, self.target_dir, self.stops = cfg, target_dir, stop_ids(target_dir)
        target = Reference(target_dir, device)
        self.target = Reader(target, head.taps)
        layers = head.target.num_layers
        exits = sorted({layers * quarter // 4 for quarter in (1, 2, 3)} - {0})
        self.drafters: dict[str, Drafter] = {"head": partial(of_head, head)}
        self.drafters |= {f"early exit {n}/{layers}": Reader(target, exit_layer=n).levels for n in exits}
        if cfg.eval.draft_model:
            check_draft_model(Path(cfg.eval.draft_model), head.target)
            self.drafters["draft model"] = Reader(Reference(Path(cfg.eval.draft_model), device)).levels

    def requests(self, prompts: list[ChatRecord], split: str) -> tuple[list[Request], dict[str, Answer]]:
        """The prompts that fit, cut where their plain answers loop with eval.cut_loops, and those answers."""
        if not prompts:
            raise UserError(f"data.prompts: no prompt for the split '{split}'; add some, or give some meta.split")
        tokenizer, cfg = load_tokenizer(self.target_dir, self.cfg.target.trust_remote_code), self.cfg
        found, _ = make_requests(all_prompt_ids(tokenizer, prompts), cfg.eval.max_tokens, cfg.target.max_model_len, max(cfg.eval.ks))
        plain = self.run(Method("head", "plain", no_drafts), found)
        if cfg.eval.cut_loops:
            found, _ = cut_at_loops(
                found, {"outputs": {name: {"token_ids": a.token_ids} for name, a in plain.items()}}, cfg.data.loop_ngram
            )
        limits = {request["id"]: request["max_tokens"] for request in found}
        return found, {name: Answer(answer.token_ids[: limits[name]]) for name, answer in plain.items()}

    def run(self, method: Method, requests: list[Request]) -> dict[str, Answer]:
        print(f"trees: {method.drafter}, {method.shape}, {len(requests)} prompts", flush=True)
        drafter = self.drafters[method.drafter]
        return {
            r["id"]: decode(self.target, drafter, method.grow, method.verify, r["prompt_ids"], r["max_tokens"], self.stops)
            for r in requests
        }


def rank_rates(answers: list[Answer], depth: int, width: int) -> list[list[float]]:
    """[depth][rank]: how often that draft was right where the likeliest ones before it were. Of answers decoded with comb_paths."""
    right = torch.zeros(depth * width)
    for node in (node for answer in answers for path in answer.paths for node in path):
        right[node] += 1
    right = right.view(depth, width)
    reached = torch.tensor([float(sum(len(answer.paths) for answer in answers)), *right[:-1, 0].tolist()])
    return (right / reached.clamp_min(1)[:, None]).tolist()


def methods(ks: list[int], most: int, rates: list[list[float]], references: list[str]) -> Iterator[Method]:
    """Every method with every number of drafts. most: drafts that the head can make in a row."""
    for k in ks:
        yield Method("head", "chain", partial(static_tree, paths=chain_paths(min(k, most))))
        yield Method("head", "static tree", partial(static_tree, paths=best_paths(rates, k)))
        yield Method("head", "dynamic tree", partial(dynamic_tree, nodes=k, width=WIDTH, depth=min(k, most, DEEPEST)))
        for name in references:
            yield Method(name, "chain", partial(static_tree, paths=chain_paths(k)))
    k = max(ks)
    for name in ["head", *references]:
        for shape, rule in RULES.items():
            generator = torch.Generator().manual_seed(0)
            grow = partial(sampled_chain, k=min(k, most) if name == "head" else k, generator=generator)
            yield Method(name, shape, grow, partial(sampled, rule, generator), 1.0)


def row(method: Method, answers: dict[str, Answer], plain: dict[str, Answer]) -> dict[str, Any]:
    """The method's figures, and at temperature 0 `lossless`, the share of answers that are token for token the plain ones."""
    counts = Counts()
    for answer in answers.values():
        depth = max(map(len, answer.paths), default=0)
        per_position = [sum(len(path) > i for path in answer.paths) for i in range(depth)]
        counts.add(len(answer.token_ids), len(answer.paths), answer.nodes, per_position)
    same = sum(answer.token_ids == plain[name].token_ids for name, answer in answers.items())
    found = {"drafter": method.drafter, "shape": method.shape, "temperature": method.temperature, **figures(counts)}
    nodes = counts.draft_tokens / max(1, counts.drafts)
    return found | {"nodes": nodes, "lossless": None if method.temperature else same / len(answers)}


def compare(
    cfg: RunConfig, head: DraftHead, target_dir: Path, heldout: list[ChatRecord], training: list[ChatRecord], device: str
) -> dict[str, Any]:
    """The report of eval/trees.json. head: with weights and frozen parts, float32, on `device`. training: prompts whose answers shape the
    static trees. UserError: a head that has no steps, or no prompts."""
    if not isinstance(head, RecurrentHead | LastStateHead) or head.kv_layers:
        raise UserError(
            f"head: {cfg.head['_target_']} does not draft step by step from the target's states, so it grows no trees here; "
            "choose a conf with one of the heads that docs/evaluation.md lists under Trees"
        )
    bench, ks = Bench(cfg, head, target_dir, device), cfg.eval.ks
    most = head.depths if isinstance(head, LastStateHead) else max(ks)
    depth = min(max(ks), most, DEEPEST)
    comb = Method("head", "ranks of its drafts, on training prompts", partial(static_tree, paths=comb_paths(depth, WIDTH)))
    rates = rank_rates([*bench.run(comb, bench.requests(training, "train")[0]).values()], depth, WIDTH)
    requests, plain = bench.requests(heldout, "heldout")
    rows = [row(m, bench.run(m, requests), plain) for m in methods(ks, most, rates, [name for name in bench.drafters if name != "head"])]
    return {
        "name": cfg.name,
        "target": {"model": cfg.target.model, "dtype": "float32"},
        "prompts": {"count": len(requests), "max_tokens": cfg.eval.max_tokens, "cut_loops": cfg.eval.cut_loops},
        "rank_rates": rates,
        "static_trees": {k: best_paths(rates, k) for k in ks},
        "methods": rows,
    }


def show(report: dict[str, Any], run_dir: Path) -> None:
    """Writes run_dir/eval/trees.json atomically and prints the table."""
    path = run_dir / "eval" / "trees.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(report, indent=1, allow_nan=False) + "\n")
    table = Table(title=f"{report['name']}: {report['prompts']['count']} prompts, offline, float32", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("drafter", "", "drafts\nverified", "acceptance\nlength", "tokens\nper pass", "equal\nto plain"):
        table.add_column(column, justify="left" if column in ("drafter", "") else "right")
    for m in report["methods"]:
        equal = "-" if m["lossless"] is None else f"{m['lossless']:.1%}"
        numbers = [f"{m['nodes']:.0f}", f"{m['acceptance_length']:.3f}", f"{m['tokens_per_pass']:.3f}", equal]
        table.add_row(m["drafter"], m["shape"], *numbers)
    table_console().print(table)
    print(f"vLLM serves chains: the trees were decoded offline, and say nothing of speed\n{path}")
