"""Which calls by lists take the kernels with warp roles on Hopper, and the constants of these:
`nsa.ops.selected.triton.warp_roles`.

Letters as in `nsa.ops.selected.triton.entries`; D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops.kernels.common import padded, width_class
from nsa.ops.kernels.tiles import sm_of
from nsa.ops.selected.triton.tile_sizes import RoleTiles
from nsa.settings import is_off


def roles_take(q: Tensor, k: Tensor, v: Tensor, *, sel_block: int, M: int) -> bool:
    """Whether `nsa.ops.selected.triton.warp_roles` computes these: rows of 64 or 128 elements of 2
    bytes at multiples of 16 bytes, blocks of 64 keys, groups of at most M heads.
    """
    return (
        q.element_size() == 2
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] in (64, 128)
        and sel_block == 64
        and q.shape[2] // k.shape[2] <= M
        and not any(x.data_ptr() % 16 for x in (q, k, v))
        and not any(stride % 8 for x in (q, k, v) for stride in x.stride()[:-1])
    )


def role_tiles(
    table: tuple[RoleTiles | None, ...], q: Tensor, k: Tensor, v: Tensor, sel_block: int
) -> RoleTiles | None:
    t = table[min(3, width_class(q, v.shape[-1]) + (q.dtype == torch.float32))]
    if t is None or is_off("roles") or not roles_take(q, k, v, sel_block=sel_block, M=t.M):
        return None
    sm = sm_of(q.device)
    return t if sm is not None and sm[0] == 9 else None


def role_sizes(
    t: RoleTiles, q: Tensor, k: Tensor, v: Tensor, sel_block: int, tile: tuple[int, int, int]
) -> tuple[tuple[int, ...], bool]:
    """(the constants of both kernels with roles from the width of a row on, whether row (b, t) of q
    is t rows after row (b, 0) and b T after row 0).
    """
    if not roles_take(q, k, v, sel_block=sel_block, M=t.M):
        raise ValueError(
            f"tiles={t} with q {tuple(q.shape)} {q.dtype}, strides {q.stride()}, sel_block="
            f"{sel_block}: roles want rows of 64 or 128 elements of 2 bytes at multiples of 16 "
            "bytes and blocks of 64 keys; give Tiles, or none"
        )
    M, QS, TILE = tile
    sizes = (q.shape[3], QS, padded(QS, 8), TILE, M, t.stages, t.blocks)
    return sizes, q.shape[0] == 1 or q.stride(0) == q.shape[1] * q.stride(1)
