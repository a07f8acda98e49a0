"""What the language models share that draft for a target of their own tokenizer: small, Llama-shaped, blind to the target's states.

Row a reads token x_a, sits at position a and predicts x_{a+1}; its depth k predicts x_{a+1+k}. An engine asks row a once x_a is the last
token it has: the contract's row t is row t + 1 here. No label falls to row 0, from which no engine drafts: it has a token of the answer by
then, and a prompt before it.

Shape suffixes: T packed tokens, R rows of them that are needed, D hidden (the model's own), V vocab, K depths, L label positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from heads.attention import Documents, KeyValues
from heads.base import Batch, DraftHead, Export, Frozen, LossOut, TargetSpec
from heads.eagle3 import llama_config
from heads.layers import Block, RMSNorm
from heads.losses import Labels, fused_loss
from heads.metrics import hits
from heads.objectives import parse, reads_target

INIT_STD = 0.02  # of the embedding, as Llama's: it is the lm_head too where they are tied


class LanguageModel(DraftHead):
    """Subclasses give `outputs`, and in `fed` what the next depth of a draft reads. The embedding is the model's own and trained; it
    and the lm_head begin as the target's where they have its hidden size."""

    def __init__(
        self,
        *,
        target: TargetSpec,
        depths: int,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        intermediate_size: int,
        tie_embeddings: bool,
        loss: str,
        loss_chunk: int,
    ) -> None:
        super().__init__()
        self.mixture = parse(loss)
        sizes = {"depths": depths, "num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads}
        sizes |= {"num_kv_heads": num_kv_heads, "intermediate_size": intermediate_size, "loss_chunk": loss_chunk}
        for key, value in sizes.items():
            if value < 1:
                raise ValueError(f"head.{key} must be at least 1, not {value}")
        if hidden_size % (2 * num_heads):
            raise ValueError(f"head.hidden_size must be head.num_heads={num_heads} heads of an even size, not {hidden_size}")
        if num_heads % num_kv_heads:
            raise ValueError(f"head.num_kv_heads must divide head.num_heads={num_heads}, not {num_kv_heads}")
        self.target, self.depths, self.loss_chunk = target, depths, loss_chunk
        self.depth_weights = (1.0,) * depths
        self.needs_last = "supervised" if reads_target(self.mixture) else "none"
        self.shape = dataclasses.replace(
            target,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=hidden_size // num_heads,
            intermediate_size=intermediate_size,
            tied_embeddings=tie_embeddings,
        )
        self.embed_tokens = nn.Embedding(target.vocab_size, hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=INIT_STD)
        self.layers = nn.ModuleList(Block(self.shape) for _ in range(num_layers))
        self.norm = RMSNorm(hidden_size, target.rms_norm_eps)
        self.lm_head = None if tie_embeddings else nn.Linear(hidden_size, target.vocab_size, bias=False)

    @torch.no_grad()
    def start_from(self, frozen: Frozen) -> None:
        if self.shape.hidden_size == self.target.hidden_size:
            self.embed_tokens.weight.copy_(frozen.embed_VD)
            if self.lm_head is not None:
                self.lm_head.weight.copy_(frozen.lm_head_VD)

    @property
    def _head_VD(self) -> Tensor:
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def caches(self) -> list[KeyValues]:
        """Empty key/value caches, one per layer."""
        return [KeyValues() for _ in self.layers]

    def run(self, tokens: Tensor, docs: Documents, caches: list[KeyValues]) -> Tensor:
        """One depth over tokens [T] at depth 0 (empty caches), then [R] at the needed rows of `docs`. Returns lm_head's input [R, D]."""
        h = self.embed_tokens(tokens)
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True), start=1):
            h = layer(h, docs, cache, last=i == len(self.layers))
        return self.norm(h)

    def outputs(self, batch: Batch, docs: Documents, labels: Labels) -> list[Tensor]:
        """Per depth the inputs [R, D] of the lm_head. On return labels.row_KL says where among them each label's row lies; where
        labels were left out, labels.weight_KL makes up for it."""
        raise NotImplementedError

    def fed(self, drafts_T: Tensor) -> Tensor:
        """Tokens [T] that the next depth reads, given what this one drafts."""
        raise NotImplementedError

    def labels(self, batch: Batch, docs: Documents) -> Labels:
        """Label positions: row j predicts x_{j+1}, supervised where x_{j+1} is. Depth k of row a has the label of row a + k."""
        index, inside = docs.shifted(1)
        position_L = (batch.loss_mask_T[index] & inside).nonzero().squeeze(1)
        depth_K1 = torch.arange(self.depths, device=position_L.device)[:, None]
        inside_KL = docs.positions_T[position_L] >= 1 + depth_K1
        return Labels(position_L, torch.where(inside_KL, position_L - depth_K1, -1), batch.token_ids_T[index][position_L])

    def count(self, batch: Batch) -> Tensor:
        docs = Documents(batch.offsets_S1, batch.token_ids_T.device)
        return (self.labels(batch, docs).row_KL >= 0).sum(1)

    def loss(self, batch: Batch, weight_K: Tensor | None = None) -> LossOut:
        """The mixture of losses at every supervised position, per depth; hits in evaluation mode."""
        docs = Documents(batch.offsets_S1, batch.token_ids_T.device)
        labels = self.labels(batch, docs)
        count_K = (labels.row_KL >= 0).sum(1)
        x_KRD = self.outputs(batch, docs, labels)
        last_TD = self._teacher_states(batch)
        weight_K = torch.ones(self.depths, device=count_K.device) if weight_K is None else weight_K
        lm_head_VD = self.frozen.lm_head_VD
        total, loss_K = fused_loss(x_KRD, self._head_VD, lm_head_VD, last_TD, labels, weight_K, self.mixture, self.loss_chunk)
        return LossOut(total, loss_K, count_K, {} if self.training else self._metrics(x_KRD, batch, docs, labels))

    def _teacher_states(self, batch: Batch) -> Tensor | None:
        """None where the loss does not ask for the target, also where the batch has its states: what is measured must not depend on
        what else a store holds."""
        if self.needs_last == "none":
            return None
        assert batch.last_TD is not None
        return batch.last_TD

    def _metrics(self, x_KRD: list[Tensor], batch: Batch, docs: Documents, labels: Labels) -> dict[str, tuple[Tensor, Tensor]]:
        """hit: share of positions whose first choice is the target's, or the text's own token where the loss asks for no target.
        accept: share of anchors whose first k + 1 choices all are, over anchors that an engine can draft from."""
        last_TD = self._teacher_states(batch)
        hit_KR = hits(x_KRD, self._head_VD, None, self.frozen.lm_head_VD, last_TD, labels, self.loss_chunk)
        valid_KR = torch.zeros_like(hit_KR)
        for k, found in enumerate(labels.row_KL):
            valid_KR[k, found[found >= 0]] = True
        anchor_KR = valid_KR.cumprod(0).bool() & docs.needed.of(batch.loss_mask_T)
        return {
            "hit": (hit_KR.sum(1), valid_KR.sum(1)),
            "accept": ((hit_KR.cumprod(0).bool() & anchor_KR).sum(1), anchor_KR.sum(1)),
        }

    @torch.no_grad()
    def propose(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        docs = Documents(batch.offsets_S1, batch.token_ids_T.device)
        index, _ = docs.shifted(1)
        tokens_T, caches, drafts, log_q = batch.token_ids_T, self.caches(), [], []
        for _ in range(k):
            parts = [x @ self._head_VD.T for x in self.run(tokens_T, docs, caches).split(self.loss_chunk)]
            top, choice = zip(*(logits.float().log_softmax(-1).max(-1) for logits in parts), strict=True)
            drafts.append(torch.cat(choice))
            log_q.append(torch.cat(top))
            tokens_T = self.fed(drafts[-1])
        return torch.stack(drafts, 1)[index], torch.stack(log_q, 1)[index]

    def export(self) -> Export:
        """An ordinary Llama of Hugging Face's layout (vLLM: models/llama.py), to be served as a draft model of its own."""
        names = {name: name if name.startswith("lm_head.") else f"model.{name}" for name in self.state_dict()}
        shape = {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": self.shape.num_layers,
            "tie_word_embeddings": self.shape.tied_embeddings,
        }
        return Export(llama_config(self.shape) | shape, names)

    def serving(self, k: int) -> dict[str, Any]:
        return {"method": "draft_model", "num_speculative_tokens": k}
