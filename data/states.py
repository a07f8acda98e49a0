"""How hidden states lie in a store: whole, in one dtype, or compact ("fp8"): taps in float8 e4m3 with a scale per row, last in 10-bit whole
numbers with a scale per 32.

A row is one tap, or last, of one token; every scale is a power of two. That of a tap brings its row's largest element into (224, 448],
the top of e4m3: the 3 bits of mantissa are the only loss (2.6 % of a row of normal numbers, in the 2-norm), and single huge elements, which
residual streams have, cost the others nothing; elements below 2^-14 of the largest lose more. last is the teacher, for which 2.6 % is
too much; behind the final norm no element is huge, and 9 bits below the largest of 32 lose 0.2 % of normal numbers, as bfloat16 does.

Shape suffixes: T tokens of a sequence, L taps, D hidden, R rows of last, B blocks of a row, b numbers of a block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from data.errors import UserError

KINDS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": torch.bfloat16,
}  # data.states_dtype -> as read
FP8 = "fp8"
BLOCK = 32  # numbers of last that share a scale
TOP = 511  # of last's whole numbers
SHIFTS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
NOT_FINITE = 127  # the exponent of a block with NaN or Inf


def read_dtype(name: str) -> torch.dtype:
    """In which states are read; UserError: an unknown name."""
    if name not in KINDS:
        raise UserError(f"data.states_dtype={name!r}: hidden states are stored as one of {', '.join(KINDS)}")
    return KINDS[name]


def parts(key: str, name: str) -> tuple[str, ...]:
    """The tensors of a shard that hold its "taps" or "last"."""
    return {"taps": ("taps", "taps_scale"), "last": ("last", "last_low", "last_scale")}[key] if name == FP8 else (key,)


def row_bytes(name: str, D: int) -> tuple[int, int]:
    """Bytes of one tap of one token, and of one row of last."""
    if name == FP8:
        return D + 4, D + D // 4 + D // math.gcd(D, BLOCK)
    return D * KINDS[name].itemsize, D * KINDS[name].itemsize


def pack_taps(taps_TLD: Tensor, name: str) -> dict[str, Tensor]:
    """The tensors of a shard that hold these taps: taps [T, L, D], taps_scale [T, L] float32. On the CPU, and not shared with them."""
    if name != FP8:
        return {"taps": taps_TLD.detach().to("cpu", KINDS[name], copy=True)}
    x_TLD = taps_TLD.detach().to("cpu", torch.float32)
    largest_TL = x_TLD.abs().amax(-1)
    scale_TL = torch.ldexp(torch.ones_like(largest_TL), _exponent(largest_TL, 448))
    packed_TLD = (x_TLD / scale_TL[..., None]).to(torch.float8_e4m3fn)
    return {"taps": packed_TLD, "taps_scale": torch.where(largest_TL.isfinite(), scale_TL, torch.nan)}


def pack_last(last_RD: Tensor, name: str) -> dict[str, Tensor]:
    """As pack_taps: last [R, D] int8, the upper 8 bits; last_low [R, D / 4] uint8, the lower 2 of four numbers; last_scale [R, B] int8, the
    exponents of the scales."""
    if name != FP8:
        return {"last": last_RD.detach().to("cpu", KINDS[name], copy=True)}
    x_RBb = last_RD.detach().to("cpu", torch.float32).unflatten(-1, (-1, math.gcd(last_RD.shape[-1], BLOCK)))
    largest_RB = x_RBb.abs().amax(-1)
    exponent_RB = _exponent(largest_RB, TOP)
    whole_RD = torch.ldexp(x_RBb, -exponent_RB[..., None]).round().to(torch.int16).flatten(-2)
    low_RD4 = (whole_RD & 3).unflatten(-1, (-1, 4)) << SHIFTS
    scale_RB = torch.where(largest_RB.isfinite(), exponent_RB, NOT_FINITE)
    return {"last": (whole_RD >> 2).to(torch.int8), "last_low": low_RD4.sum(-1).to(torch.uint8), "last_scale": scale_RB.to(torch.int8)}


def _exponent(largest: Tensor, top: int) -> Tensor:
    """The least e for which largest <= top * 2^e, but -100 at least and 126 at most."""
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1)
    top_mantissa, top_exponent = math.frexp(top)
    return (exponent - torch.where(mantissa > top_mantissa, top_exponent - 1, top_exponent)).clamp(-100, 126)


def unpack_taps(packed: list[Tensor], name: str) -> Tensor:
    """What the tensors of `parts` hold, [T, L, D], in read_dtype; compact ones exactly."""
    if len(packed) == 1:
        return packed[0]
    taps_TLD, scale_TL = packed
    return (taps_TLD.float() * scale_TL[..., None]).to(KINDS[name])


def unpack_last(packed: list[Tensor], name: str) -> Tensor:
    """As unpack_taps, [R, D]; compact ones rounded to read_dtype."""
    if len(packed) == 1:
        return packed[0]
    high_RD, low_RD4, exponent_RB = packed
    whole_RD = high_RD.float() * 4 + ((low_RD4[..., None] >> SHIFTS) & 3).flatten(-2)
    return torch.ldexp(whole_RD.unflatten(-1, (exponent_RB.shape[-1], -1)), exponent_RB[..., None].int()).flatten(-2).to(KINDS[name])


def finite(packed: dict[str, Tensor], key: str) -> bool:
    """Whether the packed "taps" or "last" hold neither NaN nor Inf."""
    if key == "last" and "last_scale" in packed:
        return bool((packed["last_scale"] != NOT_FINITE).all())
    return bool(packed[f"{key}_scale" if f"{key}_scale" in packed else key].isfinite().all())


def label_rows(loss_mask_T: Tensor) -> Tensor:
    """Rows of one sequence whose state predicts a label: row t counts iff t + 1 < T and loss_mask[t + 1]. [T] bool -> [T] bool."""
    rows_T = torch.zeros_like(loss_mask_T, dtype=torch.bool)
    rows_T[:-1] = loss_mask_T[1:]
    return rows_T
