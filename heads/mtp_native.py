"""The MTP module that a target ships, trained on: it begins as the target's own tensors and is exported under their names.

The family known is MiMo (vLLM class `mimo_mtp`). Its module is heads.mtp.MTP's, with Qwen2's biases, and reads another state: vLLM's
MiMo model hands over the last residual stream *before* the final norm, where other targets hand over the state after it. From depth 1
on it reads its own output, for which no published module was trained: that is what the recursion here teaches it (FastMTP).
"""

from __future__ import annotations

from torch import Tensor

from heads.base import Batch, TargetSpec
from heads.mtp import MTP

FAMILIES = ("MiMoForCausalLM",)  # architectures of targets


class NativeMTP(MTP):
    """depths: K recursions, each weighted depth_decay^k. loss: see heads.objectives. loss_chunk: label positions per chunk."""

    needs_last = "supervised"
    qkv_bias = True

    def __init__(self, *, target: TargetSpec, depths: int = 3, depth_decay: float = 0.8, loss: str = "kl", loss_chunk: int = 1024) -> None:
        if target.architecture not in FAMILIES:
            raise ValueError(
                f"heads.mtp_native.NativeMTP trains on the MTP module that a target ships, and knows that of {', '.join(FAMILIES)}; this "
                f"target is a {target.architecture} (target.spec.architecture): choose head=mtp, which trains a module from scratch"
            )
        super().__init__(target=target, depths=depths, depth_decay=depth_decay, loss=loss, loss_chunk=loss_chunk)
        self.taps = (target.num_layers,)
        self.begins_as = self.engine_names()

    def first_state(self, batch: Batch) -> Tensor:
        assert batch.taps_TLD is not None
        return batch.taps_TLD[:, 0]
