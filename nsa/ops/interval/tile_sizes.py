"""Sizes of the tiles and numbers of warps: the tables measured on an H200, and the choice from them
by width class and card.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.ops.kernels.common import width_class
from nsa.ops.kernels.tiles import smaller


def _tiles(BM: int, BC: int, num_warps: int, num_stages: int) -> dict[str, int]:
    return {"BM": BM, "BC": BC, "num_warps": num_warps, "num_stages": num_stages}


# By kernel and width class; without a window and with one. Measured on an H200
# (reports/kernels-log.md): classes 0 and 1, in bf16.
_SMALL, _LEAST = _tiles(64, 32, 4, 2), _tiles(32, 32, 4, 1)
TILES = {
    "forward": (
        (_tiles(64, 128, 4, 2), _tiles(64, 64, 4, 2)),
        (_tiles(64, 64, 4, 3), _tiles(64, 64, 4, 3)),
        (_SMALL, _SMALL),
        (_LEAST, _LEAST),
    ),
    "backward_q": (
        (_tiles(64, 64, 4, 3), _tiles(64, 64, 4, 3)),
        (_tiles(128, 64, 8, 3), _tiles(64, 64, 4, 2)),
        (_SMALL, _SMALL),
        (_LEAST, _LEAST),
    ),
    "backward_kv": (
        (_tiles(128, 64, 4, 2), _tiles(128, 64, 4, 2)),
        (_tiles(64, 64, 4, 2), _tiles(64, 64, 4, 2)),
        (_tiles(32, 64, 8, 1), _tiles(32, 64, 8, 1)),
        (_LEAST, _LEAST),
    ),
}


@dataclass(frozen=True, slots=True)
class RoleSizes:
    """Sizes of `nsa.ops.interval.warp_roles`."""

    BC: int  # keys of a tile
    stages: int  # tiles of keys held
    groups: int  # of four warps, each with 64 queries of a head
    registers: int  # of a thread at the start
    attend: int  # and of one that attends, but of the first group, which has the rest
    fetch: int = 24


# By width class, on Hopper, without a window and with one. At 65,536 tokens without a window .886
# ms at width 64 (1.001 by Triton's kernel) and 7.39 at 128 (8.72), with one 2.94 at 128 (3.41); at
# 64 .363 (.369), and shorter sequences lose.
FORWARD_ROLES: tuple[tuple[RoleSizes | None, RoleSizes | None], ...] = (
    (RoleSizes(128, 2, 3, 128, 160), None),
    (RoleSizes(128, 2, 2, 168, 240), RoleSizes(64, 3, 2, 168, 240)),
    (None, None),
    (None, None),
)


@dataclass(frozen=True, slots=True)
class BackwardRoleSizes:
    """Sizes of `nsa.ops.interval.warp_roles_backward`."""

    BM: int  # queries of a tile
    stages: int  # tiles of queries held
    registers: int  # of a thread at the start
    differentiate: int  # and of one that differentiates, but of the first group, which has the rest
    fetch: int = 24


# dK and dV by width class, on Hopper, without a window and with one. At 65,536 tokens of width 64
# 1.450 ms (1.998 by Triton's kernel) and .518 (.995), of width 128 15.1 (20.6) and 4.02 (6.58).
BACKWARD_KV_ROLES: tuple[tuple[BackwardRoleSizes | None, BackwardRoleSizes | None], ...] = (
    (BackwardRoleSizes(128, 2, 168, 240), BackwardRoleSizes(128, 2, 168, 240)),
    (BackwardRoleSizes(64, 2, 168, 240), BackwardRoleSizes(64, 3, 168, 240)),
    (None, None),
    (None, None),
)


def tiles_of(kernel: str, q: Tensor, DV: int, width: int | None) -> dict[str, int]:
    of_class = width_class(q, DV)
    # fp32 tiles of class 1 are not those that bf16 was measured with: exact products take more
    # registers
    if q.dtype == torch.float32:
        of_class = max(2, of_class)
    measured = TILES[kernel][of_class][width is not None]
    return {**measured, **smaller(f"interval_{kernel}", of_class, q.device)}
