"""Attention over chosen blocks by dense tiles, FlashAttention style: no sort, no parts of rows.

B batch, T queries, S keys, Q query heads, G kv heads, H query heads per kv head, J blocks a kv
head, L tokens a block; a tile of M rows is the H heads of QT neighbouring queries, and knows the
blocks that any of these chose, and which did: ``dense_tile_masks``. A block that no query of the
tile chose is not read; one that some query chose is weighted 0 for the others, and must be finite.
A pair is read one step ahead: else Triton puts the loads that wait for it a stage later, and they
no longer overlap with products. No atomics: bitwise repeatable.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.kernels.common import load_rows
from nsa.ops.selected.triton.dense_tile_masks import position_of


@triton.jit
def _rows_of(tile, g, T, H: tl.constexpr, QT: tl.constexpr, M: tl.constexpr):
    """(query, whether there is one, its bit, query head) of the rows of a tile."""
    m = tl.arange(0, M)
    t = tile * QT + m // H
    return t, (m < QT * H) & (t < T), tl.minimum(m // H, 31), g * H + m % H


@triton.jit
def _read(pair):
    """(number, mask) of a pair."""
    return (pair >> 32).to(tl.int32), pair.to(tl.int32)


@triton.jit
def _keys(
    X,
    j,
    c,
    stride,
    S,
    L: tl.constexpr,
    LP: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Block j of X as [LP, BD], 0 outside; EVEN: it ends before S."""
    i = tl.arange(0, LP)
    d = tl.arange(0, BD)
    pointer = X + (j.to(tl.int64) * L) * stride + (i.to(tl.int64)[:, None] * stride + d[None, :])
    if EVEN and L == LP:
        if D == BD:
            return tl.load(pointer)
        return tl.load(pointer, mask=(d < D)[None, :], other=0.0)
    inside = ((i < L) & (c < S))[:, None]
    if D == BD:
        return tl.load(pointer, mask=inside, other=0.0)
    return tl.load(pointer, mask=inside & (d < D)[None, :], other=0.0)


@triton.jit
def _step(
    q,
    K,
    V,
    pair,
    m,
    l,
    acc,
    pos,
    turn,
    S,
    sk_s,
    sv_s,
    scale_log2,
    L: tl.constexpr,
    LP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    EVEN: tl.constexpr,
    PREC: tl.constexpr,
):
    """One block for the rows that chose it. scale_log2 is above 0, so the largest product is the
    largest logit.
    """
    j, mask = _read(pair)
    i = tl.arange(0, LP)
    c = j * L + i
    k = _keys(K, j, c, sk_s, S, L, LP, D, BD, EVEN)
    s = tl.dot(q, tl.trans(k), input_precision=PREC)
    if not (EVEN and L == LP):
        s = tl.where((c[None, :] <= pos[:, None]) & ((i < L) & (c < S))[None, :], s, float("-inf"))
    chose = ((mask >> turn) & 1) != 0
    new = tl.where(chose, tl.maximum(m, tl.max(s, 1) * scale_log2), m)
    safe = tl.where(new == float("-inf"), 0.0, new)
    # a row that did not choose the block takes off an infinity: no mask of single elements
    p = tl.exp2(s * scale_log2 - tl.where(chose, safe, float("inf"))[:, None])
    a = tl.exp2(m - safe)
    v = _keys(V, j, c, sv_s, S, L, LP, DV, BDV, EVEN)
    acc = tl.dot(p.to(v.dtype), v, acc * a[:, None], input_precision=PREC)
    return new, l * a + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["room", "tiles"])
