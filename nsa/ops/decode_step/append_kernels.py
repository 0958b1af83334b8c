"""What a step stores of its token: q turned and the softmax gates; k turned and v, each with the
compressed block that the token completes.

Letters as in `nsa.ops.decode_step.shapes`, addresses as in `nsa.ops.decode_step.row_addresses`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.decode_step.row_addresses import row_at, rows_back, slot_of
from nsa.ops.kernels.common import load_rows


@triton.jit
def _half(X, at, p, inside, SECOND: tl.constexpr, STRIDE: tl.constexpr):
    """The first elements of the pairs of rows ``at`` of X, or the second ones, in fp32."""
    return tl.load(X + at + p * STRIDE + SECOND, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _turned(TURNS, b, p, a, c, P: tl.constexpr, ROPE: tl.constexpr):
    """(a, c) as complex numbers times those of row b of TURNS."""
    if ROPE:
        cos = tl.load(TURNS + (b * P + p) * 2, mask=p < P, other=1.0).to(tl.float32)
        sin = tl.load(TURNS + (b * P + p) * 2 + 1, mask=p < P, other=0.0).to(tl.float32)
        return a * cos - c * sin, a * sin + c * cos
    return a, c


@triton.jit
def _append_q(
    Q,
    TURNS,
    UP,
    DOWN,
    OQ,
    OGATE,
    temperature,
    b,
    g,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    PAIR: tl.constexpr,
    SECOND: tl.constexpr,
    ROPE: tl.constexpr,
    GATES: tl.constexpr,
    BH: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
):
    P: tl.constexpr = D // 2
    p = tl.arange(0, BP)
    h = tl.arange(0, BH)
    at = ((b * G + g) * H + h)[:, None] * D
    inside = (h < H)[:, None] & (p < P)[None, :]
    x = _half(Q, at, p[None, :], inside, 0, PAIR)
    y = _half(Q, at, p[None, :], inside, SECOND, PAIR)
    tx, ty = _turned(TURNS, b, p[None, :], x, y, P, ROPE)
    tl.store(OQ + at + p[None, :] * PAIR, tx.to(OQ.dtype.element_ty), mask=inside)
    tl.store(OQ + at + p[None, :] * PAIR + SECOND, ty.to(OQ.dtype.element_ty), mask=inside)
    if GATES:
        kind = OQ.dtype.element_ty
        mx = (tl.sum(x, 0) / H).to(kind).to(tl.float32)
        my = (tl.sum(y, 0) / H).to(kind).to(tl.float32)
        j = tl.arange(0, BD)
        row = UP + g * D * D + (p * PAIR)[:, None] * D + j[None, :]
        there = (p < P)[:, None] & (j < D)[None, :]
        ux = tl.load(row, mask=there, other=0.0).to(kind).to(tl.float32)
        uy = tl.load(row + SECOND * D, mask=there, other=0.0).to(kind).to(tl.float32)
        hidden = tl.sum(mx[:, None] * ux, 0) + tl.sum(my[:, None] * uy, 0)
        hidden = hidden.to(kind).to(tl.float32)
        hidden = (hidden / (1.0 + tl.exp(-hidden))).to(kind).to(tl.float32)
        n = tl.arange(0, 4)
        down = tl.load(
            DOWN + (g * D + j)[:, None] * 3 + n[None, :],
            mask=(j < D)[:, None] & (n < 3)[None, :],
            other=0.0,
        )
        z = tl.sum(hidden[:, None] * down.to(kind).to(tl.float32), 0)
        z = z.to(kind).to(tl.float32) / temperature
        z = tl.where(n < 3, z, float("-inf"))
        e = tl.exp(z - tl.max(z, 0))
        gate = (e / tl.sum(e, 0)).to(kind)
        tl.store(
            OGATE + ((b * G + g) * H + h)[:, None] * 3 + n[None, :],
            tl.broadcast_to(gate[None, :], [BH, 4]),
            mask=(h < H)[:, None] & (n < 3)[None, :],
        )


@triton.jit
def _append_k(
    K,
    TURNS,
    SEL_K,
    WIN_K,
    RAW_K,
    CMP_K,
    SEL_TABLE,
    WIN_TABLE,
    RAW_TABLE,
    CMP_TABLE,
    st_b,
    num_sel,
    num_win,
    num_cmp,
    b,
    g,
    pos,
    exists,
    G: tl.constexpr,
    D: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    PAIR: tl.constexpr,
    SECOND: tl.constexpr,
    ROPE: tl.constexpr,
    BP: tl.constexpr,
    BL: tl.constexpr,
    PAGE: tl.constexpr,
):
    P: tl.constexpr = D // 2
    p = tl.arange(0, BP)
    completed = pos + 1 - BLOCK
    completes = (completed >= 0) & (completed % STRIDE == 0)
    if PAGE:
        completes = completes & exists
    back, older = rows_back(pos, BLOCK, BL, PAGE)
    inside = p < P
    for branch in tl.static_range(3):
        at = ((b * COPIES + (branch if COPIES == 3 else 0)) * G + g) * D
        x = _half(K, at, p, inside, 0, PAIR)
        y = _half(K, at, p, inside, SECOND, PAIR)
        x, y = _turned(TURNS, b, p, x, y, P, ROPE)
        x = x.to(K.dtype.element_ty)
        y = y.to(K.dtype.element_ty)
        if branch == 0:
            slot = slot_of(pos, BLOCK, PAGE)
            row, kept = row_at(RAW_TABLE, st_b, b, g, BLOCK, slot, exists, inside, G, PAGE)
            to = RAW_K + row * D
            if completes:
                rows, there = row_at(RAW_TABLE, st_b, b, g, BLOCK, back, older, older, G, PAGE)
                rows = (rows * D)[:, None]
                whole = there[:, None] & inside[None, :]
                sx = tl.sum(_half(RAW_K, rows, p[None, :], whole, 0, PAIR), 0)
                sy = tl.sum(_half(RAW_K, rows, p[None, :], whole, SECOND, PAIR), 0)
                mx = (sx + x.to(tl.float32)) / BLOCK
                my = (sy + y.to(tl.float32)) / BLOCK
                block = completed // STRIDE
                cmp, due = row_at(CMP_TABLE, st_b, b, g, num_cmp, block, completes, inside, G, PAGE)
                cmp = CMP_K + cmp * D
                tl.store(cmp + p * PAIR, mx.to(K.dtype.element_ty), mask=due)
                tl.store(cmp + p * PAIR + SECOND, my.to(K.dtype.element_ty), mask=due)
        elif branch == 1:
            row, kept = row_at(SEL_TABLE, st_b, b, g, num_sel, pos, exists, inside, G, PAGE)
            to = SEL_K + row * D
        else:
            slot = slot_of(pos, num_win, PAGE)
            row, kept = row_at(WIN_TABLE, st_b, b, g, num_win, slot, exists, inside, G, PAGE)
            to = WIN_K + row * D
        tl.store(to + p * PAIR, x, mask=kept)
        tl.store(to + p * PAIR + SECOND, y, mask=kept)


@triton.jit
def _append_v(
    V,
    SEL_V,
    WIN_V,
    RAW_V,
    CMP_V,
    SEL_TABLE,
    WIN_TABLE,
    RAW_TABLE,
    CMP_TABLE,
    st_b,
    num_sel,
    num_win,
    num_cmp,
    b,
    g,
    pos,
    exists,
    G: tl.constexpr,
    DV: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    BDV: tl.constexpr,
    BL: tl.constexpr,
    PAGE: tl.constexpr,
):
    completed = pos + 1 - BLOCK
    completes = (completed >= 0) & (completed % STRIDE == 0)
    if PAGE:
        completes = completes & exists
    back, older = rows_back(pos, BLOCK, BL, PAGE)
    dv = tl.arange(0, BDV)
    inside = dv < DV
    for branch in tl.static_range(3):
        at = ((b * COPIES + (branch if COPIES == 3 else 0)) * G + g) * DV
        v = tl.load(V + at + dv, mask=inside, other=0.0)
        if branch == 0:
            slot = slot_of(pos, BLOCK, PAGE)
            row, kept = row_at(RAW_TABLE, st_b, b, g, BLOCK, slot, exists, inside, G, PAGE)
            to = RAW_V + row * DV
            if completes:
                rows, there = row_at(RAW_TABLE, st_b, b, g, BLOCK, back, older, older, G, PAGE)
                old = load_rows(RAW_V, rows * DV, there, DV, BDV).to(tl.float32)
                mean = (tl.sum(old, 0) + v.to(tl.float32)) / BLOCK
                block = completed // STRIDE
                cmp, due = row_at(CMP_TABLE, st_b, b, g, num_cmp, block, completes, inside, G, PAGE)
                tl.store(CMP_V + cmp * DV + dv, mean.to(V.dtype.element_ty), mask=due)
        elif branch == 1:
            row, kept = row_at(SEL_TABLE, st_b, b, g, num_sel, pos, exists, inside, G, PAGE)
            to = SEL_V + row * DV
        else:
            slot = slot_of(pos, num_win, PAGE)
            row, kept = row_at(WIN_TABLE, st_b, b, g, num_win, slot, exists, inside, G, PAGE)
            to = WIN_V + row * DV
        tl.store(to + dv, v, mask=kept)


@triton.jit(do_not_specialize=["st_b", "num_sel", "num_win", "num_cmp"])
def nsa_append_step(
    Q,
    K,
    V,
    TURNS,
    POS,
    UP,
    DOWN,
    OQ,
    OGATE,
    SEL_K,
    SEL_V,
    WIN_K,
    WIN_V,
    RAW_K,
    RAW_V,
    CMP_K,
    CMP_V,
    SEL_TABLE,
    WIN_TABLE,
    RAW_TABLE,
    CMP_TABLE,
    LEN,
    st_b,
    num_sel,
    num_win,
    num_cmp,
    temperature,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    PAIR: tl.constexpr,
    SECOND: tl.constexpr,
    ROPE: tl.constexpr,
    GATES: tl.constexpr,
    BH: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BL: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Of one (b, kv head): program 0 turns q and makes the softmax gates, 1 turns k and stores it,
    2 stores v. Both compress the block that the token completes, if any.

    A pair is elements i PAIR and i PAIR + SECOND. ``num_sel``, ``num_win``, ``num_cmp``: rows of a
    buffer. COPIES: K and V that the projection makes, one a branch or one for all. LEN: of pages,
    the tokens of each row with this one; a row that takes none stores nothing.
    """
    b = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    part = tl.program_id(2)
    pos = tl.load(POS + b).to(tl.int32)
    exists = True
    if PAGE:
        exists = pos < tl.load(LEN + b)
    if part == 0:
        _append_q(
            Q,
            TURNS,
            UP,
            DOWN,
            OQ,
            OGATE,
            temperature,
            b,
            g,
            G,
            H,
            D,
            PAIR,
            SECOND,
            ROPE,
            GATES,
            BH,
            BP,
            BD,
        )
    elif part == 1:
        _append_k(
            K,
            TURNS,
            SEL_K,
            WIN_K,
            RAW_K,
            CMP_K,
            SEL_TABLE,
            WIN_TABLE,
            RAW_TABLE,
            CMP_TABLE,
            st_b,
            num_sel,
            num_win,
            num_cmp,
            b,
            g,
            pos,
            exists,
            G,
            D,
            COPIES,
            BLOCK,
            STRIDE,
            PAIR,
            SECOND,
            ROPE,
            BP,
            BL,
            PAGE,
        )
    else:
        _append_v(
            V,
            SEL_V,
            WIN_V,
            RAW_V,
            CMP_V,
            SEL_TABLE,
            WIN_TABLE,
            RAW_TABLE,
            CMP_TABLE,
            st_b,
            num_sel,
            num_win,
            num_cmp,
            b,
            g,
            pos,
            exists,
            G,
            DV,
            COPIES,
            BLOCK,
            STRIDE,
            BDV,
            BL,
            PAGE,
        )
