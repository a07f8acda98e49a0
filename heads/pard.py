"""PARD (arXiv 2504.18583; vLLM method `draft_model` with `parallel_drafting`): a small Llama that drafts k tokens in one pass; the last
real token predicts the first of them, and k - 1 mask tokens behind it the others.

Trained on K groups over one text: group 0 is the text, and group i has a mask token at every position t >= i, standing for the i-th token
after the last known one, x_{t-i}, and predicting x_{t+1}. Query (i, t) sees (0, s) for s <= t - i and (i - d, t - d) for d = 0 .. i. By the
anchor a = t - i that is: the text up to a, and the anchor's own chain. Group i is therefore depth i of row a.

Shape suffixes: T packed tokens, R rows of them that are needed, V vocab, K depths, L label positions, n anchors of a document.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from heads.attention import Documents, KeyValues
from heads.base import Batch, Export, TargetSpec
from heads.lm import LanguageModel
from heads.losses import Labels


class Pard(LanguageModel):
    """depths: K trained groups, of equal weight; more can be drafted. mask_token_id: an id that the text never holds, whose embedding
    row becomes the mask's. keep, keep_min: in training, group i holds the share max(keep^i, keep_min) of the anchors
    (1: all). num_layers, hidden_size, num_heads, num_kv_heads, intermediate_size: the model's own, heads of hidden_size /
    num_heads. tie_embeddings: the lm_head is the embedding. loss: see heads.objectives. loss_chunk: label positions per chunk."""

    def __init__(
        self,
        *,
        target: TargetSpec,
        mask_token_id: int,
        depths: int = 8,
        keep: float = 0.7,
        keep_min: float = 0.2,
        num_layers: int = 4,
        hidden_size: int = 512,
        num_heads: int = 8,
        num_kv_heads: int = 4,
        intermediate_size: int = 1536,
        tie_embeddings: bool = True,
        loss: str = "ce",
        loss_chunk: int = 1024,
    ) -> None:
        super().__init__(
            target=target,
            depths=depths,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            intermediate_size=intermediate_size,
            tie_embeddings=tie_embeddings,
            loss=loss,
            loss_chunk=loss_chunk,
        )
        if not 0 <= mask_token_id < target.vocab_size:
            raise ValueError(f"head.mask_token_id must be a row of the embedding, 0..{target.vocab_size - 1}, not {mask_token_id}")
        for key, value in (("keep", keep), ("keep_min", keep_min)):
            if not 0 < value <= 1:
                raise ValueError(f"head.{key} must be in (0, 1], not {value}")
        self.mask_token_id = mask_token_id
        self.shares = [max(keep**k, keep_min) for k in range(depths)]

    def outputs(self, batch: Batch, docs: Documents, labels: Labels) -> list[Tensor]:
        """In evaluation mode every group has all rows; in training each has those alone that it or a deeper one has labels at."""
        dropping = self.training and self.shares[-1] < 1
        if dropping:
            self._drop(batch, docs, labels)
        deepest_T = _deepest(labels, len(batch.token_ids_T)) if dropping else None
        docs.need(labels.row_KL)
        caches, x_KRD = self.caches(), []
        for k in range(self.depths):
            if k and deepest_T is not None:
                _narrow(docs, caches, deepest_T >= k)
            x_KRD.append(self.run(batch.token_ids_T if k == 0 else self.fed(docs.needed.index_R), docs, caches))
            labels.row_KL[k] = docs.needed.place(labels.row_KL[k])
        return x_KRD

    def fed(self, drafts_T: Tensor) -> Tensor:
        return torch.full_like(drafts_T, self.mask_token_id)

    def _drop(self, batch: Batch, docs: Documents, labels: Labels) -> None:
        """Conditional drop: leaves group k the first ceil(share_k n) of a document's n anchors in a random order. The order is one for all
        groups, hence who is kept at (k, a) is kept at (k - 1, a) too; a label that is kept stands for n / ceil(share_k n), which
        keeps the expectation of the sum, and its count, those of all labels."""
        rows_KL, ids_T = labels.row_KL.cpu(), batch.token_ids_T.cpu()
        anchors = rows_KL[rows_KL >= 0].unique()
        groups_T, weight_TK = torch.zeros(len(ids_T), dtype=torch.long), torch.ones(len(ids_T), self.depths)
        for start, _, end in docs.every.spans:
            mine_n = anchors[(anchors >= start) & (anchors < end)]
            kept_K = torch.tensor([math.ceil(share * len(mine_n)) for share in self.shares])
            order_n = torch.randperm(len(mine_n), generator=_generator(ids_T[start:end]))
            groups_T[mine_n] = (order_n[:, None] < kept_K).sum(1)
            weight_TK[mine_n] = len(mine_n) / kept_K
        there_KL = (rows_KL >= 0) & (torch.arange(self.depths)[:, None] < groups_T[rows_KL])
        device = labels.row_KL.device
        labels.row_KL = torch.where(there_KL, rows_KL, -1).to(device)
        labels.weight_KL = weight_TK.T.gather(1, rows_KL.clamp(min=0)).to(device)

    def export(self) -> Export:
        export = super().export()
        return Export(export.config | {"pard_token": self.mask_token_id}, export.names)

    def serving(self, k: int) -> dict[str, Any]:
        return super().serving(k) | {"parallel_drafting": True}


def _generator(ids_T: Tensor) -> torch.Generator:
    """Of one document: it follows from the seed of the step and the document alone, so that packing changes nothing."""
    digest = hashlib.blake2b(f"{torch.initial_seed()} {ids_T.tolist()}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _deepest(labels: Labels, total: int) -> Tensor:
    """The deepest group in which each row [T] has a label, -1 where in none, on the CPU."""
    deepest_T = torch.full((total,), -1)
    for k, rows in enumerate(labels.row_KL.cpu()):
        deepest_T[rows[rows >= 0]] = k
    return deepest_T


def _narrow(docs: Documents, caches: list[KeyValues], keep_T: Tensor) -> None:
    """From now on the needed rows are those of them where keep_T is set, and the diagonals hold no others."""
    before = docs.needed
    docs.keep(keep_T)
    kept = before.place(docs.needed.index_R)
    for cache in caches:
        cache.keep(kept)
