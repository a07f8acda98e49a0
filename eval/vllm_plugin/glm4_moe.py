"""A GLM-4-MoE target whose residual streams can be captured (vLLM 0.32): vLLM's own class does not collect them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.models.glm4_moe import Glm4MoeForCausalLM
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3


class Glm4Moe(Glm4MoeForCausalLM, SupportsEagle3, EagleModelMixin):
    """Runs the layers itself, so that what vLLM would compile runs as it stands. On one pipeline stage."""

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self._set_aux_hidden_state_layers(layers)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Tensor | None = None
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        assert intermediate_tensors is None, "no pipeline stages"
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.model.embed_input_ids(input_ids)
        hidden, residual, streams = inputs_embeds, None, []
        self._maybe_add_hidden_state(streams, 0, hidden, None)
        for i, layer in enumerate(self.model.layers):
            hidden, residual = layer(positions, hidden, residual)
            self._maybe_add_hidden_state(streams, i + 1, hidden, residual)
        hidden, _ = self.model.norm(hidden, residual)
        return (hidden, streams) if streams else hidden
