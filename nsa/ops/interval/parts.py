"""The parts that gradients of keys and of values are computed in: how many, the grid that computes
them, their room, and their sums, one launch for all, in a fixed order.

B batch, T queries, C keys, G kv heads, D head dim.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import cdiv
from nsa.ops.kernels.launch import launch
from nsa.routing.thresholds import GRID_LIMIT

TILE, AT_ONCE = 512, 4  # elements a program, and parts whose loads wait for nothing


@triton.jit
def _sum(PART, OUT, num_parts, size, TILE: tl.constexpr, AT_ONCE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < size
    acc = tl.zeros([TILE], tl.float32)
    for first in range(0, num_parts, AT_ONCE):
        n = first + tl.arange(0, AT_ONCE)
        there = (n < num_parts)[:, None] & inside[None, :]
        acc += tl.sum(
            tl.load(PART + n.to(tl.int64)[:, None] * size + at[None, :], mask=there, other=0.0), 0
        )
    tl.store(OUT + at, acc.to(OUT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["parts_0", "parts_1", "parts_2"])
def nsa_interval_sum_kv(
    DK_PART_0,
    DV_PART_0,
    DK_0,
    DV_0,
    DK_PART_1,
    DV_PART_1,
    DK_1,
    DV_1,
    DK_PART_2,
    DV_PART_2,
    DK_2,
    DV_2,
    parts_0,
    parts_1,
    parts_2,
    size_k_0,
    size_v_0,
    size_k_1,
    size_v_1,
    size_k_2,
    size_v_2,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Of 1 to 3 PAIRS of dK and dV, each with its number of parts and its sizes."""
    of = tl.program_id(1)
    if of == 0:
        _sum(DK_PART_0, DK_0, parts_0, size_k_0, TILE, AT_ONCE)
    elif of == 1:
        _sum(DV_PART_0, DV_0, parts_0, size_v_0, TILE, AT_ONCE)
    if PAIRS > 1:
        if of == 2:
            _sum(DK_PART_1, DK_1, parts_1, size_k_1, TILE, AT_ONCE)
        elif of == 3:
            _sum(DV_PART_1, DV_1, parts_1, size_v_1, TILE, AT_ONCE)
    if PAIRS > 2:
        if of == 4:
            _sum(DK_PART_2, DK_2, parts_2, size_k_2, TILE, AT_ONCE)
        elif of == 5:
            _sum(DV_PART_2, DV_2, parts_2, size_v_2, TILE, AT_ONCE)


class Sums:
    """Parts of dK and dV of up to three branches, summed by one launch."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def of(self, dk: Tensor, dv: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dk fp32 [parts, B, C, G, D] and dv likewise, contiguous -> room for their sums [B, C, G,
        D] in ``dtype``, which `launch` fills; of one part, itself.
        """
        if dk.shape[0] == 1:
            return dk[0], dv[0]
        to_k = dk.new_empty(dk.shape[1:], dtype=dtype)
        to_v = dv.new_empty(dv.shape[1:], dtype=dtype)
        self._pairs.append((dk, dv, to_k, to_v))
        return to_k, to_v

    def launch(self) -> None:
        """Fill all that `of` has returned since the last one."""
        pairs, self._pairs = self._pairs, []
        if not pairs:
            return
        given = [*pairs, *[pairs[0]] * (3 - len(pairs))]
        sizes = [x.numel() for _, _, *to in given for x in to]
        launch(
            nsa_interval_sum_kv,
            (cdiv(max(sizes), TILE), 2 * len(pairs)),
            *(x for pair in given for x in pair),
            *(dk.shape[0] for dk, *_ in given),
            *sizes,
            TILE,
            AT_ONCE,
            len(pairs),
        )


@lru_cache(maxsize=1024)
def heads_and_ranges(
    num_tiles: int, H: int, T: int, *, pairs: int, banded: bool, alone: bool = False
) -> tuple[int, int]:
    """(query heads a program, ranges of queries): enough programs to fill a GPU of 132
    multiprocessors evenly, and few parts.

    Tiles of a band are alike; without one, the first tile is seen by every query and the last by
    few. The cost of a part is its size, and the cost of an uneven end grows with the work,
    ``pairs`` of a query head and a key; so the number of programs grows with the root of the work.
    Half as many fill it where one is ``alone`` on its multiprocessor.
    """
    wanted = 1024 if banded else min(4096, max(512, isqrt(pairs // 512)))
    if alone:
        wanted //= 2
    heads = H
    while heads > 1 and num_tiles * (H // heads) < wanted:
        heads = next(n for n in range(heads - 1, 0, -1) if H % n == 0)
    if banded:
        return heads, 1
    return heads, max(1, min(16, wanted // max(1, num_tiles * (H // heads)), T // 256))


def plan(
    q: Tensor, k: Tensor, BM: int, BC: int, *, banded: bool, alone: bool = False
) -> tuple[int, int, int]:
    """(query heads a program, queries a range, ranges) of tiles of BM queries and BC keys."""
    (B, T, HQ, _), (C, G) = q.shape, k.shape[1:3]
    heads, splits = heads_and_ranges(
        cdiv(C, BC) * B * G, HQ // G, T, pairs=B * HQ * T * C // 2, banded=banded, alone=alone
    )
    per_split = cdiv(cdiv(T, min(splits, max(1, GRID_LIMIT // B))), BM) * BM
    return heads, per_split, cdiv(T, per_split)


def grid(parts: int, ranges: int, tiles: int) -> tuple[int, int, int]:
    """``tiles`` in the third dimension, and where they do not fit there, in the first as well."""
    folds = max(1, cdiv(tiles, GRID_LIMIT))  # no key, no tile
    return parts * folds, ranges, cdiv(tiles, folds)


def room(k: Tensor, v: Tensor, num_parts: int) -> tuple[Tensor, Tensor]:
    """Room for parts of dK and dV, [parts, ...]: fp32 where there are several."""
    kept = torch.float32 if num_parts > 1 else k.dtype
    return k.new_empty(num_parts, *k.shape, dtype=kept), v.new_empty(
        num_parts, *v.shape, dtype=kept
    )
