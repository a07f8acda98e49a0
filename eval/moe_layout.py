"""What vLLM's (0.32) class of an MTP module with experts reads: models/glm4_moe_mtp.py."""

from __future__ import annotations

from typing import Any

from heads.base import TargetSpec
from heads.moe import moe_config

FLOAT32 = "e_score_correction_bias"  # the end of the name of what the engine keeps in float32, whatever the dtype of the model


def check_moe_config(config: dict[str, Any], serving: dict[str, Any], target: TargetSpec) -> list[str]:
    """Faults of config.json against itself and the target, as phrases. The engine sizes the module by the *target's* config, whatever this
    one says."""
    moe = target.moe
    if moe is None:
        return [f"a module with experts, and the target is a {target.architecture} without"]
    scaling = target.rope_scaling or {}
    same: dict[str, Any] = {
        "model_type": "glm4_moe",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": target.num_layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_positions,
        "rope_theta": target.rope_theta,
        "partial_rotary_factor": scaling.get("partial_rotary_factor", 1.0),
        "tie_word_embeddings": False,
        **moe_config(moe),
    }
    faults = [f"{key} is {config.get(key)}, it must be {value}" for key, value in same.items() if config.get(key) != value]
    faults += [f"config key {key} is null" for key, value in config.items() if value is None]
    if config.get("dtype") is None:
        faults.append("config key dtype is not set: the engine would take its own default")
    if serving.get("target_hf_overrides") != {"num_nextn_predict_layers": 1}:
        faults.append(
            'serving must carry target_hf_overrides {"num_nextn_predict_layers": 1}: without it a target of more modules expects more'
        )
    return faults


def glm4_moe_mtp(config: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Two input norms, a projection, a layer of the target's kind, and a norm before lm_head; embedding and lm_head are the target's."""
    size, head, module = config["hidden_size"], config["head_dim"], f"model.layers.{config['num_hidden_layers']}."
    counts = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    shapes: dict[str, tuple[int, ...]] = {"eh_proj.weight": (size, 2 * size)}
    norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
    shapes |= {f"{name}.weight": (size,) for name in norms}
    for name, count in counts.items():
        shapes[f"self_attn.{name}_proj.weight"] = (count * head, size)
        shapes |= {f"self_attn.{name}_proj.bias": (count * head,)} if config["attention_bias"] else {}
    shapes["self_attn.o_proj.weight"] = (size, counts["q"] * head)
    shapes |= {f"self_attn.{name}_norm.weight": (head,) for name in "qk"} if config["use_qk_norm"] else {}
    experts, inner, shared = config["n_routed_experts"], config["moe_intermediate_size"], config["n_shared_experts"]
    shapes |= {"mlp.gate.weight": (experts, size), f"mlp.gate.{FLOAT32}": (experts,)}
    widths = {f"experts.{j}": inner for j in range(experts)} | ({"shared_experts": shared * inner} if shared else {})
    for name, width in widths.items():
        shapes |= {f"mlp.{name}.{side}_proj.weight": (width, size) for side in ("gate", "up")}
        shapes[f"mlp.{name}.down_proj.weight"] = (size, width)
    return {module + name: shape for name, shape in shapes.items()}, set()
