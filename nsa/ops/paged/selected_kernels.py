"""The selected branch of a step over pages, where a chosen block is a page.

B batch, T queries, Q query heads, G kv heads, H query heads per kv head, N slots. Each split leaves
a normalised part and its lse (fp32, to base 2); the splits depend on shapes alone, and are summed
in their order: no atomics, bitwise repeatable.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.decode import kernels as contiguous
from nsa.ops.decode.kernels import leave, logits, more
from nsa.ops.kernels.common import LOG2E, cdiv, load_rows, padded, precision
from nsa.ops.kernels.launch import launch
from nsa.ops.paged.pages import KV, LayerPages, Pages


@triton.jit
def _page_of_slot(CHOSEN, TABLE, at, slots, J):
    """(the block in slot ``at`` of a row, its page); -1 where there is none."""
    block = tl.load(CHOSEN + at, mask=at < slots, other=-1)
    page = tl.load(TABLE + block, mask=(block >= 0) & (block < J), other=-1)
    return block, page


@triton.jit
def nsa_selected_forward_pages(
    Q,
    K,
    V,
    TABLE,
    BLOCKS,
    O,
    LSE,
    START,
    LEN,
    KS,
    VS,
    T,
    J,
    sq_b,
    sq_t,
    sq_h,
    st_b,
    scale_log2,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    PER: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    FP8: tl.constexpr,
    PREC: tl.constexpr,
):
    """One (row, kv head) over PER of its slots; a chosen block is a page."""
    at_row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = at_row // G
    g = at_row % G
    b = row // T
    t = row - b * T
    seen = tl.minimum(t.to(tl.int32) + tl.load(START + b).to(tl.int32) + 1, tl.load(LEN + b))
    h = tl.arange(0, M)
    i = tl.arange(0, L)
    q = load_rows(Q + b * sq_b + t * sq_t, (g * H + h) * sq_h, h < H, D, BD)
    if FP8:
        scale_log2 *= tl.load(KS + g)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BDV], tl.float32)
    CHOSEN, TABLE = BLOCKS + at_row * N + split * PER, TABLE + b * st_b
    slots = tl.minimum(N - split * PER, PER)
    block, page = _page_of_slot(CHOSEN, TABLE, 0, slots, J)
    for at in range(PER):
        kept = (page >= 0) & (block * L + i < seen)
        token = (page.to(tl.int64) * L + i) * G + g
        # a slot ahead, so that the next block's keys do not wait for the table
        block, page = _page_of_slot(CHOSEN, TABLE, at + 1, slots, J)
        k = load_rows(K, token * D, kept, D, BD).to(q.dtype)
        v = load_rows(V, token * DV, kept, DV, BDV).to(q.dtype)
        m, l, acc = more(logits(q, k, kept[None, :], scale_log2, PREC), v, m, l, acc, PREC)
    if FP8:
        acc *= tl.load(VS + g)
    leave(
        O,
        LSE,
        (split.to(tl.int64) * tl.num_programs(0) + at_row) * H + h,
        h < H,
        m,
        l,
        acc,
        DV,
        BDV,
    )


def selected(q: Tensor, blocks: Tensor, pages: LayerPages, *, scale: float) -> KV:
    """(o, lse) as `interval`, over chosen ``blocks`` int32 [B, T, G, N], contiguous."""
    group = pages.sel
    (B, T, HQ, _), (L, G, DV), N = q.shape, group.v.shape[1:], blocks.shape[3]
    per_split = contiguous.selected_per_split(B * T * G, N, group.k, group.v, L)
    splits = cdiv(N, per_split)
    into = q.new_empty(B, T, HQ, DV), q.new_empty(B, T, HQ, dtype=torch.float32)
    part = contiguous._parts(*into, splits)
    selected_parts(
        q,
        group,
        blocks,
        part=part,
        per_split=per_split,
        start=pages.start_B,
        seq_lens=pages.seq_lens,
        num_pages=-(-pages.max_tokens // L),
        scale=scale,
    )
    contiguous.sum_selected(part, into, splits)
    return into


def selected_parts(
    q: Tensor,
    group: Pages,
    blocks: Tensor,
    *,
    part: tuple[Tensor, Tensor],
    per_split: int,
    start: Tensor,
    seq_lens: Tensor,
    num_pages: int,
    scale: float,
) -> None:
    """Each split's o and lse of `selected` into ``part``, [P, B, T, Q, DV] and [P, B, T, Q], of
    rows of at most ``num_pages``.
    """
    (B, T, HQ, D), (L, G, DV), N = q.shape, group.v.shape[1:], blocks.shape[3]
    H, splits = HQ // G, cdiv(N, per_split)
    scales = (None, None) if group.scales is None else group.scales
    num_warps, num_stages = contiguous.selected_tiles(H, group.k, group.v, L)
    launch(
        nsa_selected_forward_pages,
        (B * T * G, splits),
        q,
        group.k,
        group.v,
        group.table,
        blocks,
        *part,
        start,
        seq_lens,
        *scales,
        T,
        num_pages,
        *q.stride()[:3],
        group.table.stride(0),
        scale * LOG2E,
        G,
        H,
        N,
        per_split,
        L,
        D,
        DV,
        padded(H),
        padded(D),
        padded(DV),
        group.scales is not None,
        precision(q),
        num_warps=num_warps,
        num_stages=num_stages,
    )
