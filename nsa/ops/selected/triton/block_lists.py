"""Which queries chose a block: entries (row, kv head, slot) sorted by block, stably, by counting.

B batch, T queries, G kv heads, N slots, J blocks a kv head, E entries, W = G J + 1 columns: the
blocks of every kv head, and one of empty slots. Rows (b, t) are taken a chunk at a time, which is a
key's highest digit. A tile is up to R neighbouring rows of one sequence and one chunk; a sequence's
rows of one chunk are a part, one of ``parts``, of ``tiles`` tiles. Four launches: count each tile's
entries by column, sum the counts over tiles, sum them over lists, place the entries. Each position
is a sum of counts, so that no atomics are needed and the order is that of a stable sort.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import cdiv
from nsa.ops.kernels.launch import launch

# Entries that a tile of rows has at least; with W or more the counts take no more memory than the
# entries.
TILE_ENTRIES = 256
AT_ONCE = 32  # entries that one step of a tile compares with each other
COUNTS_LIMIT = 4  # times as many counts as entries, up to which they are counted


@triton.jit
def _rows_of(tile, T, rows_per_chunk, parts, tiles, R):
    """(chunk, part, b, first row t, one past the last) of a tile, which may have none."""
    part = tile // tiles
    b = part // parts
    before = b * T
    chunk = before // rows_per_chunk + part % parts
    begin = tl.maximum(0, chunk * rows_per_chunk - before)
    end = tl.minimum(T, (chunk + 1) * rows_per_chunk - before)
    begin += tile % tiles * R
    return chunk, part, b, begin, tl.minimum(end, begin + R)


@triton.jit
def _columns(BLOCKS, b, begin, k, count, T, J, full, G: tl.constexpr, N: tl.constexpr):
    """The column of entries k of the tile whose rows begin at t = ``begin``; G J + 1 beyond
    ``count``.
    """
    inside = k < count
    block = tl.load(BLOCKS + (b * T + begin) * (G * N) + k, mask=inside, other=-1)
    listed = (block >= 0) & (block < J) & (begin + k // (G * N) >= full)
    column = tl.where(listed, k // N % G * J + block, G * J)
    return tl.where(inside, column, G * J + 1)


@triton.jit
def nsa_selected_count(
    BLOCKS,
    COUNT,
    RANK,
    T,
    rows_per_chunk,
    parts,
    tiles,
    R,
    J,
    full,
    G: tl.constexpr,
    N: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CLEAR: tl.constexpr,
):
    """A tile's entries by column, to COUNT [tiles, W]; how many of its column come before each
    entry in its tile, to RANK [E].

    An empty slot, or one of a sequence's first ``full`` rows, is in the last column. The counts so
    far are in memory, which the program alone reads and writes.
    """
    tile = tl.program_id(0)
    _, _, b, begin, end = _rows_of(tile, T, rows_per_chunk, parts, tiles, R)
    W = G * J + 1
    COUNT += tile.to(tl.int64) * W
    z = tl.arange(0, CLEAR)
    for first in range(0, W, CLEAR):
        tl.store(COUNT + first + z, tl.zeros([CLEAR], tl.int32), mask=first + z < W)
    tl.debug_barrier()
    count = (end - begin) * (G * N)
    RANK += (b * T + begin) * (G * N)
    i = tl.arange(0, AT_ONCE)
    # a sum of those says how many are the same, and how many of them come before
    weight = tl.where(i[None, :] < i[:, None], 2 * AT_ONCE + 1, 2 * AT_ONCE)
    column = _columns(BLOCKS, b, begin, i, count, T, J, full, G, N)
    for first in range(0, count, AT_ONCE):
        k = first + i
        inside = k < count
        so_far = tl.load(COUNT + column, mask=inside, other=0)
        following = _columns(BLOCKS, b, begin, k + AT_ONCE, count, T, J, full, G, N)
        same = tl.sum(tl.where(column[:, None] == column[None, :], weight, 0), 1)
        before = same % (2 * AT_ONCE)
        last = before + 1 == same // (2 * AT_ONCE)
        tl.store(RANK + k, so_far + before, mask=inside)
        tl.debug_barrier()  # all have read
        tl.store(COUNT + column, so_far + before + 1, mask=inside & last)
        tl.debug_barrier()
        column = following


@triton.jit
def nsa_selected_offsets(COUNT, START, tiles, W, TILES: tl.constexpr, COLUMNS: tl.constexpr):
    """Of a part: COUNT becomes how many entries of a column the tiles before have, and their total
    goes to START [parts, W].
    """
    part = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        at = COUNT + (part * tiles + tile)[:, None] * W + column[None, :]
        inside = (tile < tiles)[:, None] & (column < W)[None, :]
        n = tl.load(at, mask=inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(n, 0) - n, mask=inside)
        total += tl.sum(n, 0)
    tl.store(START + part * W + column, total, mask=column < W)


@triton.jit
def nsa_selected_bounds(
    START, BOUND, B, T, rows_per_chunk, parts, W, num_lists, per_row, LISTS: tl.constexpr
):
    """Of a chunk: START becomes the position of a part's first entry of a column, and BOUND has the
    first of every list, and one past the last of all.

    Empty slots lie in the order of sequences, behind every list.
    """
    chunk = tl.program_id(0)
    first_row = chunk * rows_per_chunk
    end_row = tl.minimum(first_row + rows_per_chunk, B * T)
    BOUND += chunk * (num_lists + 1)
    at = first_row * per_row
    i = tl.arange(0, LISTS)
    for first in range(0, num_lists, LISTS):
        list_ = first + i
        b = list_ // (W - 1)
        there = (list_ < num_lists) & (b * T < end_row) & ((b + 1) * T > first_row)
        part = (b * parts + chunk - b * T // rows_per_chunk).to(tl.int64)
        to = START + part * W + list_ % (W - 1)
        n = tl.load(to, mask=there, other=0)
        start = at + tl.cumsum(n, 0) - n
        tl.store(to, start, mask=there)
        tl.store(BOUND + list_, start, mask=list_ < num_lists)
        at += tl.sum(n, 0)
    tl.store(BOUND + num_lists, at)
    end = end_row * per_row
    for first in range(first_row // T, tl.cdiv(end_row, T), LISTS):
        b = first + i
        there = b * T < end_row
        part = (b * parts + chunk - b * T // rows_per_chunk).to(tl.int64)
        to = START + part * W + W - 1
        n = tl.load(to, mask=there, other=0)
        tl.store(to, at + tl.cumsum(n, 0) - n, mask=there)
        at += tl.sum(n, 0)
    if end_row == B * T:
        tl.store(BOUND + num_lists + 1, end)


@triton.jit
def nsa_selected_place(
    BLOCKS,
    COUNT,
    START,
    RANK,
    KEY,
    ORDER,
    T,
    rows_per_chunk,
    parts,
    tiles,
    R,
    J,
    num_lists,
    full,
    G: tl.constexpr,
    N: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """A tile's entries to their positions: the part's first of a column, those of tiles before, and
    the entry's rank.
    """
    tile = tl.program_id(0)
    chunk, part, b, begin, end = _rows_of(tile, T, rows_per_chunk, parts, tiles, R)
    W = G * J + 1
    COUNT += tile.to(tl.int64) * W
    START += part.to(tl.int64) * W
    e0 = (b * T + begin) * (G * N)
    count = (end - begin) * (G * N)
    base = chunk * (num_lists + 1)
    for first in range(0, count, ENTRIES):
        k = first + tl.arange(0, ENTRIES)
        inside = k < count
        column = _columns(BLOCKS, b, begin, k, count, T, J, full, G, N)
        to = tl.load(START + column, mask=inside, other=0)
        to += tl.load(COUNT + column, mask=inside, other=0)
        to += tl.load(RANK + e0 + k, mask=inside, other=0)
        tl.store(ORDER + to, e0 + k, mask=inside)
        list_ = tl.where(column < W - 1, b * (W - 1) + column, num_lists)
        tl.store(KEY + to, base + list_, mask=inside)


@triton.jit
def nsa_selected_keys(
    BLOCKS,
    KEY,
    E,
    T,
    rows_per_chunk,
    J,
    num_lists,
    full,
    G: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
):
    """The list that each entry belongs to: (chunk, b, g, block).

    An empty slot, or one of a sequence's first ``full`` rows, is in its chunk's last list, which is
    not read.
    """
    e = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    block = tl.load(BLOCKS + e, mask=e < E, other=-1)
    row = (e // (G * N)).to(tl.int32)
    g = (e // N % G).to(tl.int32)
    listed = (block >= 0) & (block < J) & (row % T >= full)
    of_chunk = tl.where(listed, (row // T * G + g) * J + block, num_lists)
    tl.store(
        KEY + e,
        (row // rows_per_chunk * (num_lists + 1) + of_chunk).to(KEY.dtype.element_ty),
        mask=e < E,
    )


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes of the lists of B sequences of T rows; ``rows_per_chunk`` rows a chunk."""

    B: int
    T: int
    G: int
    N: int
    J: int
    rows_per_chunk: int

    @property
    def num_entries(self) -> int:
        return self.B * self.T * self.G * self.N

    @property
    def num_lists(self) -> int:
        """Of a chunk, without the one of empty slots."""
        return self.B * self.G * self.J

    @property
    def num_bounds(self) -> int:
        return cdiv(self.B * self.T, self.rows_per_chunk) * (self.num_lists + 1) + 1

    @property
    def room(self) -> int:
        """Elements of `Lists.all`, also of symbolic sizes: keys and bounds begin at multiples of 16
        bytes.
        """
        return 2 * _aligned(self.num_entries) + self.num_bounds

    @property
    def columns(self) -> int:
        return self.G * self.J + 1

    @property
    def parts(self) -> int:
        """Most chunks that one sequence has rows in."""
        step = self.rows_per_chunk
        if step >= self.B * self.T or step % self.T == 0:
            return 1
        if self.B == 1 or self.T % step == 0:
            return cdiv(self.T, step)
        return (self.T - 2) // step + 2

    @property
    def rows_per_tile(self) -> int:
        return cdiv(max(TILE_ENTRIES, self.columns), self.G * self.N)

    @property
    def tiles(self) -> int:
        """Of a part."""
        return cdiv(min(self.rows_per_chunk, self.T), self.rows_per_tile)

    @property
    def is_counted(self) -> bool:
        """False where sequences of few rows over many blocks would have more counts than entries,
        or positions would pass 2^31: PyTorch's sort takes those.
        """
        counts = self.B * self.parts * self.tiles * self.columns
        return counts <= max(1 << 20, COUNTS_LIMIT * self.num_entries) and self.room < 2**31


