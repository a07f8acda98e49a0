"""vLLM's example connector, which speculators extracts with, where there is no CUDA stream to copy on."""

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example


class Done:
    """A copy that is over."""

    def query(self) -> bool:
        return True


class OnCpu(example.ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: example.PendingSave) -> None:
        blocks = torch.tensor(pending.block_ids)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = example.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).contiguous()
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        save_file({"hidden_states": states, "token_ids": pending.token_ids.clone()}, pending.filename)
        if lock is not None:
            os.close(lock)
        self._req_copy_events[pending.req_id] = Done()
