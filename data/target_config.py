"""What a target's config.json says in its family's words: rotary embedding, Gemma 4's kinds of attention, GLM-4-MoE's experts, and what no
head can follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data.errors import UserError
from heads.target import Moe

# Keys by which Gemma 2, Granite, Cohere and MiniCPM scale or cap embeddings and logits, and families with norms of another formula.
# Gemma 4 (`gemma4`) has the plain norm again, and a head may know of its scale and cap.
SCALED = "final_logit_softcapping logits_scaling logit_scale embedding_multiplier scale_emb dim_model_base".split()
OTHER_NORM = ("gemma", "recurrent_gemma", "qwen3_next", "qwen3_5")


def check_supported(config: dict[str, Any], path: Path) -> None:
    """Refuses what would be wrong without a word: heads take embedding rows, RMSNorm(x) * weight and h @ lm_head as they are."""
    odd = [key for key in SCALED if config.get(key) not in (None, 1, 1.0)]
    kind = str(config.get("model_type"))
    if kind == "gemma4_text":
        return
    if kind.startswith(OTHER_NORM):
        odd.append(f"model_type {kind} (its norms multiply by 1 + weight)")
    if odd:
        raise UserError(
            f"{path}: {', '.join(odd)}: such targets are not supported, for states and loss would be wrong. Supported are those "
            "that read embedding, final RMSNorm and lm_head unscaled, such as Llama, Mistral, Qwen2 and Qwen3"
        )


def gemma4(folder: Path) -> dict[str, Any]:
    """What a TargetSpec says of a Gemma 4 beyond its dimensions. Read through its config class, which knows every form of them: sizes of
    full attention come as `global_head_dim` or layer by layer. UserError: a config that the class refuses."""
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(str(folder), local_files_only=True).get_text_config()
    except (ValueError, TypeError) as error:
        raise UserError(f"{folder / 'config.json'}: {str(error).strip().splitlines()[0]}: download the target again") from error
    kinds, own = {}, config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
    for layer, kind in enumerate(own):  # the last of each kind stays
        theta, scaling = rope({"rope_parameters": dict(config.rope_parameters[kind])})
        kinds[kind] = {
            "layer": layer,
            "num_kv_heads": config.per_layer_config[layer].num_key_value_heads,
            "head_dim": config.per_layer_config[layer].head_dim,
            "window": config.sliding_window if kind == "sliding_attention" else None,
            "rope_theta": theta,
            "rope_scaling": scaling,
        }
    return {"embed_scale": config.hidden_size**0.5, "logit_softcap": config.final_logit_softcapping, "kinds": kinds}


def glm4_moe(config: dict[str, Any], path: Path) -> Moe:
    """What a TargetSpec says of the layers of a GLM-4-MoE. UserError: a key is missing, or experts are chosen by groups, which none of this
    family asks for."""
    keys = {"experts": "n_routed_experts", "chosen": "num_experts_per_tok", "shared": "n_shared_experts"}
    keys |= {"expert_size": "moe_intermediate_size", "dense_layers": "first_k_dense_replace"}
    if missing := [key for key in keys.values() if not isinstance(config.get(key), int)]:
        raise UserError(f"{path}: no number for {', '.join(missing)}, which a glm4_moe needs: download the target again")
    if (groups := config.get("n_group", 1)) != 1:
        raise UserError(f"{path}: n_group={groups}: experts that are chosen by groups are not supported; known is n_group=1")
    return {
        "experts": config[keys["experts"]],
        "chosen": config[keys["chosen"]],
        "shared": config[keys["shared"]],
        "expert_size": config[keys["expert_size"]],
        "dense_layers": config[keys["dense_layers"]],
        "renormalize": bool(config.get("norm_topk_prob", True)),
        "scale": float(config.get("routed_scaling_factor", 1.0)),
        "qkv_bias": bool(config.get("attention_bias", False)),
        "qk_norm": bool(config.get("use_qk_norm", False)),
    }


def rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling or None). transformers 5: all in `rope_parameters`, perhaps one set per kind of layer, of which heads use
    the full-attention one. transformers 4: `rope_theta` beside `rope_scaling`, whose kind may be called `type`.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise UserError(f"config.json: rope_parameters or rope_scaling is {given!r}: must be null or a mapping. Download the target again.")
    scaling = dict(given.get("full_attention", given))
    theta = float(scaling.pop("rope_theta", config.get("rope_theta", 10000.0)))
    partial = scaling.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1.0):  # heads refuse it; left out here, they would rotate the whole of each head
        scaling["partial_rotary_factor"] = partial
    kind = scaling.pop("type", None)
    scaling.setdefault("rope_type", kind or "default")
    if scaling == {"rope_type": "default"}:
        return theta, None
    if "original_max_position_embeddings" in config:
        scaling.setdefault("original_max_position_embeddings", config["original_max_position_embeddings"])
    return theta, scaling
