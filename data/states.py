"""How hidden states lie in a store: whole, in one dtype, or compact ("fp8"): taps in float8 e4m3 with a scale per row, last in bfloat16.

A row is one tap of one token. Its scale is the power of two that brings its largest element into (224, 448], the top of e4m3: then the
3 bits of mantissa are the only loss (2.6 % of a row of normal numbers, in the 2-norm), and what is read in bfloat16 is exactly what was
written. Elements below 2^-14 of a row's largest lose more. Shape suffixes: T tokens of a sequence, L taps, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data.errors import UserError

# data.states_dtype -> dtype of taps and of last on disk
KINDS = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "float32": (torch.float32, torch.float32),
    "fp8": (torch.float8_e4m3fn, torch.bfloat16),
}


def kinds(name: str) -> tuple[torch.dtype, torch.dtype]:
    """dtype of taps and of last on disk. UserError: an unknown name."""
    if name not in KINDS:
        raise UserError(f"data.states_dtype={name!r}: hidden states are stored as one of {', '.join(KINDS)}")
    return KINDS[name]


def tap_tensors(name: str) -> tuple[str, ...]:
    """The tensors of a shard that hold its taps."""
    return ("taps", "taps_scale") if kinds(name)[0] == torch.float8_e4m3fn else ("taps",)


def row_bytes(name: str, D: int) -> tuple[int, int]:
    """Bytes of one tap of one token, and of one row of last."""
    taps, last = kinds(name)
    return D * taps.itemsize + 4 * (len(tap_tensors(name)) - 1), D * last.itemsize


def pack(taps_TLD: Tensor, name: str) -> dict[str, Tensor]:
    """The tensors of a shard that hold these taps: taps [T, L, D], taps_scale [T, L] float32. On the CPU, and not shared with them."""
    kind = kinds(name)[0]
    if kind != torch.float8_e4m3fn:
        return {"taps": taps_TLD.detach().to("cpu", kind, copy=True)}
    x_TLD = taps_TLD.detach().to("cpu", torch.float32)
    largest_TL = x_TLD.abs().amax(-1)
    mantissa_TL, exponent_TL = torch.frexp(largest_TL)  # mantissa in [0.5, 1); 448 is 0.875 * 2^9
    shift_TL = (exponent_TL - torch.where(mantissa_TL > 0.875, 8, 9)).clamp(min=-100)
    scale_TL = torch.ldexp(torch.ones_like(largest_TL), shift_TL)
    packed_TLD = (x_TLD / scale_TL[..., None]).to(kind)
    return {"taps": packed_TLD, "taps_scale": torch.where(largest_TL.isfinite(), scale_TL, torch.nan)}


def unpack(packed: list[Tensor], name: str) -> Tensor:
    """What the tensors of `tap_tensors` hold, [T, L, D]: in the storage dtype, compact ones exactly in the dtype of last."""
    if len(packed) == 1:
        return packed[0]
    taps_TLD, scale_TL = packed
    return (taps_TLD.float() * scale_TL[..., None]).to(kinds(name)[1])


def finite(packed: dict[str, Tensor]) -> bool:
    """Whether packed taps hold neither NaN nor Inf."""
    return bool(packed["taps_scale" if "taps_scale" in packed else "taps"].isfinite().all())


def label_rows(loss_mask_T: Tensor) -> Tensor:
    """Rows of one sequence whose state predicts a label: row t counts iff t + 1 < T and loss_mask[t + 1]. [T] bool -> [T] bool."""
    rows_T = torch.zeros_like(loss_mask_T, dtype=torch.bool)
    rows_T[:-1] = loss_mask_T[1:]
    return rows_T
