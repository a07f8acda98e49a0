"""The frozen target as a head sees it: its dimensions, and the tensors that are handed over.

Shape suffixes: D hidden, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from torch import Tensor


class AttentionKind(TypedDict):
    """What queries need that read the target's keys and values of one of its kinds of attention."""

    layer: int  # the last one (from 0) of this kind that makes keys and values of its own
    num_kv_heads: int
    head_dim: int
    window: int | None  # a query sees so many positions, its own among them; None: all before it
    rope_theta: float
    rope_scaling: dict[str, Any] | None


class Moe(TypedDict):
    """The layers of a family with experts (heads/moe.py)."""

    experts: int
    chosen: int  # of them, for each token
    shared: int  # ones beside them that see every token
    expert_size: int  # inner width of one
    dense_layers: int  # so many first layers have an MLP instead
    renormalize: bool  # weights of the chosen ones sum to 1
    scale: float  # of their sum
    qkv_bias: bool
    qk_norm: bool  # on each head's q and k


@dataclass(frozen=True)
class TargetSpec:
    """The dimensions of a frozen target, as its config.json states them. Holds no weights."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    rope_scaling: dict[str, Any] | None = None
    architecture: str = "LlamaForCausalLM"
    tied_embeddings: bool = False
    embed_scale: float = 1.0  # what it multiplies its embedding's rows by
    logit_softcap: float | None = None  # c: its logits are c tanh(z / c)
    kinds: dict[str, AttentionKind] | None = None  # by name, of a family whose heads read its keys and values
    moe: Moe | None = None


@dataclass(frozen=True)
class Frozen:
    """The target's own parameters that a head reads and never trains: input embedding and output projection (one tensor where they
    are tied). A plain attribute of the head, so that no optimizer, checkpoint, ZeRO partition or dtype cast ever sees them."""

    embed_VD: Tensor
    lm_head_VD: Tensor
