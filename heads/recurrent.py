"""What heads that draft a chain of tokens share, and what those do that feed their own output back through attention.

`ChainHead`: depth k of row t predicts x_{t+2+k}; labels, loss, metrics, draft vocabulary. `RecurrentHead` (EAGLE-3, MTP): at depth k,
row t reads token x_{t+1+k} and the state of depth k-1 (at depth 0: the target's own state of position t), sits at
position t + k, and predicts x_{t+2+k}. Training feeds the true tokens and the head's own states (EAGLE-3's training-time
test, FastMTP's recursion); drafting feeds the drafted tokens. Attention sees the depth-0 keys of the document up to t and the
row's own chain: the same keys that an engine holds, which re-runs accepted positions with the target's true states.

Shape suffixes: T packed tokens, R rows of them that have a label, D hidden, U draft vocab, V vocab, K depths, L label positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads.attention import Documents, KeyValues
from heads.base import Batch, DraftHead, Frozen, LossOut, TargetSpec
from heads.losses import Labels, fused_loss
from heads.metrics import hits
from heads.objectives import parse


class ChainHead(DraftHead):
    """Subclasses give `outputs` and `propose`; this class gives depths, labels, loss, metrics and the draft vocabulary."""

    def __init__(
        self,
        *,
        target: TargetSpec,
        depths: int,
        depth_decay: float,
        loss_chunk: int,
        loss: str,
        draft_vocab_size: int | None = None,
        train_lm_head: bool = False,
    ) -> None:
        super().__init__()
        self.mixture = parse(loss)
        if depths < 1 or loss_chunk < 1:
            raise ValueError(f"head.depths and head.loss_chunk must be at least 1, not {depths} and {loss_chunk}")
        if not 0 < depth_decay <= 1:
            raise ValueError(f"head.depth_decay must be in (0, 1], not {depth_decay}")
        if draft_vocab_size is not None and not 1 <= draft_vocab_size <= target.vocab_size:
            raise ValueError(f"head.draft_vocab_size must be null or in 1..{target.vocab_size}, the target's size, not {draft_vocab_size}")
        self.target, self.depths, self.loss_chunk = target, depths, loss_chunk
        self.depth_weights = tuple(depth_decay**k for k in range(depths))
        size = draft_vocab_size or target.vocab_size
        self.draft_vocab_size = size if size < target.vocab_size else None
        self.draft_ids_U: Tensor | None
        self.register_buffer("draft_ids_U", torch.zeros(size, dtype=torch.long) if self.draft_vocab_size else None)
        self.lm_head = nn.Linear(target.hidden_size, size, bias=False) if train_lm_head else None

    def set_draft_vocab(self, ids_U: Tensor) -> None:
        """Sets the target ids [U] (ascending, int64) that the head may draft. Before `attach`."""
        assert self.draft_ids_U is not None and ids_U.shape == self.draft_ids_U.shape
        self.draft_ids_U.copy_(ids_U)

    def attach(self, frozen: Frozen) -> None:
        super().attach(frozen)
        self.teacher_UD = self._draft_rows(frozen)

    @torch.no_grad()
    def start_from(self, frozen: Frozen) -> None:
        if self.lm_head is not None:
            self.lm_head.weight.copy_(self._draft_rows(frozen))

    def _draft_rows(self, frozen: Frozen) -> Tensor:
        """The target's lm_head rows [U, D] of the draft vocabulary; the tensor itself where that is the whole one."""
        return frozen.lm_head_VD if self.draft_ids_U is None else frozen.lm_head_VD[self.draft_ids_U]

    def outputs(self, batch: Batch, docs: Documents, labels: Labels) -> list[Tensor]:
        """Per depth the inputs of lm_head [R, D], over the batch's own tokens, at the rows that `labels` need. Turns labels.row_KL from
        places in the pack into rows of these, and may leave out labels there and weigh the others in labels.weight_KL."""
        raise NotImplementedError

    @property
    def _head_UD(self) -> Tensor:
        return self.teacher_UD if self.lm_head is None else self.lm_head.weight

    def head_rows(self, k: int) -> Tensor:
        """lm_head rows [U, D] of depth k. Here one lm_head serves all depths."""
        return self._head_UD

    def labels(self, batch: Batch, docs: Documents) -> Labels:
        """Label positions: row j predicts x_{j+1}, supervised where x_{j+1} is. Depth k of row t has the label of row t + 1 + k."""
        index, inside = docs.shifted(1)
        position_L = (batch.loss_mask_T[index] & inside).nonzero().squeeze(1)
        depth_K1 = torch.arange(self.depths, device=position_L.device)[:, None]
        inside_KL = docs.positions_T[position_L] >= 1 + depth_K1
        token_L = self.draft_index(batch.token_ids_T[index][position_L])
        return Labels(position_L, torch.where(inside_KL, position_L - 1 - depth_K1, -1), token_L)

    def draft_index(self, token_L: Tensor) -> Tensor:
        """Indices into the draft vocabulary of target ids; -1 for those that it lacks."""
        if self.draft_ids_U is None:
            return token_L
        place_L = torch.searchsorted(self.draft_ids_U, token_L).clamp(max=len(self.draft_ids_U) - 1)
        return torch.where(self.draft_ids_U[place_L] == token_L, place_L, -1)

    def count(self, batch: Batch) -> Tensor:
        docs = Documents(batch.offsets_S1, batch.token_ids_T.device)
        return (self.labels(batch, docs).row_KL >= 0).sum(1)

    def loss(self, batch: Batch, weight_K: Tensor | None = None) -> LossOut:
        """The mixture of losses, and `more_loss`, at every supervised position, per depth; hits in evaluation mode."""
        docs = Documents(batch.offsets_S1, batch.token_ids_T.device)
        labels = self.labels(batch, docs)
        count_K = (labels.row_KL >= 0).sum(1)
        x_KRD = self.outputs(batch, docs, labels)
        assert batch.last_TD is not None
        weight_K = torch.ones(self.depths, device=batch.last_TD.device) if weight_K is None else weight_K
        total, loss_K = torch.zeros((), device=weight_K.device), torch.zeros(self.depths, device=weight_K.device)
        for depths, part in self._by_lm_head(labels):
            x, heads = [x_KRD[k] for k in depths], (self.head_rows(depths[0]), self.teacher_UD)
            part_total, loss_K[depths] = fused_loss(x, *heads, batch.last_TD, part, weight_K[depths], self.mixture, self.loss_chunk)
            total = total + part_total
        more_K = self.more_loss(x_KRD, batch.last_TD, labels)
        if more_K is not None:
            total, loss_K = total + (more_K * weight_K).sum(), loss_K + more_K.detach()
        metrics = {} if self.training else self._metrics(x_KRD, batch, docs, labels)
        return LossOut(total, loss_K, count_K, metrics)

    def more_loss(self, x_KRD: list[Tensor], last_TD: Tensor, labels: Labels) -> Tensor | None:
        """Sums per depth [K], float32 with gradient, over the rows of `labels`, of what a head trains on beside the distribution."""
        return None

    def _by_lm_head(self, labels: Labels) -> list[tuple[list[int], Labels]]:
        """The depths that share an lm_head, with their labels: in one call of the loss they share the teacher's pass too."""
        groups: dict[int, list[int]] = {}
        for k in range(self.depths):
            groups.setdefault(id(self.head_rows(k)), []).append(k)
        weights = labels.weight_KL
        return [
            (depths, Labels(labels.position_L, labels.row_KL[depths], labels.token_L, None if weights is None else weights[depths]))
            for depths in groups.values()
        ]

    def _metrics(self, x_KRD: list[Tensor], batch: Batch, docs: Documents, labels: Labels) -> dict[str, tuple[Tensor, Tensor]]:
        """hit: share of positions whose first choice is the target's. accept: share of anchors whose first k + 1 choices all are,
        over anchors that an engine can draft from (the token after the anchor is a generated one)."""
        assert batch.last_TD is not None
        valid_KR = torch.zeros(self.depths, len(x_KRD[0]), dtype=torch.bool, device=labels.row_KL.device)
        hit_KR = torch.zeros_like(valid_KR)
        for depths, part in self._by_lm_head(labels):
            x, frozen = [x_KRD[k] for k in depths], self.frozen.lm_head_VD
            hit_KR[depths] = hits(x, self.head_rows(depths[0]), self.draft_ids_U, frozen, batch.last_TD, part, self.loss_chunk)
        for k, found in enumerate(labels.row_KL):
            valid_KR[k, found[found >= 0]] = True
        index_T, inside_T = docs.shifted(1)
        anchor_KR = valid_KR.cumprod(0).bool() & docs.needed.of(batch.loss_mask_T[index_T] & inside_T)
        return {
            "hit": (hit_KR.sum(1), valid_KR.sum(1)),
            "accept": ((hit_KR.cumprod(0).bool() & anchor_KR).sum(1), anchor_KR.sum(1)),
        }

    def choose(self, x_TD: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Greedy target ids [T] of depth k and their log q [T] float32, from the inputs [T, D] of its lm_head."""
        best, score = [], []
        for x in x_TD.split(self.loss_chunk):
            top, choice = (x @ self.head_rows(k).T).float().log_softmax(-1).max(-1)
            best.append(choice if self.draft_ids_U is None else self.draft_ids_U[choice])
            score.append(top)
        return torch.cat(best), torch.cat(score)


class RecurrentHead(ChainHead):
    """Subclasses give `first_state` and `step`."""

    def first_state(self, batch: Batch) -> Tensor:
        """[T, D] state that depth 0 reads, from the target's states."""
        raise NotImplementedError

    def step(self, state: Tensor, embed: Tensor, docs: Documents, caches: list[KeyValues]) -> tuple[Tensor, Tensor]:
        """One depth. state, embed: [T, D] at depth 0 (empty caches), then [R, D] at the needed rows of `docs`. Returns (input of
        lm_head [R, D], state for the next depth [R, D])."""
        raise NotImplementedError

    def caches(self) -> list[KeyValues]:
        """Empty key/value caches, one per attention layer."""
        raise NotImplementedError

    def outputs(self, batch: Batch, docs: Documents, labels: Labels) -> list[Tensor]:
        docs.need(labels.row_KL)
        labels.row_KL = docs.needed.place(labels.row_KL)
        state, caches, x_KRD = self.first_state(batch), self.caches(), []
        for k in range(self.depths):
            index_T, _ = docs.shifted(1 + k)
            index = index_T if k == 0 else docs.needed.of(index_T)
            x_RD, state = self.step(state, self.frozen.embed_VD[batch.token_ids_T[index]], docs, caches)
            x_KRD.append(x_RD)
        return x_KRD

    @torch.no_grad()
    def propose(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        docs = Documents(batch.offsets_S1, batch.token_ids_T.device)
        index, _ = docs.shifted(1)
        tokens_T, state, caches = batch.token_ids_T[index], self.first_state(batch), self.caches()
        drafts, log_q = [], []
        for i in range(k):
            x_TD, state = self.step(state, self.frozen.embed_VD[tokens_T], docs, caches)
            tokens_T, score_T = self.choose(x_TD, i)
            drafts.append(tokens_T)
            log_q.append(score_T)
        return torch.stack(drafts, 1), torch.stack(log_q, 1)
