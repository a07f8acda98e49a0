"""What DFlash and DSpark share: a head that drafts a whole block in one pass (arXiv 2602.06036; vLLM model class `qwen3_dflash`).

    c_t = RMS_ctx(fc [h^(1)_t ; .. ; h^(L)_t])                      taps fused once, at every position of the context
    x = [E(x_a) ; E(mask) ; E(mask) ; ..] at positions a, a+1, ..   a block of slots behind its anchor a
    every layer:  K, V = [W c_{<a} ; W RMS(x)], q and k normed per head;   x = x + Attn(x);   x = x + MLP(RMS(x))
    logits = lm_head(RMS_out(x))

c is the same for all layers and never changes. Slots see the whole context before their anchor and each other, or, with `causal`, the
slots before them. Two conventions say what a slot predicts, and a mix of the two drafts rubbish without an error: slot j the token
a + j, the anchor's own slot nothing (z-lab, vLLM's `dflash`), or slot j the token a + 1 + j (DeepSpec, `sample_from_anchor`).
In either, depth k predicts x_{a+1+k}; row t of a batch is the anchor a = t + 1.

Shape suffixes: T packed tokens, B blocks, W slots of a block, R = B W rows, D hidden, V vocab, K depths, L label positions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from heads.attention import Documents, Pair
from heads.base import Batch, DraftHead, LossOut, TargetSpec
from heads.block_attention import Blocks
from heads.layers import BlockLayer, RMSNorm, llama_config, rope_tables
from heads.losses import Labels, LowRank, fused_loss
from heads.metrics import hits, rates
from heads.objectives import parse
from heads.parallel import check_mask_token
from heads.teacher import teacher_of


class BlockHead(DraftHead):
    """Subclasses say what the engine loads, and may add a term to the logits, weights of rows and further losses. See heads.dflash for
    the arguments."""

    needs_last = "supervised"
    contiguous = True

    def __init__(
        self,
        *,
        target: TargetSpec,
        taps: list[int],
        num_layers: int,
        block_size: int,
        anchors: int,
        mask_token_id: int,
        causal: bool,
        sample_from_anchor: bool,
        gamma: float,
        loss: str,
        loss_chunk: int,
    ) -> None:
        super().__init__()
        self.mixture = parse(loss)
        if not taps or list(taps) != sorted(set(taps)) or any(not 0 <= t <= target.num_layers for t in taps):
            raise ValueError(f"head.taps must be ascending layers within 0..{target.num_layers}, at least one, not {list(taps)}")
        if not 1 <= num_layers <= 5:
            raise ValueError(f"head.num_layers must be in 1..5, not {num_layers}")
        if block_size < (1 if sample_from_anchor else 2):
            raise ValueError(f"head.block_size={block_size}: must leave a slot that predicts, besides the anchor's own")
        if anchors < 1 or loss_chunk < 1:
            raise ValueError(f"head.anchors and head.loss_chunk must be at least 1, not {anchors} and {loss_chunk}")
        if not 0 < gamma < math.inf:
            raise ValueError(f"head.gamma must be positive and finite, not {gamma}")
        self.target, self.taps, self.block_size, self.anchors, self.loss_chunk = target, tuple(taps), block_size, anchors, loss_chunk
        self.mask_token_id = check_mask_token(mask_token_id, target)
        self.causal, self.sample_from_anchor = causal, sample_from_anchor
        self.first = 0 if sample_from_anchor else 1  # slot of depth 0
        self.depths = block_size - self.first
        self.depth_weights = tuple(math.exp(-k / gamma) for k in range(self.depths))
        self.fc = nn.Linear(len(taps) * target.hidden_size, target.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(target.hidden_size, target.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(target) for _ in range(num_layers))
        self.norm = RMSNorm(target.hidden_size, target.rms_norm_eps)

    # ---- what a subclass may add

    def term(self, previous_KB: list[Tensor]) -> LowRank | None:
        """Added to the logits of depth k, of the token before the one it predicts: per depth int64 [B]."""
        return None

    def row_weights(self, x_KBD: list[Tensor], labels: Labels) -> Tensor | None:
        """Weight of each label's loss besides the depth's [K, L], a constant to the gradient; None: 1."""
        return None

    def objective(
        self, x_KBD: list[Tensor], previous_KB: list[Tensor], batch: Batch, labels: Labels, weight_K: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See heads.losses.fused_loss."""
        head_VD, known = self.frozen.lm_head_VD, teacher_of(batch, self.target.vocab_size)
        chunk, term = self.loss_chunk, self.term(previous_KB)
        return fused_loss(x_KBD, head_VD, head_VD, known, labels, weight_K, self.mixture, chunk, term)

    def worked(self, tokens: int) -> tuple[float, float]:
        """See ChainHead.worked. The context passes fc and the projections to keys and values, slots pass the layers."""
        blocks, fc = min(self.anchors, tokens), self.fc.weight.numel()
        layers = {name: p.numel() for name, p in self.layers.named_parameters() if p.dim() > 1}
        context = fc + sum(size for name, size in layers.items() if "k_proj" in name or "v_proj" in name)
        whole = sum(layers.values())
        return (tokens * context + blocks * self.block_size * whole) / (fc + whole), blocks * self.depths

    # ---- the pass

    def context(self, batch: Batch, docs: Documents) -> list[Pair]:
        """Keys and values [T, heads, size] of every layer at every position."""
        assert batch.taps_TLD is not None
        c_TD = self.hidden_norm(self.fc(batch.taps_TLD.flatten(1)))
        angles = rope_tables(self.target, docs.positions_T)
        return [layer.self_attn.keys_values(c_TD, angles) for layer in self.layers]  # type: ignore[union-attr]

    def run(self, context: list[Pair], token_B: Tensor, place_B: Tensor, start_B: Tensor, depths: int) -> list[Tensor]:
        """Inputs of the lm_head [B, D] of each depth, for blocks as wide as that many depths need. Without gradients not all at once."""
        step = len(token_B) if torch.is_grad_enabled() else self.loss_chunk
        found = []
        for token, place, start in zip(*(x.split(max(1, step)) for x in (token_B, place_B, start_B)), strict=True):
            blocks = Blocks(place, start, depths + self.first, self.causal)
            ids_BW = token[:, None].repeat(1, blocks.width)
            ids_BW[:, 1:] = self.mask_token_id
            x_RD, angles = self.frozen.embed_VD[ids_BW.flatten()], rope_tables(self.target, blocks.positions_R)
            for layer, pair in zip(self.layers, context, strict=True):
                x_RD = layer(x_RD, pair, blocks, angles)
            found.append(self.norm(x_RD).unflatten(0, (-1, blocks.width))[:, self.first :])
        return list(torch.cat(found).unbind(1))

    # ---- training

    def valid(self, batch: Batch, docs: Documents) -> Tensor:
        """Where a depth counts, by the anchor's place: [K, T] bool. The anchor is no document's first token (its context would be empty),
        and x_{a+1}, .., x_{a+1+k} are all supervised tokens of its document."""
        shifts = [docs.shifted(1 + k) for k in range(self.depths)]
        supervised_KT = torch.stack([batch.loss_mask_T[index] & inside for index, inside in shifts])
        return (supervised_KT & (docs.positions_T > 0)).cumprod(0).bool()

    def count(self, batch: Batch) -> Tensor:
        """Of all anchors, also where `loss` draws some of them: its sums are scaled to all."""
        return self.valid(batch, Documents(batch.offsets_S1, batch.token_ids_T.device)).sum(1)

    def labels(self, batch: Batch, valid_KT: Tensor, place_B: Tensor) -> Labels:
        """Row b at depth k predicts x_{a+1+k}, whose teacher is the state of position a + k."""
        row_KT = torch.full_like(valid_KT, -1, dtype=torch.long)
        for k in range(self.depths):
            row_B = valid_KT[k, place_B].nonzero().squeeze(1)
            row_KT[k, place_B[row_B] + k] = row_B
        position_L = (row_KT >= 0).any(0).nonzero().squeeze(1)
        return Labels(position_L, row_KT[:, position_L], batch.token_ids_T[position_L + 1])

    def loss(self, batch: Batch, weight_K: Tensor | None = None) -> LossOut:
        """Training: at up to `anchors` anchors of the pack, drawn from torch's global generator, each as likely as any other; the sums are
        scaled by all / drawn, so that their expectation is the sum over all. Evaluation: at all of them."""
        device = batch.token_ids_T.device
        docs = Documents(batch.offsets_S1, device)
        valid_KT = self.valid(batch, docs)
        every_B = valid_KT[0].nonzero().squeeze(1)
        place_B, share = every_B, 1.0
        if self.training and len(every_B) > self.anchors:
            place_B, share = every_B[torch.randperm(len(every_B))[: self.anchors].sort().values.to(device)], len(every_B) / self.anchors
        labels = self.labels(batch, valid_KT, place_B)
        start_B = place_B - docs.positions_T[place_B]
        x_KBD = self.run(self.context(batch, docs), batch.token_ids_T[place_B], place_B, start_B, self.depths)
        labels.weight_KL = self.row_weights(x_KBD, labels)
        if share != 1:
            labels.weight_KL = share * (torch.ones(labels.row_KL.shape, device=device) if labels.weight_KL is None else labels.weight_KL)
        weight_K = torch.ones(self.depths, device=device) if weight_K is None else weight_K
        previous_KB = [batch.token_ids_T[docs.shifted(k)[0][place_B]] for k in range(self.depths)]
        total, loss_K = self.objective(x_KBD, previous_KB, batch, labels, weight_K)
        metrics = {} if self.training else self._metrics(x_KBD, previous_KB, batch, labels, batch.loss_mask_T[place_B])
        return LossOut(total, loss_K, valid_KT.sum(1), metrics)

    def _metrics(
        self, x_KBD: list[Tensor], previous_KB: list[Tensor], batch: Batch, labels: Labels, generated_B: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """generated_B: whether the anchor is a token that the target generated, as all are that an engine drafts from."""
        head_VD, term = self.frozen.lm_head_VD, self.term(previous_KB)
        known = teacher_of(batch, self.target.vocab_size)
        hit_KB = hits(x_KBD, head_VD, None, head_VD, known, labels, self.loss_chunk, term)
        return rates(hit_KB, labels.row_KL, generated_B)

    # ---- drafting

    def logits(self, x_BD: Tensor, previous_B: Tensor) -> Tensor:
        """[B, V] of one depth. previous_B: the token before the one that they predict."""
        logits_BV, term = x_BD @ self.frozen.lm_head_VD.T, self.term([previous_B])
        return logits_BV if term is None else logits_BV.addmm_(term.rows_KRE[0], term.weight_UE.T)

    @torch.no_grad()
    def propose(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        """As wide a block as k drafts need, as in the engine: with slots that see each other, its width is part of the result."""
        docs = Documents(batch.offsets_S1, batch.token_ids_T.device)
        row_T, token_T = torch.arange(len(batch.token_ids_T), device=batch.token_ids_T.device), batch.token_ids_T[docs.shifted(1)[0]]
        drafts, log_q = [], []
        for x_TD in self.run(self.context(batch, docs), token_T, row_T + 1, row_T - docs.positions_T, k):
            parts = zip(x_TD.split(self.loss_chunk), token_T.split(self.loss_chunk), strict=True)
            tops = [self.logits(x, token).float().log_softmax(-1).max(-1) for x, token in parts]
            token_T = torch.cat([top.indices for top in tops])
            drafts.append(token_T)
            log_q.append(torch.cat([top.values for top in tops]))
        return torch.stack(drafts, 1), torch.stack(log_q, 1)

    # ---- the engine

    def config(self, architecture: str) -> dict[str, Any]:
        """vLLM's raw layout. Layer ids stand there twice: as layers applied, which wins in vLLM, and as 0-based layer outputs."""
        return llama_config(self.target) | {
            "model_type": "qwen3",
            "architectures": [architecture],
            "num_hidden_layers": len(self.layers),
            "draft_vocab_size": self.target.vocab_size,
            "target_hidden_size": self.target.hidden_size,
            "block_size": self.block_size,
            "sample_from_anchor": self.sample_from_anchor,
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": [tap - 1 for tap in self.taps],
                "causal": self.causal,
            },
        }

    def speculative(self, method: str, k: int) -> dict[str, Any]:
        if k > self.depths:
            raise ValueError(
                f"head.block_size={self.block_size} drafts {self.depths} tokens at most, not {k}: lower eval.k, or train wider"
            )
        return {"method": method, "num_speculative_tokens": k}
