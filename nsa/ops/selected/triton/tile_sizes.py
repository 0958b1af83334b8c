"""Sizes of tiles by lists, with warp roles and without: by width, dtype and card.

Letters as in `nsa.ops.selected.triton.entries`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nsa.ops.kernels.common import padded, width_class
from nsa.ops.kernels.tiles import rows_that_fit, smaller

MIN_PROGRAMS = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes measured on an H200 (reports/kernels-log.md)."""

    M: int
    num_warps: int
    segments: int = 1  # tiles of M rows that a program takes
    num_stages: int = 1
    max_registers: int | None = None  # of a thread; fewer let more programs share a multiprocessor

    @property
    def options(self) -> dict[str, int]:
        """What Triton's launch takes."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}

    def entries(self, H: int, E: int) -> tuple[int, int, int]:
        """(rows M, entries a tile of M rows, entries a program): fewer where E entries would make
        too few programs.
        """
        return _entries(max(self.M, padded(H)), self.segments, H, E)


@dataclass(frozen=True, slots=True)
class RoleTiles:
    """Sizes of `nsa.ops.selected.triton.warp_roles`, for H of at most M heads."""

    M: int
    groups: int  # of four warps each that multiply: tiles in turns, and in the backward each tile
    stages: int  # tiles of M rows fetched ahead
    blocks: int  # of K and V held: of 2, the next list's arrives while this one's is in use
    segments: int  # tiles of M rows that a program takes
    registers: int  # of a thread at the start: 128 lets two programs share a multiprocessor
    fetch: int = 72  # registers of a thread that fetches; 40 spill
    multiply: int = 208  # and of one of the forward's second group; the first has the rest

    @property
    def options(self) -> dict[str, int]:
        """What Triton's launch takes."""
        return {"num_warps": 4, "maxnreg": self.registers}

    def entries(self, H: int, E: int) -> tuple[int, int, int]:
        """As `Tiles.entries`."""
        return _entries(self.M, self.segments, H, E)


def _entries(M: int, segments: int, H: int, E: int) -> tuple[int, int, int]:
    while segments > 1 and M // H * segments * MIN_PROGRAMS > E:
        segments //= 2
    return M, M // H, M // H * segments


# By width class; the first two measured in bf16.
FORWARD = (Tiles(64, 4, 3), Tiles(64, 4, 8, max_registers=128), Tiles(64, 8, 4), Tiles(32, 4, 4))
BACKWARD = (Tiles(128, 4, 32, 2), Tiles(64, 4, 128), Tiles(64, 8, 32), Tiles(32, 4, 32))
# By width class, on Hopper; None: those above. At 65,536 tokens the branch takes 1.88 ms forward
# (2.20 above) and 3.30 backward (3.59) at width 64, 28.97 backward (29.73) at 128, where no roles
# made the forward faster (reports/evidence/kernels-h200/variants-stores.txt).
FORWARD_ROLES: tuple[RoleTiles | None, ...] = (
    RoleTiles(128, 1, 4, 2, 32, 128),
    None,
    None,
    None,
)
BACKWARD_ROLES: tuple[RoleTiles | None, ...] = (
    RoleTiles(128, 2, 3, 2, 64, 168, 96),
    RoleTiles(128, 2, 1, 1, 32, 168),
    None,
    None,
)


def tiles_of(kernel: str, tiles: tuple[Tiles, ...], q: Tensor, DV: int) -> Tiles:
    of_class = min(3, width_class(q, DV) + (q.dtype == torch.float32))
    changes = smaller(kernel, of_class, q.device)
    return replace(tiles[of_class], **changes) if changes else tiles[of_class]


def backward_tiles(q: Tensor, DV: int, L: int, H: int) -> Tiles:
    t = tiles_of("selected_backward", BACKWARD, q, DV)
    M = rows_that_fit(t.M, padded(H), padded(L), (padded(q.shape[3]), padded(DV)), q)
    return t if M == t.M else replace(t, M=M)
