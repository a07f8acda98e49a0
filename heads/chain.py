"""What heads share that draft from every row of a pack: labels, loss, metrics, the draft vocabulary and greedy choice, over K depths.

Row t knows the tokens up to x_{t+ahead}, and its depth k predicts x_{t+ahead+1+k}. Heads that read the target's state of position t
know x_{t+1} too, which the target chose from it (ahead = 1); a language model reads x_t itself (ahead = 0).

Shape suffixes: T packed tokens, R rows of them that have a label, D hidden, U draft vocab, V vocab, K depths, L label positions.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor, nn

from heads.attention import Documents
from heads.base import Batch, DraftHead, Frozen, LossOut, TargetSpec, check_positive
from heads.losses import Labels, fused_loss
from heads.metrics import hits, rates
from heads.objectives import parse
from heads.teacher import Top, teacher_of

# Drafting level by level, as trees are: yields log q [R, V] after the R nodes of a level (first of the root, the last known token) and is
# sent the next level, the row of each node's parent in this one and its token, [R] int64 both.
Levels = Generator[Tensor, tuple[Tensor, Tensor], None]


class ChainHead(DraftHead):
    """Subclasses give `outputs` and `propose`; this class gives depths, labels, loss, metrics and the draft vocabulary."""

    ahead = 1

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
        check_positive(depths=depths, loss_chunk=loss_chunk)
        if not 0 < depth_decay <= 1:
            raise ValueError(f"head.depth_decay must be in (0, 1], not {depth_decay}")
        if draft_vocab_size is not None and not 1 <= draft_vocab_size <= target.vocab_size:
            raise ValueError(f"head.draft_vocab_size must be null or in 1..{target.vocab_size}, the target's size, not {draft_vocab_size}")
        self.target, self.depths, self.loss_chunk = target, depths, loss_chunk
        self.depth_weights = tuple(depth_decay**k for k in range(depths))
        self.shares = [1.0] * depths  # of the anchors that training works on, at each depth
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

    def head_rows(self, k: int) -> Tensor:
        """lm_head rows [U, D] of depth k. Here one lm_head serves all depths."""
        return self.teacher_UD if self.lm_head is None else self.lm_head.weight

    def outputs(self, batch: Batch, docs: Documents, labels: Labels) -> list[Tensor]:
        """Per depth the inputs of lm_head [R, D], over the batch's own tokens, at the rows that `labels` need. Turns labels.row_KL from
        places in the pack into rows of these, and may leave out labels there and weigh the others in labels.weight_KL."""
        raise NotImplementedError

    def more_loss(self, x_KRD: list[Tensor], batch: Batch, labels: Labels) -> Tensor | None:
        """Sums per depth [K], float32 with gradient, over the rows of `labels`, of what a head trains on beside the distribution."""
        return None

    def labels(self, batch: Batch, docs: Documents) -> Labels:
        """Label positions: row j predicts x_{j+1}, supervised where x_{j+1} is. Depth k of row t has the label of row t + ahead + k.
        x_0 and x_1 are no labels: before an engine drafts it has a prompt and the first token of the answer."""
        index, inside = docs.shifted(1)
        position_L = (batch.loss_mask_T[index] & inside).nonzero().squeeze(1)
        depth_K1 = torch.arange(self.depths, device=position_L.device)[:, None]
        inside_KL = docs.positions_T[position_L] >= 1 + depth_K1
        token_L = self.draft_index(batch.token_ids_T[index][position_L])
        return Labels(position_L, torch.where(inside_KL, position_L - self.ahead - depth_K1, -1), token_L)

    def worked(self, tokens: int) -> tuple[float, float]:
        """What training works on in a batch of so many tokens, over all depths: (times a row passes the matrices, all of them together,
        times one reaches an lm_head)."""
        return tokens * sum(self.shares), tokens * sum(self.shares)

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
        x_KRD, known = self.outputs(batch, docs, labels), self._known(batch)
        weight_K = torch.ones(self.depths, device=count_K.device) if weight_K is None else weight_K
        total, loss_K = torch.zeros((), device=weight_K.device), torch.zeros(self.depths, device=weight_K.device)
        for depths, part in self._by_lm_head(labels):
            x, heads = [x_KRD[k] for k in depths], (self.head_rows(depths[0]), self.teacher_UD)
            about = {"loss": self.mixture, "chunk": self.loss_chunk, "softcap": self.target.logit_softcap}
            part_total, loss_K[depths] = fused_loss(x, *heads, known, part, weight_K[depths], **about)
            total = total + part_total
        more_K = self.more_loss(x_KRD, batch, labels)
        if more_K is not None:
            total, loss_K = total + (more_K * weight_K).sum(), loss_K + more_K.detach()
        metrics = {} if self.training else self._metrics(x_KRD, batch, docs, labels)
        return LossOut(total, loss_K, count_K, metrics)

    def _known(self, batch: Batch) -> Tensor | Top | None:
        """What the teacher is made of. None where the head asks for none, also where the batch has it: what is measured must not depend
        on what else a store holds."""
        return None if self.needs_last == "none" else teacher_of(batch, self.target.vocab_size, self.draft_index)

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
        """An engine drafts from an anchor once it knows the tokens up to a generated one."""
        hit_KR = torch.zeros(self.depths, len(x_KRD[0]), dtype=torch.bool, device=labels.row_KL.device)
        lm_head_VD, known = self.frozen.lm_head_VD, self._known(batch)
        for depths, part in self._by_lm_head(labels):
            x = [x_KRD[k] for k in depths]
            hit_KR[depths] = hits(x, self.head_rows(depths[0]), self.draft_ids_U, lm_head_VD, known, part, self.loss_chunk)
        index_T, inside_T = docs.shifted(self.ahead)
        return rates(hit_KR, labels.row_KL, docs.needed.of(batch.loss_mask_T[index_T] & inside_T))

    def choose(self, x_TD: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Greedy target ids [T] of depth k and their log q [T] float32, from the inputs [T, D] of its lm_head."""
        best, score = [], []
        for x in x_TD.split(self.loss_chunk):
            top, choice = (x @ self.head_rows(k).T).float().log_softmax(-1).max(-1)
            best.append(choice if self.draft_ids_U is None else self.draft_ids_U[choice])
            score.append(top)
        return torch.cat(best), torch.cat(score)

    def log_q(self, x_RD: Tensor, k: int) -> Tensor:
        """log q of depth k over the target's vocabulary [R, V] float32, from the inputs [R, D] of its lm_head; -inf for a token that the
        draft vocabulary lacks."""
        log_q_RU = (x_RD @ self.head_rows(k).T).float().log_softmax(-1)
        if self.draft_ids_U is None:
            return log_q_RU
        return log_q_RU.new_full((len(x_RD), self.target.vocab_size), -torch.inf).index_copy(1, self.draft_ids_U, log_q_RU)
