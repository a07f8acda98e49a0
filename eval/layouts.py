"""What vLLM's (0.32) draft classes read: the config keys that must not be left to a default, and every tensor with its shape.

One function per (method, architecture), here and in eval/{query,moe}_layout.py. Sources: model_executor/models/{llama_eagle3,mimo_mtp,
llama_eagle,llama,medusa,qwen3_dflash,qwen3_dspark}.py, and eval/vllm_plugin for the architectures that vLLM itself does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eval.moe_layout import check_moe_config, glm4_moe_mtp
from eval.query_layout import check_query_config, query_layers
from heads.base import TargetSpec

Shapes = dict[str, tuple[int, ...]]
Layout = Callable[[dict[str, Any]], tuple[Shapes, set[str]]]

# Left out, each of these becomes a default of the config class that need not be the head's.
LLAMA_KEYS = (
    "model_type hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim num_hidden_layers vocab_size rms_norm_eps "
    "hidden_act max_position_embeddings attention_bias mlp_bias tie_word_embeddings dtype"
).split()
EAGLE3_KEYS = "draft_vocab_size target_hidden_size norm_before_residual norm_before_fc fc_norm norm_output".split()
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")  # the engine takes the first that is there
BLOCK_KEYS = "draft_vocab_size target_hidden_size block_size sample_from_anchor dflash_config".split()
MARKOV_KEYS = "markov_rank enable_confidence_head confidence_head_with_markov".split()
TAP_KEY = "eagle_aux_hidden_state_layer_ids"
# Architectures without a Llama block read none of LLAMA_KEYS; those of the plug-in keep their own keys in draft_config.
MEDUSA_KEYS = "model_type hidden_size vocab_size truncated_vocab_size num_heads num_hidden_layers medusa_fc_bias original_lm_head".split()
PLUGIN_KEYS = {
    "Eagle3HydraDraft": ["depths", "target_hidden_size", "step_mode", "num_layers", "own_lm_heads", "prefix_layer"],
    "Eagle3MLPDraft": ["depths", "target_hidden_size", "step_mode", "inner_dim", "tie_weights", "scale_input"],
}


def check_config(config: dict[str, Any], serving: dict[str, Any], target: TargetSpec) -> list[str]:
    """Faults of config.json against itself and the target, as phrases."""
    architecture = config["architectures"][0]
    if architecture in PLUGIN_KEYS:
        return _check_plugin(config, PLUGIN_KEYS[architecture], serving, target)
    if architecture == "MedusaModel":
        return _check_medusa(config, serving, target)
    if "text_config" in config:
        return check_query_config(config, target)
    if "n_routed_experts" in config:
        return check_moe_config(config, serving, target)
    eagle3, blocks = serving["method"] == "eagle3", serving["method"] in ("dflash", "dspark")
    keys = [*LLAMA_KEYS, *(EAGLE3_KEYS if eagle3 else []), *(BLOCK_KEYS if blocks else [])]
    keys += MARKOV_KEYS if "DSpark" in architecture else []
    faults = [f"config key {key} is not set: the engine would take its own default" for key in keys if config.get(key) is None]
    faults += [f"config key {key} is null" for key, value in config.items() if value is None and key not in keys]
    if "rope_theta" not in config and "rope_theta" not in (config.get("rope_parameters") or {}):
        faults.append("config sets no rope_theta: the engine would take 10000")
    same: dict[str, Any] = {"vocab_size": target.vocab_size}
    if serving["method"] != "draft_model":  # all others read the target's states
        same |= {"hidden_size": target.hidden_size}
    same |= {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}  # all that these layouts know
    if serving["method"] == "mtp":  # the engine sizes the module by the target's config, whatever this one says
        same |= {
            "num_attention_heads": target.num_heads,
            "num_key_value_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "intermediate_size": target.intermediate_size,
            "num_hidden_layers": target.num_layers,
            "num_nextn_predict_layers": 1,
        }
        if serving.get("target_hf_overrides") != {"num_nextn_predict_layers": 1}:
            faults.append('serving must carry target_hf_overrides {"num_nextn_predict_layers": 1}: without it the engine does not start')
    faults += [f"{key} is {config[key]}, it must be {value}" for key, value in same.items() if config.get(key) not in (None, value)]
    faults += _check_parallel(config, serving, target.vocab_size - 1)
    if blocks and not faults:
        faults += _check_blocks(config, serving, target)
    return faults + (_check_taps(config, target) if eagle3 else [])


def _unset(config: dict[str, Any], keys: list[str]) -> list[str]:
    return [f"config key {key} is not set" for key in keys if config.get(key) is None]


def _other(config: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [f"{key} is {config.get(key)}, it must be {value}" for key, value in wanted.items() if config.get(key) != value]


def _too_many(serving: dict[str, Any], depths: int) -> list[str]:
    k = serving["num_speculative_tokens"]
    return [f"num_speculative_tokens is {k}, the head has {depths} depths"] if k > depths else []


def _check_medusa(config: dict[str, Any], serving: dict[str, Any], target: TargetSpec) -> list[str]:
    if faults := _unset(config, [*MEDUSA_KEYS, "dtype"]):
        return faults
    size = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "truncated_vocab_size": target.vocab_size}
    return _other(config, size) + _too_many(serving, config["num_heads"])


def _check_plugin(config: dict[str, Any], keys: list[str], serving: dict[str, Any], target: TargetSpec) -> list[str]:
    """The state must hold what a later depth reads, and a counter of depths."""
    draft, size = config.get("draft_config") or {}, target.hidden_size
    if faults := _unset(config, ["hidden_size", "vocab_size", "dtype"]) + _unset(draft, keys):
        return faults
    faults = _other(config, {"vocab_size": target.vocab_size, "eagle_config": {"use_aux_hidden_state": False}})
    faults += _other(draft, {"target_hidden_size": size}) + _too_many(serving, draft["depths"])
    if draft["step_mode"] not in ("host", "tensor"):
        faults.append(f"step_mode is {draft['step_mode']}, it must be host or tensor")
    least = 1 + (max(draft["inner_dim"], size) if "inner_dim" in draft else size + 3 * (draft["depths"] - 1))
    return [*faults, f"hidden_size is {config['hidden_size']}, the state needs {least}"] if config["hidden_size"] < least else faults


def _check_taps(config: dict[str, Any], target: TargetSpec) -> list[str]:
    inner = config.get("eagle_config") or {}
    if inner.get("use_aux_hidden_state", True) is False:
        return []
    ids = config.get(TAP_KEY)
    faults = [
        f"{key} is {config[key]} at the top and {inner[key]} in eagle_config, which wins in the engine"
        for key in (TAP_KEY, "norm_before_fc")
        if key in inner and key in config and inner[key] != config[key]
    ]
    if not ids:
        middle = target.num_layers // 2
        return [*faults, f"{TAP_KEY} is not set: the engine would tap its default layers (2, {middle}, {target.num_layers - 3})"]
    if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > target.num_layers:
        faults.append(f"{TAP_KEY} {ids} must ascend without repeats within 0..{target.num_layers}: the engine sorts it and drops repeats")
    if config.get("num_aux_hidden_states", 3) != len(ids):
        faults.append(f"num_aux_hidden_states is {config.get('num_aux_hidden_states', 'not set (3)')}, the layer ids are {len(ids)}")
    return faults


def _check_parallel(config: dict[str, Any], serving: dict[str, Any], last: int) -> list[str]:
    """A model trained to draft in one pass, and the switch that makes the engine do so, go together. last: the last token."""
    found, parallel = [key for key in MASK_KEYS if config.get(key) is not None], bool(serving.get("parallel_drafting"))
    if len(found) != parallel:
        return [f"serving has parallel_drafting {parallel} and the config {' and '.join(found) or 'no mask token'}: it needs one or none"]
    return [f"{key} is {config[key]}, no row of the embedding, 0..{last}" for key in found if not 0 <= config[key] <= last]


def _check_blocks(config: dict[str, Any], serving: dict[str, Any], target: TargetSpec) -> list[str]:
    """Faults of what lays a block out: with another mask token, other slots or another attention than in training it drafts rubbish."""
    inner, ids, vocab = config["dflash_config"], config.get(TAP_KEY) or [], target.vocab_size
    missing = [key for key in ("mask_token_id", "target_layer_ids", "causal") if inner.get(key) is None]
    if missing:
        return [f"dflash_config.{key} is not set: the engine would take its own default" for key in missing]
    faults = [f"config key {key} is set and overrules dflash_config" for key in ("is_causal", "layer_types") if config.get(key) is not None]
    if not 0 <= inner["mask_token_id"] < vocab:
        faults.append(f"dflash_config.mask_token_id {inner['mask_token_id']} has no row in the target's embedding (0..{vocab - 1})")
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > target.num_layers:
        faults.append(f"{TAP_KEY} {ids} must ascend without repeats within 0..{target.num_layers}, at least one")
    if [i + 1 for i in inner["target_layer_ids"]] != list(ids):
        faults.append(f"{TAP_KEY} {ids} and dflash_config.target_layer_ids {inner['target_layer_ids']} (one less each) disagree")
    if inner.get("sample_from_anchor") or (config["sample_from_anchor"] and serving["method"] == "dflash"):
        faults.append(
            "sample_from_anchor is true: method dflash takes no anchor that predicts, dspark reads it at the top of the config alone"
        )
    faults += _other(config, {"draft_vocab_size": vocab, "target_hidden_size": target.hidden_size})
    return faults + _too_many(serving, config["block_size"] - (not config["sample_from_anchor"]))


def _block(config: dict[str, Any], prefix: str, qkv_in: int) -> Shapes:
    size, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (q, qkv_in),
        "self_attn.k_proj": (kv, qkv_in),
        "self_attn.v_proj": (kv, qkv_in),
        "self_attn.o_proj": (size, q),
    }
    shapes |= {"mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size), "mlp.down_proj": (size, inner)}
    shapes |= {"input_layernorm": (size,), "post_attention_layernorm": (size,)}
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def eagle3(config: dict[str, Any]) -> tuple[Shapes, set[str]]:
    """`midlayer.` is read as `layers.0.`. Only layer 0 reads [embedding ; state]. lm_head may be absent only with the full
    vocabulary."""
    size, vocab, draft_vocab, tap = config["hidden_size"], config["vocab_size"], config["draft_vocab_size"], config["target_hidden_size"]
    shapes: Shapes = {"norm.weight": (size,), "lm_head.weight": (draft_vocab, size)}
    for i in range(config["num_hidden_layers"]):
        shapes |= _block(config, f"layers.{i}.", 2 * size if i == 0 else size)
    shapes["layers.0.hidden_norm.weight"] = (size,)
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        taps = len(config[TAP_KEY])
        shapes["fc.weight"] = (size, taps * tap)
        if config["norm_before_fc"]:
            shapes["input_norm.weight"] = (taps * tap,)
        if config["fc_norm"]:
            shapes |= {f"fc_norm.{i}.weight": (tap,) for i in range(taps)}
        if any(key in config for key in MASK_KEYS):
            shapes["mask_hidden"] = (taps * tap,)
    if draft_vocab != vocab:
        shapes["d2t"] = (draft_vocab,)
    return shapes, {"lm_head.weight"} if draft_vocab == vocab else set()


def mimo_mtp(config: dict[str, Any]) -> tuple[Shapes, set[str]]:
    """A Qwen2 block with its q, k, v biases between two input norms and an output norm; embedding and lm_head are the
    target's."""
    size, head, prefix = config["hidden_size"], config["head_dim"], "model.mtp_layers.0."
    shapes = _block(config, prefix, size) | {f"{prefix}input_proj.weight": (size, 2 * size)}
    shapes |= {f"{prefix}{name}.weight": (size,) for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")}
    for name, count in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
        shapes[f"{prefix}self_attn.{name}_proj.bias"] = (config[count] * head,)
    return shapes, set()


def eagle(config: dict[str, Any]) -> tuple[Shapes, set[str]]:
    """EAGLE-1: no norm before layer 0, none after the last, no bias on fc (it would be dropped silently), no lm_head."""
    size = config["hidden_size"]
    shapes: Shapes = {"fc.weight": (size, 2 * size)}
    for i in range(config["num_hidden_layers"]):
        shapes |= _block(config, f"layers.{i}.", size)
    del shapes["layers.0.input_layernorm.weight"]
    return shapes, set()


def llama(config: dict[str, Any]) -> tuple[Shapes, set[str]]:
    """A language model of its own: nothing is the target's. A tied lm_head is the embedding and has no tensor."""
    size, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, size), "model.norm.weight": (size,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= _block(config, f"model.layers.{i}.", size)
    return shapes | ({} if config["tie_word_embeddings"] else {"lm_head.weight": (vocab, size)}), set()


def medusa(config: dict[str, Any]) -> tuple[Shapes, set[str]]:
    """Residual blocks per depth, and one lm_head or one a depth; the class shares nothing with the target."""
    size, vocab, depths = config["hidden_size"], config["vocab_size"], config["num_heads"]
    shapes: Shapes = {}
    for prefix in [f"blocks.{k}.layers.{j}" for k in range(depths) for j in range(config["num_hidden_layers"])]:
        shapes |= {f"{prefix}.weight": (size, size)} | ({f"{prefix}.bias": (size,)} if config["medusa_fc_bias"] else {})
    heads = ["lm_head"] if config["original_lm_head"] else [f"lm_heads.{k}" for k in range(depths)]
    return shapes | {f"{name}.weight": (vocab, size) for name in heads}, set()


def hydra(config: dict[str, Any]) -> tuple[Shapes, set[str]]:
    """The first block of depth k reads the state and k + 1 embeddings. Hydra++ has a decoder layer before them."""
    draft = config["draft_config"]
    size, shapes = draft["target_hidden_size"], {}
    for k in range(draft["depths"]):
        for name in ("0.linear", "0.res_connection"):
            shapes |= {f"blocks.{k}.{name}.weight": (size, (k + 2) * size), f"blocks.{k}.{name}.bias": (size,)}
        for j in range(1, draft["num_layers"]):
            shapes |= {f"blocks.{k}.{j}.linear.weight": (size, size), f"blocks.{k}.{j}.linear.bias": (size,)}
    if draft["prefix_layer"]:
        shapes |= _block(draft["prefix_layer"], "prefix_layer.", size)
    if draft["own_lm_heads"]:
        shapes |= {f"lm_heads.{k}.weight": (config["vocab_size"], size) for k in range(draft["depths"])}
    return shapes, set()


def recurrent_mlp(config: dict[str, Any]) -> tuple[Shapes, set[str]]:
    """Embedding, projection, norm and lm_head per depth, or with tied weights one of each and the first projection."""
    draft, vocab = config["draft_config"], config["vocab_size"]
    size, depths, tied = draft["inner_dim"], draft["depths"], draft["tie_weights"]
    shapes: Shapes = {f"proj.{i}.weight": (size, size if i else draft["target_hidden_size"]) for i in range(2 if tied else depths)}
    for i in range(1 if tied else depths):
        shapes |= {f"emb.{i}.weight": (vocab, size), f"head.{i}.weight": (vocab, size)}
        shapes |= {f"ln.{i}.weight": (size,), f"ln.{i}.bias": (size,)}
    return shapes, set()


def dflash(config: dict[str, Any]) -> tuple[Shapes, set[str]]:
    """Qwen3 blocks (a norm on each head's q and k); embedding and lm_head are the target's."""
    size, head = config["hidden_size"], config["head_dim"]
    shapes: Shapes = {"fc.weight": (size, len(config[TAP_KEY]) * config["target_hidden_size"])}
    shapes |= {"hidden_norm.weight": (size,), "norm.weight": (size,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= _block(config, f"layers.{i}.", size)
        shapes |= {f"layers.{i}.self_attn.{name}_norm.weight": (head,) for name in "qk"}
    return shapes, set()


def dspark(config: dict[str, Any]) -> tuple[Shapes, set[str]]:
    """DFlash's, the two factors of the Markov term, and the confidence where there is one."""
    shapes, optional = dflash(config)
    size, vocab, rank = config["hidden_size"], config["vocab_size"], config["markov_rank"]
    shapes |= {f"markov_head.markov_w{i}.weight": (vocab, rank) for i in (1, 2)}
    if config["enable_confidence_head"]:
        inputs = size + rank if config["confidence_head_with_markov"] else size
        shapes |= {"confidence_head.proj.weight": (1, inputs), "confidence_head.proj.bias": (1,)}
    return shapes, optional


LAYOUTS: dict[tuple[str, str], Layout] = {
    ("eagle3", "LlamaForCausalLMEagle3"): eagle3,
    ("mtp", "MiMoForCausalLM"): mimo_mtp,
    ("mtp", "Glm4MoeForCausalLM"): glm4_moe_mtp,
    ("mtp", "Gemma4AssistantForCausalLM"): query_layers,
    ("eagle", "LlamaForCausalLM"): eagle,
    ("draft_model", "LlamaForCausalLM"): llama,
    ("medusa", "MedusaModel"): medusa,
    ("eagle3", "Eagle3HydraDraft"): hydra,
    ("eagle3", "Eagle3MLPDraft"): recurrent_mlp,
    ("dflash", "DFlashDraftModel"): dflash,
    ("dflash", "DraftsmithDFlash"): dflash,
    ("dspark", "Qwen3DSparkModel"): dspark,
    ("dflash", "DraftsmithDSparkDFlash"): dspark,
}
