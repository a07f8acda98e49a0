"""What heads share that draft k tokens in one pass: mask tokens behind the last known one, and which of their rows training works out.

Depth k of an anchor is its k-th mask row. Training keeps it for the share max(keep^k, keep_min) of a document's anchors (conditional
drop, PARD, arXiv 2504.18583), nested: a row is dropped only with all deeper ones of its anchor, since it is what they attend to.

Shape suffixes: T packed tokens, K depths, L label positions, n anchors of a document.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from heads.attention import Documents, KeyValues
from heads.base import TargetSpec
from heads.losses import Labels


def check_mask_token(mask_token_id: int, target: TargetSpec) -> int:
    if not 0 <= mask_token_id < target.vocab_size:
        raise ValueError(f"head.mask_token_id must be a row of the embedding, 0..{target.vocab_size - 1}, not {mask_token_id}")
    return mask_token_id


def shares_of(keep: float, keep_min: float, depths: int) -> list[float]:
    """Share of the anchors that each depth keeps; all at depth 0, whose rows are the context."""
    for key, value in (("keep", keep), ("keep_min", keep_min)):
        if not 0 < value <= 1:
            raise ValueError(f"head.{key} must be in (0, 1], not {value}")
    return [max(keep**k, keep_min) for k in range(depths)]


def drop(labels: Labels, docs: Documents, token_ids_T: Tensor, shares: list[float]) -> None:
    """Leaves depth k the first ceil(share_k n) of a document's n anchors, those rows that have a label, in a random order, which is one for
    all depths. A label that is kept stands for n / ceil(share_k n), so that the sum is in expectation that of all labels."""
    row_KL, ids_T = labels.row_KL.cpu(), token_ids_T.cpu()
    anchors = row_KL[row_KL >= 0].unique()
    kept_T, weight_TK = torch.zeros(len(ids_T), dtype=torch.long), torch.ones(len(ids_T), len(shares))  # kept_T: at how many depths
    for start, _, end in docs.every.spans:
        mine_n = anchors[(anchors >= start) & (anchors < end)]
        count_K = torch.tensor([math.ceil(share * len(mine_n)) for share in shares])
        order_n = torch.randperm(len(mine_n), generator=_generator(ids_T[start:end]))
        kept_T[mine_n] = (order_n[:, None] < count_K).sum(1)
        weight_TK[mine_n] = len(mine_n) / count_K
    there_KL = (row_KL >= 0) & (torch.arange(len(shares))[:, None] < kept_T[row_KL])
    device = labels.row_KL.device
    labels.row_KL = torch.where(there_KL, row_KL, -1).to(device)
    labels.weight_KL = weight_TK.T.gather(1, row_KL.clamp(min=0)).to(device)


def _generator(ids_T: Tensor) -> torch.Generator:
    """Of one document: it follows from torch's seed and the document alone, so that packing changes nothing."""
    digest = hashlib.blake2b(f"{torch.initial_seed()} {ids_T.tolist()}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def each_depth(labels: Labels, docs: Documents, caches: list[KeyValues], token_ids_T: Tensor, shares: list[float] | None) -> Iterator[int]:
    """The depths in turn. While the caller works out one, docs.needed holds the rows that it or a deeper one has labels at, the diagonals
    of `caches` no others, and labels.row_KL[k] says where among them they lie. shares None: nothing is dropped, every depth has the
    rows of all."""
    if shares is not None:
        drop(labels, docs, token_ids_T, shares)
    deepest_T = None if shares is None else _deepest(labels, len(token_ids_T))
    docs.need(labels.row_KL)
    for k in range(len(labels.row_KL)):
        if k and deepest_T is not None:
            before = docs.needed
            docs.keep(deepest_T >= k)
            for cache in caches:
                cache.keep(before.place(docs.needed.index_R))
        labels.row_KL[k] = docs.needed.place(labels.row_KL[k])
        yield k


def _deepest(labels: Labels, total: int) -> Tensor:
    """The deepest depth at which each row [T] has a label, -1 where at none, on the CPU."""
    deepest_T = torch.full((total,), -1)
    for k, row_L in enumerate(labels.row_KL.cpu()):
        deepest_T[row_L[row_L >= 0]] = k
    return deepest_T
