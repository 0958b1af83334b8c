"""Sizes of tiles and numbers of warps, by the number of rows and a card's shared memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops.kernels.common import padded
from nsa.ops.kernels.tiles import card_at
from nsa.routing.cards import HOPPER

PROGRAMS = 132  # multiprocessors of the GPU that the sizes here were chosen for


def rows_a_tile(num_rows: int, others: int, x: Tensor, least: int) -> int:
    """The most rows of a tile with which there are enough programs for a GPU."""
    M = 128
    while least < M and (num_rows + M - 1) // M * others < PROGRAMS:
        M //= 2
    return min(M, 64) if _is_small(x) or x.dtype == torch.float32 else M


def _is_small(x: Tensor) -> bool:
    return card_at(x.device).shared_bytes < HOPPER.shared_bytes


def launch_options(M: int, x: Tensor, *, wide: bool = False) -> dict[str, Any]:
    """``wide``: a program gathers two products."""
    num_warps = 8 if M == 128 or wide else 4
    return {"num_warps": num_warps, "num_stages": 2 if _is_small(x) else 3}


def product_depth(x: Tensor) -> int:
    """Elements that a step of a product takes: 128 bytes."""
    return 128 // x.element_size()


def tile_width(x: Tensor, *sizes: int) -> int:
    """Of a tile: up to 128 columns of the widest of ``sizes``, 64 where memory is little."""
    return min(padded(max(sizes)), 64 if _is_small(x) or x.dtype == torch.float32 else 128)
