"""The parts that gradients of keys and of values are computed in: how many, and their sum, one
launch for both, in a fixed order.

B batch, C keys, G kv heads, D head dim.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import cdiv, named_by
from nsa.ops.kernels.launch import launch

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


@triton.jit(
    repr=named_by("nsa_interval_sum_kv", {"BANDED": "_band"}), do_not_specialize=["num_parts"]
)
def nsa_interval_sum_kv(
    DK_PART,
    DV_PART,
    DK,
    DV,
    num_parts,
    size_k,
    size_v,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BANDED: tl.constexpr,
):
    """BANDED is for the name that a profiler shows."""
    if tl.program_id(1) == 0:
        _sum(DK_PART, DK, num_parts, size_k, TILE, AT_ONCE)
    else:
        _sum(DV_PART, DV, num_parts, size_v, TILE, AT_ONCE)


def summed(dk: Tensor, dv: Tensor, *, dtype: torch.dtype, banded: bool) -> tuple[Tensor, Tensor]:
    """dk fp32 [parts, B, C, G, D] and dv likewise, contiguous -> their sums [B, C, G, D] in
    ``dtype``. ``banded``: the window's.
    """
    to_k, to_v = dk.new_empty(dk.shape[1:], dtype=dtype), dv.new_empty(dv.shape[1:], dtype=dtype)
    sizes = to_k.numel(), to_v.numel()
    launch(
        nsa_interval_sum_kv,
        (cdiv(max(sizes), TILE), 2),
        dk,
        dv,
        to_k,
        to_v,
        dk.shape[0],
        *sizes,
        TILE,
        AT_ONCE,
        banded,
    )
    return to_k, to_v


@lru_cache(maxsize=1024)
def heads_and_ranges(
    num_tiles: int, H: int, T: int, *, pairs: int, banded: bool
) -> tuple[int, int]:
    """(query heads a program, ranges of queries): enough programs to fill a GPU of 132
    multiprocessors evenly, and few parts.

    Tiles of a band are alike; without one, the first tile is seen by every query and the last by
    few. The cost of a part is its size, and the cost of an uneven end grows with the work,
    ``pairs`` of a query head and a key; so the number of programs grows with the root of the work.
    """
    wanted = 1024 if banded else min(4096, max(512, isqrt(pairs // 512)))
    heads = H
    while heads > 1 and num_tiles * (H // heads) < wanted:
        heads = next(n for n in range(heads - 1, 0, -1) if H % n == 0)
    if banded:
        return heads, 1
    return heads, max(1, min(16, wanted // max(1, num_tiles * (H // heads)), T // 256))
