"""Rotary tables equal transformers' for every scaling kind a target may have."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import SPEC
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from heads.layers import rope_tables, rotate

SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_tuned": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_tables_equal_transformers(name):
    spec = dataclasses.replace(SPEC, rope_theta=500000.0, head_dim=64, rope_scaling=SCALINGS[name])
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 500000.0} | (SCALINGS[name] or {"rope_type": "default"}),
    )
    positions = torch.arange(300)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = rope_tables(spec, positions)
    torch.testing.assert_close(ours[0], cos[0, :, :32], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1], sin[0, :, :32], rtol=1e-5, atol=1e-5)


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    cos, sin = rope_tables(SPEC, torch.arange(20))
    x = torch.randn(1, 1, SPEC.head_dim).expand(20, 2, SPEC.head_dim)
    y = rotate(x, cos, sin)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(y[:, 0], y[:, 1])
    scores = y[:, 0] @ y[:, 0].T
    torch.testing.assert_close(scores[0, 5], scores[10, 15])


def test_unknown_scaling_is_refused():
    with pytest.raises(ValueError, match="longrope.*known: default, linear, llama3, yarn"):
        rope_tables(dataclasses.replace(SPEC, rope_scaling={"rope_type": "longrope"}), torch.arange(2))
