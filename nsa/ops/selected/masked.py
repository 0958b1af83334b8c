"""Path `masked`: one SDPA over a boolean mask.

The first implementation's `grouped_selection_attention_masked`.

B batch, T query tokens, S key tokens, G kv heads, J selection blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops import sdpa
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
    mask_BGTS = _token_mask(blocks, k.shape[1], sel_block, position_BT)
    empty_BGT1 = ~mask_BGTS.any(-1, keepdim=True)
    # An empty row attends to every key, so that its softmax is finite, and its output is then
    # dropped.
    o = sdpa.grouped(q, k, v, mask_BGTS | empty_BGT1, scale=scale)
    empty_BTG = empty_BGT1[..., 0].transpose(1, 2)
    o_BTGHD = o.unflatten(2, (k.shape[2], -1)).masked_fill(empty_BTG[..., None, None], 0.0)
    return o_BTGHD.flatten(2, 3)


def _token_mask(blocks_BTGN: Tensor, num_keys: int, sel_block: int, position_BT: Tensor) -> Tensor:
    """Boolean [B, G, T, S]: the key's block was chosen and the key is not in the future."""
    B, T, G, _ = blocks_BTGN.shape
    J = -(-num_keys // sel_block)
    index = blocks_BTGN.transpose(1, 2).long()
    if torch.compiler.is_compiling() and index.device.type == "cpu":
        # No token is divided by l' here. Inductor (torch 2.13, CPU) splits the loop over S tokens
        # where one is into S // l' times l': the mask of the last S % l' keys was never written.
        token_S = torch.arange(num_keys, device=index.device)
        begin_BGTN1 = (index * sel_block)[..., None]
        inside_BGTNS = (token_S >= begin_BGTN1) & (token_S < begin_BGTN1 + sel_block)
        return inside_BGTNS.any(3) & (token_S <= position_BT[..., None])[:, None]
    # slot J takes the padding
    chosen_BGTJ = index.new_zeros(B, G, T, J + 1, dtype=torch.bool)
    chosen_BGTJ.scatter_(3, torch.where(index < 0, J, index.clamp(max=J)), True)
    # Slot J is spread out as well, so that the cut always drops something: were it nothing where l'
    # divides S, torch.compile would make such lengths a graph of their own. (A gather by token
    # needs no cut, but takes 4 times as long on a CPU.)
    mask_BGTL = chosen_BGTJ[..., None].expand(-1, -1, -1, -1, sel_block).flatten(3)
    past_BTL = (
        torch.arange(mask_BGTL.shape[-1], device=blocks_BTGN.device) <= position_BT[..., None]
    )
    return (mask_BGTL & past_BTL[:, None])[..., :num_keys]


define_formula(
    "selected_masked",
    "(Tensor q, Tensor k, Tensor v, Tensor blocks, Tensor? q_starts, SymInt q_start, SymInt"
    " sel_block, float scale) -> Tensor",
    _attend,
)
