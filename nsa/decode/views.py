"""What attention and a cache exchange: views of keys, and where a step's token goes.

B batch, T tokens of the chunk, G kv heads, D head dim, l compressed block, d its stride.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

KV = tuple[Tensor, Tensor]
# (k, v) raw [B, L, G, D] and the index of the first block of each row [B] -> (k, v) compressed [B,
# C(L), G, D]
CompressFn = Callable[[Tensor, Tensor, Tensor], KV]


@dataclass(frozen=True, slots=True)
class View:
    """What the branches attend to: ``cmp`` compressed, ``sel`` all tokens, ``win`` the last w - 1
    and the chunk.

    ``q_start`` is the position of the chunk's first query (int, or int64 [B] where rows differ),
    ``win_start`` the same within ``win``, whose keys begin later.
    """

    cmp: KV
    sel: KV
    win: KV
    q_start: int | Tensor
    win_start: int | Tensor


@dataclass(frozen=True, slots=True)
class DenseStep:
    """As `Step`, of a layer with full causal attention: ``position_B`` int64, the same as int32,
    and the row [B, 1, 1, 1] of K and V that takes the token.
    """

    position_B: Tensor
    position_int32_B: Tensor
    row_B111: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """Where the one token of each row goes, int64; the same for every layer, so a model makes it
    once a forward.

    ``position_B``, and ``win_start_B`` within the ring; the rows [B, 1, 1, 1] of each buffer that
    take the token, or in ``cmp`` the block that it completes; ``block_BL11`` the slots of the last
    l raw tokens; ``block_B`` which block they are, were they one.
    """

    position_B: Tensor
    win_start_B: Tensor
    sel_B111: Tensor
    win_B111: Tensor
    raw_B111: Tensor
    cmp_B111: Tensor
    block_BL11: Tensor
    block_B: Tensor
