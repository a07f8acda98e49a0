"""DSpark (arXiv 2607.05147): DFlash's backbone, a low-rank Markov term that makes each slot depend on the token before it, and a
confidence (vLLM model class `qwen3_dspark`).

    logits_k = lm_head(y_k) + W2 W1[x_{a+k}]                        teacher-forced in training, drafted left to right in the engine
    confidence_k = sigmoid(w [y_k ; W1[x_{a+k}]] + b)               its label: the chance a that the draft is accepted, a constant

a = sum min(p, q) = 1 - |p - q| / 2. The paper's loss, 0.1 CE + 0.9 |p - q| + 1.0 BCE, is `0.1*ce+1.8*tv` with confidence_weight 1.

Shape suffixes: B blocks, D hidden, K depths, E rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.base import Batch, Export, TargetSpec, check_positive
from heads.block import BlockHead
from heads.losses import Labels, LowRank, fused_loss
from heads.teacher import teacher_of


class DSpark(BlockHead):
    """markov_rank: of the Markov term. confidence_weight: of the confidence's loss; 0: no confidence. sample_from_anchor: the anchor's
    slot predicts too (DeepSpec), so that block_size slots draft as many tokens; else one less, as in DFlash. plugin: export for our
    class in vLLM (eval/vllm_plugin, method `dflash`), which also runs on a CPU but takes no such slots, instead of vLLM's own
    `dspark`. Everything else: see heads.dflash.
    """

    def __init__(
        self,
        *,
        target: TargetSpec,
        taps: list[int],
        mask_token_id: int,
        num_layers: int = 2,
        block_size: int = 8,
        sample_from_anchor: bool = False,
        anchors: int = 512,
        causal: bool = False,
        markov_rank: int = 256,
        confidence_weight: float = 1.0,
        gamma: float = 4.0,
        loss: str = "0.1*ce+1.8*tv",
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
            sample_from_anchor=sample_from_anchor,
            gamma=gamma,
            loss=loss,
            loss_chunk=loss_chunk,
        )
        check_positive(markov_rank=markov_rank)
        if not 0 <= confidence_weight < math.inf:
            raise ValueError(f"head.confidence_weight must be finite and not negative, not {confidence_weight}")
        if plugin and sample_from_anchor:
            raise ValueError("head.plugin=true lays blocks out as `dflash` does, which serves no head.sample_from_anchor=true")
        self.plugin, self.confidence_weight, self.self_labelled = plugin, confidence_weight, confidence_weight > 0
        self.markov_w1 = nn.Embedding(target.vocab_size, markov_rank)
        self.markov_w2 = nn.Linear(markov_rank, target.vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)  # begins as DFlash
        self.confidence = nn.Linear(target.hidden_size + markov_rank, 1) if confidence_weight else None

    def term(self, previous_KB: list[Tensor]) -> LowRank | None:
        return LowRank([self.markov_w1(previous_B) for previous_B in previous_KB], self.markov_w2.weight)

    def objective(
        self, x_KBD: list[Tensor], previous_KB: list[Tensor], batch: Batch, labels: Labels, weight_K: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The mixture, and the cross-entropy of the confidence with the chance of acceptance, weighted as the mixture's rows are."""
        if self.confidence is None:
            return super().objective(x_KBD, previous_KB, batch, labels, weight_K)
        head_VD, term = self.frozen.lm_head_VD, self.term(previous_KB)
        known = teacher_of(batch, self.target.vocab_size)
        assert term is not None
        wide = torch.promote_types(head_VD.dtype, torch.float32)
        accepted_KB = torch.zeros(self.depths, len(x_KBD[0]), dtype=wide, device=head_VD.device)
        total, loss_K = fused_loss(x_KBD, head_VD, head_VD, known, labels, weight_K, self.mixture, self.loss_chunk, term, accepted_KB)
        sums = []
        for k, (x_BD, e_BE) in enumerate(zip(x_KBD, term.rows_KRE, strict=True)):
            there_L = labels.row_KL[k] >= 0
            row_L, guess_B = labels.row_KL[k][there_L], self.confidence(torch.cat([x_BD, e_BE], -1)).squeeze(1)
            weight_L = None if labels.weight_KL is None else labels.weight_KL[k][there_L].to(wide)
            label_L = accepted_KB[k, row_L].clamp(max=1)
            sums.append(F.binary_cross_entropy_with_logits(guess_B[row_L].to(wide), label_L, weight_L, reduction="sum"))
        sum_K = self.confidence_weight * torch.stack(sums)
        return total + (weight_K * sum_K).sum().to(total.dtype), loss_K + sum_K.detach().to(loss_K.dtype)

    def export(self) -> Export:
        config = self.config("DraftsmithDSparkDFlash" if self.plugin else "Qwen3DSparkModel") | {
            "markov_rank": self.markov_w1.embedding_dim,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.confidence is not None,
            "confidence_head_with_markov": self.confidence is not None,
        }
        names = {
            name: name.replace("markov_", "markov_head.markov_").replace("confidence.", "confidence_head.proj.")
            for name in self.state_dict()
        }
        return Export(config, names)

    def serving(self, k: int) -> dict[str, Any]:
        return self.speculative("dflash" if self.plugin else "dspark", k)