def nsa_selected_forward_tiles(
    Q,
    K,
    V,
    PAIRS,
    COUNT,
    O,
    LSE,
    Q0,
    T,
    S,
    q0,
    room,
    tiles,
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
    L: tl.constexpr,
    LP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    QT: tl.constexpr,
    M: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    RAGGED: tl.constexpr,
    PREC: tl.constexpr,
):
    """One tile of one kv head a program, the longest first."""
    pairs = tl.num_programs(0) // tiles
    tile = tiles - 1 - tl.program_id(0) // pairs
    bg = (tl.program_id(0) % pairs).to(tl.int64)
    b = bg // G
    g = bg % G
    t, live, turn, head = _rows_of(tile, g, T, H, QT, M)
    pos = position_of(t, b, q0, Q0, RAGGED)
    q = load_rows(Q, b * sq_b + t.to(tl.int64) * sq_t + head * sq_h, live, D, BD)
    K += b * sk_b + g * sk_g
    V += b * sv_b + g * sv_g
    at = bg * tiles + tile
    PAIRS += at * room
    count = tl.load(COUNT + at * 2)
    inner = tl.load(COUNT + at * 2 + 1)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BDV], tl.float32)
    pair = tl.load(PAIRS)
    for n in range(inner):
        following = tl.load(PAIRS + n + 1)
        m, l, acc = _step(
            q,
            K,
            V,
            pair,
            m,
            l,
            acc,
            pos,
            turn,
            S,
            sk_s,
            sv_s,
            scale_log2,
            L,
            LP,
            D,
            DV,
            BD,
            BDV,
            True,
            PREC,
        )
        pair = following
    for n in range(inner, count):
        following = tl.load(PAIRS + n + 1)
        m, l, acc = _step(
            q,
            K,
            V,
            pair,
            m,
            l,
            acc,
            pos,
            turn,
            S,
            sk_s,
            sv_s,
            scale_log2,
            L,
            LP,
            D,
            DV,
            BD,
            BDV,
            False,
            PREC,
        )
        pair = following
    some = l != 0  # NaN stays NaN
    o = acc / tl.where(some, l, 1.0)[:, None]
    row = (b * T + t) * (G * H) + head
    dv = tl.arange(0, BDV)
    tl.store(
        O + row[:, None] * DV + dv[None, :],
        o.to(O.dtype.element_ty),
        mask=live[:, None] & (dv < DV)[None, :],
    )
    tl.store(
        LSE + row, tl.where(some, m + tl.log2(tl.where(some, l, 1.0)), float("-inf")), mask=live
    )


@triton.jit
def _of_rows(LSE, DELTA, row, live):
    """(lse, delta); a row that sees nothing has an lse of -inf, but chose no block, so that it is
    not asked for.
    """
    lse = tl.load(LSE + row, mask=live, other=float("inf"))
    return lse, tl.load(DELTA + row, mask=live, other=0.0)


@triton.jit
def _step_q(
    q,
    do,
    K,
    V,
    pair,
    acc,
    lse,
    delta,
    pos,
    turn,
    S,
    sk_s,
    sv_s,
    scale_log2,
    L: tl.constexpr,
    LP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    EVEN: tl.constexpr,
    PREC: tl.constexpr,
):
    j, mask = _read(pair)
    i = tl.arange(0, LP)
    c = j * L + i
    k = _keys(K, j, c, sk_s, S, L, LP, D, BD, EVEN)
    v = _keys(V, j, c, sv_s, S, L, LP, DV, BDV, EVEN)
    off = tl.where(((mask >> turn) & 1) != 0, lse, float("inf"))
    p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PREC) * scale_log2 - off[:, None])
    if not (EVEN and L == LP):
        p = tl.where((c[None, :] <= pos[:, None]) & ((i < L) & (c < S))[None, :], p, 0.0)
    ds = p * (tl.dot(do, tl.trans(v), input_precision=PREC) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, acc, input_precision=PREC)


