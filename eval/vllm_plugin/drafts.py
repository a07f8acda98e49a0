"""Feed-forward draft heads behind vLLM's EAGLE-3 proposer (v1/spec_decode/llm_base_proposer.py, V1 model runner).

The proposer calls `combine_hidden_states` once a proposal, then for each draft `forward(token, state) -> (output, next state)` and
argmax of `compute_logits(output)`. The state is the draft's own: as wide as config.hidden_size, made of the target's last state by
`combine_hidden_states`. Its last channel counts depths, per row: small integers are exact in every dtype, and a count kept in the
tensors, unlike one kept in Python, is right in a CUDA graph that is replayed for every depth. The output carries it too, since
`compute_logits` has to know its depth.

Shape suffixes: T rows, H hidden size of the target, W width of the state, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.transformers_utils.config import patch_rope_parameters

STEP_MODES = ("host", "tensor")
DIGITS = 3  # of a token id in the state: eight bits each, which bfloat16 holds exactly
STACKED: dict[str, list[tuple[str, str | int]]] = {  # layers that the engine makes of several: our names, and which part of it each is
    "qkv_proj": [("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v")],
    "gate_up_proj": [("gate_proj", 0), ("up_proj", 1)],
}


class Body(nn.Module):
    """What the proposer calls the draft's `model`: it looks for `embed_tokens` there."""

    embed_tokens: nn.Module
    unused: Attention


def borrowed_attention(vllm_config: VllmConfig) -> Attention:
    """An attention layer that is never called. The proposer takes block size and metadata from the draft's attention layers and asserts
    that there is one; this one shares the cache of a layer of the target, so that it costs no memory."""
    layers = get_layers_from_vllm_config(vllm_config, Attention)
    name, layer = next(
        (name, layer) for name, layer in layers.items() if layer.kv_sharing_target_layer_name is None and layer.sliding_window is None
    )
    return Attention(
        layer.num_heads,
        layer.head_size,
        1.0,
        num_kv_heads=layer.num_kv_heads,
        cache_config=vllm_config.cache_config,
        prefix=f"model.layers.{vllm_config.model_config.get_total_num_hidden_layers()}.unused.attn",
        kv_sharing_target_layer_name=name,
    )


