"""Building blocks of draft heads, named as in Llama-family checkpoints so that export is mostly the identity.

Shape suffixes: T packed tokens, R rows of them (of block heads: slots), D hidden, N query heads, M key/value heads, H head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.attention import Documents, KeyValues, Pair, Rows, causal_diagonal
from heads.base import TargetSpec
from heads.block_attention import Blocks, block_attention
from heads.kernels import rms_norm, rotate, swiglu

Angles = tuple[Tensor, Tensor]  # cos, sin [*, H/2] of rotary embedding


class RMSNorm(nn.Module):
    """x / rms(x) * weight, statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def _llama3(inv_freq: Tensor, s: dict[str, Any]) -> Tensor:
    """Llama-3.1 frequency scaling (transformers `rope_type: llama3`)."""
    low, high, old = s["low_freq_factor"], s["high_freq_factor"], s["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    smooth = ((old / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / s["factor"] + smooth * inv_freq


def _yarn(inv_freq: Tensor, s: dict[str, Any], theta: float, size: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolates low frequencies, keeps high ones, and scales the attention logits."""
    old, factor = s["original_max_position_embeddings"], s["factor"]

    def dim(rotations: float) -> float:
        return size * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dim(s.get("beta_fast") or 32)), 0)
    high = min(math.ceil(dim(s.get("beta_slow") or 1)), size - 1)
    ramp = ((torch.arange(size // 2, dtype=torch.float32, device=inv_freq.device) - low) / max(high - low, 1e-3)).clamp(0, 1)
    scale = s.get("attention_factor") or 0.1 * math.log(factor) + 1.0
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), scale


def rope_tables(spec: TargetSpec, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [*, H/2] float32 of rotary embedding at integer `positions`, for every scaling kind that Llama-like targets use; of the
    part of each head that turns, where that is not the whole."""
    theta, s = spec.rope_theta, spec.rope_scaling or {}
    kind, scale, part = s.get("rope_type", s.get("type", "default")), 1.0, s.get("partial_rotary_factor", 1.0)
    size = spec.head_dim if kind == "proportional" else int(spec.head_dim * part)
    # The same operations in the same order as transformers and vLLM: float32 rounding of the angles then agrees too.
    inv_freq = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size)
    if kind == "proportional":  # Gemma 4: the first frequencies turn, the others stand still
        inv_freq = inv_freq * (torch.arange(size // 2, device=positions.device) < int(part * size // 2))
    elif kind == "linear":
        inv_freq = inv_freq / s["factor"]
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, s)
    elif kind == "yarn":
        inv_freq, scale = _yarn(inv_freq, s, theta, size)
    elif kind != "default":
        raise ValueError(f"rope scaling {kind!r} of the target is not supported (known: default, linear, llama3, yarn)")
    angle = positions.float()[..., None] * inv_freq
    return angle.cos() * scale, angle.sin() * scale


class Attention(nn.Module):
    """Grouped-query attention of one draft layer over all depths: causal over depth 0, own chain beyond it. own_kv: makes keys and
    values, which a subclass may find elsewhere. qk_norm: a norm on each head's q and k. partial: a part of each head may turn."""

    def __init__(
        self,
        spec: TargetSpec,
        input_size: int,
        qkv_bias: bool = False,
        own_kv: bool = True,
        qk_norm: bool = False,
        partial: bool = False,
    ) -> None:
        super().__init__()
        scaling = spec.rope_scaling or {}
        if not partial and scaling.get("rope_type") != "proportional" and (part := scaling.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ValueError(f"rotary embedding of a part of each head (partial_rotary_factor={part}) is not supported by this head")
        try:
            rope_tables(spec, torch.zeros(1))  # here rather than in the first step: what the target asks for must be known
        except (KeyError, TypeError) as error:
            raise ValueError(f"rope scaling {spec.rope_scaling} of the target is not complete: {error}") from None
        self.spec = spec
        self.q_proj = nn.Linear(input_size, spec.num_heads * spec.head_dim, bias=qkv_bias)
        if own_kv:
            self.k_proj = nn.Linear(input_size, spec.num_kv_heads * spec.head_dim, bias=qkv_bias)
            self.v_proj = nn.Linear(input_size, spec.num_kv_heads * spec.head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, spec.hidden_size, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(spec.head_dim, spec.rms_norm_eps) if qk_norm else nn.Identity() for _ in range(2))

    def partly(self, x: Tensor) -> Tensor:
        """[*, (N + 2 M) H]: q, k and v side by side, as far as the first features of the input make them, which x has."""
        return torch.cat([F.linear(x, proj.weight[:, : x.shape[-1]]) for proj in (self.q_proj, self.k_proj, self.v_proj)], -1)

    def forward(self, x: Tensor, docs: Documents, cache: KeyValues, rows: Rows, before: Tensor | None = None) -> Tensor:
        """x: [T, input] at depth 0, at later depths [R, input], its rows that are needed, or [1, input] where they are all the same.
        `cache` holds the keys and values of the earlier depths and receives this one's. rows: where queries are asked. before: of the
        first features of the input what `partly` makes; x then has the others. Returns [R, D]."""
        depth, size = len(cache.keys), self.spec.head_dim
        cos, sin = rope_tables(self.spec, (rows.positions_R if depth else docs.positions_T) + depth)
        sizes = [proj.out_features for proj in (self.q_proj, self.k_proj, self.v_proj)]
        of_q, of_k, of_v = [None] * 3 if before is None else before.split(sizes, -1)
        cache.keys.append(rotate(self.k_norm(_linear(self.k_proj, x, of_k).unflatten(1, (-1, size))), cos, sin))
        cache.values.append(_linear(self.v_proj, x, of_v).unflatten(1, (-1, size)).expand(len(cos), -1, -1))
        if depth == 0:
            x, cos, sin = rows.of(x), rows.of(cos), rows.of(sin)
            of_q = None if of_q is None else rows.of(of_q)
        q = rotate(self.q_norm(_linear(self.q_proj, x, of_q).unflatten(1, (-1, size))), cos, sin)
        return self.o_proj(causal_diagonal(q, cache.keys, cache.values, rows, size**-0.5).flatten(1))


def _linear(proj: nn.Linear, x: Tensor, before: Tensor | None) -> Tensor:
    """proj of [what made `before` ; x], or of x."""
    return proj(x) if before is None else torch.addmm(before, x, proj.weight[:, -x.shape[1] :].T)


def rows_at(docs: Documents, cache: KeyValues, last: bool) -> Rows:
    """Where a layer asks queries. At depth 0 the keys of the next layer need every row."""
    return docs.needed if last or cache.keys else docs.every


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Block(nn.Module):
    """Pre-norm decoder layer. `input_norm=False` leaves out the norm before attention, as EAGLE-1 does in its first layer; `qkv_bias`
    adds Qwen2's biases. mlp: what stands in its place; qk_norm, partial: see Attention."""

    def __init__(
        self,
        spec: TargetSpec,
        input_norm: bool = True,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        partial: bool = False,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps) if input_norm else nn.Identity()
        self.self_attn = Attention(spec, spec.hidden_size, qkv_bias, qk_norm=qk_norm, partial=partial)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp: Any = mlp or MLP(spec.hidden_size, spec.intermediate_size)

    def forward(self, x: Tensor, docs: Documents, cache: KeyValues, last: bool) -> Tensor:
        """x as in Attention.forward. last: no layer follows, so that at depth 0 too only the needed rows are worked out."""
        rows = rows_at(docs, cache, last)
        residual = x if cache.keys else rows.of(x)
        h = residual + self.self_attn(self.input_layernorm(x), docs, cache, rows)
        return h + self.mlp(self.post_attention_layernorm(h))


class BlockAttention(Attention):
    """Attention of the slots of draft blocks (heads/block.py), with a norm on each head's q and k, as in Qwen3."""

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__(spec, spec.hidden_size, qk_norm=True)

    def keys_values(self, x: Tensor, angles: Angles) -> Pair:
        k, v = (proj(x).unflatten(1, (-1, self.spec.head_dim)) for proj in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(k), *angles), v

    def forward(self, x: Tensor, context: Pair, blocks: Blocks, angles: Angles) -> Tensor:  # type: ignore[override]
        """x [R, D]; context: `keys_values` of what the blocks read, for the whole pack. Returns [R, D]."""
        q = rotate(self.q_norm(self.q_proj(x).unflatten(1, (-1, self.spec.head_dim))), *angles)
        mixed = block_attention(q, self.keys_values(x, angles), context, blocks, self.spec.head_dim**-0.5)
        return self.o_proj(mixed.flatten(1))


class BlockLayer(nn.Module):
    """Pre-norm decoder layer of the slots of draft blocks."""

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = BlockAttention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec.hidden_size, spec.intermediate_size)

    def forward(self, x: Tensor, context: Pair, blocks: Blocks, angles: Angles) -> Tensor:
        """See BlockAttention.forward."""
        h = x + self.self_attn(self.input_layernorm(x), context, blocks, angles)
        return h + self.mlp(self.post_attention_layernorm(h))


def llama_config(spec: TargetSpec) -> dict[str, Any]:
    """The config.json fields of a Llama-shaped draft with the target's dimensions. Rope equals the target's."""
    return {
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rope_theta,
        "rope_scaling": spec.rope_scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
