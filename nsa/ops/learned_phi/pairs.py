"""K and V in one launch: a program of the first half of the grid is K's, of the second V's.

Letters of this folder: B batch, S tokens, C blocks of l tokens with stride d, N chunks of d tokens,
G kv heads, D head dim, F features of the first product (D where there is no second), row: a block
of one kv head, (b, c, g) in that order, KW = l D columns of a weight, k: one of them. P = l / d.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # of K and of V


@triton.jit
def own_of(k, v):
    """What a program of the second half of the grid takes instead: that of V."""
    return tl.where(tl.program_id(1) == 0, k, v)


def contiguous_pair(pair: Pair | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if pair is None else (pair[0].contiguous(), pair[1].contiguous())
