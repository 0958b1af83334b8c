"""Which calls of the selected branch go by dense tiles, and what launches them: see
``dense_tile_kernels``.

B batch, T queries, S keys, Q query heads, G kv heads, H query heads per kv head, N slots, J blocks
a kv head, L tokens a block, M rows a tile, QT queries a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from nsa.ops.interval import parts
from nsa.ops.kernels.common import LOG2E, cdiv, padded, precision, rows, starts, width_class
from nsa.ops.kernels.launch import launch
from nsa.ops.kernels.tiles import smaller
from nsa.ops.selected.triton.dense_tile_kernels import (
    nsa_selected_backward_tiles_kv,
    nsa_selected_backward_tiles_q,
    nsa_selected_forward_tiles,
)
from nsa.ops.selected.triton.dense_tile_masks import TileMasks

MOST_QUERIES = 32  # of a tile: the bits of a mask


@dataclass(frozen=True, slots=True)
class DenseTiles:
    """Tiles of up to M rows, and what a launch over tiles takes; that of the gradients of keys,
    through whose programs tiles stream, takes ``kv_warps`` and ``kv_stages``.
    """

    M: int
    num_warps: int
    num_stages: int = 2
    kv_warps: int = 4
    kv_stages: int = 2
    max_registers: int | None = None  # of a thread; fewer let more programs share a multiprocessor

    def of_heads(self, H: int) -> tuple[int, int]:
        """(rows M, queries QT)."""
        QT = max(1, min(MOST_QUERIES, self.M // H))
        return padded(QT * H), QT

    @property
    def options(self) -> dict[str, int]:
        """What Triton's launch over tiles takes."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}


# By width class. The first two are the fastest of four each on an H200, the backward's second and
# the others are not measured; built for SM 9.0 the first two spill no register.
FORWARD = (
    DenseTiles(64, 4, 2, max_registers=128),
    DenseTiles(64, 4, 3),
    DenseTiles(64, 4, 1),
    DenseTiles(32, 4, 1),
)
BACKWARD = (
    DenseTiles(64, 4, 3, 4, 2),
    DenseTiles(64, 4, 2, 8, 2),
    DenseTiles(32, 4, 1, 4, 1),
    DenseTiles(32, 4, 1, 4, 1),
)


@dataclass(frozen=True, slots=True)
class TileLimits:
    """Up to where tiles are the faster way: ``pairs`` (row, block) that they compute for one that
    was chosen, and ``rows`` (b, t, kv head), as many fill a GPU with lists, which do less work.
    """

    pairs: float
    rows: int


NEVER = TileLimits(0.0, 0)
# By width class, ms of lists and of tiles on an H200 (reports/kernels-log.md).
# 12 heads over 2 of 64, at 2,048, 4,096, 8,192 and 16,384 tokens: forward .086 and .040, .146 and
# .087, .275 and .254, .529 and .676; backward .175 and .092, .283 and .254, .483 and .765. 64 heads
# over 4 of 128, forward at 2,048 and 8,192: .324 and .173, 1.67 and 1.28; no backward wins.
FORWARD_LIMITS = (TileLimits(3.96, 32768), TileLimits(2.55, 32768), NEVER, NEVER)
BACKWARD_LIMITS = (TileLimits(2.45, 32768), NEVER, NEVER, NEVER)
MIN_ROWS = 1024  # (b, t, kv head): fewer make too few tiles
# Longer blocks were not measured, and their K and V of two or three stages do not fit: of 256
# tokens, 128 wide, the forward takes 400 KB of an H200's 227; of 64, 88 of a small card's 99.
MOST_TOKENS = 64
KV_PROGRAMS = 512  # wanted for the gradients of keys: .092 ms at 2,048 tokens; 256 .115, 1,024 .106
MOST_PARTS = 16
# the masks of the backward take 12 bytes a (tile, block): at most so many times the bytes of q,
# where the parts of lists take PARTS_OF_Q times
MASKS_OF_Q = 1


def _class(q: Tensor, DV: int) -> int:
    return min(3, width_class(q, DV) + (q.dtype == torch.float32))


def _forward_tiles(q: Tensor, DV: int) -> DenseTiles:
    of_class = _class(q, DV)
    changes = smaller("dense_forward", of_class, q.device)
    return replace(FORWARD[of_class], **changes) if changes else FORWARD[of_class]


@lru_cache(maxsize=1024)
def pairs_an_entry(T: int, S: int, N: int, H: int, L: int, tiles: DenseTiles) -> float:
    """(row, block) pairs that tiles compute for one that was chosen, where the last T of S queries
    choose N blocks of their past each, independently of one another.

    Of P blocks, QT queries choose P * (1 - (1 - N / P)^QT) at least once; neighbours that choose
    alike make it less. The mean over 16 positions; rows that pad a tile are counted, also those of
    a tile that T queries do not fill.
    """
    M, QT = tiles.of_heads(H)
    QT = min(QT, T)
    visited = chosen = 0.0
    for i in range(16):
        past = max(1.0, (S - T + (i + 0.5) / 16 * T) / L + 0.5)
        share = min(1.0, N / past)
        visited += past * (1 - (1 - share) ** QT)
        chosen += past * share
    return visited / chosen * M / (QT * H)


