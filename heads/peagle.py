"""P-EAGLE (arXiv 2602.01469): EAGLE-3 that drafts k tokens in one pass (vLLM model class `llama_eagle3` with `parallel_drafting`).

    depth 0 of row t:      E(x_{t+1}) and the fused taps of position t, as in EAGLE-3
    depth k > 0 of row t:  E(mask token) and fc(norms(mask_hidden)), a learnt state in the place of the taps, at position t + k

An engine appends k - 1 mask rows to the accepted prefix and runs the whole causally. So a mask row of depth k sees the depth-0 rows up
to t and its own anchor's mask rows of depths 1..k, and no depth sees a later one: run depth by depth, every layer works out just what
it would in one pass over all depths, and the anchors of a document share their depth-0 rows. That is the attention of
heads.recurrent; the difference is that a mask row knows neither the token drafted before it nor the state behind it.

Training draws which mask rows to work out (nested drops, PARD's COD, arXiv 2504.18583): anchor t is kept at depth k with the chance
c_k = max(keep^k, keep_min), decided for all depths by one number u_t < c_k, so that a row that is kept has its parents. What is left is
weighed 1 / c_k: in expectation the loss and its gradient are those of all rows. The rows of depth 0 all stay: they are the context.

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
        if not 0 <= mask_token_id < target.vocab_size:
            raise ValueError(f"head.mask_token_id must be a token of the target, in 0..{target.vocab_size - 1}, not {mask_token_id}")
        if not 0 < keep <= 1 or not 0 < keep_min <= 1:
            raise ValueError(f"head.keep and head.keep_min must be in (0, 1], not {keep} and {keep_min}")
        self.mask_token_id = mask_token_id
        self.chance_K = [max(keep**k, keep_min) if k else 1.0 for k in range(depths)]
        self.mask_hidden = nn.Parameter(torch.randn(len(taps) * target.hidden_size))

    def step(self, state: Tensor, embed: Tensor, docs: Documents, caches: list[KeyValues]) -> tuple[Tensor, Tensor]:
        if caches[0].keys:  # one row [1, D] for all mask rows, which differ by what they attend to
            state = self.fuse(self.mask_hidden.view(1, len(self.taps), -1))
            embed = self.frozen.embed_VD[self.mask_token_id][None]
        return super().step(state, embed, docs, caches)

    def outputs(self, batch: Batch, docs: Documents, labels: Labels) -> list[Tensor]:
        if not self.training:
            return super().outputs(batch, docs, labels)
        wanted_KT = self._draw(labels, len(batch.token_ids_T))
        docs.need(labels.row_KL)
        index_T, _ = docs.shifted(1)
        caches, row_KL = self.caches(), labels.row_KL.clone()
        x_RD, _ = self.step(self.first_state(batch), self.frozen.embed_VD[batch.token_ids_T[index_T]], docs, caches)
        x_KRD, row_KL[0] = [x_RD], docs.needed.place(labels.row_KL[0])
        for k in range(1, self.depths):
            before = docs.needed
            docs.keep(wanted_KT[k])
            for cache in caches:
                cache.keep(before.place(docs.needed.index_R))
            x_KRD.append(self.step(x_RD, x_RD, docs, caches)[0])
            row_KL[k] = docs.needed.place(labels.row_KL[k])
        labels.row_KL = row_KL
        return x_KRD

    def _draw(self, labels: Labels, total: int) -> Tensor:
        """Leaves out and weighs labels. Returns the rows of each depth that a label at it or behind it needs: bool [K, T], on the CPU.
        The numbers are those of the CPU's generator on every device."""
        row_KL, device = labels.row_KL, labels.row_KL.device
        chance_K1 = torch.tensor(self.chance_K)[:, None]
        kept_KT = (torch.rand(total) < chance_K1).to(device)
        kept_KL = (row_KL >= 0) & kept_KT.gather(1, row_KL.clamp(min=0))
        labels.row_KL = torch.where(kept_KL, row_KL, -1)
        labels.weight_KL = (1 / chance_K1).to(device).expand(row_KL.shape)
        wanted_KT = torch.zeros(len(row_KL), total, dtype=torch.int8, device=device)
        wanted_KT.scatter_reduce_(1, row_KL.clamp(min=0), kept_KL.to(torch.int8), "amax")
        return wanted_KT.flip(0).cummax(0).values.flip(0).bool().cpu()

    def export(self) -> Export:
        """EAGLE-3's layout with `mask_hidden`; vLLM reads the mask token as `ptd_token_id`, and its row from the target's embedding."""
        export = super().export()
        return Export(export.config | {"ptd_token_id": self.mask_token_id}, export.names, export.extra)

    def serving(self, k: int) -> dict[str, Any]:
        return super().serving(k) | {"parallel_drafting": True}
