"""Parameter groups and learning-rate schedules. A schedule is a pure function of the optimizer step, so nothing of it needs saving."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from train.config import OptimConfig


def param_groups(module: nn.Module, optim: OptimConfig, vocabularies: set[int]) -> list[dict[str, Any]]:
    """Trainable parameters in groups, each once: matrices decay; vectors (norms and biases) do not.

    With optim.algorithm=muon the matrices between hidden states are Muon's (arXiv 2502.16982). Vectors, and tables with a row for each
    token (vocabularies: their numbers of rows), are AdamW's at optim.adam_lr.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim >= 2]
    vectors = {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0}
    if optim.algorithm == "adamw":
        groups = [{"params": matrices, "weight_decay": optim.weight_decay}, vectors]
    else:
        hidden = [p for p in matrices if p.ndim == 2 and p.shape[0] not in vocabularies]
        rest = [p for p in matrices if all(p is not other for other in hidden)]
        adam = {"use_muon": False, "lr": optim.adam_lr, "betas": tuple(optim.betas), "eps": optim.eps}
        muon = {"use_muon": True, "lr": optim.lr, "momentum": optim.momentum, "weight_decay": optim.weight_decay}
        groups = [{"params": hidden, **muon}, {"params": rest, "weight_decay": optim.weight_decay, **adam}, {**vectors, **adam}]
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
