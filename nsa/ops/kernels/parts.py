"""The sum of the parts that a gradient of keys was computed in, and of those of the values: one launch for both, in a fixed order.

B batch, C keys, G kv heads, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import cdiv, named_by

TILE = 1024  # elements a program


@triton.jit
def _sum(PART, OUT, num_parts, size, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < size
    acc = tl.zeros([TILE], tl.float32)
    part = PART + at
    for _ in range(num_parts):
        acc += tl.load(part, mask=inside, other=0.0)
        part += size
    tl.store(OUT + at, acc.to(OUT.dtype.element_ty), mask=inside)


@triton.jit(repr=named_by("nsa_interval_sum_kv", {"BANDED": "_band"}), do_not_specialize=["num_parts"])
def nsa_interval_sum_kv(DK_PART, DV_PART, DK, DV, num_parts, size_k, size_v, TILE: tl.constexpr, BANDED: tl.constexpr):
    """BANDED is for the name that a profiler shows."""
    if tl.program_id(1) == 0:
        _sum(DK_PART, DK, num_parts, size_k, TILE)
    else:
        _sum(DV_PART, DV, num_parts, size_v, TILE)


def summed(dk: Tensor, dv: Tensor, *, dtype: torch.dtype, banded: bool) -> tuple[Tensor, Tensor]:
    """dk fp32 [parts, B, C, G, D] and dv likewise, contiguous -> their sums [B, C, G, D] in ``dtype``. ``banded``: the window's."""
    to_k, to_v = dk.new_empty(dk.shape[1:], dtype=dtype), dv.new_empty(dv.shape[1:], dtype=dtype)
    sizes = to_k.numel(), to_v.numel()
    nsa_interval_sum_kv[(cdiv(max(sizes), TILE), 2)](dk, dv, to_k, to_v, dk.shape[0], *sizes, TILE, banded)
    return to_k, to_v
