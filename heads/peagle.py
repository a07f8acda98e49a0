"""P-EAGLE (arXiv 2602.01469): EAGLE-3 that drafts k tokens in one pass (vLLM model class `llama_eagle3` with `parallel_drafting`).

    depth 0 of row t:      E(x_{t+1}) and the fused taps of position t, as in EAGLE-3
    depth k > 0 of row t:  E(mask token) and fc(norms(mask_hidden)), a learnt state in the place of the taps, at position t + k

An engine appends k - 1 mask rows to the accepted prefix and runs the whole causally. So a mask row of depth k sees the depth-0 rows up
to t and its own anchor's mask rows of depths 1..k, and no depth sees a later one: run depth by depth, every layer works out just what
it would in one pass over all depths, and the anchors of a document share their depth-0 rows. That is the attention of
heads.recurrent; the difference is that a mask row knows neither the token drafted before it nor the state behind it.

Training leaves out some of the mask rows and weighs the others up for it: see heads/parallel.py. The rows of depth 0 all stay: they are
the context.

Shape suffixes: T packed tokens, R rows, D hidden, K depths, L label positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heads.attention import Documents, KeyValues
from heads.base import Batch, Export, TargetSpec
from heads.eagle3 import Eagle3
from heads.losses import Labels
from heads.parallel import check_mask_token, each_depth, shares_of


class PEagle(Eagle3):
    """taps: layers applied, ascending, at least one. depths: trained depths, each weighted depth_decay^k. keep, keep_min: share of the
    rows worked out, see above; 1 works out all. num_layers: the first one is fused, the others are plain blocks. mask_token_id: the
    token that stands for a drafted one; its embedding is the target's row, frozen like all of them (mask_hidden learns). The rest: see
    Eagle3."""

    def __init__(
        self,
        *,
        target: TargetSpec,
        taps: list[int],
        mask_token_id: int,
        depths: int = 8,
        depth_decay: float = 0.8,
        keep: float = 0.7,
        keep_min: float = 0.2,
        loss: str = "kl",
        num_layers: int = 4,
        draft_vocab_size: int | None = None,
        train_lm_head: bool = False,
        fc_norm: bool = False,
        norm_before_fc: bool = False,
        norm_before_residual: bool = False,
        loss_chunk: int = 1024,
    ) -> None:
        super().__init__(
            target=target,
            taps=taps,
            depths=depths,
            depth_decay=depth_decay,
            loss=loss,
            num_layers=num_layers,
            draft_vocab_size=draft_vocab_size,
            train_lm_head=train_lm_head,
            fc_norm=fc_norm,
            norm_before_fc=norm_before_fc,
            norm_before_residual=norm_before_residual,
            loss_chunk=loss_chunk,
        )
        if not taps:
            raise ValueError("head.taps must name at least one layer: a mask row has a learnt state in the place of the taps")
        self.mask_token_id = check_mask_token(mask_token_id, target)
        self.shares = shares_of(keep, keep_min, depths)
        self.mask_hidden = nn.Parameter(torch.randn(len(taps) * target.hidden_size))

    def step(self, state: Tensor, embed: Tensor, docs: Documents, caches: list[KeyValues]) -> tuple[Tensor, Tensor]:
        if caches[0].keys:  # one row [1, D] for all mask rows, which differ by what they attend to
            state = self.fuse(self.mask_hidden.view(1, len(self.taps), -1))
            embed = self.embedded(self.frozen.embed_VD[self.mask_token_id][None])
        return super().step(state, embed, docs, caches)

    def outputs(self, batch: Batch, docs: Documents, labels: Labels) -> list[Tensor]:
        index_T, _ = docs.shifted(1)
        state, embed = self.first_state(batch), self.embedded(self.frozen.embed_VD[batch.token_ids_T[index_T]])  # read at depth 0 alone
        caches, x_KRD = self.caches(batch), []
        for _ in each_depth(labels, docs, caches, batch.token_ids_T, self.shares if self.training else None):
            x_KRD.append(self.depth(state, embed, None, docs, caches)[0])
        return x_KRD

    def export(self) -> Export:
        """EAGLE-3's layout with `mask_hidden`; vLLM reads the mask token as `ptd_token_id`, and its row from the target's embedding."""
        export = super().export()
        return Export(export.config | {"ptd_token_id": self.mask_token_id}, export.names, export.extra)

    def serving(self, k: int) -> dict[str, Any]:
        return super().serving(k) | {"parallel_drafting": True}
