"""The operator of ``nsa.ops.scores.kernels``: block scores and the best blocks, from what the
compressed branch left. No gradient.

B batch, T queries, C compressed blocks, Q query heads, G kv heads, D head dim, N slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops.operator import call, define_operator, int_and_tensor

_SCHEMA = (
    "(Tensor q, Tensor k_cmp, Tensor lse, Tensor? q_starts, Tensor? first, SymInt q_start, SymInt"
    " kv_len, SymInt block, SymInt stride, SymInt sel_block, SymInt num_selected, SymInt"
    " num_initial, SymInt num_local, float scale) -> Tensor"
)


def choose(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    *,
    q_start: int | Tensor,
    first: Tensor | None,
    kv_len: int,
    block: int,
    stride: int,
    sel_block: int,
    num_selected: int,
    num_initial: int,
    num_local: int,
    scale: float,
) -> Tensor:
    """q [B, T, Q, D], k_cmp [B, C, G, D], lse to base 2 [B, T, Q] -> blocks int32 [B, T, G, N], as
    ``nsa.selection.choose``.
    """
    at, q_starts = int_and_tensor(q_start)
    geometry = (at, kv_len, block, stride, sel_block, num_selected, num_initial, num_local, scale)
    blocks: Tensor = call("choose", q.detach(), k_cmp.detach(), lse, q_starts, first, *geometry)
    return blocks


def _choose(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    q_starts: Tensor | None,
    first: Tensor | None,
    q_start: int,
    kv_len: int,
    block: int,
    stride: int,
    sel_block: int,
    num_selected: int,
    num_initial: int,
    num_local: int,
    scale: float,
) -> Tensor:
    from nsa.ops.scores import kernels

    return kernels.choose(
        q,
        k_cmp,
        lse,
        block=block,
        stride=stride,
        sel_block=sel_block,
        num_selected=num_selected,
        num_initial=num_initial,
        num_local=num_local,
        kv_len=kv_len,
        q_start=q_start if q_starts is None else q_starts,
        first=first,
        scale=scale,
    )


def _fake(q: Tensor, k_cmp: Tensor, *rest: object) -> Tensor:
    num_selected = rest[8]
    assert isinstance(num_selected, int | torch.SymInt)
    return q.new_empty(*q.shape[:2], k_cmp.shape[2], num_selected, dtype=torch.int32)


define_operator("choose", _SCHEMA, _choose, _fake)
