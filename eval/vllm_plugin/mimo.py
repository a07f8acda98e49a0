"""A MiMo target whose residual streams can be captured (vLLM 0.32).

vLLM's own class leaves out both the final norm and the collecting of residual streams; but for its MTP module, which is no part of the
target's forward, the model is a Qwen2, whose class has them.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM


class MiMo(Qwen2ForCausalLM):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights((name, tensor) for name, tensor in weights if not name.startswith("model.mtp_layers."))
