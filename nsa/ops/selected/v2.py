"""Path `v2`: whole blocks gathered, all rows packed into varlen calls. No Python over rows, no host sync.

R rows (one query token of one kv head each), H query heads per kv head, N blocks a row, J blocks of a kv head, D head dim.

A row's blocks lie one after another in a slot of N * l' tokens. Blocks ascend, so the tokens that the row may see are a
prefix of its slot; the rest of the slot is a sequence without queries. (Packing token by token, as the founding reports
did, gathers 128-byte rows: 20 ms a layer at 1 x 8,192 on an H100, against 8 KB rows here.) The packed copy is O(S n l'),
so rows go in chunks within a workspace, only indices are kept, and the backward gathers again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.ops import flash, sdpa
from nsa.ops.positions import query_positions

WORKSPACE_BYTES = 1 << 30  # packed K and V of one chunk
MAX_SEQUENCES = 65_535  # FA-2 puts sequences on gridDim.y


def attend(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, *, sel_block: int, q_start: int | Tensor, scale: float, fa2: str | None
) -> Tensor:
    """See ``nsa.ops.selected.AttendFn``."""
    B, T, G, _ = blocks.shape
    S = k.shape[1]
    limit_BT1 = (query_positions(q_start, T, q.device) + 1).clamp(max=S)[..., None]
    # Rows are kv-head major, so that a chunk of them touches few blocks.
    blocks_RN = blocks.transpose(1, 2).flatten(0, 2).long()
    limit_R = limit_BT1.expand(B, T, G).transpose(1, 2).reshape(-1)
    q_RHD = q.unflatten(2, (G, -1)).transpose(1, 2).flatten(0, 2)
    k_JLD, v_JLD = _by_block(k, sel_block), _by_block(v, sel_block)
    o_RHD = _Packed.apply(q_RHD, k_JLD, v_JLD, blocks_RN, limit_R, T, scale, fa2)
    return o_RHD.unflatten(0, (B, G, T)).transpose(1, 2).flatten(2, 3)


def _by_block(x_BSGD: Tensor, sel_block: int) -> Tensor:
    """[B, S, G, D] -> [B * G * J, l', D], the last block filled up with zeros."""
    filled = F.pad(x_BSGD, (0, 0, 0, 0, 0, -x_BSGD.shape[1] % sel_block))
    return filled.transpose(1, 2).unflatten(2, (-1, sel_block)).flatten(0, 2)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of one packed call: ``index`` [R, N] into ``k_JLD[columns]``, ``length_R`` visible tokens of each slot."""

    rows: slice
    columns: slice
    index_RN: Tensor
    length_R: Tensor


def _chunks(blocks_RN: Tensor, limit_R: Tensor, rows_per_head: int, num_blocks: int, sel_block: int, size: int) -> list[_Chunk]:
    R = blocks_RN.shape[0]
    return [_chunk(blocks_RN, limit_R, rows_per_head, num_blocks, sel_block, slice(lo, min(lo + size, R))) for lo in range(0, R, size)]


def _chunk(blocks_RN: Tensor, limit_R: Tensor, rows_per_head: int, num_blocks: int, sel_block: int, rows: slice) -> _Chunk:
    first_head, last_head = rows.start // rows_per_head, (rows.stop - 1) // rows_per_head
    blocks, limit = blocks_RN[rows], limit_R[rows]
    # A padded or future block holds no visible token, and may be any block.
    length_R = (limit[:, None] - blocks * sel_block).clamp(0, sel_block).masked_fill(blocks < 0, 0).sum(1)
    head_R = torch.arange(rows.start, rows.stop, device=blocks.device) // rows_per_head - first_head
    index_RN = head_R[:, None] * num_blocks + blocks.clamp(0, num_blocks - 1)
    return _Chunk(rows, slice(first_head * num_blocks, (last_head + 1) * num_blocks), index_RN, length_R)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks_RN: Tensor, limit_R: Tensor, rows_per_head: int, scale: float, fa2: str | None
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, blocks_RN, limit_R)
        ctx.rows_per_head, ctx.scale, ctx.fa2 = rows_per_head, scale, fa2
        o = q.new_empty(*q.shape[:2], v.shape[-1])
        for chunk in _plan(k, v, blocks_RN, limit_R, rows_per_head):
            o[chunk.rows] = _attend_chunk(q[chunk.rows], _gather(k, chunk), _gather(v, chunk), chunk, scale, fa2)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, blocks_RN, limit_R = ctx.saved_tensors
        wide = torch.promote_types(k.dtype, torch.float32)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for chunk in _plan(k, v, blocks_RN, limit_R, ctx.rows_per_head):
            inputs = [x.detach().requires_grad_() for x in (q[chunk.rows], _gather(k, chunk), _gather(v, chunk))]
            with torch.enable_grad():
                o = _attend_chunk(inputs[0], inputs[1], inputs[2], chunk, ctx.scale, ctx.fa2)
            dq[chunk.rows], *d_packed = torch.autograd.grad(o, inputs, do[chunk.rows])
            for total, part in zip((dk, dv), d_packed, strict=True):
                total[chunk.columns] += _sum_by_block(part, chunk, total[chunk.columns].shape[0])
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None


def _plan(k: Tensor, v: Tensor, blocks_RN: Tensor, limit_R: Tensor, rows_per_head: int) -> list[_Chunk]:
    num_blocks = k.shape[0] // (blocks_RN.shape[0] // rows_per_head)
    row_bytes = blocks_RN.shape[1] * k.shape[1] * (k.shape[2] * k.element_size() + v.shape[2] * v.element_size())
    # Each row is two sequences: its visible tokens, and the rest of its slot.
    size = max(1, min(MAX_SEQUENCES // 2, WORKSPACE_BYTES // row_bytes))
    return _chunks(blocks_RN, limit_R, rows_per_head, num_blocks, k.shape[1], size)


def _gather(x_JLD: Tensor, chunk: _Chunk) -> Tensor:
    """The blocks of a chunk's rows, one slot after another: [R * N, l', D]."""
    return x_JLD[chunk.columns].index_select(0, chunk.index_RN.flatten())


def _attend_chunk(q_RHD: Tensor, k_PLD: Tensor, v_PLD: Tensor, chunk: _Chunk, scale: float, fa2: str | None) -> Tensor:
    """One packed call; k and v [R * N, l', D]. A row that sees nothing is exactly 0."""
    R, H, _ = q_RHD.shape
    slot = chunk.index_RN.shape[1] * k_PLD.shape[1]
    empty_R11 = (chunk.length_R == 0)[:, None, None]
    if fa2 is None:
        visible_RS = torch.arange(slot, device=q_RHD.device) < chunk.length_R[:, None]
        # An empty row attends to its whole slot, so that its softmax is finite, and its output is then dropped.
        o = sdpa.rows(q_RHD, k_PLD.view(R, slot, -1), v_PLD.view(R, slot, -1), visible_RS | empty_R11[..., 0], scale=scale)
        return o.masked_fill(empty_R11, 0.0)
    cu_q, cu_k = _boundaries(chunk.length_R, H, slot)
    # A row's heads share its keys: they go in as H queries of one head, so K is read once and dK needs no sum over heads.
    q, k, v = (x.reshape(-1, 1, x.shape[-1]) for x in (q_RHD, k_PLD, v_PLD))
    o = flash.varlen(fa2, q, k, v, cu_q, cu_k, H, slot, scale=scale)
    return o.view(R, H, -1).masked_fill(empty_R11, 0.0)


def _boundaries(length_R: Tensor, heads: int, slot: int) -> tuple[Tensor, Tensor]:
    """cu_seqlens int32 [2 R + 1] of queries and keys: (row's H queries, its prefix), (no query, rest of the slot), ..."""
    R = length_R.shape[0]
    row = torch.arange(R + 1, device=length_R.device, dtype=torch.int32)
    cu_q = torch.stack([row * heads, (row + 1) * heads], 1).flatten()[: 2 * R + 1]
    cu_k = torch.stack([row * slot, row * slot + F.pad(length_R, (0, 1))], 1).flatten()[: 2 * R + 1]
    return cu_q, cu_k.int()


def _sum_by_block(part_PLD: Tensor, chunk: _Chunk, num_columns: int) -> Tensor:
    """Sum the gradients of a chunk's slots over the rows that chose each block: a product with a 0/1 matrix.

    Repeatable, accumulated in fp32 inside the GEMM; fp32 atomics took 28 ms a layer at 1 x 8,192 on an H100.
    """
    column = torch.arange(num_columns, device=part_PLD.device)
    chosen_CP = (column[:, None] == chunk.index_RN.flatten()).to(part_PLD.dtype)
    return (chosen_CP @ part_PLD.flatten(1)).view(num_columns, *part_PLD.shape[1:])
