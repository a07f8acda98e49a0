"""The teacher in a store: the target's last state, or its k likeliest tokens with their log-probabilities (data.teacher=top<k>).

A manifest says under `last` what there is: the state nowhere ("none"), at supervised positions or everywhere ("all"), or "top<k>" in its
place at supervised positions. What is not among the k, the tail, has the mass that their probabilities leave, so it is not stored.

Shape suffixes: T tokens of a sequence, R rows, C likeliest tokens, D hidden, V vocab.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from data.errors import UserError
from data.states import parts, read_dtype, unpack_last
from heads.kernels import softcapped, wide

LAST_POLICIES = ("none", "supervised", "all")  # each holds all that those before it hold
TOP = re.compile(r"top([1-9]\d*)")
CHUNK = 256  # rows whose logits over the whole vocabulary are there at once


def top_k(kept: str) -> int | None:
    """k of "top<k>", of a store or data.teacher; None of everything else."""
    found = TOP.fullmatch(kept)
    return int(found[1]) if found else None


def kept_for(needs_last: str, teacher: str) -> str:
    """What a store holds under `last` for a head that needs the last state so, with this data.teacher. UserError: the head reads the state
    itself, not as its teacher alone."""
    if teacher == "last" or needs_last == "none":
        return needs_last
    if needs_last == "all":
        raise UserError(
            f"data.teacher={teacher}: this head reads the target's last state itself, not its probabilities alone; set data.teacher=last"
        )
    return teacher


def holds(stored: str, needed: str) -> bool:
    """Whether a store with this under `last` has what is needed."""
    if needed in (stored, "none"):
        return True
    return {stored, needed} <= set(LAST_POLICIES) and LAST_POLICIES.index(needed) <= LAST_POLICIES.index(stored)


def _value_dtype(name: str) -> torch.dtype:
    """Of log-probabilities: 11 bits of mantissa where states have fewer."""
    return torch.float32 if name == "float32" else torch.float16


def top_bytes(k: int, name: str) -> int:
    """Bytes of one row. name: data.states_dtype."""
    return k * (torch.int32.itemsize + _value_dtype(name).itemsize)


@torch.no_grad()
def likeliest(last_RD: Tensor, lm_head_VD: Tensor, k: int, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    """The target's k likeliest next tokens, the likeliest first: ids [R, C] int32, and log-probabilities over the whole vocabulary [R, C],
    at least float32. Products are in the dtype of the states, as the engine's are. softcap: of the target's logits."""
    ids, log_p = [], []
    for x_RD in last_RD.split(CHUNK):
        z_RV = softcapped(wide(x_RD @ lm_head_VD.T), softcap)
        top_RC, ids_RC = z_RV.topk(k)
        ids.append(ids_RC.int())
        log_p.append(top_RC - z_RV.logsumexp(-1, keepdim=True))
    return torch.cat(ids), torch.cat(log_p)


def pack_top(ids_RC: Tensor, log_p_RC: Tensor, name: str) -> dict[str, Tensor]:
    """The tensors of a shard that hold these rows: top_ids int32, top_log_p float16, or float32 with data.states_dtype=float32."""
    dtype = _value_dtype(name)
    log_p_RC = log_p_RC.detach().to("cpu").clamp(min=torch.finfo(dtype).min)
    return {"top_ids": ids_RC.to("cpu", torch.int32, copy=True), "top_log_p": log_p_RC.to(dtype, copy=True)}


def read_rows(get: Callable[[str], Tensor], kept: str, rows_T: Tensor, D: int, name: str) -> dict[str, Tensor]:
    """What a shard holds under `last` for the rows [T] bool of a sequence, zero at the others: last [T, D] as read, or of "top<k>" top_ids
    int32 and top_log_p float32 [T, C]. get: from a tensor's name to these rows of it."""
    k, T = top_k(kept), len(rows_T)
    found = {"last": torch.zeros(T, D, dtype=read_dtype(name))}
    if k is not None:
        found = {"top_ids": torch.zeros(T, k, dtype=torch.int32), "top_log_p": torch.zeros(T, k)}
    if rows_T.any():
        for key, x in found.items():
            x[rows_T] = unpack_last([get(part) for part in parts("last", name)], name) if key == "last" else get(key).to(x.dtype)
    return found


def tail_mass(log_p_RC: Tensor) -> Tensor:
    """Mass [R] of the tokens that are not among the C, float64."""
    return (1 - log_p_RC.double().exp().sum(-1)).clamp(min=0)
