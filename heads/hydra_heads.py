"""Hydra heads (arXiv 2402.05109): Medusa's guesses made in turn, each reading the tokens guessed before it.

    u = [z_t ; E(x_{t+1}) ; .. ; E(x_{t+1+k})];   r_1 = P_k u + c_k + SiLU(W_{k,1} u + b_{k,1})
    r_j = r_{j-1} + SiLU(W_{k,j} r_{j-1} + b_{k,j});   logits_k = lm_head_k(r_n)  ->  x_{t+2+k}

E is the target's embedding. W and b start at zero and P picks z_t, so that every depth starts as the target's own distribution of
x_{t+1}. Hydra++ (the same paper, section 3.2) reads, in place of z_t, a decoder layer over z_0 .. z_t: what one state leaves out of the
text before it. It starts as the identity. Served through the plug-in (eval/vllm_plugin): the engine's classes have none that does this.

Shape suffixes: T packed tokens, R rows, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heads.attention import Documents, KeyValues
from heads.base import Export, TargetSpec
from heads.last_state import LastStateHead, plugin_config, residual_blocks
from heads.layers import Block, llama_config


class HydraHeads(LastStateHead):
    """depths: K guesses, each weighted depth_decay^k. loss: see heads.objectives. num_layers: residual blocks of each. train_lm_head:
    an lm_head for each depth, else the target's. prefix_layer: Hydra++'s layer. loss_chunk: label positions per chunk."""

    def __init__(
        self,
        *,
        target: TargetSpec,
        depths: int = 4,
        depth_decay: float = 0.8,
        loss: str = "kl",
        num_layers: int = 1,
        train_lm_head: bool = False,
        prefix_layer: bool = False,
        loss_chunk: int = 1024,
    ) -> None:
        shared = {"depths": depths, "depth_decay": depth_decay, "loss": loss, "loss_chunk": loss_chunk}
        super().__init__(target=target, train_lm_head=train_lm_head, **shared)
        size = target.hidden_size
        self.blocks = residual_blocks([(k + 2) * size for k in range(depths)], size, num_layers)
        self.num_layers = num_layers
        self.prefix_layer = Block(target) if prefix_layer else None
        if self.prefix_layer is not None:
            for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                nn.init.zeros_(self.prefix_layer.get_parameter(name))

    def first_state(self, last_TD: Tensor, docs: Documents) -> Tensor:
        if self.prefix_layer is None:
            return super().first_state(last_TD, docs)
        return self.prefix_layer(last_TD, docs, KeyValues(), last=True)

    def step(self, k: int, state: Tensor, token_R: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.cat([state, self.frozen.embed_VD[token_R]], -1)
        return self.blocks[k](state), state

    def export(self) -> Export:
        """The plug-in's names are ours. Its state: z_t, and three base-256 digits for each drafted token that a later depth reads."""
        draft: dict[str, Any] = {"depths": self.depths, "num_layers": self.num_layers, "own_lm_heads": len(self.lm_heads) > 0}
        draft["prefix_layer"] = llama_config(self.target) if self.prefix_layer is not None else {}
        width = self.target.hidden_size + 3 * (self.depths - 1)
        config = plugin_config(self.target, "Eagle3HydraDraft", width, draft)
        return Export(config, {name: name for name in self.state_dict()})

    def serving(self, k: int) -> dict[str, Any]:
        self.check_drafts(k)
        return {"method": "eagle3", "num_speculative_tokens": k}
