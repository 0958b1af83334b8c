"""The backward by lists: parts of dQ, one an entry, and of dK and dV, one a run of a list; and
their sums, by row and by block.

Letters and entries as in `nsa.ops.selected.triton.entries`. Some on Hopper go to
`nsa.ops.selected.triton.warp_roles` for their parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.kernels.common import load_rows
from nsa.ops.selected.triton.entries import row_of, run_of


@triton.jit
def nsa_selected_backward(
    Q,
    K,
    V,
    DO,
    LSE,
    DELTA,
    KEY,
    ORDER,
    DQ_PART,
    DK_PART,
    DV_PART,
    Q0,
    e0,
    e1,
    base,
    T,
    S,
    q0,
    J,
    num_lists,
    sq_b,
    sq_t,
    sq_h,
    sk_b,
    sk_s,
    sk_g,
    sv_b,
    sv_s,
    sv_g,
    scale,
    scale_log2,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    QS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_P: tl.constexpr,
    M: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    RAGGED: tl.constexpr,
    PREC: tl.constexpr,
):
    """TILE neighbouring entries a program.

    Each run of one list gives a part of its dK and dV, in slot (tile + list): unique, ascending.
    """
    tile = tl.program_id(0)
    begin = e0 + tile * TILE
    stop = tl.minimum(begin + TILE, e1)
    m = tl.arange(0, M)
    d = tl.arange(0, BD)
    dv_ = tl.arange(0, BDV)
    i = tl.arange(0, LP)
    head_at = (m % H).to(tl.int64) * sq_h  # may exceed 2^31
    current, end = run_of(KEY, begin, stop, base, TILE, TILE_P)
    while (begin < stop) & (current < num_lists):
        bg = current // J
        g = (bg % G).to(tl.int64)
        c = (current - bg * J) * L + i
        inside = (i < L) & (c < S)
        k = load_rows(
            K, (bg // G).to(tl.int64) * sk_b + g * sk_g + c.to(tl.int64) * sk_s, inside, D, BD
        )
        v = load_rows(
            V, (bg // G).to(tl.int64) * sv_b + g * sv_g + c.to(tl.int64) * sv_s, inside, DV, BDV
        )
        dk = tl.zeros([LP, BD], tl.float32)
        dv = tl.zeros([LP, BDV], tl.float32)
        for at in range(begin, end, QS):
            e = at + m // H
            live = (e < end) & (m < QS * H)
            flat = tl.load(ORDER + e, mask=live, other=0).to(tl.int32)
            row, b, pos = row_of(flat, T, q0, Q0, G, N, RAGGED)
            head = row.to(tl.int64) * (G * H) + g * H + m % H
            q = load_rows(
                Q,
                b.to(tl.int64) * sq_b + (row - b * T).to(tl.int64) * sq_t + g * H * sq_h + head_at,
                live,
                D,
                BD,
            )
            do = load_rows(DO, head * DV, live, DV, BDV)
            lse = tl.load(LSE + head, mask=live, other=float("inf"))
            lse = tl.where(lse == float("-inf"), float("inf"), lse)
            delta = tl.load(DELTA + head, mask=live, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision=PREC) * scale_log2
            p = tl.where(
                (c[None, :] <= pos[:, None]) & inside[None, :], tl.exp2(s - lse[:, None]), 0.0
            )
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PREC)
            ds = p * (tl.dot(do, tl.trans(v), input_precision=PREC) - delta[:, None]) * scale
            ds = ds.to(q.dtype)
            dk = tl.dot(tl.trans(ds), q, dk, input_precision=PREC)
            dq = tl.dot(ds, k, input_precision=PREC)
            to = DQ_PART + (((flat.to(tl.int64) - e0) * H + m % H) * D)[:, None] + d[None, :]
            tl.store(
                to,
                dq.to(DQ_PART.dtype.element_ty),
                mask=live[:, None] & (d < D)[None, :],
                eviction_policy="evict_first",
            )
        slot = ((tile + current).to(tl.int64) * L + i)[:, None]
        tl.store(DK_PART + slot * D + d[None, :], dk, mask=(i < L)[:, None] & (d < D)[None, :])
        tl.store(
            DV_PART + slot * DV + dv_[None, :], dv, mask=(i < L)[:, None] & (dv_ < DV)[None, :]
        )
        begin = end
        if begin < stop:
            current, end = run_of(KEY, begin, stop, base, TILE, TILE_P)


@triton.jit
def _sum_list(
    PART,
    SO_FAR,
    X,
    DENSE,
    lo,
    hi,
    S,
    full,
    bg,
    j,
    sx_b,
    sx_s,
    sx_g,
    L: tl.constexpr,
    LP: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    ADD: tl.constexpr,
):
    """Sum parts lo .. hi - 1 to the rows of block j of X, with those of DENSE [B, full, G, D],
    unless it is None, and ADD those of SO_FAR, which lies as X.
    """
    i = tl.arange(0, LP)
    d = tl.arange(0, BD)
    acc = tl.zeros([LP, BD], tl.float32)
    inside = (i < L)[:, None] & (d < D)[None, :]
    part = PART + (lo.to(tl.int64) * L + i)[:, None] * D + d[None, :]
    for _ in range(lo, hi):
        acc += tl.load(part, mask=inside, other=0.0)
        part += L * D
    c = j * L + i
    at = (
        (bg // G).to(tl.int64) * sx_b
        + (bg % G) * sx_g
        + c.to(tl.int64)[:, None] * sx_s
        + d[None, :]
    )
    inside = inside & (c < S)[:, None]
    if DENSE is not None:
        dense = (
            DENSE
            + (((bg // G).to(tl.int64) * full + c.to(tl.int64)) * G + bg % G)[:, None] * D
            + d[None, :]
        )
        acc += tl.load(dense, mask=inside & (c < full)[:, None], other=0.0).to(tl.float32)
    if ADD:
        acc += tl.load(SO_FAR + at, mask=inside, other=0.0)
    tl.store(X + at, acc.to(X.dtype.element_ty), mask=inside)


@triton.jit
def nsa_selected_sum_kv(
    DK_PART,
    DV_PART,
    BOUND,
    DK_SO_FAR,
    DV_SO_FAR,
    DK,
    DV_,
    DENSE_K,
    DENSE_V,
    e0,
    base,
    S,
    full,
    J,
    sk_b,
    sk_s,
    sk_g,
    sv_b,
    sv_s,
    sv_g,
    G: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    ADD: tl.constexpr,
):
    """Sum a block's parts in their order; ADD what earlier chunks left.

    DENSE: what the first ``full`` rows gave, or None.
    """
    list_ = tl.program_id(0)
    first = tl.load(BOUND + base + list_) - e0
    last = tl.load(BOUND + base + list_ + 1) - e0
    lo = list_ + first // TILE
    hi = tl.where(last > first, list_ + (last - 1) // TILE + 1, lo)
    bg = list_ // J
    if tl.program_id(1) == 0:
        _sum_list(
            DK_PART,
            DK_SO_FAR,
            DK,
            DENSE_K,
            lo,
            hi,
            S,
            full,
            bg,
            list_ - bg * J,
            sk_b,
            sk_s,
            sk_g,
            L,
            LP,
            G,
            D,
            BD,
            ADD,
        )
    else:
        _sum_list(
            DV_PART,
            DV_SO_FAR,
            DV_,
            DENSE_V,
            lo,
            hi,
            S,
            full,
            bg,
            list_ - bg * J,
            sv_b,
            sv_s,
            sv_g,
            L,
            LP,
            G,
            DV,
            BDV,
            ADD,
        )


@triton.jit
def nsa_selected_sum_q(
    DQ_PART,
    BLOCKS,
    DQ,
    first_row,
    T,
    full,
    J,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    HP: tl.constexpr,
    BD: tl.constexpr,
    ADD: tl.constexpr,
):
    """One (row, kv head) a program: dq is the sum over its slots. ADD to what DQ holds."""
    local = tl.program_id(0).to(tl.int64)
    at_row = first_row * G + local
    if (at_row // G) % T >= full:  # rows before that are done
        h = tl.arange(0, HP)
        d = tl.arange(0, BD)
        acc = tl.zeros([HP, BD], tl.float32)
        for n in tl.static_range(N):
            block = tl.load(BLOCKS + at_row * N + n)
            at = (local * N + n) * H + h
            there = (h < H)[:, None] & (d < D)[None, :] & (block >= 0) & (block < J)
            acc += tl.load(
                DQ_PART + at[:, None] * D + d[None, :],
                mask=there,
                other=0.0,
                eviction_policy="evict_first",
            ).to(tl.float32)
        to = DQ + (at_row * H + h)[:, None] * D + d[None, :]
        mask = (h < H)[:, None] & (d < D)[None, :]
        if ADD:
            acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, acc.to(DQ.dtype.element_ty), mask=mask)
