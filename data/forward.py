"""The target's own forward pass in transformers, one sequence at a time: for checks, and for targets small enough to run beside a training.

A sequence by itself, because then its states depend on nothing but its tokens: not on the batch it is read for, nor on the number of
ranks. From some 200 tokens on a GPU is busy with products rather than with reading weights, so little is lost by it.

Shape suffixes: T tokens of one sequence, L taps, D hidden, M key/value heads, H head size.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.errors import UserError


class Forward:
    """taps: layers applied, in any order; one for each column of the states. Safe to use from several threads.

    UserError: transformers does not know the target's architecture, or the device has no room for it.
    """

    def __init__(
        self, folder: Path, taps: Sequence[int], dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool = False
    ) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        settings: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "trust_remote_code": trust_remote_code}
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(str(folder), **settings)
            model.to(device)
        except torch.OutOfMemoryError as error:
            raise UserError(f"target {folder}: no room for it on {device}, beside what is there already") from error
        except (ValueError, ImportError) as error:  # an architecture it does not know, code that it would have to trust, a lacking package
            raise UserError(f"target {folder}: transformers cannot load it ({str(error).strip().splitlines()[0]})") from error
        self.decoder: Any = model.eval().requires_grad_(False).get_decoder()
        self.taps, self.device = tuple(taps), torch.device(device)
        self._streams: dict[int, Tensor] = {}
        self._lock = threading.Lock()
        # The residual stream after t layers is what layer t reads; after all of them, what the final norm reads.
        readers = [*self.decoder.layers, self.decoder.norm]
        for tap in set(self.taps):
            readers[tap].register_forward_pre_hook(lambda _, args, tap=tap: self._streams.__setitem__(tap, args[0]))

    @torch.no_grad()
    def states(
        self, token_ids_T: Tensor, exit_layer: int | None = None, taps: Sequence[int] | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Residual streams [T, L, D] after `taps` layers and the state [T, D] after the final norm, on the target's device in its dtype.

        taps: those of the object's own that are wanted, in their order; None: all. exit_layer: the final norm comes after so many layers
        already, and no stream is returned. options: of the decoder's forward."""
        layers, wanted = self.decoder.layers, self.taps if taps is None else taps
        with self._lock:
            try:
                self.decoder.layers = layers[:exit_layer]
                found = self.decoder(token_ids_T[None].to(self.device), **{"use_cache": False, **options})
            finally:
                self.decoder.layers = layers
            last_TD = found.last_hidden_state[0]
            streams = [] if exit_layer is not None else [self._streams[tap].view_as(last_TD) for tap in wanted]
            self._streams.clear()
        return torch.stack(streams, 1) if streams else last_TD.new_empty(len(last_TD), 0, last_TD.shape[1]), last_TD

    def states_and_kv(self, token_ids_T: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """`states`, and of each of `layers` (from 0; they make keys and values of their own) [T, 2, M, H] as its attention reads them."""
        cache = self.empty_cache()
        streams_TLD, last_TD = self.states(token_ids_T, past_key_values=cache, use_cache=True)
        kept = [(cache.layers[layer].keys[0], cache.layers[layer].values[0]) for layer in layers]  # each [M, T, H]
        return streams_TLD, last_TD, [torch.stack(pair).permute(2, 0, 1, 3) for pair in kept]

    @staticmethod
    def empty_cache() -> Any:
        """Of keys and values, for `states`. It holds every token, also where the model's config would let go of those beyond a window."""
        from transformers import DynamicCache

        return DynamicCache()
