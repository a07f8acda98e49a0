"""DFlash (arXiv 2602.06036): the block head of heads/block.py as it is, its slots independent of each other's tokens.

Shape suffixes: B blocks, D hidden, K depths, L label positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.base import Export, TargetSpec
from heads.block import BlockHead
from heads.losses import Labels, log_likelihood

ALPHA = 0.5  # of D-PACE: floor of what a slot counts as accepted


class DFlash(BlockHead):
    """taps: layers applied, ascending. num_layers: 1..5. block_size: slots, the anchor's included, so that it drafts block_size - 1
    tokens. anchors: blocks drawn from a pack. mask_token_id: what the other slots read, a token of the target's own vocabulary.
    causal: a slot sees those before it only. weights: `decay`, exp(-k / gamma) of depth k, or `dpace`, which follows from the head's
    own certainty. loss: see heads.objectives. loss_chunk: label positions, and in drafting blocks, per chunk. plugin: export for
    our class in vLLM (eval/vllm_plugin), which is right with more than one layer on a CPU too, instead of vLLM's own.
    """

    def __init__(
        self,
        *,
        target: TargetSpec,
        taps: list[int],
        mask_token_id: int,
        num_layers: int = 2,
        block_size: int = 8,
        anchors: int = 512,
        causal: bool = False,
        weights: str = "decay",
        gamma: float = 4.0,
        loss: str = "kl",
        loss_chunk: int = 1024,
        plugin: bool = False,
    ) -> None:
        super().__init__(
            target=target,
            taps=taps,
            num_layers=num_layers,
            block_size=block_size,
            anchors=anchors,
            mask_token_id=mask_token_id,
            causal=causal,
            sample_from_anchor=False,  # the only convention that vLLM's `dflash` serves
            gamma=gamma,
            loss=loss,
            loss_chunk=loss_chunk,
        )
        if weights not in ("decay", "dpace"):
            raise ValueError(f"head.weights={weights}: must be decay or dpace")
        self.plugin, self.self_labelled = plugin, weights == "dpace"
        if self.self_labelled:
            self.depth_weights = (1.0,) * self.depths

    @torch.no_grad()
    def row_weights(self, x_KBD: list[Tensor], labels: Labels) -> Tensor | None:
        """D-PACE (arXiv 2605.18810): with q_i the chance that the head gives the text's token of slot i, softened to
        (1 - ALPHA) q_i + ALPHA, a slot weighs what its loss costs: w_j = sum over the block's valid m >= j of prod_{i <= m} q_i."""
        if not self.self_labelled:
            return None
        q_KB = (1 - ALPHA) * log_likelihood(x_KBD, self.frozen.lm_head_VD, labels, self.loss_chunk).exp() + ALPHA
        valid_KB = torch.zeros_like(q_KB)
        for k, row_L in enumerate(labels.row_KL):
            valid_KB[k, row_L[row_L >= 0]] = 1
        reached_KB = q_KB.cumprod(0) * valid_KB
        weight_KB = reached_KB.flip(0).cumsum(0).flip(0)
        return torch.stack([weight_B[row_L.clamp(min=0)] for weight_B, row_L in zip(weight_KB, labels.row_KL, strict=True)])

    def export(self) -> Export:
        config = self.config("DraftsmithDFlash" if self.plugin else "DFlashDraftModel")
        return Export(config, {name: name for name in self.state_dict()})

    def serving(self, k: int) -> dict[str, Any]:
        return self.speculative("dflash", k)
