"""Which queries of a tile chose a block: for tiles of QT <= 32 neighbouring queries one int32 a
block.

B batch, T queries, S keys, G kv heads, N slots, J blocks a kv head, L tokens a block. A pair is an
int64, the number of a block (or a tile) above the 32 bits of the queries. A tile's pairs are of the
blocks that any of its queries chose, ascending; a block's are of the tiles that chose it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import cdiv, padded, starts
from nsa.ops.kernels.launch import launch


@triton.jit
def position_of(t, b, q0, Q0, RAGGED: tl.constexpr):
    """Position of query t of batch row b."""
    if RAGGED:
        return t + tl.load(Q0 + b).to(tl.int32)
    return t + q0


@triton.jit
def _pair(number, mask):
    return (number.to(tl.int64) << 32) | (mask.to(tl.int64) & 0xFFFFFFFF)


@triton.jit(do_not_specialize=["tiles", "room"])
def nsa_selected_masks_of_tiles(
    BLOCKS,
    MASK,
    PAIRS,
    COUNT,
    Q0,
    T,
    S,
    q0,
    J,
    tiles,
    room,
    G: tl.constexpr,
    N: tl.constexpr,
    L: tl.constexpr,
    QT: tl.constexpr,
    QP: tl.constexpr,
    BJ: tl.constexpr,
    BN: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """MASK [B, G, tiles, J], where it is given: which queries of a tile chose a block and see a key
    of it. PAIRS [B, G, tiles, room]: the blocks that some query chose. COUNT [B, G, tiles, 2]:
    how many, and how many of these lie before every query of the tile and before S, which come
    first.
    """
    at = tl.program_id(0).to(tl.int64)
    tile = (at % tiles).to(tl.int32)
    bg = at // tiles
    b = bg // G
    i = tl.arange(0, QP)
    t = tile * QT + i
    live = (i < QT) & (t < T)
    pos = position_of(t, b, q0, Q0, RAGGED)
    slots = BLOCKS + ((b * T + t) * G + bg % G) * N
    least = tl.min(tl.where(live, pos, 0x7FFFFFFF), 0)
    most = tl.max(tl.where(live, pos, -1), 0)
    count = 0
    inner = 0
    for j0 in range(0, J, BJ):
        j = j0 + tl.arange(0, BJ)
        mask = tl.zeros([BJ], tl.int32)
        if j0 * L <= most:
            hit = tl.zeros([QP, BJ], tl.int1)
            for n0 in range(0, N, BN):
                for n in tl.static_range(BN):
                    block = tl.load(slots + n0 + n, mask=live & (n0 + n < N), other=-1)
                    hit = hit | (block[:, None] == j[None, :])
            hit = hit & ((j * L)[None, :] <= pos[:, None]) & (j < J)[None, :]
            mask = tl.sum(tl.where(hit, (1 << i)[:, None], 0), 0)
        some = mask != 0
        place = count + tl.cumsum(some.to(tl.int32), 0) - 1
        tl.store(PAIRS + at * room + place, _pair(j, mask), mask=some)
        if MASK is not None:
            tl.store(MASK + at * J + j, mask, mask=j < J)
        end = (j + 1) * L
        count += tl.sum(some.to(tl.int32), 0)
        inner += tl.sum((some & (end <= least + 1) & (end <= S)).to(tl.int32), 0)
    tl.store(COUNT + at * 2, count)
    tl.store(COUNT + at * 2 + 1, inner)


@triton.jit(do_not_specialize=["tiles"])
def nsa_selected_masks_of_blocks(
    MASK,
    PAIRS,
    COUNT,
    Q0,
    q0,
    J,
    tiles,
    G: tl.constexpr,
    L: tl.constexpr,
    QT: tl.constexpr,
    BT: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """PAIRS [B, G, J, tiles]: the tiles that chose a block. COUNT [B, G, J, 2]: how many, and how
    many of these have a query that does not see all of the block, which come first.
    """
    at = tl.program_id(0).to(tl.int64)
    j = (at % J).to(tl.int32)
    bg = at // J
    count = 0
    outer = 0
    for tile0 in range(0, tiles, BT):
        tile = tile0 + tl.arange(0, BT)
        mask = tl.load(MASK + (bg * tiles + tile) * J + j, mask=tile < tiles, other=0)
        some = mask != 0
        place = count + tl.cumsum(some.to(tl.int32), 0) - 1
        tl.store(PAIRS + at * tiles + place, _pair(tile, mask), mask=some)
        first = position_of(tile * QT, bg // G, q0, Q0, RAGGED)
        count += tl.sum(some.to(tl.int32), 0)
        outer += tl.sum((some & (first < (j + 1) * L - 1)).to(tl.int32), 0)
    tl.store(COUNT + at * 2, count)
    tl.store(COUNT + at * 2 + 1, outer)


@dataclass(frozen=True, slots=True)
class TileMasks:
    """The pairs of each tile: what `nsa_selected_masks_of_tiles` made.

    ``pairs`` has one element more than [B, G, tiles, room], since the pair after the last is read
    ahead.
    """

    pairs: Tensor
    count: Tensor
    mask: Tensor | None
    tiles: int
    room: int

    @classmethod
    def of(
        cls, blocks: Tensor, S: int, L: int, QT: int, q_start: int | Tensor, *, keep: bool
    ) -> TileMasks:
        """Of contiguous ``blocks`` [B, T, G, N]. ``keep`` the mask of every block, from which
        `by_block` makes pairs.
        """
        B, T, G, N = blocks.shape
        J, tiles, (q0, Q0) = cdiv(S, L), cdiv(T, QT), starts(q_start)
        room = min(J, QT * N)
        pairs = blocks.new_empty(B * G * tiles * room + 1, dtype=torch.int64)
        count = blocks.new_empty(B, G, tiles, 2, dtype=torch.int32)
        mask = blocks.new_empty(B, G, tiles, J, dtype=torch.int32) if keep else None
        QP, BJ = padded(QT, 1), min(64, padded(J))
        launch(
            nsa_selected_masks_of_tiles,
            (B * G * tiles,),
            blocks,
            mask,
            pairs,
            count,
            Q0,
            T,
            S,
            q0,
            J,
            tiles,
            room,
            G,
            N,
            L,
            QT,
            QP,
            BJ,
            min(16, padded(N, 1)),
            Q0 is not None,
            num_warps=max(1, min(4, QP * BJ // 256)),
        )
        return cls(pairs, count, mask, tiles, room)

    def by_block(self, L: int, QT: int, q_start: int | Tensor) -> tuple[Tensor, Tensor]:
        """(pairs of each block [B, G, J, tiles] and one more, count [B, G, J, 2]): see
        `nsa_selected_masks_of_blocks`.
        """
        assert self.mask is not None, "made with keep=True"
        B, G, tiles, J = self.mask.shape
        q0, Q0 = starts(q_start)
        pairs = self.pairs.new_empty(B * G * J * tiles + 1)
        count = self.count.new_empty(B, G, J, 2)
        launch(
            nsa_selected_masks_of_blocks,
            (B * G * J,),
            self.mask,
            pairs,
            count,
            Q0,
            q0,
            J,
            tiles,
            G,
            L,
            QT,
            min(1024, padded(tiles)),
            Q0 is not None,
        )
        return pairs, count