@triton.jit(do_not_specialize=["room", "tiles"])
def nsa_selected_backward_tiles_q(
    Q,
    K,
    V,
    DO,
    LSE,
    DELTA,
    PAIRS,
    COUNT,
    DQ,
    Q0,
    T,
    S,
    q0,
    room,
    tiles,
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
    L: tl.constexpr,
    LP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    QT: tl.constexpr,
    M: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    RAGGED: tl.constexpr,
    PREC: tl.constexpr,
    ADD: tl.constexpr,
):
    """dQ of one tile of one kv head a program. ADD to what DQ holds."""
    pairs = tl.num_programs(0) // tiles
    tile = tiles - 1 - tl.program_id(0) // pairs
    bg = (tl.program_id(0) % pairs).to(tl.int64)
    b = bg // G
    g = bg % G
    t, live, turn, head = _rows_of(tile, g, T, H, QT, M)
    pos = position_of(t, b, q0, Q0, RAGGED)
    row = (b * T + t) * (G * H) + head
    q = load_rows(Q, b * sq_b + t.to(tl.int64) * sq_t + head * sq_h, live, D, BD)
    do = load_rows(DO, row * DV, live, DV, BDV)
    lse, delta = _of_rows(LSE, DELTA, row, live)
    K += b * sk_b + g * sk_g
    V += b * sv_b + g * sv_g
    at = bg * tiles + tile
    PAIRS += at * room
    count = tl.load(COUNT + at * 2)
    inner = tl.load(COUNT + at * 2 + 1)
    acc = tl.zeros([M, BD], tl.float32)
    pair = tl.load(PAIRS)
    for n in range(inner):
        following = tl.load(PAIRS + n + 1)
        acc = _step_q(
            q,
            do,
            K,
            V,
            pair,
            acc,
            lse,
            delta,
            pos,
            turn,
            S,
            sk_s,
            sv_s,
            scale_log2,
            L,
            LP,
            D,
            DV,
            BD,
            BDV,
            True,
            PREC,
        )
        pair = following
    for n in range(inner, count):
        following = tl.load(PAIRS + n + 1)
        acc = _step_q(
            q,
            do,
            K,
            V,
            pair,
            acc,
            lse,
            delta,
            pos,
            turn,
            S,
            sk_s,
            sv_s,
            scale_log2,
            L,
            LP,
            D,
            DV,
            BD,
            BDV,
            False,
            PREC,
        )
        pair = following
    acc *= scale
    d = tl.arange(0, BD)
    to = DQ + row[:, None] * D + d[None, :]
    mask = live[:, None] & (d < D)[None, :]
    if ADD:
        acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, acc.to(DQ.dtype.element_ty), mask=mask)


@triton.jit
def _step_kv(
    k,
    v,
    Q,
    DO,
    LSE,
    DELTA,
    pair,
    query,
    at_q,
    at_row,
    c,
    dk,
    dv,
    T,
    first,
    sq_t,
    scale_log2,
    HQ: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    QT: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    CAUSAL: tl.constexpr,
    PREC: tl.constexpr,
):
    """One tile, of whose queries ``query`` is the row's, -1 where it has none; ``first`` is the
    position of query 0. at_q and at_row are what the rows' addresses have in common in all tiles.
    """
    tile, mask = _read(pair)
    t0 = tile * QT
    live = (query >= 0) & (query < T - t0)
    q = load_rows(Q + t0.to(tl.int64) * sq_t, at_q, live, D, BD)
    row = t0.to(tl.int64) * HQ
    do = load_rows(DO + row * DV, at_row.to(tl.int64) * DV, live, DV, BDV)
    lse, delta = _of_rows(LSE + row, DELTA + row, at_row, live)
    off = tl.where(((mask >> tl.maximum(query, 0)) & 1) != 0, lse, float("inf"))
    # [keys, rows]
    p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PREC) * scale_log2 - off[None, :])
    if CAUSAL:
        p = tl.where((c - t0 - first)[:, None] <= query[None, :], p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PREC)
    ds = p * (tl.dot(v, tl.trans(do), input_precision=PREC) - delta[None, :])
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PREC), dv