def check_served(vllm_config: VllmConfig, depths: int, draft: dict[str, Any], vocab_size: int) -> None:
    """ValueError for what would load and then fail at the first request, or draft wrongly."""
    speculative, target = vllm_config.speculative_config, vllm_config.model_config
    assert speculative is not None
    if speculative.method != "eagle3":
        raise ValueError(f'this draft is served with "method": "eagle3", not {speculative.method!r}')
    if speculative.num_speculative_tokens > depths:
        raise ValueError(f"num_speculative_tokens={speculative.num_speculative_tokens}: this draft has {depths} depths")
    if vllm_config.use_v2_model_runner:
        raise ValueError("this draft needs vLLM's V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("this draft is not served with pipeline parallelism: its target's embedding is on another rank")
    if draft["step_mode"] not in STEP_MODES:
        raise ValueError(f"draft_config.step_mode={draft['step_mode']!r}: must be one of {', '.join(STEP_MODES)}")
    served, trained = (target.get_hidden_size(), target.get_vocab_size()), (draft["target_hidden_size"], vocab_size)
    if served != trained:
        raise ValueError(f"the draft is for a target of hidden size and vocabulary {trained}, this one has {served}")


class LastStateDraft(Eagle3LlamaForCausalLM):
    """Subclasses give `build`, `advance` and `lm_head_of`. Of vLLM's class only the type is used: the proposer asserts it."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        assert vllm_config.speculative_config is not None
        self.prefix_layer: PrefixLayer | None = None
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        draft = dict(self.config.draft_config)
        self.depths, self.vocab_size = draft["depths"], self.config.vocab_size
        check_served(vllm_config, self.depths, draft, self.vocab_size)
        self.input_size, self.width = draft["target_hidden_size"], self.config.hidden_size
        self.on_host = draft["step_mode"] == "host"
        self.has_own_embed_tokens = self.has_own_lm_head = False
        self.model = Body()
        self.logits_processor = LogitsProcessor(self.vocab_size)
        self.build(draft, vllm_config, prefix)
        if self.prefix_layer is None:
            self.model.unused = borrowed_attention(vllm_config)

    def build(self, draft: dict[str, Any], vllm_config: VllmConfig, prefix: str) -> None:
        """Makes the parameters, under the names of the export."""
        raise NotImplementedError

    def start(self, last_TH: Tensor) -> Tensor:
        """What depth 0 reads of the target's last state."""
        return last_TH

    def advance(self, k: int, ids_T: Tensor, state_TW: Tensor) -> tuple[Tensor, Tensor]:
        """Depth k. Returns (input of its lm_head [T, *], next state [T, up to W - 1])."""
        raise NotImplementedError

    def lm_head_of(self, k: int) -> nn.Module:
        raise NotImplementedError

    @property
    def distinct_heads(self) -> int:
        """1: one lm_head serves all depths."""
        raise NotImplementedError

    def embed_input_ids(self, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.shape[-1] != self.input_size:
            raise ValueError(f"the engine hands over states of width {hidden_states.shape[-1]}, the draft reads one of {self.input_size}")
        return self._widened(self.start(hidden_states), self.width)

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if inputs_embeds is not None:
            raise ValueError("this draft reads token ids, which the engine does not hand over for a multimodal target")
        step_T1 = hidden_states[:, -1:]
        if self.on_host:
            x, state = self.advance(self._depth(step_T1), input_ids, hidden_states)
        else:
            found = [self.advance(k, input_ids, hidden_states) for k in range(self.depths)]
            x = self._pick([x for x, _ in found], step_T1)
            state = self._pick([self._widened(state, self.width - 1) for _, state in found], step_T1)
        return torch.cat([x, step_T1], -1), torch.cat([self._widened(state, self.width - 1), step_T1 + 1], -1)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        x, step_T1 = hidden_states[:, :-1].contiguous(), hidden_states[:, -1:]
        if self.distinct_heads == 1:
            return self.logits_processor(self.lm_head_of(0), x)
        if self.on_host:
            return self.logits_processor(self.lm_head_of(self._depth(step_T1)), x)
        every = (self.logits_processor(self.lm_head_of(k), x) for k in range(self.depths))
        found = [logits for logits in every if logits is not None]  # only the first rank gathers them
        return self._pick(found, step_T1) if found else None

    def _depth(self, step_T1: Tensor) -> int:
        """All rows of a pass are at one depth. The rows that fill up a batch are stale and may say anything, but the first is real."""
        return min(int(step_T1[0]), self.depths - 1)

    @staticmethod
    def _pick(found: list[Tensor], step_T1: Tensor) -> Tensor:
        """Each row from the depth that its counter names, without asking the device what it says."""
        out = found[0]
        for k, other in enumerate(found[1:], start=1):
            out = torch.where(step_T1 == k, other, out)
        return out

    @staticmethod
    def _widened(x: Tensor, width: int) -> Tensor:
        return F.pad(x, (0, width - x.shape[-1]))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """ValueError: a tensor that has no place, or a parameter without a tensor. vLLM's own draft classes pass over both."""
        places = self._places()
        for name, tensor in weights:
            if name not in places:
                raise ValueError(f"tensor {name} has no place in {type(self).__name__}")
            parameter, part = places.pop(name)
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor, *part)
        if places:
            raise ValueError(f"missing tensors: {', '.join(sorted(places))}")
        return {name for name, _ in self.named_parameters()}

    def _places(self) -> dict[str, tuple[nn.Parameter, tuple[str | int, ...]]]:
        """Where each exported tensor goes: the parameter and, of one that the engine stacks, the part."""
        places = {}
        for name, parameter in self.named_parameters():
            layer = name.split(".")[-2]
            for exported, *part in STACKED.get(layer, [(layer,)]):
                places[name.replace(f".{layer}.", f".{exported}.")] = (parameter, tuple(part))
        return {name: place for name, place in places.items() if not name.startswith("model.")}


class PrefixLayer(LlamaDecoderLayer):
    """A decoder layer over the target's last states, with a cache of its own. It runs at depth 0 alone: the states of accepted drafts come
    anew, as those of the target, with the next proposal, and overwrite what deeper passes leave in the cache."""

    def __init__(self, vllm_config: VllmConfig, config: Any) -> None:
        patch_rope_parameters(config)
        super().__init__(vllm_config, f"model.layers.{vllm_config.model_config.get_total_num_hidden_layers()}", config)

    def get_quant_config(self, vllm_config: VllmConfig) -> None:
        """What the engine would give is the target's."""

    def over(self, positions: Tensor, last_TH: Tensor) -> Tensor:
        """[T, H] from [T, H], which is left as it was: the engine's norm adds in place."""
        return torch.stack(self(positions, last_TH.clone(), None)).sum(0)


class Block(nn.Module):
    """x + SiLU(W x + b); between two sizes, the first term is a linear map of x."""

    def __init__(self, input_size: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(input_size, size)
        self.res_connection = nn.Linear(input_size, size) if input_size != size else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + F.silu(self.linear(x))


class HydraDraft(LastStateDraft):
    """Hydra heads. State: [z | digits of the drafted tokens so far | count]; the tokens are embedded anew at every depth, by the target's
    embedding, which the proposer puts in place of `embed_tokens`, as it does with a shared lm_head."""

    def build(self, draft: dict[str, Any], vllm_config: VllmConfig, prefix: str) -> None:
        size = self.input_size
        if draft["prefix_layer"]:
            longest = max(draft["prefix_layer"]["max_position_embeddings"], vllm_config.model_config.max_model_len)
            config = type(self.config.model)(**draft["prefix_layer"] | {"max_position_embeddings": longest})
            self.prefix_layer = PrefixLayer(vllm_config, config)
        self.model.embed_tokens = VocabParallelEmbedding(self.vocab_size, size, prefix=f"{prefix}.embed_tokens")
        self.blocks = nn.ModuleList(
            nn.Sequential(Block((k + 2) * size, size), *(Block(size, size) for _ in range(draft["num_layers"] - 1)))
            for k in range(self.depths)
        )
        if draft["own_lm_heads"]:
            self.has_own_lm_head = True
            heads = (ParallelLMHead(self.vocab_size, size, prefix=f"{prefix}.lm_heads.{k}") for k in range(self.depths))
            self.lm_heads = nn.ModuleList(heads)
            self.__dict__["lm_head"] = self.lm_heads[0]  # the proposer looks at it; not a second parameter name

    @property
    def distinct_heads(self) -> int:
        return self.depths if self.has_own_lm_head else 1

    def lm_head_of(self, k: int) -> nn.Module:
        return self.lm_heads[k] if self.has_own_lm_head else self.lm_head

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        step_T1 = hidden_states[:, -1:]
        if self.prefix_layer is not None and not (self.on_host and self._depth(step_T1)):
            last_TH, rest = hidden_states.split([self.input_size, self.width - self.input_size], -1)
            last_TH = torch.where(step_T1 == 0, self.prefix_layer.over(positions, last_TH), last_TH)
            hidden_states = torch.cat([last_TH, rest], -1)
        return super().forward(input_ids, positions, hidden_states, inputs_embeds)

    def advance(self, k: int, ids_T: Tensor, state_TW: Tensor) -> tuple[Tensor, Tensor]:
        size = self.input_size
        filled = size + DIGITS * k
        earlier = state_TW[:, size:filled].long().unflatten(1, (k, DIGITS)).unbind(1) if k else ()
        last = ids_T.long()
        ids = [digits[:, 0] | digits[:, 1] << 8 | digits[:, 2] << 16 for digits in earlier]
        embeds = self.model.embed_tokens(torch.stack([*ids, last], 1))
        x = self.blocks[k](torch.cat([state_TW[:, :size], embeds.flatten(1)], -1))
        if k + 1 == self.depths:
            return x, state_TW[:, :filled]
        digits = torch.stack([last & 255, last >> 8 & 255, last >> 16], 1)
        return x, torch.cat([state_TW[:, :filled], digits.to(state_TW.dtype)], -1)
