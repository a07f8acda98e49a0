"""A draft model in the classic sense (Leviathan et al. 2023; vLLM method `draft_model`): a small Llama of the target's tokenizer, distilled
on the target's own text. It reads tokens alone, so that with the loss `ce` no hidden states need be stored at all.

    h = E'(x_a);   h = Block_n(.. Block_1(h));   logits = lm_head'(RMS(h)), of x_{a+1};   a draft is fed back as the next token
"""

from __future__ import annotations

from torch import Tensor

from heads.attention import Documents
from heads.base import Batch, TargetSpec
from heads.lm import LanguageModel
from heads.losses import Labels


class DraftLM(LanguageModel):
    """num_layers, hidden_size, num_heads, num_kv_heads, intermediate_size: the model's own, heads of hidden_size / num_heads.
    tie_embeddings: the lm_head is the embedding. loss: see heads.objectives. loss_chunk: label positions per chunk."""

    def __init__(
        self,
        *,
        target: TargetSpec,
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
            depths=1,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            intermediate_size=intermediate_size,
            tie_embeddings=tie_embeddings,
            loss=loss,
            loss_chunk=loss_chunk,
        )

    def outputs(self, batch: Batch, docs: Documents, labels: Labels) -> list[Tensor]:
        docs.need(labels.row_KL)
        labels.row_KL = docs.needed.place(labels.row_KL)
        return [self.run(batch.token_ids_T, docs, self.caches())]

    def fed(self, drafts_T: Tensor) -> Tensor:
        return drafts_T
