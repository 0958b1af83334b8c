"""Path `masked`: one SDPA over a boolean mask.

The first implementation's `grouped_selection_attention_masked`.

B batch, T query tokens, S key tokens, G kv heads, J selection blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops import sdpa
from nsa.ops.masks import token_mask
from nsa.ops.operator import define_formula, int_and_tensor, is_transformed
from nsa.ops.positions import query_positions


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    sel_block: int,
    q_start: int | Tensor,
    scale: float,
    fa2: str | None,
    num_full_rows: int = 0,
) -> tuple[Tensor, None]:
    """See ``nsa.ops.selected.AttendFn``. Memory is O(B * G * T * S)."""
    del fa2, num_full_rows
    at, q_starts = int_and_tensor(q_start)
    run = _attend if is_transformed() else torch.ops.nsa.selected_masked
    o: Tensor = run(q, k, v, blocks, q_starts, at, sel_block, scale)
    return o, None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    q_starts: Tensor | None,
    q_start: int,
    sel_block: int,
    scale: float,
) -> Tensor:
    position_BT = query_positions(q_start if q_starts is None else q_starts, q.shape[1], q.device)
    mask_BGTS = token_mask(blocks, k.shape[1], sel_block, position_BT)
    empty_BGT1 = ~mask_BGTS.any(-1, keepdim=True)
    # An empty row attends to every key, so that its softmax is finite, and its output is then
    # dropped.
    o = sdpa.grouped(q, k, v, mask_BGTS | empty_BGT1, scale=scale)
    empty_BTG = empty_BGT1[..., 0].transpose(1, 2)
    o_BTGHD = o.unflatten(2, (k.shape[2], -1)).masked_fill(empty_BTG[..., None, None], 0.0)
    return o_BTGHD.flatten(2, 3)


define_formula(
    "selected_masked",
    "(Tensor q, Tensor k, Tensor v, Tensor blocks, Tensor? q_starts, SymInt q_start, SymInt"
    " sel_block, float scale) -> Tensor",
    _attend,
)