def serves(
    q: Tensor, v: Tensor, blocks: Tensor, sel_block: int, scale: float, *, backward: bool = False
) -> bool:
    """Whether a call goes by dense tiles, by its shapes alone; q [B, T, Q, D], v [B, S, G, DV],
    blocks [B, T, G, N].

    Not where the scale is 0 or below: the forward takes the largest product for the largest logit;
    nor of blocks, or of heads of one query, that make a tile larger than those that were measured.
    """
    width = _class(q, v.shape[3])
    limits = (BACKWARD_LIMITS if backward else FORWARD_LIMITS)[width]
    (B, T, HQ), (S, G), N = q.shape[:3], v.shape[1:3], blocks.shape[3]
    if not MIN_ROWS <= B * T * G <= limits.rows or scale <= 0 or S == 0 or N == 0:
        return False
    tiles = (BACKWARD if backward else FORWARD)[width]
    if padded(sel_block) > MOST_TOKENS or HQ // G > tiles.M:
        return False
    if backward:
        pairs = cdiv(T, tiles.of_heads(HQ // G)[1]) * cdiv(S, sel_block)
        if 12 * B * G * pairs > MASKS_OF_Q * q.numel() * q.element_size():
            return False
    return pairs_an_entry(T, S, N, HQ // G, sel_block, tiles) <= limits.pairs


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    sel_block: int,
    q_start: int | Tensor,
    scale: float,
    tiles: DenseTiles | None = None,
) -> tuple[Tensor, Tensor]:
    """As `nsa.ops.selected.triton.forward.forward`, of ``scale`` above 0 and at least one key and
    one slot. Keys that another query of a tile chose must be finite, too.
    """
    q, k, v, blocks = rows(q), rows(k), rows(v), blocks.contiguous()
    (B, T, HQ, D), (S, G, DV) = q.shape, v.shape[1:]
    o, lse = q.new_empty(B, T, HQ, DV), q.new_empty(B, T, HQ, dtype=torch.float32)
    t = tiles or _forward_tiles(q, DV)
    M, QT = t.of_heads(HQ // G)
    masks = TileMasks.of(blocks, S, sel_block, QT, q_start, keep=False)
    q0, Q0 = starts(q_start)
    launch(
        nsa_selected_forward_tiles,
        (masks.tiles * B * G,),
        q,
        k,
        v,
        masks.pairs,
        masks.count,
        o,
        lse,
        Q0,
        T,
        S,
        q0,
        masks.room,
        masks.tiles,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        scale * LOG2E,
        G,
        HQ // G,
        sel_block,
        padded(sel_block),
        D,
        DV,
        QT,
        M,
        padded(D),
        padded(DV),
        Q0 is not None,
        precision(q),
        **t.options,
    )
    return o, lse


def num_parts(programs: int, tiles: int) -> int:
    """Into how many parts the tiles of a block go, where all blocks are ``programs``."""
    return max(1, min(MOST_PARTS, KV_PROGRAMS // max(1, programs), tiles // 8))


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    sel_block: int,
    q_start: int | Tensor,
    scale: float,
    dq: Tensor | None = None,
    sums: parts.Sums | None = None,
    tiles: DenseTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `nsa.ops.selected.triton.backward.backward`, under the conditions of `forward`."""
    q, k, v, blocks = rows(q), rows(k), rows(v), blocks.contiguous()
    (B, T, HQ, D), (S, G, DV) = q.shape, v.shape[1:]
    adds = dq is not None
    dq = q.new_empty(B, T, HQ, D) if dq is None else dq
    t = tiles or BACKWARD[_class(q, DV)]
    M, QT = t.of_heads(HQ // G)
    masks = TileMasks.of(blocks, S, sel_block, QT, q_start, keep=True)
    pairs, count = masks.by_block(sel_block, QT, q_start)
    J, (q0, Q0) = count.shape[2], starts(q_start)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], scale, scale * LOG2E)
    shapes = (
        G,
        HQ // G,
        sel_block,
        padded(sel_block),
        D,
        DV,
        QT,
        M,
        padded(D),
        padded(DV),
        Q0 is not None,
        precision(q),
    )
    launch(
        nsa_selected_backward_tiles_q,
        (masks.tiles * B * G,),
        q,
        k,
        v,
        do,
        lse,
        delta,
        masks.pairs,
        masks.count,
        dq,
        Q0,
        T,
        S,
        q0,
        masks.room,
        masks.tiles,
        *strides,
        *shapes,
        adds,
        **t.options,
    )
    splits = num_parts(J * B * G, masks.tiles)
    kept = torch.float32 if splits > 1 else k.dtype
    dk, dv = (q.new_empty(splits, B, S, G, n, dtype=kept) for n in (D, DV))
    launch(
        nsa_selected_backward_tiles_kv,
        (splits * B * G * J,),
        q,
        k,
        v,
        do,
        lse,
        delta,
        pairs,
        count,
        dk,
        dv,
        Q0,
        T,
        S,
        q0,
        J,
        masks.tiles,
        splits,
        *strides,
        *shapes,
        num_warps=t.kv_warps,
        num_stages=t.kv_stages,
    )
    sums = sums or parts.Sums()
    dk, dv = sums.of(dk, dv, dtype=k.dtype)
    sums.launch()
    return dq, dk, dv
