"""IBM's recurrent MLP as a draft of eval/vllm_plugin/drafts.py.

Shape suffixes: T rows, H hidden size of the target, W width of the state.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from eval.vllm_plugin.drafts import LastStateDraft

MLP_EPS = 1e-6


class ShiftedNorm(nn.Module):
    """x / rms(x) * weight + bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, MLP_EPS) + self.bias


class MLPDraft(LastStateDraft):
    """IBM's recurrent MLP, with embeddings and lm_heads of its own. State: [s, at depth 0 z | count]."""

    def build(self, draft: dict[str, Any], vllm_config: VllmConfig, prefix: str) -> None:
        size, tied = draft["inner_dim"], draft["tie_weights"]
        self.inner, self.tied, self.scale_input = size, tied, draft["scale_input"]
        sets, projections = (1, 2) if tied else (self.depths, self.depths)
        self.emb = nn.ModuleList(VocabParallelEmbedding(self.vocab_size, size, prefix=f"{prefix}.emb.{i}") for i in range(sets))
        self.proj = nn.ModuleList(nn.Linear(size if i else self.input_size, size, bias=False) for i in range(projections))
        self.ln = nn.ModuleList(ShiftedNorm(size) for _ in range(sets))
        self.head = nn.ModuleList(ParallelLMHead(self.vocab_size, size, prefix=f"{prefix}.head.{i}") for i in range(sets))
        self.has_own_embed_tokens = self.has_own_lm_head = True  # the proposer looks at these two; not second parameter names
        self.model.__dict__["embed_tokens"], self.__dict__["lm_head"] = self.emb[0], self.head[0]
        state_weight = 0.5 ** (0.5 / self.depths)
        self.embed_scale = math.sqrt((1 - state_weight**2) * size / 2) / state_weight

    @property
    def distinct_heads(self) -> int:
        return len(self.head)

    def lm_head_of(self, k: int) -> nn.Module:
        return self.head[k]

    def start(self, last_TH: Tensor) -> Tensor:
        return F.rms_norm(last_TH, last_TH.shape[-1:], eps=MLP_EPS) / math.sqrt(2) if self.scale_input else last_TH

    def advance(self, k: int, ids_T: Tensor, state_TW: Tensor) -> tuple[Tensor, Tensor]:
        i, j = (0, min(k, 1)) if self.tied else (k, k)
        before = state_TW[:, : self.inner if k else self.input_size]
        x = self.proj[j](before).add(self.emb[i](ids_T), alpha=self.embed_scale)
        x = F.gelu(self.ln[i](x))
        return x, x
