"""Which calls go by lists, and of which the gradient takes those that the forward left."""

from __future__ import annotations

from torch import Tensor

from nsa.ops.selected.triton import dense_tiles
from nsa.routing.thresholds import SORT_MIN_ROWS
from nsa.settings import is_off


def sorts(rows: int) -> bool:
    """Whether a forward of so many (b, t, kv head) goes by lists."""
    return rows >= SORT_MIN_ROWS and not is_off("lists")


def leaves_lists(q: Tensor, v: Tensor, blocks: Tensor, sel_block: int, scale: float) -> bool:
    """Whether the forward of these goes by lists, and so not by dense tiles."""
    goes = sorts(q.shape[0] * q.shape[1] * v.shape[2])
    return goes and not dense_tiles.serves(q, v, blocks, sel_block, scale)


def lists_left(
    lists: Tensor | None, q: Tensor, v: Tensor, blocks: Tensor, sel_block: int, scale: float
) -> Tensor | None:
    """``lists`` as the operator's forward returned them, None where it went without."""
    if lists is None or not lists.numel():
        return None
    return lists if leaves_lists(q, v, blocks, sel_block, scale) else None
