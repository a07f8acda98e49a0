"""The MTP module that a target ships, trained on: it begins as the target's own tensors and is exported under their names.

It is heads.mtp.MTP's, and differs by family in what vLLM's class of it computes:
  MiMo (`mimo_mtp`): Qwen2's biases; vLLM's MiMo model hands over the last residual stream *before* the final norm.
  GLM-4-MoE (`glm4_moe_mtp`, GLM-4.5, 4.6 and 4.7): the state after the final norm; the embedding first in the projection; a layer with
  experts, of whose heads a part turns; at later depths it reads its own output before its norm.
From depth 1 on a module reads its own output, for which no published one was trained: that is what the recursion here teaches it (FastMTP).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from heads.base import Batch, Export, TargetSpec
from heads.layers import Block, llama_config
from heads.moe import MixtureOfExperts, moe_config
from heads.mtp import MTP


@dataclass(frozen=True)
class Family:
    """A family's module. prefix: before its tensors' names, {L}: the target's layers. names: of ours, where theirs differ; those of the
    block stand right behind the prefix."""

    prefix: str
    names: dict[str, str]
    stream: bool  # it reads the last residual stream (tap L) instead of the state after the target's final norm
    state_first: bool  # its projection reads [state ; embedding]
    feeds_norm: bool  # a later depth reads its output after its norm
    block: Callable[[TargetSpec], Block]
    config: Callable[[TargetSpec], dict[str, Any]]


def _glm4_moe_block(target: TargetSpec) -> Block:
    moe = target.moe
    if moe is None:
        raise ValueError(
            f"a {target.architecture} has layers with experts, of which target.spec.moe says nothing: copy it from its config.json"
        )
    experts = MixtureOfExperts(target, moe)
    return Block(target, qkv_bias=moe["qkv_bias"], qk_norm=moe["qk_norm"], partial=True, mlp=experts)


def _glm4_moe_config(target: TargetSpec) -> dict[str, Any]:
    assert target.moe is not None
    scaling = dict(target.rope_scaling or {})
    part = {"partial_rotary_factor": scaling.pop("partial_rotary_factor", 1.0)}
    rope = {"rope_scaling": None if scaling == {"rope_type": "default"} else scaling or None}
    return {"model_type": "glm4_moe"} | part | rope | moe_config(target.moe)


FAMILIES = {  # architectures of targets
    "MiMoForCausalLM": Family(
        prefix="model.mtp_layers.0.",
        names={},
        stream=True,
        state_first=True,
        feeds_norm=True,
        block=lambda target: Block(target, qkv_bias=True),
        config=lambda _: {"model_type": "qwen2"},  # its config class loads everywhere; vLLM picks the module by architecture
    ),
    "Glm4MoeForCausalLM": Family(
        prefix="model.layers.{L}.",
        names={"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "shared_head.norm"},
        stream=False,
        state_first=False,
        feeds_norm=False,
        block=_glm4_moe_block,
        config=_glm4_moe_config,
    ),
}


class NativeMTP(MTP):
    """depths: K recursions, each weighted depth_decay^k. loss: see heads.objectives. loss_chunk: label positions per chunk."""

    def __init__(self, *, target: TargetSpec, depths: int = 3, depth_decay: float = 0.8, loss: str = "kl", loss_chunk: int = 1024) -> None:
        if target.architecture not in FAMILIES:
            raise ValueError(
                f"heads.mtp_native.NativeMTP trains on the MTP module that a target ships, and knows that of {', '.join(FAMILIES)}; this "
                f"target is a {target.architecture} (target.spec.architecture): choose head=mtp, which trains a module from scratch"
            )
        self.family = FAMILIES[target.architecture]
        super().__init__(target=target, depths=depths, depth_decay=depth_decay, loss=loss, loss_chunk=loss_chunk)
        self.state_first = self.family.state_first
        self.taps = (target.num_layers,) if self.family.stream else ()
        self.needs_last = "supervised" if self.family.stream else "all"
        self.begins_as = self.engine_names()

    def make_block(self) -> Block:
        return self.family.block(self.target)

    def first_state(self, batch: Batch) -> Tensor:
        if self.family.stream:
            assert batch.taps_TLD is not None
            return batch.taps_TLD[:, 0]
        return super().first_state(batch)

    def fed_back(self, x: Tensor, y: Tensor) -> Tensor:
        return y if self.family.feeds_norm else x

    def engine_names(self) -> dict[str, str]:
        found = {}
        for name in self.state_dict():
            first, _, rest = name.partition(".")
            theirs = rest if first == "block" else f"{self.family.names.get(first, first)}.{rest}"
            found[name] = self.family.prefix.format(L=self.target.num_layers) + theirs
        return found

    def export(self) -> Export:
        """vLLM's layout of the target's own module; embedding and lm_head come from the target."""
        config = llama_config(self.target) | {
            "architectures": [self.target.architecture],
            "num_hidden_layers": self.target.num_layers,
            "num_nextn_predict_layers": 1,
        }
        return Export(config | self.family.config(self.target), self.engine_names())

    def serving(self, k: int) -> dict[str, Any]:
        # The target announces its module itself; an engine that is told of one still takes that one alone.
        return {"method": "mtp", "num_speculative_tokens": k, "target_hf_overrides": {"num_nextn_predict_layers": 1}}
