"""What validation asks of a head's first choices.

Shape suffixes: T packed tokens, R rows that the head worked out, L label positions, D hidden, V vocab, U draft vocab, K depths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.losses import Labels, LowRank
from heads.teacher import Top


@torch.no_grad()
def hits(  # noqa: PLR0913
    x_KRD: list[Tensor],
    head_UD: Tensor,
    draft_ids_U: Tensor | None,
    lm_head_VD: Tensor,
    known: Tensor | Top | None,
    labels: Labels,
    chunk: int,
    term: LowRank | None = None,
) -> Tensor:
    """Whether the head's first choice is the target's own, over the whole target vocabulary: [K, R] bool. known: the target's states
    or likeliest tokens; None: whether it is the text's own token. term: see heads.losses.fused_loss.

    A token that the draft vocabulary lacks can never be hit, as in the engine.
    """
    hit_KR = torch.zeros(len(x_KRD), len(x_KRD[0]), dtype=torch.bool, device=head_UD.device)
    for i in range(0, len(labels.position_L), chunk):
        here = slice(i, i + chunk)
        if isinstance(known, Tensor):
            best_L, ids_U = (known[labels.position_L[here]] @ lm_head_VD.T).argmax(-1), draft_ids_U
        else:  # indices into the draft vocabulary already
            best_L, ids_U = labels.token_L[here] if known is None else known.place_TC[labels.position_L[here], 0], None
        for k, x_RD in enumerate(x_KRD):
            rows = labels.row_KL[k, i : i + chunk]
            valid = rows >= 0
            logits = x_RD[rows[valid]] @ head_UD.T
            choice = (logits if term is None else logits.addmm_(term.rows_KRE[k][rows[valid]], term.weight_UE.T)).argmax(-1)
            hit_KR[k, rows[valid]] = (choice if ids_U is None else ids_U[choice]) == best_L[valid]
    return hit_KR


def rates(hit_KR: Tensor, row_KL: Tensor, anchor_R: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """(sum [K], count [K]) of two shares. hit: of rows with a label, those that hit. accept: of the rows `anchor_R` [R] bool, from which
    an engine can draft, with a label at depths 0 .. k, those that hit at all of them."""
    valid_KR = torch.zeros_like(hit_KR)
    for k, found in enumerate(row_KL):
        valid_KR[k, found[found >= 0]] = True
    anchor_KR = valid_KR.cumprod(0).bool() & anchor_R
    return {
        "hit": (hit_KR.sum(1), valid_KR.sum(1)),
        "accept": ((hit_KR.cumprod(0).bool() & anchor_KR).sum(1), anchor_KR.sum(1)),
    }
