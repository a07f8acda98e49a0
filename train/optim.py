"""Parameter groups and learning-rate schedules. A schedule is a pure function of the optimizer step, so nothing of it needs saving."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from train.config import OptimConfig


def param_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices decay; vectors (norms and biases) do not. Each parameter appears once."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim >= 2]
    vectors = [p for p in trainable if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def lr_at(step: int, steps: int, cfg: OptimConfig) -> float:
    """Learning rate of optimizer step `step` (0 <= step < steps).

    A linear warm-up over the first `warmup` share of the steps, then: constant; cosine to min_lr_ratio at the last step;
    or wsd (warm-up, stable, decay; arXiv 2405.18392), which falls linearly over the last `decay` share of the steps.
    """
    floor = cfg.lr * cfg.min_lr_ratio
    warm = math.ceil(cfg.warmup * steps)
    if step < warm:
        return cfg.lr * (step + 1) / warm
    if cfg.schedule == "constant":
        return cfg.lr
    begin = warm if cfg.schedule == "cosine" else max(warm, steps - math.ceil(cfg.decay * steps))
    if step < begin:
        return cfg.lr
    progress = (step - begin + 1) / (steps - begin)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if cfg.schedule == "cosine" else 1 - progress
    return floor + (cfg.lr - floor) * share
