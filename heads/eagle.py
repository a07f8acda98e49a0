"""EAGLE-1, whose weights EAGLE-2 reuses (arXiv 2401.15077; vLLM model class `llama_eagle`).

    x = W_fc [E(x_{t+1}) ; h_t];   r = Block(x), without the norm before its attention;   logits = lm_head(r);   next state = r

h is the target's last state after its final norm, and r is trained to be the next one: that is why nothing norms it before lm_head.
The layer is that of heads.mtp.MTP without its norms, and is exported as that is; here is what trains it EAGLE's way:

    L = mixture of heads.objectives + feature_weight * smooth L1 between r_t and h_{t+1}

Later depths (HASS, arXiv 2408.15766) are compared with the target's state of their own position in the same way.

Shape suffixes: T packed tokens, R rows, D hidden, K depths, L labels of one depth.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.base import Batch, TargetSpec
from heads.losses import Labels
from heads.mtp import MTP


class Eagle(MTP):
    """depths: 1 is EAGLE as published, more feed the head's own states back. loss: see heads.objectives; EAGLE has a tenth of the soft
    cross-entropy, whose gradient is that of kl. feature_weight: of the smooth L1, 0 for none. norms: restores the RMSNorms that EAGLE
    leaves out, which makes it MTP's module trained on features too. loss_chunk: label positions per chunk."""

    def __init__(
        self,
        *,
        target: TargetSpec,
        depths: int = 3,
        depth_decay: float = 0.8,
        loss: str = "0.1*kl",
        feature_weight: float = 1.0,
        norms: bool = False,
        loss_chunk: int = 1024,
    ) -> None:
        super().__init__(target=target, depths=depths, depth_decay=depth_decay, loss=loss, norms=norms, loss_chunk=loss_chunk)
        if not 0 <= feature_weight < float("inf"):
            raise ValueError(f"head.feature_weight must be a number not below 0, not {feature_weight}")
        self.feature_weight = feature_weight

    def more_loss(self, x_KRD: list[Tensor], batch: Batch, labels: Labels) -> Tensor | None:
        """feature_weight times the smooth L1 (beta 1) of each label's row from the state at the label's position, which is the state
        that predicts the label's token. The mean over D, so that its scale does not depend on the target's width; the sum over rows."""
        if not self.feature_weight:
            return None
        assert batch.last_TD is not None
        sums = []
        for x_RD, row_L in zip(x_KRD, labels.row_KL, strict=True):
            there = row_L >= 0
            x_LD, state_LD = x_RD[row_L[there]], batch.last_TD[labels.position_L[there]]
            sums.append(F.smooth_l1_loss(x_LD.float(), state_LD.float(), reduction="sum") / x_LD.shape[1])
        return self.feature_weight * torch.stack(sums)
