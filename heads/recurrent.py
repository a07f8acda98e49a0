"""What heads share that feed their own output back through attention (EAGLE-3, MTP).

At depth k, row t reads token x_{t+1+k} and the state of depth k-1 (at depth 0: the target's own state of position t), sits at
position t + k, and predicts x_{t+2+k}. Training feeds the true tokens and the head's own states (EAGLE-3's training-time
test, FastMTP's recursion); drafting feeds the drafted tokens. Attention sees the depth-0 keys of the document up to t and the
row's own chain: the same keys that an engine holds, which re-runs accepted positions with the target's true states.

Shape suffixes: T packed tokens, R rows of them that have a label, D hidden.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from heads.attention import Documents, KeyValues
from heads.base import Batch
from heads.chain import ChainHead, Levels
from heads.losses import Labels


class RecurrentHead(ChainHead):
    """Subclasses give `first_state` and `step`."""

    recompute = False

    def first_state(self, batch: Batch) -> Tensor:
        """[T, D] state that depth 0 reads, from the target's states."""
        raise NotImplementedError

    def embedded(self, embed_RD: Tensor) -> Tensor:
        """What `step` reads of tokens [R, *], from their embeddings alone: training works it out once, for depths read shifted tokens."""
        return embed_RD

    def step(self, state: Tensor, embed: Tensor, docs: Documents, caches: list[KeyValues]) -> tuple[Tensor, Tensor]:
        """One depth. state [*, D], embed (see `embedded`): T rows at depth 0, then the R needed ones of `docs`. Returns (input of
        lm_head [R, D], state for the next depth [R, D])."""
        raise NotImplementedError

    def caches(self, batch: Batch) -> list[KeyValues]:
        """Key/value caches, one per attention layer: empty, or of what the target made."""
        raise NotImplementedError

    def depth(self, state: Tensor, embed: Tensor, index: Tensor | None, docs: Documents, caches: list[KeyValues]) -> tuple[Tensor, Tensor]:
        """`step` in training, over the rows `index` of embed (all where not given): with `recompute` it keeps its inputs alone, and is
        taken again in the backward."""
        if not (self.recompute and torch.is_grad_enabled()):
            return self.step(state, _rows(embed, index), docs, caches)
        docs, before = copy.copy(docs), [KeyValues([*cache.keys], [*cache.values]) for cache in caches]  # as they are now

        def again(state: Tensor, embed: Tensor) -> tuple[Tensor, ...]:
            own = [KeyValues([*cache.keys], [*cache.values]) for cache in before]
            x, fed_back = self.step(state, _rows(embed, index), docs, own)
            return x, fed_back, *(x[-1] for cache in own for x in (cache.keys, cache.values))

        x, fed_back, *new = checkpoint(again, state, embed, use_reentrant=False, preserve_rng_state=False)  # nothing in it is random
        for i, cache in enumerate(caches):
            cache.keys.append(new[2 * i])
            cache.values.append(new[2 * i + 1])
        return x, fed_back

    def outputs(self, batch: Batch, docs: Documents, labels: Labels) -> list[Tensor]:
        docs.need(labels.row_KL)
        labels.row_KL = docs.needed.place(labels.row_KL)
        state, caches, x_KRD = self.first_state(batch), self.caches(batch), []
        embed = self.embedded(self.frozen.embed_VD[batch.token_ids_T])
        for k in range(self.depths):
            index_T, _ = docs.shifted(1 + k)
            index = index_T if k == 0 else docs.needed.of(index_T)
            x_RD, state = self.depth(state, embed, index, docs, caches)
            x_KRD.append(x_RD)
        return x_KRD

    @torch.no_grad()
    def propose(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        docs = Documents(batch.offsets_S1, batch.token_ids_T.device)
        index, _ = docs.shifted(1)
        tokens_T, state, caches = batch.token_ids_T[index], self.first_state(batch), self.caches(batch)
        drafts, log_q = [], []
        for i in range(k):
            x_TD, state = self.step(state, self.embedded(self.frozen.embed_VD[tokens_T]), docs, caches)
            tokens_T, score_T = self.choose(x_TD, i)
            drafts.append(tokens_T)
            log_q.append(score_T)
        return torch.stack(drafts, 1), torch.stack(log_q, 1)

    @torch.no_grad()
    def levels(self, batch: Batch) -> Levels:
        """Drafts a tree after the last token of one document, whose states are known but for that token's own (that row is not read)."""
        docs, row = Documents(batch.offsets_S1, batch.token_ids_T.device), len(batch.token_ids_T) - 2
        docs.repeat(row, 1)
        index_T, _ = docs.shifted(1)
        tokens, state, caches, k = batch.token_ids_T[index_T], self.first_state(batch), self.caches(batch), 0
        while True:
            x_RD, state = self.step(state, self.embedded(self.frozen.embed_VD[tokens]), docs, caches)
            parent_R, tokens = yield self.log_q(x_RD, k)
            state, k = state[parent_R], k + 1
            docs.repeat(row, len(tokens))
            for cache in caches:
                cache.keep(parent_R)


def _rows(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, index)
