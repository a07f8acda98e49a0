"""What vLLM's (0.32) class of a drafter reads that asks queries alone of the target's keys and values: models/gemma4_mtp.py."""

from __future__ import annotations

from typing import Any

from heads.base import TargetSpec

TOP_KEYS = "backbone_hidden_size use_ordered_embeddings tie_word_embeddings dtype".split()
KEYS = (
    "model_type hidden_size intermediate_size num_attention_heads num_hidden_layers layer_types per_layer_config rope_parameters "
    "sliding_window vocab_size rms_norm_eps max_position_embeddings hidden_activation attention_bias hidden_size_per_layer_input "
    "vocab_size_per_layer_input"
).split()
SCALINGS = "partial_rotary_factor rope_type factor".split()


def check_query_config(config: dict[str, Any], target: TargetSpec) -> list[str]:
    """Faults of config.json against itself and the target, as phrases. Queries that are rotated or cut otherwise than the target's keys
    load without a word."""
    text, kinds = config["text_config"], target.kinds or {}
    faults = [f"config key {key} is not set: the engine would take its own default" for key in TOP_KEYS if config.get(key) is None]
    faults += [f"text_config.{key} is not set: the engine would take its own default" for key in KEYS if text.get(key) is None]
    if faults:
        return faults
    same = {"backbone_hidden_size": target.hidden_size, "use_ordered_embeddings": False, "tie_word_embeddings": True}
    inner = {"vocab_size": target.vocab_size, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
    inner |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_hidden_layers": len(text["layer_types"])}
    faults = [f"{key} is {config[key]}, it must be {value}" for key, value in same.items() if config[key] != value]
    faults += [f"text_config.{key} is {text[key]}, it must be {value}" for key, value in inner.items() if text[key] != value]
    if text.get("final_logit_softcapping") is not None:
        faults.append("text_config.final_logit_softcapping is set: the head was trained without")
    if text["layer_types"][-1:] != ["full_attention"]:
        faults.append("the last of text_config.layer_types must be full_attention: the engine would make it that")
    for i, name in enumerate(text["layer_types"]):
        if name not in kinds:
            faults.append(f"layer {i} asks for {name}, of which the target has no keys and values: it has {', '.join(kinds) or 'none'}")
            continue
        kind, rope = kinds[name], text["rope_parameters"].get(name, {})
        wanted: dict[str, Any] = {key: kind[key] for key in ("head_dim", "rope_theta")} | {"num_key_value_heads": kind["num_kv_heads"]}
        wanted |= {"sliding_window": kind["window"]} if kind["window"] else {}
        wanted |= {key: (kind["rope_scaling"] or {"rope_type": "default"}).get(key) for key in SCALINGS}
        found = text["per_layer_config"].get(str(i), {}) | {"sliding_window": text["sliding_window"]} | rope
        faults += [f"layer {i} has {key} {found.get(key)}, the target {value}" for key, value in wanted.items() if found.get(key) != value]
    return faults


def query_layers(config: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Queries and outputs of attention, four norms a layer, and a lm_head stored as the embedding. layer_scalar left out becomes 1."""
    text = config["text_config"]
    size, inner, backbone = text["hidden_size"], text["intermediate_size"], config["backbone_hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (text["vocab_size"], size), "model.norm.weight": (size,)}
    shapes |= {"pre_projection.weight": (size, 2 * backbone), "post_projection.weight": (backbone, size)}
    for i in range(text["num_hidden_layers"]):
        layer, head = f"model.layers.{i}.", text["per_layer_config"][str(i)]["head_dim"]
        q = text["num_attention_heads"] * head
        shapes |= {f"{layer}self_attn.q_proj.weight": (q, size), f"{layer}self_attn.o_proj.weight": (size, q)}
        shapes |= {f"{layer}self_attn.q_norm.weight": (head,), f"{layer}layer_scalar": (1,)}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (inner, size) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (size, inner)
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        shapes |= {f"{layer}{name}_layernorm.weight": (size,) for name in norms}
    return shapes, set()
