"""What feed-forward heads on the target's last state share (Medusa, Hydra heads, IBM's MLP).

Depth k of row t reads z_t, the target's state after its final norm, and of the tokens x_{t+1} .. x_{t+1+k} as many as the head
looks at; it predicts x_{t+2+k}. No depth has attention of its own. Training feeds the true tokens, drafting the drafted ones. Every
depth has parameters of its own, so a head drafts at most as many tokens as it has depths.

Shape suffixes: T packed tokens, R rows of them that have a label, D hidden, V vocab.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.attention import Documents
from heads.base import Batch, Frozen, TargetSpec, check_positive
from heads.chain import ChainHead, Levels
from heads.losses import Labels


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), W and b zero at the start: the identity. Between two sizes the skip is a linear map, which starts as the
    identity on the first inputs and zero on the others."""

    def __init__(self, input_size: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(input_size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.res_connection = nn.Linear(input_size, size) if input_size != size else None
        if self.res_connection is not None:
            nn.init.eye_(self.res_connection.weight)
            nn.init.zeros_(self.res_connection.bias)

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.res_connection is None else self.res_connection(x)) + F.silu(self.linear(x))


def residual_blocks(input_sizes: list[int], size: int, num_layers: int) -> nn.ModuleList:
    """num_layers blocks for each depth, of parameters of their own; the first of each reads its input_sizes."""
    check_positive(num_layers=num_layers)
    later = range(num_layers - 1)
    return nn.ModuleList(nn.Sequential(ResidualBlock(n, size), *(ResidualBlock(size, size) for _ in later)) for n in input_sizes)


class LastStateHead(ChainHead):
    """Subclasses give `step`. train_lm_head: an lm_head for each depth, which begins as the target's, instead of the target's."""

    needs_last = "all"

    def __init__(self, *, target: TargetSpec, depths: int, depth_decay: float, loss: str, loss_chunk: int, train_lm_head: bool) -> None:
        super().__init__(target=target, depths=depths, depth_decay=depth_decay, loss=loss, loss_chunk=loss_chunk)
        count = depths if train_lm_head else 0
        self.lm_heads = nn.ModuleList(nn.Linear(target.hidden_size, target.vocab_size, bias=False) for _ in range(count))

    @torch.no_grad()
    def start_from(self, frozen: Frozen) -> None:
        for k in range(len(self.lm_heads)):
            self.head_rows(k).copy_(frozen.lm_head_VD)

    def head_rows(self, k: int) -> Tensor:
        return self.get_parameter(f"lm_heads.{k}.weight") if self.lm_heads else self.frozen.lm_head_VD

    def first_state(self, last_TD: Tensor, docs: Documents) -> Tensor:
        """[R, *] what depth 0 reads of the target's last state, at the needed rows of `docs`."""
        return docs.needed.of(last_TD)

    def step(self, k: int, state: Tensor, token_R: Tensor) -> tuple[Tensor, Tensor]:
        """Depth k. state [R, *] of the depth before; token_R: x_{t+1+k}, int64. Returns (input of lm_head [R, *], state for the next
        depth)."""
        raise NotImplementedError

    def worked(self, tokens: int) -> tuple[float, float]:
        """Every depth has matrices of its own."""
        return tokens, tokens * self.depths

    def outputs(self, batch: Batch, docs: Documents, labels: Labels) -> list[Tensor]:
        docs.need(labels.row_KL)
        labels.row_KL = docs.needed.place(labels.row_KL)
        assert batch.last_TD is not None
        state, x_KRD = self.first_state(batch.last_TD, docs), []
        for k in range(self.depths):
            index_T, _ = docs.shifted(1 + k)
            x_RD, state = self.step(k, state, batch.token_ids_T[docs.needed.of(index_T)])
            x_KRD.append(x_RD)
        return x_KRD

    @torch.no_grad()
    def propose(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        self.check_drafts(k)
        assert batch.last_TD is not None
        docs = Documents(batch.offsets_S1, batch.token_ids_T.device)
        index_T, _ = docs.shifted(1)
        tokens_T, state = batch.token_ids_T[index_T], self.first_state(batch.last_TD, docs)
        drafts, log_q = [], []
        for i in range(k):
            x_TD, state = self.step(i, state, tokens_T)
            tokens_T, score_T = self.choose(x_TD, i)
            drafts.append(tokens_T)
            log_q.append(score_T)
        return torch.stack(drafts, 1), torch.stack(log_q, 1)

    @torch.no_grad()
    def levels(self, batch: Batch) -> Levels:
        """As heads.recurrent.RecurrentHead.levels; ends after head.depths levels."""
        assert batch.last_TD is not None
        docs = Documents(batch.offsets_S1, batch.token_ids_T.device)
        docs.repeat(len(batch.token_ids_T) - 2, 1)
        tokens_R, state = batch.token_ids_T[-1:], self.first_state(batch.last_TD, docs)
        for k in range(self.depths):
            x_RD, state = self.step(k, state, tokens_R)
            parent_R, tokens_R = yield self.log_q(x_RD, k)
            state = state[parent_R]

    def check_drafts(self, k: int) -> None:
        """ValueError: more drafts than depths."""
        if not 1 <= k <= self.depths:
            raise ValueError(f"head.depths={self.depths} makes 1 to {self.depths} drafts a pass, eval.k={k} asks for {k}")


def plugin_config(target: TargetSpec, architecture: str, width: int, draft_config: dict[str, Any]) -> dict[str, Any]:
    """config.json for the engine plug-in (eval/vllm_plugin): to the engine, a Llama of one layer whose hidden size holds `width`
    channels and one more. That size is a multiple of the target's heads, so that tensor parallelism divides what it divides there.

    step_mode: "host" reads the depth from the device once a pass; "tensor" works out every depth and picks, as CUDA graphs need it."""
    unit = math.lcm(16, target.num_heads)
    size = -(-(width + 1) // unit) * unit
    return {
        "model_type": "llama",
        "architectures": [architecture],
        "hidden_size": size,
        "intermediate_size": size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": size // target.num_heads,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": target.rms_norm_eps,
        "tie_word_embeddings": False,
        "eagle_config": {"use_aux_hidden_state": False},
        "draft_config": {"target_hidden_size": target.hidden_size, "step_mode": "host"} | draft_config,
    }
