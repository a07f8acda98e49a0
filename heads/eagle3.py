"""EAGLE-3 and EAGLE-3.1 (arXiv 2503.01840; vLLM model class `llama_eagle3`).

    g = fc [h^(l) ; h^(m) ; h^(u)]                              taps fused once, at depth 0
    c = [RMS_in(E(x_{t+1})) ; RMS_h(g)]                         attention reads both, 2D wide
    a = r + Attn(c), r = g (or RMS_h(g) with norm_before_residual);   h = a + MLP(RMS_post(a))
    logits = lm_head(RMS_out(h));   next state = h, or RMS_out(h) with norm_output (EAGLE-3.1)

EAGLE-3.1 also gives each tap its own norm (`fc_norm`). With no taps the head reads the target's last state instead (vLLM:
`use_aux_hidden_state: false`), which makes it an MTP-like head that needs no override on the target.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heads.attention import Documents, KeyValues
from heads.base import Batch, Export, TargetSpec, check_positive
from heads.layers import MLP, Attention, Block, RMSNorm, llama_config, rows_at
from heads.recurrent import RecurrentHead


class FusedBlock(nn.Module):
    """The first layer of EAGLE-3: attention over [embedding ; state], residual on the state alone."""

    def __init__(self, spec: TargetSpec, norm_before_residual: bool) -> None:
        super().__init__()
        size, eps = spec.hidden_size, spec.rms_norm_eps
        self.input_layernorm, self.hidden_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.self_attn = Attention(spec, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, spec.intermediate_size)
        self.norm_before_residual = norm_before_residual

    def embedded(self, embed_RD: Tensor) -> Tensor:
        """The embeddings' part of q, k and v, side by side."""
        return self.self_attn.partly(self.input_layernorm(embed_RD))

    def forward(self, state: Tensor, embed: Tensor, docs: Documents, cache: KeyValues, last: bool) -> Tensor:
        """See heads.layers.Block. embed: as `embedded` gives it."""
        rows, normed = rows_at(docs, cache, last), self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        residual = residual if cache.keys else rows.of(residual)
        h = residual + self.self_attn(normed, docs, cache, rows, embed)
        return h + self.mlp(self.post_attention_layernorm(h))


class Eagle3(RecurrentHead):
    """taps: layers applied (ascending), [] for the target's last state. depths: K trained depths, each weighted
    depth_decay^k. loss: see heads.objectives. draft_vocab_size: size of the reduced vocabulary, null for the target's own.
    train_lm_head: train the lm_head (it starts as the target's rows) instead of keeping those rows frozen. loss_chunk: label
    positions per chunk.
    """

    def __init__(
        self,
        *,
        target: TargetSpec,
        taps: list[int],
        depths: int = 3,
        depth_decay: float = 0.8,
        loss: str = "kl",
        num_layers: int = 1,
        draft_vocab_size: int | None = None,
        train_lm_head: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        norm_before_fc: bool = False,
        norm_before_residual: bool = False,
        loss_chunk: int = 1024,
    ) -> None:
        super().__init__(
            target=target,
            depths=depths,
            depth_decay=depth_decay,
            loss=loss,
            loss_chunk=loss_chunk,
            draft_vocab_size=draft_vocab_size,
            train_lm_head=train_lm_head,
        )
        check_positive(num_layers=num_layers)
        _check_taps(taps, target, fc_norm or norm_before_fc)
        self.taps, self.needs_last = tuple(taps), "supervised" if taps else "all"
        size, eps = target.hidden_size, target.rms_norm_eps
        self.norm_output, self.norm_before_residual = norm_output, norm_before_residual
        self.fc = nn.Linear(len(taps) * size, size, bias=False) if taps else None
        self.input_norm = RMSNorm(len(taps) * size, eps) if norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in taps) if fc_norm else None
        self.first = FusedBlock(target, norm_before_residual)
        self.rest = nn.ModuleList(Block(target) for _ in range(num_layers - 1))
        self.norm = RMSNorm(size, eps)

    def caches(self, batch: Batch) -> list[KeyValues]:
        return [KeyValues() for _ in range(1 + len(self.rest))]

    def first_state(self, batch: Batch) -> Tensor:
        if self.fc is None:
            assert batch.last_TD is not None
            return batch.last_TD
        assert batch.taps_TLD is not None
        return self.fuse(batch.taps_TLD)

    def fuse(self, taps_TLD: Tensor) -> Tensor:
        """The taps [T, L, D] as one state [T, D]: norms and fc."""
        assert self.fc is not None
        if self.input_norm is not None:
            taps_TLD = self.input_norm(taps_TLD.flatten(1)).view_as(taps_TLD)
        if self.fc_norm is not None:
            taps_TLD = torch.stack([norm(x) for norm, x in zip(self.fc_norm, taps_TLD.unbind(1), strict=True)], 1)
        return self.fc(taps_TLD.flatten(1))

    def embedded(self, embed_RD: Tensor) -> Tensor:
        return self.first.embedded(embed_RD)

    def step(self, state: Tensor, embed: Tensor, docs: Documents, caches: list[KeyValues]) -> tuple[Tensor, Tensor]:
        h = self.first(state, embed, docs, caches[0], last=not self.rest)
        for i, layer in enumerate(self.rest, start=1):
            h = layer(h, docs, caches[i], last=i == len(self.rest))
        y = self.norm(h)
        return y, (y if self.norm_output else h)

    def export(self) -> Export:
        """vLLM's raw EAGLE-3 layout. d2t holds offsets: target id = j + d2t[j]. A reduced vocabulary always ships its lm_head
        rows, without which vLLM would take the target's first rows and say nothing."""
        names = {
            name: name.replace("first.", "midlayer.") if name.startswith("first.") else name
            for name in self.state_dict()
            if name != "draft_ids_U"
        }
        for i in range(len(self.rest)):
            names = {ours: theirs.replace(f"rest.{i}.", f"layers.{i + 1}.") for ours, theirs in names.items()}
        extra: dict[str, Tensor] = {}
        if self.draft_ids_U is not None:
            extra["d2t"] = self.draft_ids_U.cpu() - torch.arange(len(self.draft_ids_U))
            if self.lm_head is None:
                extra["lm_head.weight"] = self.teacher_UD.detach()
        return Export(self._config(), names, extra)

    def _config(self) -> dict[str, Any]:
        config = llama_config(self.target) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1 + len(self.rest),
            "draft_vocab_size": self.draft_vocab_size or self.target.vocab_size,
            "target_hidden_size": self.target.hidden_size,
            "fc_norm": self.fc_norm is not None,
            "norm_output": self.norm_output,
            "norm_before_fc": self.input_norm is not None,
            "norm_before_residual": self.norm_before_residual,
        }
        if not self.taps:
            return config | {"eagle_config": {"use_aux_hidden_state": False}}
        ids = {"eagle_aux_hidden_state_layer_ids": list(self.taps)}
        return config | ids | {"num_aux_hidden_states": len(self.taps), "eagle_config": ids | {"use_aux_hidden_state": True}}

    def serving(self, k: int) -> dict[str, Any]:
        return {"method": "eagle3", "num_speculative_tokens": k}


def _check_taps(taps: list[int], target: TargetSpec, normed: bool) -> None:
    if list(taps) != sorted(set(taps)) or any(not 0 <= t <= target.num_layers for t in taps):
        raise ValueError(f"head.taps must ascend without repeats within 0..{target.num_layers} (layers applied), not {list(taps)}")
    if not taps and normed:
        raise ValueError("head.fc_norm and head.norm_before_fc need taps: with taps=[] the head has no fc")
