"""Rows that each read whole blocks, gathered into varlen calls within a workspace.

The arithmetic of path `v2`.

R rows (one query token of one kv head each), H query heads per kv head, N blocks a row, J blocks of
all kv heads, L tokens a block, P = R * N gathered blocks, D head dim.

A row's blocks lie one after another in a slot of N * L tokens. Blocks ascend, so the tokens that
the row may see are a prefix of its slot; the rest of the slot is a sequence without queries.
(Packing token by token, as the first implementation did, gathers 128-byte rows: 20 ms a layer at
1 x 8,192 on an H100, against 8 KB rows here.) The packed copy is O(S n l'), so rows go in chunks
within a workspace, and the backward gathers again. Nothing here is traced by a compiler or recorded
by autograd, except inside `backward`, which differentiates one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.ops import flash, sdpa

WORKSPACE_BYTES = 1 << 30  # packed K and V of one chunk
MAX_SEQUENCES = 65_535  # FA-2 puts sequences on gridDim.y


@dataclass(frozen=True, slots=True)
class Rows:
    """What R rows read, kv-head major: ``blocks_RN`` int64, -1 where absent; tokens from
    ``limit_R`` int64 on do not exist.
    """

    blocks_RN: Tensor
    limit_R: Tensor
    rows_per_head: int
    blocks_per_head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherShape:
    """What each row of a call gathers: ``num_selected`` blocks of ``sel_block`` tokens of its kv
    head's K and V.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    num_selected: int
    sel_block: int
    dtype: torch.dtype

    @property
    def block_numel(self) -> int:
        """Numbers of K and V of one block."""
        return self.sel_block * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of one packed call: ``index_RN`` into ``k_JLD[columns]``, ``length_R`` visible tokens of
    each slot.
    """

    rows: slice
    columns: slice
    index_RN: Tensor
    length_R: Tensor


def forward(
    q_RHD: Tensor,
    k_JLD: Tensor,
    v_JLD: Tensor,
    rows: Rows,
    *,
    scale: float,
    fa2: str | None,
    limit_bytes: int = WORKSPACE_BYTES,
) -> Tensor:
    """Softmax over each row's visible tokens: o [R, H, DV] in q's dtype; a row that sees nothing is
    exactly 0.

    ``fa2`` names the FA-2 provider, None for SDPA; ``limit_bytes`` bounds the packed K and V of one
    chunk (one row at least).
    """
    o = q_RHD.new_empty(*q_RHD.shape[:2], v_JLD.shape[-1])
    for chunk in _chunks(k_JLD, v_JLD, rows, limit_bytes):
        o[chunk.rows] = _attend_chunk(
            q_RHD[chunk.rows], _gather(k_JLD, chunk), _gather(v_JLD, chunk), chunk, scale, fa2
        )
    return o


def backward(
    do_RHD: Tensor,
    q_RHD: Tensor,
    k_JLD: Tensor,
    v_JLD: Tensor,
    rows: Rows,
    *,
    scale: float,
    fa2: str | None,
    limit_bytes: int = WORKSPACE_BYTES,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `forward` in the dtypes of q, k and v; dk and dv are added up in fp32 or
    wider.
    """
    wide = torch.promote_types(k_JLD.dtype, torch.float32)
    dq = torch.empty_like(q_RHD)
    dk, dv = torch.zeros_like(k_JLD, dtype=wide), torch.zeros_like(v_JLD, dtype=wide)
    for chunk in _chunks(k_JLD, v_JLD, rows, limit_bytes):
        packed = _gather(k_JLD, chunk), _gather(v_JLD, chunk)
        dq[chunk.rows], *parts = _differentiate(
            do_RHD[chunk.rows], q_RHD[chunk.rows], *packed, chunk, scale, fa2
        )
        del packed  # else they would be held while the next chunk's are gathered
        for total, part in zip((dk, dv), parts, strict=True):
            total[chunk.columns] += _sum_by_block(part, chunk, total[chunk.columns].shape[0])
        del parts, part
    return dq, dk.to(k_JLD.dtype), dv.to(v_JLD.dtype)


