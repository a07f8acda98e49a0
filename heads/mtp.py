"""A DeepSeek-style multi-token-prediction module for any Llama-like target (DeepSeek-V3 report, section 2.2; vLLM class `mimo_mtp`).

    x = W_proj [RMS_h(h) ; RMS_e(E(x_{t+1}))];   y = RMS_out(Block(x));   logits = lm_head(y);   next state = y

h is the target's last state after its final norm, at later depths the module's own y: one module, applied recursively.
The norms are the *restored* ones: without them (`norms: false`: no input norms, no first norm of the block, no output norm) the
module is the EAGLE-1 layer, and is exported and served as such, so that the effect of the norms can be measured in the engine.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.attention import Documents, KeyValues
from heads.base import Batch, Export, TargetSpec
from heads.layers import Block, RMSNorm, llama_config
from heads.recurrent import RecurrentHead

MODULE = "model.mtp_layers.0."  # before every tensor of the module in a MiMo checkpoint


class MTP(RecurrentHead):
    """depths: K recursions, each weighted depth_decay^k. norms: the restored RMSNorms. loss_chunk: label positions per chunk."""

    needs_last = "all"
    qkv_bias = False  # the engine's block is Qwen2's, which has biases on q, k and v: zero in the export of a head without them

    def __init__(
        self,
        *,
        target: TargetSpec,
        depths: int = 3,
        depth_decay: float = 0.8,
        loss: str = "kl",
        norms: bool = True,
        loss_chunk: int = 1024,
    ) -> None:
        super().__init__(target=target, depths=depths, depth_decay=depth_decay, loss=loss, loss_chunk=loss_chunk)
        size, eps = target.hidden_size, target.rms_norm_eps
        self.norms = norms
        self.state_first = norms  # whether input_proj reads [state ; embedding]
        self.token_layernorm = RMSNorm(size, eps) if norms else None
        self.hidden_layernorm = RMSNorm(size, eps) if norms else None
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.block = self.make_block()
        self.final_layernorm = RMSNorm(size, eps) if norms else None

    def make_block(self) -> Block:
        return Block(self.target, input_norm=self.norms, qkv_bias=self.qkv_bias)

    def caches(self, batch: Batch) -> list[KeyValues]:
        return [KeyValues()]

    def first_state(self, batch: Batch) -> Tensor:
        assert batch.last_TD is not None
        return batch.last_TD

    def _columns(self) -> tuple[Tensor, Tensor]:
        """Those of input_proj that read the embedding, and the state."""
        first, second = self.input_proj.weight.chunk(2, 1)
        return (second, first) if self.state_first else (first, second)

    def embedded(self, embed_RD: Tensor) -> Tensor:
        normed = embed_RD if self.token_layernorm is None else self.token_layernorm(embed_RD)
        return F.linear(normed, self._columns()[0])

    def step(self, state: Tensor, embed: Tensor, docs: Documents, caches: list[KeyValues]) -> tuple[Tensor, Tensor]:
        if self.norms and not caches[0].keys:
            # The engine feeds a zero embedding at position 0 (DeepSeek's convention, kept by vLLM's MiMo class).
            embed = embed.masked_fill((docs.positions_T == 0)[:, None], 0)
        normed = state if self.hidden_layernorm is None else self.hidden_layernorm(state)
        x = self.block(torch.addmm(embed, normed, self._columns()[1].T), docs, caches[0], last=True)
        y = x if self.final_layernorm is None else self.final_layernorm(x)
        return y, self.fed_back(x, y)

    def fed_back(self, x: Tensor, y: Tensor) -> Tensor:
        """The state that the next depth reads: of the block's output x and its norm y."""
        return y

    def engine_names(self) -> dict[str, str]:
        """Our parameter name -> the engine's."""
        prefix, block = (MODULE, MODULE) if self.norms else ("", "layers.0.")
        names = {name: block + name[6:] if name.startswith("block.") else prefix + name for name in self.state_dict()}
        return names if self.norms else names | {"input_proj.weight": "fc.weight"}

    def export(self) -> Export:
        """vLLM's MiMo MTP layout (embedding and lm_head come from the target), or without norms its EAGLE-1 layout."""
        names = self.engine_names()
        if not self.norms:
            return Export(llama_config(self.target) | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, names)
        config = llama_config(self.target) | {
            # Qwen2's config class loads everywhere; vLLM picks the module by architecture.
            "model_type": "qwen2",
            "architectures": ["MiMoForCausalLM"],
            "num_hidden_layers": self.target.num_layers,
            "num_nextn_predict_layers": 1,
        }
        heads = {"q": self.target.num_heads, "k": self.target.num_kv_heads, "v": self.target.num_kv_heads}
        biases = {f"{MODULE}self_attn.{x}_proj.bias": torch.zeros(n * self.target.head_dim) for x, n in heads.items()}
        return Export(config, names, {} if self.qkv_bias else biases)

    def serving(self, k: int) -> dict[str, Any]:
        t = self.target
        if self.norms and t.num_heads * t.head_dim != t.hidden_size:
            raise ValueError(
                f"the engine's module for heads.mtp.MTP has heads of hidden_size / num_heads, which is not the target's {t.head_dim}; "
                "train head=mtp_eagle3 or head=mtp_nonorm for this target"
            )
        if not self.norms:
            return {"method": "eagle", "num_speculative_tokens": k}
        # vLLM sizes the module by the *target's* config, so the target must announce that it has one.
        return {"method": "mtp", "num_speculative_tokens": k, "target_hf_overrides": {"num_nextn_predict_layers": 1}}
