"""Medusa (arXiv 2401.10774; vLLM model class `medusa`): K independent guesses at the next tokens, from the target's last state alone.

    r_0 = z_t;   r_j = r_{j-1} + SiLU(W_{k,j} r_{j-1} + b_{k,j});   logits_k = lm_head_k(r_n)  ->  x_{t+2+k}

The token x_{t+1}, which the engine knows when it drafts, is not read. W and b start at zero and lm_head_k as the target's rows, so
that every depth starts as the target's own distribution of x_{t+1}.

Shape suffixes: R rows.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from heads.base import Export, TargetSpec
from heads.last_state import LastStateHead, residual_blocks


class Medusa(LastStateHead):
    """depths: K guesses, each weighted depth_decay^k. loss: see heads.objectives. num_layers: residual blocks of each. train_lm_head:
    an lm_head for each depth, else the target's. loss_chunk: label positions per chunk. The vocabulary is the target's whole one,
    since vLLM 0.32 fails on the map of a reduced one."""

    def __init__(
        self,
        *,
        target: TargetSpec,
        depths: int = 4,
        depth_decay: float = 0.8,
        loss: str = "kl",
        num_layers: int = 1,
        train_lm_head: bool = False,
        loss_chunk: int = 1024,
    ) -> None:
        shared = {"depths": depths, "depth_decay": depth_decay, "loss": loss, "loss_chunk": loss_chunk}
        super().__init__(target=target, train_lm_head=train_lm_head, **shared)
        size = target.hidden_size
        self.blocks = residual_blocks([size] * depths, size, num_layers)
        self.num_layers = num_layers

    def step(self, k: int, state: Tensor, token_R: Tensor) -> tuple[Tensor, Tensor]:
        return self.blocks[k](state), state

    def export(self) -> Export:
        """The engine's class shares nothing with the target: the file holds its lm_head, once for all depths."""
        names = {name: re.sub(r"blocks\.(\d+)\.(\d+)\.linear", r"blocks.\1.layers.\2", name) for name in self.state_dict()}
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
            "truncated_vocab_size": self.target.vocab_size,
            "num_heads": self.depths,
            "num_hidden_layers": self.num_layers,
            "medusa_fc_bias": True,
            "original_lm_head": not self.lm_heads,
        }
        return Export(config, names, {} if self.lm_heads else {"lm_head.weight": self.frozen.lm_head_VD.detach()})

    def serving(self, k: int) -> dict[str, Any]:
        self.check_drafts(k)
        return {"method": "medusa", "num_speculative_tokens": k}
