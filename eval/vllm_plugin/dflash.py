"""Block heads behind vLLM's DFlash proposer (v1/spec_decode/dflash.py, V1 model runner; vLLM 0.32).

Two things differ from vLLM's own classes. Keys of the context are normed with each layer's own weight: vLLM's operator takes the weights
of all layers at once, of which its CPU kernel applies the first to every layer. And DSpark's Markov chain, which vLLM has in its V2
runner alone, runs inside `compute_logits`: the proposer calls it once a proposal, with the rows of all drafts of all requests, request
by request, and takes the argmax of what it returns, which is what the chain has gone on from.

Shape suffixes: L layers, T context rows, M key/value heads, H head size, B requests, D hidden, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM


def check_served(vllm_config: VllmConfig) -> int:
    """The number of drafts. ValueError for what would load and then draft wrongly."""
    speculative = vllm_config.speculative_config
    assert speculative is not None
    config, k = speculative.draft_model_config.hf_config, speculative.num_speculative_tokens
    if speculative.method != "dflash":
        raise ValueError(f"method {speculative.method}: this draft is served with method dflash")
    if config.sample_from_anchor:
        raise ValueError("sample_from_anchor: method dflash lays out an anchor that predicts nothing, in this draft it predicts")
    if k >= config.block_size:
        raise ValueError(f"num_speculative_tokens={k}: this draft was trained for up to {config.block_size - 1} tokens")
    return k


def layerwise_norm(model: DFlashQwen3Model) -> Callable[[Tensor], Tensor]:
    """`model._normalize_context_k`, layer by layer."""

    def norm(all_k: Tensor) -> Tensor:
        """[L, T, M, H]."""
        eps, weights = model._rms_norm_eps, model._k_norm_weights
        assert isinstance(eps, float) and isinstance(weights, Tensor)
        return torch.stack([rms_norm(k, k.shape[-1:], weight, eps) for k, weight in zip(all_k, weights, strict=True)])

    return norm


class DFlash(DFlashQwen3ForCausalLM):
    """DFlash of any number of layers, right on a CPU too."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        check_served(vllm_config)
        self.model._normalize_context_k = layerwise_norm(self.model)  # type: ignore[method-assign]


class DSpark(Qwen3DSparkForCausalLM):
    """DSpark with greedy drafts. Its confidence is loaded and not asked: the V1 runner drafts a fixed number of tokens."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.drafts = check_served(vllm_config)
        speculative = vllm_config.speculative_config
        if speculative is not None and speculative.draft_sample_method != "greedy":
            raise ValueError(f"draft_sample_method={speculative.draft_sample_method}: this head's drafts are greedy")
        self.model._normalize_context_k = layerwise_norm(self.model)  # type: ignore[method-assign]
        self.block_ids: Tensor | None = None

    def forward(self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """Keeps the blocks [anchor, mask, ..] of the pass for compute_logits."""
        self.block_ids = input_ids
        return super().forward(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[B k, D] -> [B k, V], each draft's logits with the Markov term of the draft before it."""
        assert self.block_ids is not None
        rows_BkV = self.compute_draft_logits(hidden_states).unflatten(0, (-1, self.drafts))
        previous_B = self.block_ids[: len(rows_BkV) * (self.drafts + 1) : self.drafts + 1]
        for j in range(self.drafts):
            rows_BkV[:, j] += self.markov_bias(self.markov_embed(previous_B))
            previous_B = rows_BkV[:, j].argmax(-1)
        return rows_BkV.flatten(0, 1)
