"""Draft trees from anything that drafts level by level (heads.chain.Levels): static ones, as Medusa and Hydra use them, EAGLE-2's dynamic
ones, and the chain, which is the static tree of one path.

Shape suffixes: R nodes of a level, W width, V vocab, k drafts of a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.accept import draw
from heads.chain import Levels

Ranks = tuple[int, ...]  # a path: (0, 2) is the third likeliest token after the likeliest


@dataclass
class Tree:
    """Drafts after the last token of a text, the root. parents: of each node, parents before children, -1 for a child of the root."""

    tokens: list[int]
    parents: list[int]
    q_kV: Tensor | None = None  # of a sampled chain, what each draft was sampled from


def chain_paths(k: int) -> list[Ranks]:
    return [(0,) * depth for depth in range(1, k + 1)]


def comb_paths(depth: int, width: int) -> list[Ranks]:
    """The chain of the likeliest drafts with all its siblings: what shows how often each rank is right."""
    return [(0,) * d + (rank,) for d in range(depth) for rank in range(width)]


def best_paths(rates: Sequence[Sequence[float]], nodes: int) -> list[Ranks]:
    """The static tree of at most so many nodes that accepts most, by Medusa's rule (arXiv 2401.10774, section 2.3.3): a path is worth the
    product of rates[depth][rank], how often that draft was right where those before it were; the worthiest are taken in turn."""
    worth: dict[Ranks, float] = {(rank,): rate for rank, rate in enumerate(rates[0])}
    chosen: list[Ranks] = []
    while len(chosen) < nodes and worth:
        path = max(worth, key=worth.__getitem__)
        value = worth.pop(path)
        chosen.append(path)
        if len(path) < len(rates):
            worth |= {(*path, rank): value * rate for rank, rate in enumerate(rates[len(path)])}
    return chosen


def static_tree(levels: Levels, paths: Sequence[Ranks]) -> Tree:
    """The tree of these paths; what a path passes through must be among them. Nodes are in the order of sorted(paths, key=(len, path))."""
    ordered = sorted(paths, key=lambda path: (len(path), path))
    node, inner = {path: i for i, path in enumerate(ordered)}, {path[:-1] for path in ordered}
    rows: dict[Ranks, int] = {(): 0}
    tree, log_q_RV = Tree([], []), next(levels)
    for depth in range(1, len(ordered[-1]) + 1):
        level = [path for path in ordered if len(path) == depth]
        ranked_RW = log_q_RV.topk(1 + max(path[-1] for path in level)).indices.tolist()
        tokens = {path: ranked_RW[rows[path[:-1]]][path[-1]] for path in level}
        tree.tokens += tokens.values()
        tree.parents += [node.get(path[:-1], -1) for path in level]
        if grown := [path for path in level if path in inner]:
            device = log_q_RV.device
            parent_R = torch.tensor([rows[path[:-1]] for path in grown], device=device)
            log_q_RV = levels.send((parent_R, torch.tensor([tokens[path] for path in grown], device=device)))
            rows = {path: i for i, path in enumerate(grown)}
    return tree


def dynamic_tree(levels: Levels, nodes: int, width: int, depth: int) -> Tree:
    """EAGLE-2's tree (arXiv 2406.16858, section 4): the `width` likeliest nodes of each level, by the product of q along their paths, get
    their `width` likeliest children, `depth` levels deep at most; of all these the `nodes` likeliest are kept.

    A child is never likelier than its parent, so that what is kept is a tree; and growth ends early once no node of a level can stay."""
    log_q_RV, score_R = next(levels), torch.zeros(1)
    place_R = torch.tensor([-1])
    tokens, parents, scores = (torch.empty(0, dtype=kind) for kind in (torch.long, torch.long, torch.float))
    for level in range(1, depth + 1):
        log_q_RW, token_RW = (x.cpu() for x in log_q_RV.topk(width))
        score_C = (score_R[:, None] + log_q_RW).flatten()
        first = len(tokens)
        tokens, scores = torch.cat([tokens, token_RW.flatten()]), torch.cat([scores, score_C])
        parents = torch.cat([parents, place_R.repeat_interleave(width)])
        score_R, best_R = score_C.topk(min(width, int(score_C.isfinite().sum())))
        least = scores.topk(min(nodes, len(scores))).values[-1]
        if level == depth or len(scores) >= nodes and score_R[0] < least:
            break
        place_R = first + best_R
        log_q_RV = levels.send((best_R.div(width, rounding_mode="floor").to(log_q_RV.device), tokens[place_R].to(log_q_RV.device)))
    likely = scores.sort(descending=True, stable=True).indices[:nodes]
    kept = likely[scores[likely].isfinite()].sort().values.tolist()
    node = {-1: -1} | {place: i for i, place in enumerate(kept)}
    return Tree(tokens[kept].tolist(), [node[int(parents[place])] for place in kept])


def sampled_chain(levels: Levels, k: int, generator: torch.Generator) -> Tree:
    """A chain of drafts sampled from q at temperature 1."""
    log_q_1V, tokens, rows = next(levels), [], []
    for i in range(k):
        rows.append(log_q_1V.softmax(-1))
        token_1 = draw(rows[-1], torch.rand(1, generator=generator, dtype=torch.float64).to(log_q_1V.device))
        tokens.append(int(token_1))
        if i + 1 < k:
            log_q_1V = levels.send((torch.zeros_like(token_1), token_1))
    return Tree(tokens, list(range(-1, k - 1)), torch.cat(rows))
