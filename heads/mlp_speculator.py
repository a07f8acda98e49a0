"""IBM's recurrent MLP (arXiv 2404.19124; layout of fms-extras and of the ibm-ai-platform checkpoints).

    s_{-1} = z_t, or rms(z_t) / sqrt(2) with scale_input
    s_k = GELU(rms(P_k s_{k-1} + (w_e / w_s) E_k(x_{t+1+k})) * g_k + b_k);   logits_k = H_k s_k  ->  x_{t+2+k}
    w_s = 0.5^(0.5 / K),   w_e = sqrt((1 - w_s^2) * d / 2),   d = inner_dim

so that z_t makes up half of the last state's magnitude (with embeddings of deviation 1 / sqrt(d), as they start). Embeddings and
lm_heads are the head's own. tie_weights: one E, H, g, b for all depths, and one P for all but the first. Served through the plug-in
(eval/vllm_plugin): vLLM 0.32 has lost its own class for it.

Shape suffixes: R rows, D hidden, V vocab.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.attention import Documents
from heads.base import Export, TargetSpec
from heads.last_state import LastStateHead, plugin_config
from heads.layers import RMSNorm

EPS = 1e-6


class ShiftedRMSNorm(RMSNorm):
    """RMSNorm with a shift."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class MLPSpeculator(LastStateHead):
    """depths: K recursions, each weighted depth_decay^k. loss: see heads.objectives. inner_dim: size of the state, null for the target's
    hidden size. tie_weights, scale_input: see above. loss_chunk: label positions per chunk."""

    def __init__(
        self,
        *,
        target: TargetSpec,
        depths: int = 4,
        depth_decay: float = 0.8,
        loss: str = "kl",
        inner_dim: int | None = None,
        tie_weights: bool = True,
        scale_input: bool = True,
        loss_chunk: int = 1024,
    ) -> None:
        shared = {"depths": depths, "depth_decay": depth_decay, "loss": loss, "loss_chunk": loss_chunk}
        super().__init__(target=target, train_lm_head=False, **shared)
        if inner_dim is not None and inner_dim < 1:
            raise ValueError(f"head.inner_dim must be null or at least 1, not {inner_dim}")
        if tie_weights and depths < 2:
            raise ValueError("head.tie_weights needs head.depths of 2 or more: with one depth there is nothing to tie")
        size = target.hidden_size if inner_dim is None else inner_dim
        sets, projections = (1, 2) if tie_weights else (depths, depths)
        self.emb = nn.ModuleList(nn.Embedding(target.vocab_size, size) for _ in range(sets))
        self.proj = nn.ModuleList(nn.Linear(size if i else target.hidden_size, size, bias=False) for i in range(projections))
        self.ln = nn.ModuleList(ShiftedRMSNorm(size, EPS) for _ in range(sets))
        self.head = nn.ModuleList(nn.Linear(size, target.vocab_size, bias=False) for _ in range(sets))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.trunc_normal_(parameter, std=size**-0.5)
        self.inner_dim, self.tied, self.scale_input = size, tie_weights, scale_input
        state_weight = 0.5 ** (0.5 / depths)
        self.embed_scale = math.sqrt((1 - state_weight**2) * size / 2) / state_weight

    def worked(self, tokens: int) -> tuple[float, float]:
        return tokens * self.depths / len(self.proj), tokens * self.depths

    def head_rows(self, k: int) -> Tensor:
        return self.get_parameter(f"head.{0 if self.tied else k}.weight")

    def first_state(self, last_TD: Tensor, docs: Documents) -> Tensor:
        last_RD = super().first_state(last_TD, docs)
        return F.rms_norm(last_RD, last_RD.shape[-1:], eps=EPS) / math.sqrt(2) if self.scale_input else last_RD

    def step(self, k: int, state: Tensor, token_R: Tensor) -> tuple[Tensor, Tensor]:
        i = 0 if self.tied else k
        x = self.proj[min(k, 1) if self.tied else k](state).add(self.emb[i](token_R), alpha=self.embed_scale)
        x = F.gelu(self.ln[i](x))
        return x, x

    def export(self) -> Export:
        """The plug-in's names are ours, which are IBM's. Its state is as wide as the wider of z_t and s."""
        draft = {"depths": self.depths, "inner_dim": self.inner_dim, "tie_weights": self.tied, "scale_input": self.scale_input}
        config = plugin_config(self.target, "Eagle3MLPDraft", max(self.inner_dim, self.target.hidden_size), draft)
        return Export(config, {name: name for name in self.state_dict()})

    def serving(self, k: int) -> dict[str, Any]:
        self.check_drafts(k)
        return {"method": "eagle3", "num_speculative_tokens": k}