def _aligned(n: int) -> int:
    return -(-n // 4) * 4


@dataclass(frozen=True, slots=True)
class Lists:
    """Entries sorted by list, a list of queries for each (chunk, b, kv head, block); within a list
    in order of rows. int32, in one tensor, ``all``.

    ``key_E``: the list of each position; ``order_E``: its entry; ``bound``: first position of every
    list, and one past the last.
    """

    all: Tensor
    key_E: Tensor
    order_E: Tensor
    bound: Tensor
    rows_per_chunk: int
    num_lists: int  # of a chunk, without the one of empty slots

    @classmethod
    def in_(cls, memory: Tensor, grid: Grid) -> Lists:
        """Those that ``memory`` int32 [grid.room] has, or has room for."""
        E = grid.num_entries
        order, key = memory[:E], memory[_aligned(E) : _aligned(E) + E]
        return cls(
            memory,
            key,
            order,
            memory[2 * _aligned(E) : grid.room],
            grid.rows_per_chunk,
            grid.num_lists,
        )

    @classmethod
    def of(
        cls,
        blocks: Tensor,
        J: int,
        rows_per_chunk: int,
        *,
        full: int,
        into: Tensor | None = None,
        counted: bool | None = None,
    ) -> Lists:
        """The lists of every row but each sequence's first ``full``, of contiguous ``blocks`` int32
        [B, T, G, N]; in ``into`` int32 [grid.room], where that is given.

        ``counted``: by counting or, False, by PyTorch's sort; None: `Grid.is_counted`.
        """
        B, T, G, N = blocks.shape
        grid = Grid(B, T, G, N, J, rows_per_chunk)
        if into is None:
            into = blocks.new_empty(grid.room, dtype=torch.int32)
        lists = cls.in_(into, grid)
        if grid.is_counted if counted is None else counted:
            lists._count(blocks, grid, full)
        else:
            lists._sort(blocks, grid, full)
        return lists

    def _count(self, blocks: Tensor, grid: Grid, full: int) -> None:
        G, N, J, W = grid.G, grid.N, grid.J, grid.columns
        where = (grid.T, grid.rows_per_chunk, grid.parts, grid.tiles, grid.rows_per_tile, J)
        parts = grid.B * grid.parts
        num_tiles = parts * grid.tiles
        count = blocks.new_empty(num_tiles * W, dtype=torch.int32)
        start = blocks.new_empty(parts * W, dtype=torch.int32)
        rank = blocks.new_empty(grid.num_entries, dtype=torch.int32)
        launch(
            nsa_selected_count,
            (num_tiles,),
            blocks,
            count,
            rank,
            *where,
            full,
            G,
            N,
            AT_ONCE,
            512,
            num_warps=1,
            num_stages=1,
        )
        launch(
            nsa_selected_offsets,
            (parts, cdiv(W, 16)),
            count,
            start,
            grid.tiles,
            W,
            256,
            16,
            num_warps=8,
        )
        chunks = cdiv(grid.B * grid.T, grid.rows_per_chunk)
        launch(
            nsa_selected_bounds,
            (chunks,),
            start,
            self.bound,
            grid.B,
            grid.T,
            grid.rows_per_chunk,
            grid.parts,
            W,
            grid.num_lists,
            G * N,
            2048,
            num_warps=8,
        )
        launch(
            nsa_selected_place,
            (num_tiles,),
            blocks,
            count,
            start,
            rank,
            self.key_E,
            self.order_E,
            *where,
            grid.num_lists,
            full,
            G,
            N,
            1024,
            num_warps=4,
        )

    def _sort(self, blocks: Tensor, grid: Grid, full: int) -> None:
        E = grid.num_entries
        # a radix sort passes over half as many digits of 16 bits
        dtype = torch.int16 if grid.num_bounds - 1 < 2**15 else torch.int32
        unsorted = torch.empty(E, dtype=dtype, device=blocks.device)
        launch(
            nsa_selected_keys,
            (cdiv(E, 1024),),
            blocks,
            unsorted,
            E,
            grid.T,
            grid.rows_per_chunk,
            grid.J,
            grid.num_lists,
            full,
            grid.G,
            grid.N,
            1024,
        )
        key, order = torch.sort(unsorted, stable=True)
        lists = torch.arange(grid.num_bounds, dtype=dtype, device=blocks.device)
        torch.searchsorted(key, lists, out_int32=True, out=self.bound)
        self.key_E.copy_(key)
        self.order_E.copy_(order)
