"""Path `v2`: whole blocks gathered, all rows packed into varlen calls.

No Python over rows, no host sync.

B batch, T query tokens, S key tokens, G kv heads, H query heads per kv head, R = B * G * T rows, N
blocks a row, J blocks of all kv heads, L tokens a block, D head dim.

Forward and backward are an operator each, opaque to torch.compile: how rows are split into chunks
depends on the lengths, and one graph must serve all of them.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from nsa.ops.operator import Backward, Gradients, call, define_operator
from nsa.ops.positions import query_positions
from nsa.ops.selected import gathered_rows
from nsa.ops.selected.gathered_rows import WORKSPACE_BYTES

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor blocks, Tensor position"
_OPTIONS = "SymInt sel_block, float scale, str? fa2, SymInt workspace_bytes"


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
    """See ``nsa.ops.selected.AttendFn``. WORKSPACE_BYTES bounds what is packed at a time."""
    del num_full_rows
    position_BT = query_positions(q_start, q.shape[1], q.device)
    o: Tensor = call(
        "selected_v2", q, k, v, blocks, position_BT, sel_block, scale, fa2, WORKSPACE_BYTES
    )
    return o, None


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    position: Tensor,
    sel_block: int,
    scale: float,
    fa2: str | None,
    workspace_bytes: int,
) -> Tensor:
    G = k.shape[2]
    rows = _rows(k, blocks, position, sel_block)
    tensors = _by_head(q, G), _by_block(k, sel_block), _by_block(v, sel_block)
    o_RHD = gathered_rows.forward(*tensors, rows, scale=scale, fa2=fa2, limit_bytes=workspace_bytes)
    return (
        o_RHD.unflatten(0, (q.shape[0], G, q.shape[1])).transpose(1, 2).flatten(2, 3).contiguous()
    )


def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    position: Tensor,
    sel_block: int,
    scale: float,
    fa2: str | None,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, G = blocks.shape[:3]
    rows = _rows(k, blocks, position, sel_block)
    tensors = _by_head(do, G), _by_head(q, G), _by_block(k, sel_block), _by_block(v, sel_block)
    dq_RHD, dk_JLD, dv_JLD = gathered_rows.backward(
        *tensors, rows, scale=scale, fa2=fa2, limit_bytes=workspace_bytes
    )
    dq = dq_RHD.unflatten(0, (B, G, T)).transpose(1, 2).flatten(2, 3).contiguous()
    dk, dv = (
        x.unflatten(0, (B, G, -1)).flatten(2, 3)[:, :, : k.shape[1]].transpose(1, 2).contiguous()
        for x in (dk_JLD, dv_JLD)
    )
    return dq, dk, dv


def _rows(k: Tensor, blocks: Tensor, position_BT: Tensor, sel_block: int) -> gathered_rows.Rows:
    """Kv-head major, so that a chunk of rows touches few blocks."""
    B, T, G, _ = blocks.shape
    S = k.shape[1]
    limit_BT1 = (position_BT + 1).clamp(max=S)[..., None]
    limit_R = limit_BT1.expand(B, T, G).transpose(1, 2).reshape(-1)
    return gathered_rows.Rows(
        blocks.transpose(1, 2).flatten(0, 2).long(), limit_R, T, -(-S // sel_block)
    )


def _by_head(x_BTQD: Tensor, num_kv_heads: int) -> Tensor:
    """[B, T, G * H, D] -> [R, H, D]."""
    return x_BTQD.unflatten(2, (num_kv_heads, -1)).transpose(1, 2).flatten(0, 2)


def _by_block(x_BSGD: Tensor, sel_block: int) -> Tensor:
    """[B, S, G, D] -> [J, L, D], the last block of each kv head filled up with zeros."""
    filled = F.pad(x_BSGD, (0, 0, 0, 0, 0, -x_BSGD.shape[1] % sel_block))
    return filled.transpose(1, 2).unflatten(2, (-1, sel_block)).flatten(0, 2)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _fake_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _gradients(ctx: Any, do: Tensor) -> Gradients:
    gradients = call("selected_v2_backward", do, *ctx.saved_tensors, *ctx.options)
    return (*gradients, None, None, None, None, None, None)


define_operator(
    "selected_v2",
    f"({_INPUTS}, {_OPTIONS}) -> Tensor",
    _forward,
    _fake_forward,
    Backward(
        f"(Tensor do, {_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
        _backward,
        _fake_backward,
        _save,
        _gradients,
    ),
    only_launches=False,
)
