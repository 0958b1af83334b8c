"""The forward: which way a call goes (dense tiles, few rows, row by row, lists), and the launches
by lists.

Letters as in `nsa.ops.selected.triton.entries`; D and DV head dims.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops.decode import kernels as decode
from nsa.ops.interval import forward_kernels as interval_forward
from nsa.ops.kernels.common import LOG2E, cdiv, padded, precision, rows, starts
from nsa.ops.kernels.launch import launch
from nsa.ops.selected.triton import dense_tiles
from nsa.ops.selected.triton.block_lists import Lists
from nsa.ops.selected.triton.by_row import forward as forward_by_row
from nsa.ops.selected.triton.chunks import grid_of
from nsa.ops.selected.triton.forward_kernels import nsa_selected_forward, nsa_selected_sum
from nsa.ops.selected.triton.full_rows import FULL, rows_in_full
from nsa.ops.selected.triton.list_calls import sorts
from nsa.ops.selected.triton.roles import role_sizes, role_tiles
from nsa.ops.selected.triton.tile_sizes import FORWARD, FORWARD_ROLES, RoleTiles, Tiles, tiles_of
from nsa.settings import is_off


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    sel_block: int,
    q_start: int | Tensor,
    scale: float,
    full: int = 0,
    lists: Tensor | None = None,
    tiles: Tiles | RoleTiles | None = None,
    by_row: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """q [B, T, Q, D], k [B, S, G, D], v [B, S, G, DV], blocks [B, T, G, N] -> (o [B, T, Q, DV], lse
    to base 2 [B, T, Q] fp32).

    ``full``: a promise that queries at positions below it chose every block up to their own, and
    that q_start is 0. ``lists`` int32 [grid_of(...).room]: where the lists are left for `backward`,
    where there are any (`sorts`).
    """
    as_tiles = by_row is None and tiles is None and not is_off("lists")
    if as_tiles and dense_tiles.serves(q, v, blocks, sel_block, scale):
        return dense_tiles.forward(
            q, k, v, blocks, sel_block=sel_block, q_start=q_start, scale=scale
        )
    q, k, v, blocks = rows(q), rows(k), rows(v), blocks.contiguous()
    (B, T, HQ, D), (S, G, DV), N = q.shape, v.shape[1:], blocks.shape[3]
    H, J, L = HQ // G, -(-S // sel_block), sel_block
    o, lse = q.new_empty(B, T, HQ, DV), q.new_empty(B, T, HQ, dtype=torch.float32)
    q0, Q0 = starts(q_start)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], scale * LOG2E)
    tail = (padded(D), padded(DV), Q0 is not None, precision(q))
    if not sorts(B * T * G) if by_row is None else by_row:
        if by_row is None and decode.few_rows(B * T * G):
            decode.selected(
                q, k, v, blocks, into=(o, lse), sel_block=L, q_start=q_start, scale=scale
            )
            return o, lse
        forward_by_row(q, k, v, blocks, into=(o, lse), sel_block=L, q_start=q_start, scale=scale)
        return o, lse
    if full := rows_in_full(full, T):
        interval_forward.forward(
            q[:, :full],
            k[:, :full],
            v[:, :full],
            scale=scale,
            into=(o, lse),
            work=q.numel(),
            **FULL,
        )
    t = tiles or role_tiles(FORWARD_ROLES, q, k, v, L)
    t = t or tiles_of("selected_forward", FORWARD, q, DV)
    M, QS, TILE = t.entries(H, blocks.numel())
    kernel: Any = nsa_selected_forward
    sizes: tuple[Any, ...] = (padded(L), D, DV, QS, TILE, padded(TILE), M, *tail)
    if isinstance(t, RoleTiles):
        from nsa.ops.selected.triton import warp_roles  # Triton's Gluon, for it alone

        common, one_stride = role_sizes(t, q, k, v, L, (M, QS, TILE))
        kernel = warp_roles.nsa_selected_forward_roles
        sizes = (*common, t.groups, t.fetch, t.multiply, Q0 is not None, one_stride)
    step = grid_of(q, v, blocks, L).rows_per_chunk
    made = Lists.of(blocks, J, step, full=full, into=lists)
    part = q.new_empty(step * G * N * H, DV)
    lse_part = q.new_empty(step * G * N * H, dtype=torch.float32)
    for number, r0 in enumerate(range(0, B * T, step)):
        n = min(step, B * T - r0)
        e0, e1 = r0 * G * N, (r0 + n) * G * N
        launch(
            kernel,
            (cdiv(e1 - e0, TILE),),
            q,
            k,
            v,
            made.key_E,
            made.order_E,
            part,
            lse_part,
            Q0,
            e0,
            e1,
            number * (made.num_lists + 1),
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
            **t.options,
        )
        launch(
            nsa_selected_sum,
            (n * G,),
            part,
            lse_part,
            blocks,
            o,
            lse,
            r0,
            T,
            full,
            J,
            G,
            H,
            N,
            padded(N, 1),
            DV,
            padded(H, 1),
            padded(DV),
            num_warps=4 if H * DV > 512 else 1,
        )
    return o, lse
