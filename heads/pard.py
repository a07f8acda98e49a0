"""PARD (arXiv 2504.18583; vLLM method `draft_model` with `parallel_drafting`): a small Llama that drafts k tokens in one pass; the last
real token predicts the first of them, and k - 1 mask tokens behind it the others.

Trained on K groups over one text: group 0 is the text, and group i has a mask token at every position t >= i, standing for the i-th token
after the last known one, x_{t-i}, and predicting x_{t+1}. Query (i, t) sees (0, s) for s <= t - i and (i - d, t - d) for d = 0 .. i. By the
anchor a = t - i that is: the text up to a, and the anchor's own chain. Group i is therefore depth i of row a.

Shape suffixes: T packed tokens, R rows of them that are needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.attention import Documents
from heads.base import Batch, Export, TargetSpec
from heads.lm import LanguageModel
from heads.losses import Labels
from heads.parallel import check_mask_token, each_depth, shares_of


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
        self.mask_token_id = check_mask_token(mask_token_id, target)
        self.shares = shares_of(keep, keep_min, depths)

    def outputs(self, batch: Batch, docs: Documents, labels: Labels) -> list[Tensor]:
        caches, x_KRD = self.caches(), []
        for k in each_depth(labels, docs, caches, batch.token_ids_T, self.shares if self.training else None):
            x_KRD.append(self.run(batch.token_ids_T if k == 0 else self.fed(docs.needed.index_R), docs, caches))
        return x_KRD

    def fed(self, drafts_T: Tensor) -> Tensor:
        return torch.full_like(drafts_T, self.mask_token_id)

    def export(self) -> Export:
        export = super().export()
        return Export(export.config | {"pard_token": self.mask_token_id}, export.names)

    def serving(self, k: int) -> dict[str, Any]:
        return super().serving(k) | {"parallel_drafting": True}
