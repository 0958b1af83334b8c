"""What the launchers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.ops.kernels.tiles import card_at
from nsa.routing.thresholds import COPY_MIN_ELEMENTS
from nsa.settings import is_off

LOG2E = 1.4426950408889634


# What runs before each launch is plain Python: triton.cdiv and triton.next_power_of_2 take 2 to 3
# us a call.
def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@lru_cache(maxsize=1024)  # some 50 calls for each forward and backward
def padded(size: int, least: int = 16) -> int:
    """The least power of two that holds ``size``, at least 16, the minimum of a dot."""
    return max(least, 1 << (max(1, size) - 1).bit_length())


def width_class(x: Tensor, DV: int) -> int:
    """0 to 3 for rows of up to 128, 256, 512 and 1,024 bytes: what a tile takes of the shared
    memory.
    """
    row_bytes = padded(max(x.shape[-1], DV)) * x.element_size()
    return max(0, (row_bytes - 1).bit_length() - 7)


def precision(x: Tensor) -> str:
    """Input precision of a dot: fp32 inputs are for tests, and must not be rounded to tf32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def rows(x: Tensor) -> Tensor:
    """x with its last dimension contiguous, as the kernels read it; other strides are free."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def starts(q_start: int | Tensor) -> tuple[int, Tensor | None]:
    """(position of the first query, None), or (0, those of each row)."""
    return (0, q_start) if isinstance(q_start, Tensor) else (q_start, None)


def named_by(name: str, marks: Mapping[str, str], end: str = "") -> Callable[[Any], str]:
    """For `triton.jit(repr=...)`: the name that a profiler shows, with the mark of each constexpr
    that is true, then ``end``.
    """

    def shown(specialization: Any) -> str:
        return (
            name
            + "".join(mark for flag, mark in marks.items() if specialization.constants.get(flag))
            + end
        )

    return shown


def described(
    tile_rows: int, *tensors: Tensor, work: int
) -> tuple[list[Tensor | TensorDescriptor], bool]:
    """(each x [B, L, heads, D] in tiles of ``tile_rows`` rows of one head, for the copy engine,
    True), or (the tensors, False).

    Beyond L and D a tile reads 0. False where ``work``, the elements of q, is less than
    COPY_MIN_ELEMENTS, where the engine cannot take one of the tensors (empty, expanded, or at
    addresses that are no multiples of 16 bytes), where a setting turns it off, and on cards where
    it does not pay (nsa.routing.cards).
    """
    if work < COPY_MIN_ELEMENTS or is_off("copy") or not card_at(tensors[0].device).by_descriptors:
        return list(tensors), False
    made: list[Tensor | TensorDescriptor] = []
    for x in tensors:
        strides = _strides_for_copies(tuple(x.shape), x.stride(), x.element_size())
        if strides is None or x.data_ptr() % 16:
            return list(tensors), False
        one = object.__new__(TensorDescriptor)  # without its own checks, which were made above
        one.base, one.shape, one.strides = x, list(x.shape), [*strides, 1]
        one.block_shape, one.padding = [1, tile_rows, 1, padded(x.shape[-1])], "zero"
        made.append(one)
    return made, True


@lru_cache(maxsize=1024)
def _strides_for_copies(
    shape: tuple[int, ...], strides: tuple[int, ...], element_size: int
) -> tuple[int, ...] | None:
    """Those of all dimensions but the last, as the copy engine wants them; None where it cannot
    take such a tensor.
    """
    unit = 16 // element_size
    # the stride of a dimension of size 1 is never used, and may be anything
    wanted = tuple(unit if n == 1 else s for n, s in zip(shape[:-1], strides[:-1], strict=True))
    return None if 0 in shape or any(n % unit or n == 0 for n in wanted) else wanted


@triton.jit
def load_rows(X, at, inside, D: tl.constexpr, BD: tl.constexpr):
    """Rows of X that begin at ``at`` (int64), as [rows, BD]; 0 outside."""
    d = tl.arange(0, BD)
    if D == BD:
        return tl.load(X + at[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    return tl.load(X + at[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
