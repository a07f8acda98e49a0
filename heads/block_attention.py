"""The training attention of block heads: each block over the context before its anchor and over itself, documents isolated.

Shape suffixes: T packed tokens, B blocks, W slots of a block, R = B W rows, C context rows of some blocks, n of these blocks, N query
heads, M key/value heads, H head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.flash import grouped

QUERIES = 256  # of one call: bounds its mask


class Blocks:
    """Blocks of `width` slots, ascending. place_B: where in the pack the anchor, a block's first slot, lies (in the row after the
    document's last for an anchor that is not in the pack); start_B: where its document begins. A block sees start <= t < place."""

    def __init__(self, place_B: Tensor, start_B: Tensor, width: int, causal: bool) -> None:
        self.place_B, self.width = place_B, width
        slot_W = torch.arange(width, device=place_B.device)
        self.positions_R = ((place_B - start_B)[:, None] + slot_W).flatten()  # in their documents, R = B W
        self.inner_WW = slot_W <= slot_W[:, None] if causal else torch.ones(width, width, dtype=torch.bool, device=place_B.device)
        self.parts: list[tuple[int, int, int, int]] = []  # (first context row, row after the last, first block, block after the last)
        places, starts, step = place_B.tolist(), start_B.tolist(), max(1, QUERIES // width)
        for i, (place, start) in enumerate(zip(places, starts, strict=True)):
            begun = self.parts.pop() if self.parts and self.parts[-1][0] == start and i - self.parts[-1][2] < step else (start, 0, i, 0)
            self.parts.append((start, place, begun[2], i + 1))

    def mask(self, part: tuple[int, int, int, int]) -> Tensor:
        """What the slots of a part see of its context rows and of its own slots: [n W, C + n W] bool."""
        start, end, first, last = part
        n, W, device = last - first, self.width, self.place_B.device
        context_nC = torch.arange(start, end, device=device) < self.place_B[first:last, None]
        own_nWnW = torch.eye(n, dtype=torch.bool, device=device)[:, None, :, None] & self.inner_WW[:, None]
        return torch.cat([context_nC[:, None].expand(-1, W, -1), own_nWnW.reshape(n, W, n * W)], -1).flatten(0, 1)


def block_attention(q: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], blocks: Blocks, scale: float) -> Tensor:
    """Queries of all slots over the context before their anchor and over their own block (DFlash, arXiv 2602.06036).

    q [R, N, H] with R = B W; own: keys and values of the slots [R, M, H]; context: those of the pack [T, M, H]. Returns [R, N, H].
    """
    group, out = q.shape[1] // own[0].shape[1], []
    for part in blocks.parts:
        start, end, first, last = part
        rows = slice(first * blocks.width, last * blocks.width)
        k, v = (torch.cat([c[start:end], x[rows]]) for c, x in zip(context, own, strict=True))
        queries = q[rows].unflatten(1, (-1, group)).permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(queries, grouped(k, group), grouped(v, group), blocks.mask(part), scale=scale)
        out.append(mixed.permute(2, 0, 1, 3).flatten(1, 2))
    # Without a block the gradients of all that went in must be zeros, not missing.
    return torch.cat(out) if out else q + 0 * sum(x.sum() for x in (*own, *context))
