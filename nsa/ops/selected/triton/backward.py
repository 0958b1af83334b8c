"""The backward: which way a call goes (dense tiles, lists), and the launches by lists.

Letters as in `nsa.ops.selected.triton.entries`; D and DV head dims.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops.interval import backward as interval_backward
from nsa.ops.interval.parts import Sums
from nsa.ops.kernels.common import LOG2E, cdiv, padded, precision, rows, starts
from nsa.ops.kernels.launch import launch
from nsa.ops.selected.triton import dense_tiles
from nsa.ops.selected.triton.backward_kernels import (
    nsa_selected_backward,
    nsa_selected_sum_kv,
    nsa_selected_sum_q,
)
from nsa.ops.selected.triton.block_lists import Lists
from nsa.ops.selected.triton.chunks import grid_of
from nsa.ops.selected.triton.full_rows import FULL, rows_in_full
from nsa.ops.selected.triton.roles import role_sizes, role_tiles
from nsa.ops.selected.triton.tile_sizes import BACKWARD_ROLES, RoleTiles, Tiles, backward_tiles


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    sel_block: int,
    q_start: int | Tensor,
    scale: float,
    full: int = 0,
    dq: Tensor | None = None,
    lists: Tensor | None = None,
    sums: Sums | None = None,
    tiles: Tiles | RoleTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each in its dtype, that of q added to ``dq`` where it is given.

    ``do``, ``lse`` and ``delta`` as in `nsa.ops.interval.backward.backward`; ``full`` as in
    `forward`, and so ``lists``, which it left, unless it was without; None: they are made here.
    ``sums``: of other branches, which are launched here.
    """
    if tiles is None and dense_tiles.serves(q, v, blocks, sel_block, scale, backward=True):
        return dense_tiles.backward(
            do,
            q,
            k,
            v,
            blocks,
            lse,
            delta,
            sel_block=sel_block,
            q_start=q_start,
            scale=scale,
            dq=dq,
            sums=sums,
        )
    q, k, v, blocks = rows(q), rows(k), rows(v), blocks.contiguous()
    (B, T, HQ, D), (S, G, DV), N = q.shape, v.shape[1:], blocks.shape[3]
    H, J, L = HQ // G, -(-S // sel_block), sel_block
    adds = dq is not None
    dq = q.new_empty(B, T, HQ, D) if dq is None else dq
    q0, Q0 = starts(q_start)
    t = tiles or role_tiles(BACKWARD_ROLES, q, k, v, L) or backward_tiles(q, DV, L, H)
    M, QS, TILE = t.entries(H, blocks.numel())
    kernel: Any = nsa_selected_backward
    options = t.options
    sizes: tuple[Any, ...] = (padded(L), D, DV, QS, TILE, padded(TILE), M)
    sizes = (*sizes, padded(D), padded(DV), Q0 is not None, precision(q))
    if isinstance(t, RoleTiles):
        from nsa.ops.selected.triton import warp_roles  # Triton's Gluon, for it alone

        common, one_stride = role_sizes(t, q, k, v, L, (M, QS, TILE))
        kernel = warp_roles.nsa_selected_backward_roles
        sizes = (*common, 4 * t.groups, t.fetch, Q0 is not None, one_stride)
        options = {**options, "num_warps": 4 * t.groups}
    grid, full = grid_of(q, v, blocks, L), rows_in_full(full, T)
    step = grid.rows_per_chunk
    made = Lists.of(blocks, J, step, full=full) if lists is None else Lists.in_(lists, grid)
    dk, dv = k.new_empty(B, S, G, D), v.new_empty(B, S, G, DV)
    so_far = (dk, dv)
    if step < B * T:  # sums of several chunks are kept in fp32
        so_far = (
            torch.empty_like(dk, dtype=torch.float32),
            torch.empty_like(dv, dtype=torch.float32),
        )
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], scale, scale * LOG2E)
    dense: tuple[Tensor | None, Tensor | None] = (None, None)
    if full:
        few = (q[:, :full], k[:, :full], v[:, :full])
        dense = interval_backward.backward(
            do, *few, lse, delta, scale=scale, dq=dq, adds=adds, sums=sums, work=q.numel(), **FULL
        )[1:]
    if sums is not None:
        sums.launch()  # whose parts are freed before those of this branch are made
    slots = cdiv(step * G * N, TILE) + made.num_lists
    dq_part = q.new_empty(step * G * N * H, D)
    dk_part, dv_part = (q.new_empty(slots, L, n, dtype=torch.float32) for n in (D, DV))
    for number, r0 in enumerate(range(0, B * T, step)):
        n = min(step, B * T - r0)
        e0, e1 = r0 * G * N, (r0 + n) * G * N
        base = number * (made.num_lists + 1)
        launch(
            kernel,
            (cdiv(e1 - e0, TILE),),
            q,
            k,
            v,
            do,
            lse,
            delta,
            made.key_E,
            made.order_E,
            dq_part,
            dk_part,
            dv_part,
            Q0,
            e0,
            e1,
            base,
            T,
            S,
            q0,
            J,
            made.num_lists,
            *strides,
            G,
            H,
            N,
            L,
            *sizes,
            **options,
        )
        launch(
            nsa_selected_sum_kv,
            (made.num_lists, 2),
            dk_part,
            dv_part,
            made.bound,
            *so_far,
            *((dk, dv) if r0 + n == B * T else so_far),
            *dense,
            e0,
            base,
            S,
            full,
            J,
            *dk.stride()[:3],
            *dv.stride()[:3],
            G,
            L,
            padded(L),
            D,
            DV,
            TILE,
            padded(D),
            padded(DV),
            number > 0,
        )
        dense = (None, None)  # only once
        launch(
            nsa_selected_sum_q,
            (n * G,),
            dq_part,
            blocks,
            dq,
            r0,
            T,
            full,
            J,
            G,
            H,
            N,
            D,
            padded(H, 1),
            padded(D),
            adds,
            num_warps=4 if H * D > 512 else 1,
        )
    return dq, dk, dv
