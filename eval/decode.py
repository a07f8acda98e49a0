"""Speculative decoding with transformers, one answer at a time: each pass drafts a tree, and the target reads it in one forward with a tree
attention mask. It counts acceptance exactly and says nothing of speed.

Shape suffixes: T tokens or nodes read at once, L taps, D hidden, V vocab, k drafts, n = k + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.check import Reference
from eval.accept import tree_accepted
from eval.tree import Tree
from heads.base import Batch
from heads.chain import Levels
from heads.last_state import LastStateHead
from heads.recurrent import RecurrentHead


@dataclass
class States:
    """What the target made of tokens that it has read."""

    taps_TLD: Tensor
    last_TD: Tensor

    def then(self, more: States, rows: list[int]) -> States:
        """These and those rows of `more`."""
        return States(torch.cat([self.taps_TLD, more.taps_TLD[rows]]), torch.cat([self.last_TD, more.last_TD[rows]]))


Drafter = Callable[[list[int], States], Levels]  # of the text, and of the target's states of all its tokens but the last
Verify = Callable[[Tree, Tensor], tuple[list[int], int]]  # the accepted nodes and the token after them, from logits of root and nodes


class Reader:
    """A language model with the keys and values of the text that it has read. exit_layer: layers applied before the final norm and
    lm_head (early exit), None for all. taps: see heads.base.DraftHead."""

    def __init__(self, model: Reference, taps: tuple[int, ...] = (), exit_layer: int | None = None) -> None:
        self.model, self.taps, self.exit_layer = model, taps, exit_layer
        self.forget()

    def forget(self) -> None:
        self.text: list[int] = []
        self.cache = self.model.forward.empty_cache()

    def forward(self, tokens: list[int], parents: list[int]) -> States:
        """Reads a tree after the text: every node sees the text, its ancestors and itself, at the position of its depth. `keep` must
        follow."""
        device, length = self.model.lm_head_VD.device, len(self.text)
        seen_TT = torch.eye(len(tokens), dtype=torch.bool)
        for node, parent in enumerate(parents):
            if parent >= 0:
                seen_TT[node] |= seen_TT[parent]
        hidden = torch.nn.functional.pad(~seen_TT, (length, 0))[None, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(torch.float32).min).to(device)
        positions = (length - 1 + seen_TT.sum(1))[None].to(device)
        options = {"attention_mask": mask, "position_ids": positions, "past_key_values": self.cache, "use_cache": True}
        return States(*self.model.states(torch.tensor(tokens, device=device), self.exit_layer, self.taps, **options))

    def logits(self, last_RD: Tensor) -> Tensor:
        """[R, V]"""
        return last_RD @ self.model.lm_head_VD.T

    def keep(self, tokens: list[int], nodes: list[int]) -> None:
        """The text goes on with these nodes of the tree that was read last, which are these tokens; of the others nothing is left."""
        for layer in self.cache.layers:
            for kind in ("keys", "values"):
                old = getattr(layer, kind)
                setattr(layer, kind, torch.cat([old[:, :, : len(self.text)], old[:, :, [len(self.text) + node for node in nodes]]], 2))
        self.text = self.text + tokens

    def read(self, text: list[int]) -> States:
        """Reads what is new of a text, from its beginning where it is another text than before."""
        if self.text != text[:-1][: len(self.text)]:
            self.forget()
        new = text[len(self.text) :]
        states = self.forward(new, list(range(-1, len(new) - 1)))
        self.keep(new, list(range(len(new))))
        return states

    def levels(self, text: list[int], _: States) -> Levels:
        """The model as a drafter. The nodes of all levels are read again at each, for the cache holds the text alone."""
        tokens, parents, row = [], [], [-1]
        last_RD = self.read(text).last_TD[-1:]
        while True:
            parent_R, token_R = yield self.logits(last_RD).log_softmax(-1)
            parents += [row[parent] for parent in parent_R.tolist()]
            row = list(range(len(tokens), len(tokens) + len(token_R)))
            tokens += token_R.tolist()
            last_RD = self.forward(tokens, parents).last_TD[row]
            self.keep([], [])


def of_head(head: RecurrentHead | LastStateHead, text: list[int], states: States) -> Levels:
    """The head as a drafter, float32, on the target's device. Depth 0 of the whole text is worked out at each pass."""
    unread = torch.nn.functional.pad  # the last token's states, which no head reads
    taps_TLD, last_TD = unread(states.taps_TLD, (0, 0, 0, 0, 0, 1)), unread(states.last_TD, (0, 0, 0, 1))
    tokens_T = torch.tensor(text, device=last_TD.device)
    return head.levels(Batch(tokens_T, torch.zeros_like(tokens_T, dtype=torch.bool), torch.tensor([0, len(text)]), taps_TLD, last_TD))


def no_drafts(*_: object) -> Tree:
    """Grows nothing: plain decoding, one token a pass."""
    return Tree([], [])


def greedily(tree: Tree, logits_TV: Tensor) -> tuple[list[int], int]:
    """Verification at temperature 0."""
    choices = logits_TV.argmax(-1).tolist()
    path = tree_accepted(tree.tokens, tree.parents, choices)
    return path, choices[1 + path[-1] if path else 0]


def sampled(rule: Callable[..., tuple[Tensor, Tensor]], generator: torch.Generator, tree: Tree, logits_TV: Tensor) -> tuple[list[int], int]:
    """Verification of a sampled chain at temperature 1 by a rule of eval.accept. Of a tree without drafts: plain sampling."""
    p_1nV = logits_TV.double().softmax(-1)[None]
    uniform_1n = torch.rand(1, p_1nV.shape[1], generator=generator, dtype=torch.float64).to(p_1nV.device)
    q_1kV = p_1nV[:, :0] if tree.q_kV is None else tree.q_kV[None].double()
    accepted_1, token_1 = rule(torch.tensor([tree.tokens], device=p_1nV.device, dtype=torch.long), q_1kV, p_1nV, uniform_1n)
    return list(range(int(accepted_1))), int(token_1)


@dataclass
class Answer:
    token_ids: list[int]
    paths: list[list[int]] = field(default_factory=list)  # accepted nodes of every drafting pass
    nodes: int = 0  # drafts verified


@torch.no_grad()
def decode(  # noqa: PLR0913
    target: Reader,
    drafter: Drafter,
    grow: Callable[[Levels], Tree],
    verify: Verify,
    prompt: list[int],
    limit: int,
    stop_ids: Collection[int],
) -> Answer:
    """One answer of at most `limit` tokens, up to the first of stop_ids. As in an engine, the first token comes from the prefill, and the
    last pass counts whole, also what it accepts beyond the end."""
    target.forget()
    states = target.read(prompt)
    token = verify(no_drafts(), target.logits(states.last_TD[-1:]))[1]
    answer, done = Answer([token]), {*stop_ids}
    while len(answer.token_ids) < limit and not done & {*answer.token_ids}:
        root = answer.token_ids[-1]
        tree = grow(drafter(prompt + answer.token_ids, states))
        read = target.forward([root, *tree.tokens], [-1, *(parent + 1 for parent in tree.parents)])
        path, token = verify(tree, target.logits(read.last_TD))
        kept, drafts = [0, *(node + 1 for node in path)], [tree.tokens[node] for node in path]
        target.keep([root, *drafts], kept)
        states = states.then(read, kept)
        answer.token_ids += [*drafts, token]
        answer.paths.append(path)
        answer.nodes += len(tree.tokens)
    ends = [i + 1 for i, token in enumerate(answer.token_ids) if token in done]
    answer.token_ids = answer.token_ids[: min([limit, *ends])]
    return answer
