"""Attention over chosen blocks, query-outer: for few rows, where sorting would cost more than it
saves. No parts, no chunks.

B batch, T queries, S keys, Q query heads, G kv heads, H query heads per kv head, N slots, J blocks
a kv head, L tokens a block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import LOG2E, load_rows, padded, precision, starts, width_class
from nsa.ops.kernels.launch import launch
from nsa.ops.kernels.tiles import smaller

WARPS, STAGES = 1, 2


@triton.jit
def nsa_selected_forward_by_row(
    Q,
    K,
    V,
    BLOCKS,
    O,
    LSE,
    Q0,
    T,
    S,
    q0,
    J,
    sq_b,
    sq_t,
    sq_h,
    sk_b,
    sk_s,
    sk_g,
    sv_b,
    sv_s,
    sv_g,
    scale_log2,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    RAGGED: tl.constexpr,
    PREC: tl.constexpr,
):
    """One (row, kv head) a program over its N blocks."""
    at_row = tl.program_id(0).to(tl.int64)
    row = (at_row // G).to(tl.int32)
    g = at_row % G
    b = row // T
    pos = row - b * T + q0
    if RAGGED:
        pos = row - b * T + tl.load(Q0 + b).to(tl.int32)
    h = tl.arange(0, M)
    dv = tl.arange(0, BDV)
    i = tl.arange(0, LP)
    q = load_rows(
        Q,
        b.to(tl.int64) * sq_b + (row - b * T).to(tl.int64) * sq_t + (g * H + h) * sq_h,
        h < H,
        D,
        BD,
    )
    K += b.to(tl.int64) * sk_b + g * sk_g
    V += b.to(tl.int64) * sv_b + g * sv_g
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BDV], tl.float32)
    for n in range(N):
        block = tl.load(BLOCKS + at_row * N + n)
        if (block >= 0) & (block < J):
            c = block * L + i
            inside = (i < L) & (c < S)
            k = load_rows(K, c.to(tl.int64) * sk_s, inside, D, BD)
            s = tl.dot(q, tl.trans(k), input_precision=PREC) * scale_log2
            s = tl.where((inside & (c <= pos))[None, :], s, float("-inf"))
            new = tl.maximum(m, tl.max(s, 1))
            safe = tl.where(new == float("-inf"), 0.0, new)
            p = tl.exp2(s - safe[:, None])
            a = tl.exp2(m - safe)
            v = load_rows(V, c.to(tl.int64) * sv_s, inside, DV, BDV)
            acc = tl.dot(p.to(v.dtype), v, acc * a[:, None], input_precision=PREC)
            l = l * a + tl.sum(p, 1)
            m = new
    some = l != 0  # NaN stays NaN
    to = at_row * H + h
    o = acc / tl.where(some, l, 1.0)[:, None]
    tl.store(
        O + to[:, None] * DV + dv[None, :],
        o.to(O.dtype.element_ty),
        mask=(h < H)[:, None] & (dv < DV)[None, :],
    )
    tl.store(
        LSE + to, tl.where(some, m + tl.log2(tl.where(some, l, 1.0)), float("-inf")), mask=h < H
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    into: tuple[Tensor, Tensor],
    sel_block: int,
    q_start: int | Tensor,
    scale: float,
) -> None:
    """As `nsa.ops.selected.triton.forward.forward`, into contiguous (o, lse); blocks are
    contiguous, last dimensions too.
    """
    (B, T, HQ, D), (S, G, DV), N = q.shape, v.shape[1:], blocks.shape[3]
    H, J, L = HQ // G, -(-S // sel_block), sel_block
    tile = {"num_warps": WARPS, "num_stages": STAGES}
    tile.update(smaller("by_row", min(3, width_class(q, DV)), q.device))
    tile["num_warps"] = max(tile["num_warps"], padded(H) // 16)
    q0, Q0 = starts(q_start)
    launch(
        nsa_selected_forward_by_row,
        (B * T * G,),
        q,
        k,
        v,
        blocks,
        *into,
        Q0,
        T,
        S,
        q0,
        J,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        scale * LOG2E,
        G,
        H,
        N,
        L,
        padded(L),
        D,
        DV,
        padded(H),
        padded(D),
        padded(DV),
        Q0 is not None,
        precision(q),
        **tile,
    )
