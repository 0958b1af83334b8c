"""Attention over chosen blocks, KV-outer: each block meets all the queries that chose it, so K and
V are read once, not once a query. Here is what the kernels of both directions read of the sorted
entries: the row of an entry, and the run of one list. No kernel of its own.

B batch, T queries, S keys, Q query heads, G kv heads, H query heads per kv head, N slots, J blocks
a kv head, L tokens a block, E entries (row, kv head, slot). Entries are sorted by block; a tile of
M rows is the H heads of QS entries; each entry's softmax over its one block is a part, and a row's
parts are summed in the order of its slots. No atomics: bitwise repeatable. Rows (b, t) are taken a
chunk at a time, which bounds the parts' memory; the chunk is the sort key's highest digit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of(flat, T, q0, Q0, G: tl.constexpr, N: tl.constexpr, RAGGED: tl.constexpr):
    """(row, b, position) of entries."""
    row = flat // (G * N)
    b = row // T
    pos = row - b * T + q0
    if RAGGED:
        pos = row - b * T + tl.load(Q0 + b).to(tl.int32)
    return row, b, pos


@triton.jit
def run_of(KEY, begin, stop, base, TILE: tl.constexpr, TILE_P: tl.constexpr):
    """(list of entry ``begin``, one past its last entry before ``stop``)."""
    first = tl.load(KEY + begin).to(tl.int32)
    e = tl.arange(0, TILE_P)
    same = (begin + e < stop) & (e < TILE)
    same = same & (tl.load(KEY + begin + e, mask=same, other=-1).to(tl.int32) == first)
    return first - base, begin + tl.sum(same.to(tl.int32), 0)
