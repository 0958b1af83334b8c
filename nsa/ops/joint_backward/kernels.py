"""The gradient of the gated sum of three branches in one go: gates folded into the lse, one dQ.

B batch, T queries, Q query heads, G kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nsa.ops.interval import merged_backward_kernels as merged
from nsa.ops.interval import parts
from nsa.ops.selected.triton import backward as selected_backward

KV = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes in tokens, as NSAConfig has them; ``q_start`` and ``first`` as in
    `nsa.ops.interval.attend`; ``win_begin``: the position of the first key of the window.
    """

    block: int
    stride: int
    sel_block: int
    window: int
    scale: float
    q_start: int | Tensor
    first: Tensor | None
    num_full_rows: int  # as `full` of `nsa.ops.selected.triton.forward.forward`
    win_begin: int = 0


def backward(
    do: Tensor,
    q: Tensor,
    cmp: KV,
    sel: KV,
    win: KV,
    blocks: Tensor,
    delta: Tensor,
    lse_gated: Tensor,
    geometry: Geometry,
    lists: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of q, and of k and v of cmp, sel and win, each in its dtype. The selected branch's
    dQ is added to that of the others.

    ``do`` is contiguous, ``delta`` and ``lse_gated`` fp32 [3, B, T, Q] as
    `nsa.ops.kernels.products.gate_products` has them: no gate may be below 0. ``lists`` as of
    `nsa.ops.selected.triton.backward.backward`.
    """
    at = geometry
    where: dict[str, Any] = {
        "block": at.block,
        "stride": at.stride,
        "window": at.window,
        "win_begin": at.win_begin,
        "q_start": at.q_start,
        "first": at.first,
        "scale": at.scale,
    }
    of_two = (do, q, cmp, win, (lse_gated[0], lse_gated[2]), (delta[0], delta[2]))
    dq, sums = merged.backward_q_of_two(*of_two, **where), parts.Sums()
    d_cmp, d_win = merged.backward_kv_of_two(*of_two, sums=sums, **where)
    _, *d_sel = selected_backward.backward(
        do,
        q,
        *sel,
        blocks,
        lse_gated[1],
        delta[1],
        dq=dq,
        sel_block=at.sel_block,
        q_start=at.q_start,
        scale=at.scale,
        full=at.num_full_rows,
        lists=lists,
        sums=sums,
    )
    return dq, *d_cmp, *d_sel, *d_win
