"""Our KV connector: hands the hidden states of each finished sequence from vLLM's cache to the store, inside vLLM's worker.

Loaded by vLLM itself (`kv_connector_module_path="data.vllm_connector"`) beside the method `extract_hidden_states`, which
keeps the residual streams of chosen layers in a cache group of its own. Shapes: n tokens, C captured layers, L taps, D hidden.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    ExampleHiddenStatesConnectorMetadata,
    PendingSave,
    extract_from_kv_cache,
)

from data.answers import Spans, mask_of
from data.states import label_rows
from data.store import StoreWriter
from data.target import final_norm, frozen
from data.teacher import likeliest, top_k
from data.window import Sizes, WindowWriter


@dataclass
class Handover(PendingSave):
    """A finished sequence on its way from the scheduler to the worker, and its supervised spans."""

    record_id: str
    spans: Spans


def rms_norm(x_nD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMSNorm as transformers' LlamaRMSNorm: in float32, cast to the states' dtype, then scaled in that dtype."""
    x32_nD = x_nD.float()
    normed_nD = x32_nD * torch.rsqrt(x32_nD.square().mean(-1, keepdim=True) + eps)
    return weight_D.to(x_nD.dtype) * normed_nD.to(x_nD.dtype)


class StoreConnector(ExampleHiddenStatesConnector):
    """Extra config: store_dir, manifest, layer_ids (ascending, as vLLM orders its columns), taps, last, target_dir, eps,
    depth (the target's layers), softcap (of its logits), shard_tokens, window (the fields of data.window.Sizes, or None)."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.use_lock = False
        self.plan: dict[str, Any] = self._kv_transfer_config.kv_connector_extra_config
        self.handed: set[str] = set()
        self.writer: StoreWriter | None = None
        self.thread = ThreadPoolExecutor(1, "store")  # of the writer alone: the target goes on while states are packed and written
        self.backlog: deque[tuple[Future[None], int]] = deque()  # what it has still to do, and tokens of each
        self.lock = threading.Lock()  # of the writer

    # scheduler side
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keeps the sequence's blocks until the worker has read them, and notes whose they are."""
        keep, _ = super().request_finished(request, block_ids)
        if keep:
            saved = self._pending_saves[request.request_id]
            self._pending_saves[request.request_id] = Handover(**vars(saved), **request.kv_transfer_params)
        return keep, None

    # worker side
    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if self._is_tp_rank_zero:
            kind = WindowWriter if self.plan["window"] else StoreWriter
            self.writer = kind(Path(self.plan["store_dir"]), self.plan["manifest"], self.plan["shard_tokens"])
            self.norm_D, self.k = final_norm(Path(self.plan["target_dir"])), top_k(self.plan["last"])
            self.columns = [self.plan["layer_ids"].index(tap) for tap in self.plan["taps"]]
            if self.k is not None:
                assert self._kv_cache is not None
                self.norm_D = self.norm_D.to(self._kv_cache.device)
                self.lm_head_VD = frozen(Path(self.plan["target_dir"]), self._kv_cache.dtype, self._kv_cache.device).lm_head_VD

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Stores what finished in the step before, and lets the scheduler free those blocks."""
        if self.has_connector_metadata():
            meta = self._get_connector_metadata()
            if isinstance(meta, ExampleHiddenStatesConnectorMetadata) and self._is_tp_rank_zero:
                for pending in meta.pending_saves:
                    assert isinstance(pending, Handover)
                    self._store(pending)
        self._accumulated_finished_req_ids.update(finished_req_ids)
        done = self._accumulated_finished_req_ids & self.handed
        self._accumulated_finished_req_ids -= done
        self.handed -= done
        return done or None, None

    def _store(self, pending: Handover) -> None:
        """Takes the states out of the cache, whose blocks may then be used again, and hands them to the writer's thread; the likeliest
        tokens are worked out where the cache is."""
        assert self._kv_cache is not None
        n = pending.token_ids.shape[0]
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots_n = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()[:n]
        states_nCD = extract_from_kv_cache(self._kv_cache, slots_n.to(self._kv_cache.device), n)
        mask_n = torch.tensor(mask_of(pending.spans, n))
        top = None
        if self.k is not None:
            rows = label_rows(mask_n).nonzero().squeeze(1).to(states_nCD.device)
            found = likeliest(self._last(states_nCD[rows]), self.lm_head_VD, self.k, self.plan["softcap"])
            top = (found[0].to("cpu", non_blocking=True), found[1].to("cpu", non_blocking=True))
        states_nCD = states_nCD.to("cpu", non_blocking=True)
        copied = torch.cuda.Event() if self._kv_cache.is_cuda else None
        if copied:
            copied.record()
        self.backlog.append((self.thread.submit(self._write, pending, mask_n, states_nCD, top, copied), n))
        self.handed.add(pending.req_id)
        self.wait_for_writer(self.plan["shard_tokens"])

    def wait_for_writer(self, tokens: int) -> None:
        """Until it has no more than `tokens` before it. Raises what it raised."""
        while self.backlog and (self.backlog[0][0].done() or sum(n for _, n in self.backlog) > tokens):
            self.backlog.popleft()[0].result()

    def _last(self, states_nCD: Tensor) -> Tensor:
        """After the final norm: vLLM gives the last residual stream before it."""
        return rms_norm(states_nCD[:, self.plan["layer_ids"].index(self.plan["depth"])], self.norm_D, self.plan["eps"])

    def _write(
        self, pending: Handover, mask_n: Tensor, states_nCD: Tensor, top: tuple[Tensor, Tensor] | None, copied: torch.cuda.Event | None
    ) -> None:
        assert self.writer is not None
        if copied:
            copied.synchronize()
        taps_nLD = states_nCD[:, self.columns] if self.columns else None
        last_nD = self._last(states_nCD) if top is None and self.plan["last"] != "none" else None
        with self.lock:
            self.writer.add(pending.record_id, pending.token_ids, mask_n, taps_nLD, last_nD, top)


def close_store(_worker: Any) -> None:
    """Closes the store of this worker's connector. For `LLM.collective_rpc`: an engine's own shutdown is no promise."""
    connector = _connector()
    if connector.writer is not None:
        connector.wait_for_writer(0)
        connector.writer.close()


def has_room(_worker: Any) -> bool:
    """Whether the window of this worker's connector has room for one more sequence."""
    connector = _connector()
    writer = connector.writer
    with connector.lock:
        return not isinstance(writer, WindowWriter) or writer.has_room(Sizes(**connector.plan["window"]))


def _connector() -> StoreConnector:
    connector = get_kv_transfer_group()
    assert isinstance(connector, StoreConnector)
    return connector
