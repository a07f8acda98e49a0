"""What the language models share that draft for a target of their own tokenizer: small, Llama-shaped, blind to the target's states.

Row a reads token x_a, sits at position a and predicts x_{a+1}; its depth k predicts x_{a+1+k}. An engine asks row a once x_a is the last
token it has: the contract's row t is row t + 1 here.

Shape suffixes: T packed tokens, R rows of them that are needed, D hidden (the model's own), V vocab.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from heads.attention import Documents, KeyValues
from heads.base import Batch, Export, Frozen, TargetSpec, check_positive
from heads.chain import ChainHead
from heads.layers import Block, RMSNorm, llama_config
from heads.objectives import reads_target

INIT_STD = 0.02  # of the embedding, as Llama's: it is the lm_head too where they are tied


class LanguageModel(ChainHead):
    """Subclasses give `outputs`, and in `fed` what the next depth of a draft reads. The embedding is the model's own and trained; it
    and the lm_head begin as the target's where they have its hidden size."""

    ahead = 0

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
        super().__init__(target=target, depths=depths, depth_decay=1.0, loss_chunk=loss_chunk, loss=loss)
        sizes = {"num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads}
        sizes |= {"num_kv_heads": num_kv_heads, "intermediate_size": intermediate_size}
        check_positive(**sizes)
        if hidden_size % (2 * num_heads):
            raise ValueError(f"head.hidden_size must be head.num_heads={num_heads} heads of an even size, not {hidden_size}")
        if num_heads % num_kv_heads:
            raise ValueError(f"head.num_kv_heads must divide head.num_heads={num_heads}, not {num_kv_heads}")
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

    def head_rows(self, k: int) -> Tensor:
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

    def fed(self, drafts_T: Tensor) -> Tensor:
        """Tokens [T] that the next depth reads, given what this one drafts."""
        raise NotImplementedError

    @torch.no_grad()
    def propose(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        docs = Documents(batch.offsets_S1, batch.token_ids_T.device)
        index, _ = docs.shifted(1)
        tokens_T, caches, drafts, log_q = batch.token_ids_T, self.caches(), [], []
        for i in range(k):
            draft_T, score_T = self.choose(self.run(tokens_T, docs, caches), i)
            drafts.append(draft_T)
            log_q.append(score_T)
            tokens_T = self.fed(draft_T)
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