@triton.jit(do_not_specialize=["J", "tiles", "num_parts"])
def nsa_selected_backward_tiles_kv(
    Q,
    K,
    V,
    DO,
    LSE,
    DELTA,
    PAIRS,
    COUNT,
    DK,
    DV_,
    Q0,
    T,
    S,
    q0,
    J,
    tiles,
    num_parts,
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
    L: tl.constexpr,
    LP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    QT: tl.constexpr,
    M: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    RAGGED: tl.constexpr,
    PREC: tl.constexpr,
):
    """dK and dV of one block from one part of the tiles that chose it, to DK and DV_ [parts, B, S,
    G, D]; the oldest blocks, which the most tiles chose, first.
    """
    part = tl.program_id(0) % num_parts
    pairs = tl.num_programs(0) // (num_parts * J)
    bg = (tl.program_id(0) // num_parts % pairs).to(tl.int64)
    j = tl.program_id(0) // (num_parts * pairs)
    b = bg // G
    g = bg % G
    g_ = g.to(tl.int32)
    i = tl.arange(0, LP)
    c = j * L + i
    k = _keys(K + b * sk_b + g * sk_g, j, c, sk_s, S, L, LP, D, BD, False)
    v = _keys(V + b * sv_b + g * sv_g, j, c, sv_s, S, L, LP, DV, BDV, False)
    dk = tl.zeros([LP, BD], tl.float32)
    dv = tl.zeros([LP, BDV], tl.float32)
    at = bg * J + j
    PAIRS += at * tiles
    count = tl.load(COUNT + at * 2)
    outer = tl.load(COUNT + at * 2 + 1)
    each = tl.cdiv(count, num_parts)
    begin = tl.minimum(part * each, count)
    stop = tl.minimum(begin + each, count)
    inner = tl.minimum(tl.maximum(begin, outer), stop)
    m_ = tl.arange(0, M)
    query = tl.where(m_ < QT * H, m_ // H, -1)
    head = g * H + m_ % H
    at_q = query.to(tl.int64) * sq_t + head * sq_h
    at_row = query * (G * H) + (g_ * H + m_ % H)
    first = position_of(0, b, q0, Q0, RAGGED)
    Q += b * sq_b
    DO += b * T * (G * H) * DV
    LSE += b * T * (G * H)
    DELTA += b * T * (G * H)
    pair = tl.load(PAIRS + begin)
    for n in range(begin, inner):
        following = tl.load(PAIRS + n + 1)
        dk, dv = _step_kv(
            k,
            v,
            Q,
            DO,
            LSE,
            DELTA,
            pair,
            query,
            at_q,
            at_row,
            c,
            dk,
            dv,
            T,
            first,
            sq_t,
            scale_log2,
            G * H,
            D,
            DV,
            QT,
            BD,
            BDV,
            True,
            PREC,
        )
        pair = following
    for n in range(inner, stop):
        following = tl.load(PAIRS + n + 1)
        dk, dv = _step_kv(
            k,
            v,
            Q,
            DO,
            LSE,
            DELTA,
            pair,
            query,
            at_q,
            at_row,
            c,
            dk,
            dv,
            T,
            first,
            sq_t,
            scale_log2,
            G * H,
            D,
            DV,
            QT,
            BD,
            BDV,
            False,
            PREC,
        )
        pair = following
    d = tl.arange(0, BD)
    dv_ = tl.arange(0, BDV)
    inside = ((i < L) & (c < S))[:, None]
    to = ((part * (pairs // G) + b) * S + c) * G + g
    tl.store(
        DK + to[:, None] * D + d[None, :],
        (dk * scale).to(DK.dtype.element_ty),
        mask=inside & (d < D)[None, :],
    )
    tl.store(
        DV_ + to[:, None] * DV + dv_[None, :],
        dv.to(DV_.dtype.element_ty),
        mask=inside & (dv_ < DV)[None, :],
    )