def workspace_bytes(
    batch: int,
    tokens: int,
    shape: GatherShape,
    *,
    q_tokens: int | None = None,
    backward: bool = True,
    limit_bytes: int = WORKSPACE_BYTES,
) -> int:
    """Bytes of the largest chunk of a call over ``tokens`` keys by ``q_tokens`` queries (default:
    as many).

    Without ``backward`` that is the packed K and V alone. The backward adds their gradients, as
    large; the boolean matrix [columns, P] of `_sum_by_block` and its copy in the dtype of K; and dK
    and dV of all tokens in fp32 or wider. What the attention kernel itself keeps is left out.
    """
    rows_per_head = tokens if q_tokens is None else q_tokens
    blocks_per_head, size = -(-tokens // shape.sel_block), shape.dtype.itemsize
    heads, block_numel = batch * shape.num_kv_heads, shape.block_numel
    row_bytes = shape.num_selected * block_numel * size
    R = heads * rows_per_head
    step = _rows_per_chunk(row_bytes, limit_bytes)
    gathered = min(step, R) * row_bytes
    if not backward:
        return gathered
    spans = (
        (rows.stop - rows.start, _columns(rows, rows_per_head, blocks_per_head))
        for rows in _slices(R, step)
    )
    matrix = max(
        (
            count * shape.num_selected * (columns.stop - columns.start) * (1 + size)
            for count, columns in spans
        ),
        default=0,
    )
    wide = torch.promote_types(shape.dtype, torch.float32).itemsize
    return 2 * gathered + matrix + heads * blocks_per_head * block_numel * wide


def reserve(num_bytes: int, device: torch.device) -> None:
    """Let PyTorch's caching allocator hold ``num_bytes`` on ``device`` before the first step, for
    this thread's current stream.

    Nothing is kept here, so no two modules can share a live buffer. A CPU has no caching allocator:
    there it does nothing.
    """
    if device.type != "cpu":
        torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _rows_per_chunk(row_bytes: int, limit_bytes: int) -> int:
    # Each row is two sequences: its visible tokens, and the rest of its slot.
    return max(1, min(MAX_SEQUENCES // 2, limit_bytes // max(1, row_bytes)))


def _slices(num_rows: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _columns(rows: slice, rows_per_head: int, blocks_per_head: int) -> slice:
    """Blocks of the kv heads that the rows belong to."""
    return slice(
        rows.start // rows_per_head * blocks_per_head,
        ((rows.stop - 1) // rows_per_head + 1) * blocks_per_head,
    )


def _chunks(k_JLD: Tensor, v_JLD: Tensor, rows: Rows, limit_bytes: int) -> Iterator[_Chunk]:
    R, N = rows.blocks_RN.shape
    row_bytes = (
        N
        * k_JLD.shape[1]
        * (k_JLD.shape[2] * k_JLD.element_size() + v_JLD.shape[2] * v_JLD.element_size())
    )
    return (
        _chunk(rows, part, k_JLD.shape[1])
        for part in _slices(R, _rows_per_chunk(row_bytes, limit_bytes))
    )


def _chunk(rows: Rows, part: slice, sel_block: int) -> _Chunk:
    columns = _columns(part, rows.rows_per_head, rows.blocks_per_head)
    blocks, limit = rows.blocks_RN[part], rows.limit_R[part]
    # A padded or future block holds no visible token, and may be any block.
    length_R = (
        (limit[:, None] - blocks * sel_block).clamp(0, sel_block).masked_fill(blocks < 0, 0).sum(1)
    )
    head_R = (
        torch.arange(part.start, part.stop, device=blocks.device) // rows.rows_per_head
        - part.start // rows.rows_per_head
    )
    index_RN = head_R[:, None] * rows.blocks_per_head + blocks.clamp(0, rows.blocks_per_head - 1)
    return _Chunk(part, columns, index_RN, length_R)


def _gather(x_JLD: Tensor, chunk: _Chunk) -> Tensor:
    """The blocks of a chunk's rows, one slot after another: [P, L, D]."""
    return x_JLD[chunk.columns].index_select(0, chunk.index_RN.flatten())


def _differentiate(
    do_RHD: Tensor,
    q_RHD: Tensor,
    k_PLD: Tensor,
    v_PLD: Tensor,
    chunk: _Chunk,
    scale: float,
    fa2: str | None,
) -> tuple[Tensor, ...]:
    """Gradients of one packed call, by running it again."""
    # Unlike enable_grad this also records where an operator's body is cut off from autograd, as
    # under a dispatch mode.
    with torch.inference_mode(False):
        inputs = [x.detach().requires_grad_() for x in (q_RHD, k_PLD, v_PLD)]
        o = _attend_chunk(inputs[0], inputs[1], inputs[2], chunk, scale, fa2)
        return torch.autograd.grad(o, inputs, do_RHD)


def _attend_chunk(
    q_RHD: Tensor, k_PLD: Tensor, v_PLD: Tensor, chunk: _Chunk, scale: float, fa2: str | None
) -> Tensor:
    """One packed call; k and v [P, L, D]. A row that sees nothing is exactly 0."""
    R, H, _ = q_RHD.shape
    slot = chunk.index_RN.shape[1] * k_PLD.shape[1]
    empty_R11 = (chunk.length_R == 0)[:, None, None]
    if fa2 is None:
        visible_RS = torch.arange(slot, device=q_RHD.device) < chunk.length_R[:, None]
        # An empty row attends to its whole slot, so that its softmax is finite, and its output is
        # then dropped.
        o = sdpa.rows(
            q_RHD,
            k_PLD.view(R, slot, -1),
            v_PLD.view(R, slot, -1),
            visible_RS | empty_R11[..., 0],
            scale=scale,
        )
        return o.masked_fill(empty_R11, 0.0)
    cu_q, cu_k = _boundaries(chunk.length_R, H, slot)
    # A row's heads share its keys: they go in as H queries of one head, so K is read once and dK
    # needs no sum over heads.
    q, k, v = (x.reshape(-1, 1, x.shape[-1]) for x in (q_RHD, k_PLD, v_PLD))
    o = flash.varlen(fa2, q, k, v, cu_q, cu_k, H, slot, scale=scale)
    return o.view(R, H, -1).masked_fill(empty_R11, 0.0)


def _boundaries(length_R: Tensor, heads: int, slot: int) -> tuple[Tensor, Tensor]:
    """cu_seqlens int32 [2 R + 1] of queries and keys: (row's H queries, its prefix), (no query,
    rest of the slot), ...
    """
    R = length_R.shape[0]
    row = torch.arange(R + 1, device=length_R.device, dtype=torch.int32)
    cu_q = torch.stack([row * heads, (row + 1) * heads], 1).flatten()[: 2 * R + 1]
    cu_k = torch.stack([row * slot, row * slot + F.pad(length_R, (0, 1))], 1).flatten()[: 2 * R + 1]
    return cu_q, cu_k.int()


def _sum_by_block(part_PLD: Tensor, chunk: _Chunk, num_columns: int) -> Tensor:
    """Sum the gradients of a chunk's slots over the rows that chose each block: a product with a
    0/1 matrix.

    Repeatable, accumulated in fp32 inside the GEMM; fp32 atomics took 28 ms a layer at 1 x 8,192 on
    an H100.
    """
    column = torch.arange(num_columns, device=part_PLD.device)
    chosen_CP = (column[:, None] == chunk.index_RN.flatten()).to(part_PLD.dtype)
    return (chosen_CP @ part_PLD.flatten(1)).view(num_columns, *part_PLD.shape[1:])
