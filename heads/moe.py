"""A mixture of experts in the place of an MLP, as DeepSeek-V3 and GLM-4-MoE have it (vLLM: models/glm4_moe.py, Glm4MoE).

    s = sigmoid(W x);   chosen: the A largest of s + b;   w = s / sum of s over the chosen
    y = scale * sum over the chosen of w_e Expert_e(x) + Shared(x)

b corrects the choice alone, to spread the load, and is no parameter: it stays what the target ships. The parameters are named as in the
target's checkpoint.

Shape suffixes: R rows, D hidden, E experts, A chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.base import TargetSpec
from heads.kernels import wide
from heads.layers import MLP
from heads.target import Moe


class Router(nn.Module):
    """In float32 or wider, as in the engine: near-ties are then broken alike."""

    e_score_correction_bias: Tensor

    def __init__(self, hidden: int, moe: Moe) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe["experts"], hidden))
        nn.init.normal_(self.weight, std=hidden**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(moe["experts"], dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Moves with the module, but no cast reaches the correction: rounded to bfloat16 it would choose other experts."""
        kept = self.e_score_correction_bias
        super()._apply(fn, recurse)
        self.e_score_correction_bias = kept.to(self.e_score_correction_bias.device)
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(experts [R, A] int64, their weights [R, A]) of x [R, D]."""
        score_RE = F.linear(wide(x), wide(self.weight)).sigmoid()
        chosen_RA = (score_RE.detach() + self.e_score_correction_bias).topk(self.moe["chosen"], -1).indices
        weight_RA = score_RE.gather(1, chosen_RA)
        if self.moe["renormalize"]:
            weight_RA = weight_RA / weight_RA.sum(-1, keepdim=True)
        return chosen_RA, weight_RA * self.moe["scale"]


class MixtureOfExperts(nn.Module):
    """Every expert runs in every pass, be it on no row at all: one that was not chosen has a gradient of zeros, and all ranks sum the same
    gradients in the same order."""

    def __init__(self, spec: TargetSpec, moe: Moe) -> None:
        super().__init__()
        self.spec, self.moe = spec, moe
        self.gate = Router(spec.hidden_size, moe)
        self.experts = nn.ModuleList(MLP(spec.hidden_size, moe["expert_size"]) for _ in range(moe["experts"]))
        self.shared_experts = MLP(spec.hidden_size, moe["expert_size"] * moe["shared"]) if moe["shared"] else None

    @property
    def idle(self) -> int:
        """Parameters of the experts that a row does not meet."""
        return (self.moe["experts"] - self.moe["chosen"]) * 3 * self.spec.hidden_size * self.moe["expert_size"]

    @property
    def kept(self) -> int:
        """Numbers kept for the backward pass per row: gate, up and their product, and of each chosen expert its input, its output and that
        in the order of the rows."""
        a, size = self.moe["chosen"], self.moe["expert_size"]
        return 3 * (a + self.moe["shared"]) * size + 3 * a * self.spec.hidden_size

    def forward(self, x: Tensor) -> Tensor:
        chosen_RA, weight_RA = self.gate(x)
        expert = chosen_RA.flatten()
        order = expert.argsort(stable=True)
        parts = x[order // self.moe["chosen"]].split(expert.bincount(minlength=self.moe["experts"]).tolist())
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        out_RAD = out[order.argsort()].unflatten(0, weight_RA.shape)
        y = torch.einsum("rad,ra->rd", out_RAD, weight_RA.to(x.dtype))
        return y if self.shared_experts is None else y + self.shared_experts(x)


def moe_config(moe: Moe) -> dict[str, Any]:
    """Of config.json, in the words of this family."""
    return {
        "attention_bias": moe["qkv_bias"],
        "use_qk_norm": moe["qk_norm"],
        "n_routed_experts": moe["experts"],
        "num_experts_per_tok": moe["chosen"],
        "n_shared_experts": moe["shared"],
        "moe_intermediate_size": moe["expert_size"],
        "first_k_dense_replace": moe["dense_layers"],
        "norm_topk_prob": moe["renormalize"],
        "routed_scaling_factor": moe["scale"],
        "n_group": 1,
        "topk_group": 1,
    }
