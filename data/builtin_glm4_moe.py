"""The tensors and the config of a tiny random GLM-4-MoE with an MTP module (data/builtin.py makes a folder of them)."""

from __future__ import annotations

from typing import Any

import torch

V, D, HEADS, KV_HEADS, SIZE, INNER, LAYERS = 512, 64, 4, 2, 32, 128, 2
EXPERTS, CHOSEN, EXPERT_INNER, SHARED, DENSE = 4, 2, 32, 1, 1


def tensors() -> dict[str, torch.Tensor]:
    """Seeded, float32: a dense layer, a layer of experts, and the module (`model.layers.2.`) with its copies of embedding and lm_head, as
    published checkpoints have them."""
    generator = torch.Generator().manual_seed(0)

    def linear(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    def norm(size: int) -> torch.Tensor:  # unlike ones, so that none can be left out without a trace
        return 0.5 + torch.rand(size, generator=generator)

    def mlp(inner: int) -> dict[str, torch.Tensor]:
        return {"gate_proj.weight": linear(inner, D), "up_proj.weight": linear(inner, D), "down_proj.weight": linear(D, inner)}

    found = {"model.embed_tokens.weight": linear(V, D, gain=D**0.5), "lm_head.weight": linear(V, D, gain=4.0), "model.norm.weight": norm(D)}
    for i in range(LAYERS + 1):
        layer, attn, moe = f"model.layers.{i}.", f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        for name, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"{attn}{name}_proj.weight"] = linear(count * SIZE, D)
            found[f"{attn}{name}_proj.bias"] = linear(count * SIZE, 1)[:, 0]
        found[f"{attn}o_proj.weight"] = linear(D, HEADS * SIZE)
        found |= {f"{attn}{name}_norm.weight": norm(SIZE) for name in "qk"}
        found |= {f"{layer}{name}_layernorm.weight": norm(D) for name in ("input", "post_attention")}
        if i < DENSE:
            found |= {moe + name: x for name, x in mlp(INNER).items()}
            continue
        # A gain on the router spreads its scores: near-ties, where two ways of rounding choose other experts, are rare.
        found[f"{moe}gate.weight"] = linear(EXPERTS, D, gain=2.0)
        found[f"{moe}gate.e_score_correction_bias"] = torch.linspace(-0.3, 0.3, EXPERTS)
        for j in range(EXPERTS):
            found |= {f"{moe}experts.{j}.{name}": x for name, x in mlp(EXPERT_INNER).items()}
        found |= {f"{moe}shared_experts.{name}": x for name, x in mlp(EXPERT_INNER * SHARED).items()}
    module = f"model.layers.{LAYERS}."
    found |= {f"{module}{name}.weight": norm(D) for name in ("enorm", "hnorm", "shared_head.norm")}
    found |= {f"{module}eh_proj.weight": linear(D, 2 * D)}
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    return found | {f"{module}{name}.weight": found[f"{own}.weight"].clone() for name, own in copies.items()}


def config() -> dict[str, Any]:
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": SHARED,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": EXPERT_INNER,
        "first_k_dense_replace": DENSE,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
