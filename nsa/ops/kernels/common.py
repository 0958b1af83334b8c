"""What the launchers share."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

LOG2E = 1.4426950408889634


def padded(size: int, least: int = 16) -> int:
    """The power of two that holds ``size``; a dot wants 16."""
    return max(least, int(triton.next_power_of_2(size)))


def width_class(x: Tensor, DV: int) -> int:
    """0 to 3 for rows of up to 128, 256, 512 and 1,024 bytes: what a tile takes of the shared memory."""
    row_bytes = padded(max(x.shape[-1], DV)) * x.element_size()
    return max(0, (row_bytes - 1).bit_length() - 7)


def precision(x: Tensor) -> str:
    """fp32 is for tests, and must not be rounded to tf32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def rows(x: Tensor) -> Tensor:
    """x with its last dimension contiguous, as the kernels read it; other strides are free."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def starts(q_start: int | Tensor) -> tuple[int, Tensor | None]:
    """(position of the first query, None), or (0, those of each row)."""
    return (0, q_start) if isinstance(q_start, Tensor) else (q_start, None)
