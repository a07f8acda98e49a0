"""Gemma 4's MTP drafter, its "assistant" (transformers `gemma4_assistant`, vLLM class `Gemma4MTPModel`): a small decoder without keys and
values of its own. Its layers ask queries of the target's: of the last layer of each kind of attention that makes its own.

    x = W_pre [sqrt(D) E(token) ; s];   x = Layer_n(.. Layer_1(x));   y = RMS(x);   logits = E' y;   next s = W_post y

s is the target's last state after its final norm, at later depths the drafter's own. Every depth of row t asks from position t and sees
the target's keys and values up to t: nothing is written between drafts, so the position does not move either (vLLM; transformers' own
generator asks from t + 1). In the engine row t is the last token that the target has read.

Shape suffixes: T packed tokens, R rows of them that are needed, D hidden of the target, E hidden of the head, N query heads, M key/value
heads, H head size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.attention import Documents, KeyValues, Rows
from heads.base import Batch, Export, Frozen, TargetSpec, check_positive
from heads.flash import grouped
from heads.kernels import rotate
from heads.layers import MLP, Attention, RMSNorm, rope_tables
from heads.recurrent import RecurrentHead
from heads.target import AttentionKind

QUERIES = 256  # of one call of attention: bounds its mask


def attend(q: Tensor, cache: KeyValues, rows: Rows, window: int | None) -> Tensor:
    """Queries [R, N, H] at `rows` over the target's keys and values [T, M, H] of their own document: up to the row's position, and of those
    no more than `window`. Logits are not scaled: the norms of q and k do that. Returns [R, N, H]."""
    keys, values, group, out = cache.keys[0], cache.values[0], q.shape[1] // cache.keys[0].shape[1], []
    for here, (start, first, end) in rows.parts():
        whole = here.stop - here.start == end - first  # else rows of the span were left out, or are there more than once
        for i in range(here.start, here.stop, QUERIES):
            part = slice(i, min(i + QUERIES, here.stop))
            low, high = (first + i - here.start, first + part.stop - here.start) if whole else (first, end)
            low = start if window is None else max(start, low - window + 1)
            place_Q1, seen = rows.index_R[part, None], torch.arange(low, high, device=q.device)
            mask = seen <= place_Q1 if window is None else (seen <= place_Q1) & (seen > place_Q1 - window)
            queries = q[part].unflatten(1, (-1, group)).permute(1, 2, 0, 3)
            k, v = (grouped(x[low:high], group) for x in (keys, values))
            mixed = F.scaled_dot_product_attention(queries, k, v, mask, scale=1.0)
            out.append(mixed.permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(out) if out else q


class QueryAttention(Attention):
    """Queries alone, each normed."""

    def __init__(self, spec: TargetSpec, window: int | None) -> None:
        super().__init__(spec, spec.hidden_size, own_kv=False)
        self.q_norm, self.window = RMSNorm(spec.head_dim, spec.rms_norm_eps), window

    def forward(self, x: Tensor, cache: KeyValues, rows: Rows) -> Tensor:  # type: ignore[override]
        """x [R, E]. Returns [R, E]."""
        q = self.q_norm(self.q_proj(x).unflatten(1, (-1, self.spec.head_dim)))
        q = rotate(q, *rope_tables(self.spec, rows.positions_R))
        return self.o_proj(attend(q, cache, rows, self.window).flatten(1))


class GeGLU(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class QueryLayer(nn.Module):
    """Norms before and after attention and MLP. layer_scalar: a constant of published drafters, which is not trained."""

    layer_scalar: Tensor

    def __init__(self, spec: TargetSpec, window: int | None) -> None:
        super().__init__()
        size, eps = spec.hidden_size, spec.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.self_attn, self.mlp = QueryAttention(spec, window), GeGLU(size, spec.intermediate_size)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, cache: KeyValues, rows: Rows) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cache, rows))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class Gemma4MTP(RecurrentHead):
    """layers: the kind of attention of each. hidden_size, num_heads, intermediate_size: the head's own; an attention head's size is the
    target's. depths: K recursions, each weighted depth_decay^k. loss: see heads.objectives. loss_chunk: label positions per chunk."""

    needs_last = "all"
    scaled = True
    recompute = None  # a depth leaves no keys of its own, which is what the next ones would be told

    def __init__(
        self,
        *,
        target: TargetSpec,
        layers: list[str],
        hidden_size: int = 512,
        num_heads: int = 4,
        intermediate_size: int = 2048,
        depths: int = 3,
        depth_decay: float = 0.8,
        loss: str = "kl",
        loss_chunk: int = 1024,
    ) -> None:
        super().__init__(target=target, depths=depths, depth_decay=depth_decay, loss=loss, loss_chunk=loss_chunk)
        kinds, sizes = _kinds(target), {"hidden_size": hidden_size, "num_heads": num_heads, "intermediate_size": intermediate_size}
        check_positive(**sizes)
        if depths < 2:
            raise ValueError(f"head.depths must be at least 2, not {depths}: the projection that is fed back learns from the second on")
        if not layers or not set(layers) <= set(kinds) or layers[-1] != "full_attention":
            raise ValueError(f"head.layers={layers}: must be kinds of the target's attention ({', '.join(kinds)}), the last full_attention")
        for name in layers:
            if num_heads % kinds[name]["num_kv_heads"]:
                raise ValueError(f"head.num_heads={num_heads}: cannot share the target's {kinds[name]['num_kv_heads']} heads of {name}")
        self.kinds, self.kind_of = {name: kinds[name] for name in sorted(set(layers))}, list(layers)
        self.kv_layers = tuple(kind["layer"] for kind in self.kinds.values())
        shape = dataclasses.replace(target, **sizes)
        parts = ("head_dim", "num_kv_heads", "rope_theta", "rope_scaling")
        specs = {name: dataclasses.replace(shape, **{key: kind[key] for key in parts}) for name, kind in self.kinds.items()}
        self.pre_projection = nn.Linear(2 * target.hidden_size, hidden_size, bias=False)
        self.layers = nn.ModuleList(QueryLayer(specs[name], kinds[name]["window"]) for name in layers)
        self.norm = RMSNorm(hidden_size, target.rms_norm_eps)
        self.post_projection = nn.Linear(hidden_size, target.hidden_size, bias=False)
        self.lm_head = nn.Linear(hidden_size, target.vocab_size, bias=False)

    def start_from(self, frozen: Frozen) -> None:
        """Nothing is the target's: another width."""

    def head_rows(self, k: int) -> Tensor:
        assert self.lm_head is not None
        return self.lm_head.weight

    def caches(self, batch: Batch) -> list[KeyValues]:
        assert len(batch.kv) == len(self.kv_layers)
        of_kind = dict(zip(self.kinds, batch.kv, strict=True))
        return [KeyValues([of_kind[name][:, 0]], [of_kind[name][:, 1]]) for name in self.kind_of]

    def first_state(self, batch: Batch) -> Tensor:
        assert batch.last_TD is not None
        return batch.last_TD

    def step(self, state: Tensor, embed: Tensor, docs: Documents, caches: list[KeyValues]) -> tuple[Tensor, Tensor]:
        rows, pair = docs.needed, torch.cat([embed * self.target.embed_scale, state], -1)
        x_RE = self.pre_projection(rows.of(pair) if len(pair) == rows.total else pair)
        for layer, cache in zip(self.layers, caches, strict=True):
            x_RE = layer(x_RE, cache, rows)
        y_RE = self.norm(x_RE)
        return y_RE, self.post_projection(y_RE)

    def export(self) -> Export:
        """vLLM's layout (models/gemma4_mtp.py): the lm_head is stored as the embedding that it is tied to; the engine puts the target's
        embedding in that one's place."""
        inner = ("layers.", "norm.")
        names = {name: f"model.{name}" if name.startswith(inner) else name for name in self.state_dict()}
        return Export(self._config(), names | {"lm_head.weight": "model.embed_tokens.weight"})

    def _config(self) -> dict[str, Any]:
        first = self.layers[0]
        assert isinstance(first, QueryLayer)
        shape = first.self_attn.spec
        overrides = {
            str(i): {"head_dim": self.kinds[name]["head_dim"], "num_key_value_heads": self.kinds[name]["num_kv_heads"]}
            for i, name in enumerate(self.kind_of)
        }
        return {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": self.target.hidden_size,
            "use_ordered_embeddings": False,
            "tie_word_embeddings": True,
            "text_config": {
                "model_type": "gemma4_text",
                "hidden_size": shape.hidden_size,
                "intermediate_size": shape.intermediate_size,
                "num_attention_heads": shape.num_heads,
                "num_key_value_heads": shape.num_kv_heads,
                "head_dim": shape.head_dim,
                "per_layer_config": overrides,
                "num_hidden_layers": len(self.kind_of),
                "num_kv_shared_layers": len(self.kind_of),
                "layer_types": self.kind_of,
                "sliding_window": next((kind["window"] for kind in self.kinds.values() if kind["window"]), self.target.max_positions),
                "rope_parameters": {name: _rope(kind) for name, kind in self.kinds.items()},
                "vocab_size": self.target.vocab_size,
                "rms_norm_eps": self.target.rms_norm_eps,
                "max_position_embeddings": self.target.max_positions,
                "hidden_activation": "gelu_pytorch_tanh",
                "attention_bias": False,
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": 0,
                "tie_word_embeddings": True,
            },
        }

    def serving(self, k: int) -> dict[str, Any]:
        return {"method": "mtp", "num_speculative_tokens": k}


def _kinds(target: TargetSpec) -> dict[str, AttentionKind]:
    if target.kinds is None:
        raise ValueError(
            f"heads.gemma4_mtp.Gemma4MTP reads the keys and values of a Gemma 4, and this target is a {target.architecture} "
            "(target.spec.kinds): choose head=mtp, which reads its last state alone"
        )
    return target.kinds


def _rope(kind: AttentionKind) -> dict[str, Any]:
    return {"rope_theta": kind["rope_theta"], **(kind["rope_scaling"] or {"rope_type": "default"})}
