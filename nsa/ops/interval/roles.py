"""Which calls take the kernels with warp roles on Hopper, and their launches: the forward of
`nsa.ops.interval.warp_roles`, dK and dV of `nsa.ops.interval.warp_roles_backward`.

B batch, T queries, Q query heads, G kv heads, C keys, D head dim of q, k and v.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nsa.ops.interval import parts
from nsa.ops.interval.tile_sizes import (
    BACKWARD_KV_ROLES,
    FORWARD_ROLES,
    BackwardRoleSizes,
    RoleSizes,
)
from nsa.ops.kernels.common import LOG2E, cdiv, described, width_class
from nsa.ops.kernels.launch import launch
from nsa.ops.kernels.shares import of_all
from nsa.ops.kernels.tiles import sm_of
from nsa.routing.thresholds import SORT_MIN_ROWS
from nsa.settings import is_off


def forward_sizes(
    q: Tensor, k: Tensor, v: Tensor, width: int | None, scale: float, *, work: int
) -> RoleSizes | None:
    """Those of the forward where it computes these: groups of heads that it divides, and what
    `_take`; ``width`` of a window.
    """
    t = FORWARD_ROLES[_class_of(q, v)][width is not None]
    if t is None or not scale > 0 or q.shape[2] // k.shape[2] % t.groups:
        return None
    return t if _take(t.BC, q, k, v, work=work) else None


def backward_kv_sizes(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, width: int | None, *, work: int
) -> BackwardRoleSizes | None:
    """Those of dK and dV where it computes these; ``width`` of a window."""
    t = BACKWARD_KV_ROLES[_class_of(q, v)][width is not None]
    return t if t is not None and _take(t.BM, q, k, v, do, work=work) else None


def _class_of(q: Tensor, v: Tensor) -> int:
    return min(3, width_class(q, v.shape[3]) + (q.dtype == torch.float32))


def _take(tile_rows: int, q: Tensor, k: Tensor, v: Tensor, *others: Tensor, work: int) -> bool:
    """Whether kernels with roles compute these: on Hopper, as many rows as the other steps with
    roles, of 64 or 128 elements of 2 bytes, and what the copy engine takes.
    """
    sm = sm_of(q.device)
    if is_off("roles") or sm is None or sm[0] != 9 or q.element_size() != 2:
        return False
    if of_all(q.shape[0] * q.shape[1] * k.shape[2]) < SORT_MIN_ROWS:
        return False
    if not (q.shape[3] == v.shape[3] in (64, 128)):
        return False
    return described(tile_rows, q, k, v, *others, work=of_all(work))[1]


@lru_cache(maxsize=64)
def _layout(tile: tuple[int, ...], dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for(
        tile, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    )


def _in_tiles(x: Tensor, tile_rows: int) -> Any:
    """x [B, L, heads, D] in tiles of ``tile_rows`` rows of one head, as Gluon's copies take it."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    unit = 16 // x.element_size()
    # the stride of a dimension of size 1 is never used, and may be anything
    strides = [
        unit if size == 1 else stride
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ]
    tile = (1, tile_rows, 1, x.shape[3])
    return TensorDescriptor(x, list(x.shape), [*strides, 1], list(tile), _layout(tile, x.dtype))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    into: tuple[Tensor, Tensor],
    t: RoleSizes,
    where: tuple[int, int, int, int | None],
    scale: float,
) -> None:
    """As `nsa_interval_forward`, ``into`` o and lse. ``where``: q_start, block, stride, width."""
    from nsa.ops.interval import warp_roles  # Triton's Gluon, for it alone

    (B, T, HQ, D), (C, G) = q.shape, k.shape[1:3]
    *grid, width = where
    launch(
        warp_roles.nsa_interval_forward_roles,
        (cdiv(T, 64), HQ // t.groups, B),
        *(_in_tiles(x, n) for x, n in ((q, 64), (k, t.BC), (v, t.BC))),
        *into,
        T,
        into[1].shape[1],
        C,
        *grid,
        width or 0,
        scale * LOG2E,
        HQ // G,
        HQ,
        D,
        t.BC,
        t.stages,
        t.groups,
        width is not None,
        t.attend,
        t.fetch,
        num_warps=4,
        maxnreg=t.registers,
    )


def backward_kv(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_rows: tuple[Tensor, Tensor],
    t: BackwardRoleSizes,
    where: tuple[int, int, int, int | None],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Parts of dK and of dV, as `nsa_interval_backward_kv` stores them. ``of_rows``: lse, delta;
    ``where``: q_start, block, stride, width.
    """
    from nsa.ops.interval import warp_roles_backward  # Triton's Gluon, for it alone

    (B, T, HQ, D), (C, G) = q.shape, k.shape[1:3]
    q0, block, stride, width = where
    H, BC = HQ // G, 128  # 64 keys for each of two groups
    heads, per_split, splits = parts.plan(q, k, t.BM, BC, banded=width is not None, alone=True)
    dk, dv = parts.room(k, v, splits * (H // heads))
    launch(
        warp_roles_backward.nsa_interval_backward_kv_roles,
        parts.grid(G * (H // heads), B * splits, cdiv(C, BC)),
        *(_in_tiles(x, t.BM) for x in (q, do)),
        *(_in_tiles(x, 64) for x in (k, v)),
        *of_rows,
        dk,
        dv,
        T,
        of_rows[0].shape[1],
        C,
        q0,
        block,
        stride,
        width or 0,
        per_split,
        splits,
        scale,
        scale * LOG2E,
        G,
        H,
        heads,
        D,
        t.BM,
        t.stages,
        width is not None,
        t.differentiate,
        t.fetch,
        num_warps=4,
        maxnreg=t.registers,
    )
    return dk, dv
