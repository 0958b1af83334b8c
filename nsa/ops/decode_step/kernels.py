"""The kernels of a fused decode step, and what launches them.

B batch, Q query heads, G kv heads, H query heads per kv head, D head dim, P = D / 2 pairs, l
compressed block, d its stride, w rows of the window's ring, C compressed keys, J blocks, N slots.

One set of kernels serves contiguous buffers and pages: PAGE is the entries of a page, 0 where rows
lie one behind another, and then tables are None. What differs is the address of a row (`_at`) and
that pages have no rings: a token lies where its position says. Sums take the same order.

Numbers are those of the single operators (nsa.rope, nsa.gate, nsa.compression, nsa.ops.decode,
nsa.ops.scores, nsa.ops.gated_sum), rounded where those round, but for the order of a mean's sum and
of a log-sum-exp. No atomics, bitwise repeatable. Positions are read on the device alone, so that a
CUDA graph may hold the step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.decode.kernels import (
    AT_ONCE,
    SUM_WARPS,
    TILES,
    interval_splits,
    leave,
    logits,
    more,
    selected_parts,
    selected_per_split,
    summed,
)
from nsa.ops.decode_step.best_blocks import take_best
from nsa.ops.decode_step.shapes import Buffers, Projected, StepGeometry, StepPages, held
from nsa.ops.kernels.common import LOG2E, cdiv, load_rows, padded, precision, width_class
from nsa.ops.kernels.launch import launch
from nsa.ops.paged.kernels import selected_parts as selected_parts_of_pages
from nsa.ops.paged.pages import Pages
from nsa.ops.scores.kernels import CANDIDATES, ranked

LOGITS_AT_ONCE = 8192  # that a program of `nsa_choose_step` loads, 32 a thread
CHOOSE_WARPS = 8


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
def _at(TABLE, st_b, b, g, num_rows, i, ok, inside, G: tl.constexpr, PAGE: tl.constexpr):
    """(where row ``i`` of (b, kv head g) lies, counted in heads; ``inside`` where it has a page).

    ``num_rows``: of a contiguous buffer. ``ok``: of pages, which i are in the table's width.
    """
    if PAGE:
        page = tl.load(TABLE + b * st_b + i // PAGE, mask=ok, other=-1)
        return (page.to(tl.int64) * PAGE + i % PAGE) * G + g, inside & (page >= 0)
    return (b * num_rows + i) * G + g, inside


@triton.jit
def _slot(pos, ring, PAGE: tl.constexpr):
    """The row that takes token ``pos``: of ``ring`` rows, or of pages its own."""
    if PAGE:
        return pos
    return pos % ring


@triton.jit
def _rows_back(pos, BEHIND: tl.constexpr, BL: tl.constexpr, PAGE: tl.constexpr):
    """(rows of the BEHIND tokens up to ``pos``, oldest first; which of BL those are, but for the
    last, which is not stored yet).
    """
    i = tl.arange(0, BL)
    if PAGE:
        return pos + 1 - BEHIND + i, i < BEHIND - 1
    return (pos + 1 + i) % BEHIND, i < BEHIND - 1


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
    back, older = _rows_back(pos, BLOCK, BL, PAGE)
    inside = p < P
    for branch in tl.static_range(3):
        at = ((b * COPIES + (branch if COPIES == 3 else 0)) * G + g) * D
        x = _half(K, at, p, inside, 0, PAIR)
        y = _half(K, at, p, inside, SECOND, PAIR)
        x, y = _turned(TURNS, b, p, x, y, P, ROPE)
        x = x.to(K.dtype.element_ty)
        y = y.to(K.dtype.element_ty)
        if branch == 0:
            slot = _slot(pos, BLOCK, PAGE)
            row, kept = _at(RAW_TABLE, st_b, b, g, BLOCK, slot, exists, inside, G, PAGE)
            to = RAW_K + row * D
            if completes:
                rows, there = _at(RAW_TABLE, st_b, b, g, BLOCK, back, older, older, G, PAGE)
                rows = (rows * D)[:, None]
                whole = there[:, None] & inside[None, :]
                sx = tl.sum(_half(RAW_K, rows, p[None, :], whole, 0, PAIR), 0)
                sy = tl.sum(_half(RAW_K, rows, p[None, :], whole, SECOND, PAIR), 0)
                mx = (sx + x.to(tl.float32)) / BLOCK
                my = (sy + y.to(tl.float32)) / BLOCK
                block = completed // STRIDE
                cmp, due = _at(CMP_TABLE, st_b, b, g, num_cmp, block, completes, inside, G, PAGE)
                cmp = CMP_K + cmp * D
                tl.store(cmp + p * PAIR, mx.to(K.dtype.element_ty), mask=due)
                tl.store(cmp + p * PAIR + SECOND, my.to(K.dtype.element_ty), mask=due)
        elif branch == 1:
            row, kept = _at(SEL_TABLE, st_b, b, g, num_sel, pos, exists, inside, G, PAGE)
            to = SEL_K + row * D
        else:
            slot = _slot(pos, num_win, PAGE)
            row, kept = _at(WIN_TABLE, st_b, b, g, num_win, slot, exists, inside, G, PAGE)
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
    back, older = _rows_back(pos, BLOCK, BL, PAGE)
    dv = tl.arange(0, BDV)
    inside = dv < DV
    for branch in tl.static_range(3):
        at = ((b * COPIES + (branch if COPIES == 3 else 0)) * G + g) * DV
        v = tl.load(V + at + dv, mask=inside, other=0.0)
        if branch == 0:
            slot = _slot(pos, BLOCK, PAGE)
            row, kept = _at(RAW_TABLE, st_b, b, g, BLOCK, slot, exists, inside, G, PAGE)
            to = RAW_V + row * DV
            if completes:
                rows, there = _at(RAW_TABLE, st_b, b, g, BLOCK, back, older, older, G, PAGE)
                old = load_rows(RAW_V, rows * DV, there, DV, BDV).to(tl.float32)
                mean = (tl.sum(old, 0) + v.to(tl.float32)) / BLOCK
                block = completed // STRIDE
                cmp, due = _at(CMP_TABLE, st_b, b, g, num_cmp, block, completes, inside, G, PAGE)
                tl.store(CMP_V + cmp * DV + dv, mean.to(V.dtype.element_ty), mask=due)
        elif branch == 1:
            row, kept = _at(SEL_TABLE, st_b, b, g, num_sel, pos, exists, inside, G, PAGE)
            to = SEL_V + row * DV
        else:
            slot = _slot(pos, num_win, PAGE)
            row, kept = _at(WIN_TABLE, st_b, b, g, num_win, slot, exists, inside, G, PAGE)
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


@triton.jit
def _pages_of_tile(TABLE, c0, end, newest, lap, num_win, BC: tl.constexpr, PAGE: tl.constexpr):
    """Pages of the tile of keys from ``c0`` on: of its keys up to ``newest``, and of those behind,
    which are of the lap before; -1 where there are none. One load a lap, not one a key, through
    which no key is fetched ahead.
    """
    here = tl.load(TABLE + (c0 + lap) // PAGE, mask=(c0 < end) & (c0 <= newest), other=-1)
    behind = (c0 < end) & (c0 + BC > newest + 1) & (lap > 0)
    before = tl.load(TABLE + (c0 + lap - num_win) // PAGE, mask=behind, other=-1)
    return here, before


@triton.jit(do_not_specialize=["st_b", "C", "num_cmp", "num_win", "cmp_splits"])
def nsa_interval_forward_both_split(
    Q,
    CMP_K,
    CMP_V,
    WIN_K,
    WIN_V,
    O,
    LSE,
    LOGITS,
    POS,
    CMP_TABLE,
    WIN_TABLE,
    st_b,
    C,
    num_cmp,
    num_win,
    cmp_splits,
    block,
    stride,
    scale_log2,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    PREC: tl.constexpr,
    PAGE: tl.constexpr,
    TILED: tl.constexpr,
):
    """One (b, kv head) over one split of the compressed keys, or of the window's ring, whose splits
    come behind: an equal share, in tiles, of the keys that the token sees. Of compressed keys the
    logits are left, too, fp32 to base 2 [B, Q, C]. Of pages, the window's keys are those of the
    ring of as many rows, in its order. TILED: a tile lies within a page, and a lap of the ring is
    whole pages.
    """
    # compressed keys first: one row's splits next to one another would give half of the
    # multiprocessors those of windows alone
    g = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    pos = tl.load(POS + b).to(tl.int32)
    is_cmp = split < cmp_splits
    hi = tl.minimum(tl.where(pos + 1 < block, 0, (pos + 1 - block) // stride + 1), C)
    last = tl.where(is_cmp, hi, tl.minimum(pos + 1, num_win))
    own = tl.where(is_cmp, split, split - cmp_splits)
    splits = tl.where(is_cmp, cmp_splits, tl.num_programs(2) - cmp_splits)
    share = tl.cdiv(tl.cdiv(last, splits), BC) * BC
    begin = own * share
    end = tl.minimum(begin + share, last)
    h = tl.arange(0, M)
    head = (b * G + g) * H + h
    q = load_rows(Q, head * D, (h < H) & (begin < end), D, BD)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BDV], tl.float32)
    # one loop for both, since two would take the shared memory of both
    K = tl.where(is_cmp, CMP_K, WIN_K)
    V = tl.where(is_cmp, CMP_V, WIN_V)
    if PAGE:
        TABLE = tl.where(is_cmp, CMP_TABLE, WIN_TABLE) + b * st_b
        # slots of the ring behind the newest token's hold the lap before
        newest = tl.where(is_cmp, C, pos % num_win)
        lap = tl.where(is_cmp, 0, pos - pos % num_win)
        if TILED:
            here, before = _pages_of_tile(TABLE, begin, end, newest, lap, num_win, BC, PAGE)
    else:
        first = b * tl.where(is_cmp, num_cmp, num_win) * G + g
    for c0 in range(begin, end, BC):
        c = c0 + tl.arange(0, BC)
        kept = c < end
        if PAGE:
            if TILED:
                page = tl.where(c <= newest, here, before)
                slot = c % PAGE
                # a tile ahead, so that the next tile's keys do not wait for the table
                here, before = _pages_of_tile(TABLE, c0 + BC, end, newest, lap, num_win, BC, PAGE)
            else:
                i = c + tl.where(c <= newest, lap, lap - num_win)
                page = tl.load(TABLE + i // PAGE, mask=kept, other=-1)
                slot = i % PAGE
            kept = kept & (page >= 0)
            at = (page.to(tl.int64) * PAGE + slot) * G + g
        else:
            at = first + c.to(tl.int64) * G
        k = load_rows(K, at * D, kept, D, BD)
        v = load_rows(V, at * DV, kept, DV, BDV)
        s = logits(q, k, kept[None, :], scale_log2, PREC)
        left = (h < H)[:, None] & (c < end)[None, :] & is_cmp
        tl.store(LOGITS + head[:, None] * C + c[None, :], s, mask=left)
        m, l, acc = more(s, v, m, l, acc, PREC)
    row = split.to(tl.int64) * tl.num_programs(1) * (G * H) + head
    leave(O, LSE, row, h < H, m, l, acc, DV, BDV)


@triton.jit(do_not_specialize=["num_rows", "C", "cmp_splits", "J"])
def nsa_choose_step(
    LOGITS,
    LSE,
    SCORE,
    EDGE,
    SPARE_J,
    SPARE_S,
    BLOCKS,
    POS,
    num_rows,
    C,
    cmp_splits,
    block,
    stride,
    J,
    L,
    num_initial,
    num_local,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    BH: tl.constexpr,
    BS: tl.constexpr,
    BC: tl.constexpr,
    BJ: tl.constexpr,
    NC: tl.constexpr,
):
    """One (b, kv head): the compressed branch's log-sum-exp from those of its splits, the scores
    from its logits, and the best blocks (nsa.ops.scores).
    """
    at = tl.program_id(0).to(tl.int64)
    b = at // G
    pos = tl.load(POS + b).to(tl.int32)
    hi = tl.minimum(tl.where(pos + 1 < block, 0, (pos + 1 - block) // stride + 1), C)
    h = tl.arange(0, BH)
    n = tl.arange(0, BS)
    parts = tl.load(
        LSE + n.to(tl.int64)[:, None] * num_rows + (at * H + h)[None, :],
        mask=(n < cmp_splits)[:, None] & (h < H)[None, :],
        other=float("-inf"),
    )
    m = tl.max(parts, 0)
    safe = tl.where(m == float("-inf"), 0.0, m)
    total = tl.sum(tl.exp2(parts - safe[None, :]), 0)
    lse = safe + tl.log2(tl.where(total == 0, 1.0, total))
    i = tl.arange(0, R)
    own = tl.minimum(R - i, W).to(tl.float32)[None, :]
    for c0 in range(0, hi, BC):
        c = c0 + tl.arange(0, BC)
        # all heads at once: one after another, each would wait for its own load
        seen = (h < H)[:, None] & (c < hi)[None, :]
        s = tl.load(LOGITS + (at * H + h)[:, None] * C + c[None, :], mask=seen, other=float("-inf"))
        p = tl.sum(tl.where(seen, tl.exp2(s - lse[:, None]), 0.0), 0)
        p = tl.reshape(p, [BC // R, R])
        j = c0 // R + tl.arange(0, BC // R)
        tl.store(SCORE + at * J + j, ranked(tl.sum(p * own, 1)), mask=j < J)
        if W > 1:
            tl.store(EDGE + at * J + j, ranked(tl.sum(p * (W - own), 1)), mask=j < J)
    tl.debug_barrier()
    take_best(
        SCORE,
        EDGE,
        SPARE_J,
        SPARE_S,
        BLOCKS + at * N,
        at,
        pos // L,
        hi,
        0,
        J,
        num_initial,
        num_local,
        N,
        NP,
        R,
        W,
        BJ,
        NC,
    )


@triton.jit(do_not_specialize=["cmp_splits", "win_splits", "sel_splits"])
def nsa_sum_step(
    PART,
    LSE_PART,
    GATE,
    O,
    cmp_splits,
    win_splits,
    sel_splits,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One head of one row: the gated sum of the branches, each summed over its splits and rounded.

    Splits lie in the order cmp, win, sel.
    """
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    dv = tl.arange(0, BDV)
    kind = O.dtype.element_ty
    win = cmp_splits.to(tl.int64) * rows
    sel = (cmp_splits + win_splits).to(tl.int64) * rows
    cmp_o, _ = summed(PART, LSE_PART, row, rows, cmp_splits, DV, BDV, AT_ONCE)
    sel_o, _ = summed(PART + sel * DV, LSE_PART + sel, row, rows, sel_splits, DV, BDV, AT_ONCE)
    win_o, _ = summed(PART + win * DV, LSE_PART + win, row, rows, win_splits, DV, BDV, AT_ONCE)
    o = tl.load(GATE + row * 3).to(tl.float32) * cmp_o.to(kind).to(tl.float32)
    o += tl.load(GATE + row * 3 + 1).to(tl.float32) * sel_o.to(kind).to(tl.float32)
    o += tl.load(GATE + row * 3 + 2).to(tl.float32) * win_o.to(kind).to(tl.float32)
    tl.store(O + row * DV + dv, o.to(kind), mask=dv < DV)


def append(
    x: Projected, buffers: Buffers, geometry: StepGeometry, pages: StepPages | None = None
) -> tuple[Tensor, Tensor]:
    """Store the token, and the compressed block that it completes; (q [B, 1, Q, D] turned, gates
    [B, 1, Q, 3]). ``pages``: where the buffers are pools of pages.
    """
    (B, _, HQ, D), (G, DV) = x.q.shape, buffers.sel_v.shape[2:]
    q, gates = x.q.new_empty(x.q.shape), x.gates
    if gates is None:
        gates = x.q.new_empty(B, 1, HQ, 3)
    interleaved = geometry.rope == "interleaved"
    rows = held(buffers, pages)
    launch(
        nsa_append_step,
        (B, G, 3),
        x.q,
        x.k,
        x.v,
        x.turns,
        x.position,
        x.up,
        x.down,
        q,
        gates,
        buffers.sel_k,
        buffers.sel_v,
        buffers.win_k,
        buffers.win_v,
        buffers.raw_k,
        buffers.raw_v,
        buffers.cmp_k,
        buffers.cmp_v,
        *((None,) * 5 if pages is None else (*pages.tables, pages.seq_lens)),
        0 if pages is None else pages.sel.stride(0),
        rows.tokens + 1,
        rows.window,
        rows.blocks + 1,
        float(geometry.temperature),
        G,
        HQ // G,
        D,
        DV,
        x.k.shape[2] // G,
        geometry.block,
        geometry.stride,
        2 if interleaved else 1,
        1 if interleaved else D // 2,
        geometry.rope != "none",
        x.gates is None,
        padded(HQ // G, 1),
        padded(D // 2, 1),
        padded(D, 1),
        padded(DV, 1),
        padded(geometry.block, 1),
        0 if pages is None else buffers.sel_k.shape[1],
        num_warps=4 if D <= 128 else 8,
    )
    return q, gates


def attend(
    q: Tensor,
    gates: Tensor,
    position: Tensor,
    buffers: Buffers,
    geometry: StepGeometry,
    pages: StepPages | None = None,
) -> tuple[Tensor, Tensor]:
    """(o [B, 1, Q, DV], blocks int32 [B, 1, G, N]) of what the buffers hold; ``pages`` as in
    `append`.
    """
    (B, _, HQ, D), (G, DV) = q.shape, buffers.sel_v.shape[2:]
    (S, w, C), L = held(buffers, pages), geometry.sel_block
    N, H, start = geometry.num_selected, HQ // G, position
    if pages is not None:
        position = pages.last  # of a row that takes no token, the last that it has
    J, R, W = cdiv(S, L), L // geometry.stride, geometry.block // geometry.stride
    cmp_splits = interval_splits(B * G, C, banded=False)
    win_splits = interval_splits(B * G, w, banded=True)
    per_split = selected_per_split(B * G, N, buffers.sel_k, buffers.sel_v, L)
    sel_splits, before = cdiv(N, per_split), cmp_splits + win_splits
    part = q.new_empty(before + sel_splits, B, 1, HQ, DV, dtype=torch.float32)
    lse = q.new_empty(before + sel_splits, B, 1, HQ, dtype=torch.float32)
    left = q.new_empty(B, HQ, max(1, C), dtype=torch.float32)
    BC, num_warps, num_stages = TILES[min(3, width_class(q, DV) + (precision(q) == "ieee"))]
    page = 0 if pages is None else buffers.cmp_k.shape[1]
    launch(
        nsa_interval_forward_both_split,
        (G, B, before),
        q,
        buffers.cmp_k,
        buffers.cmp_v,
        buffers.win_k,
        buffers.win_v,
        part,
        lse,
        left,
        position,
        *((None, None) if pages is None else (pages.cmp, pages.win)),
        0 if pages is None else pages.cmp.stride(0),
        C,
        C + 1,
        w,
        cmp_splits,
        geometry.block,
        geometry.stride,
        geometry.scale * LOG2E,
        G,
        H,
        D,
        DV,
        padded(H),
        BC,
        padded(D),
        padded(DV),
        precision(q),
        page,
        page > 0 and page % BC == 0 and w % page == 0,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    score = q.new_empty(2, B * G, J, dtype=torch.float32)
    candidates = max(CANDIDATES, padded(N, 1))
    spare_s = q.new_empty(B * G, candidates, dtype=torch.float32)
    spare_j = q.new_empty(B * G, candidates, dtype=torch.int32)
    blocks = q.new_empty(B, 1, G, N, dtype=torch.int32)
    launch(
        nsa_choose_step,
        (B * G,),
        left,
        lse,
        score[0],
        score[1],
        spare_j,
        spare_s,
        blocks,
        position,
        B * HQ,
        C,
        cmp_splits,
        geometry.block,
        geometry.stride,
        J,
        L,
        geometry.num_initial,
        geometry.num_local,
        G,
        H,
        N,
        padded(N, 1),
        R,
        W,
        padded(H, 1),
        padded(cmp_splits, 1),
        max(min(LOGITS_AT_ONCE // padded(H, 1), padded(C, 1)), R),
        padded(J, 1),
        candidates,
        num_warps=CHOOSE_WARPS,
    )
    into: dict[str, Any] = {"part": (part[before:], lse[before:]), "per_split": per_split}
    into["scale"] = geometry.scale
    if pages is None:
        k, v = buffers.sel_k[:, :S], buffers.sel_v[:, :S]
        selected_parts(q, k, v, blocks, sel_block=L, q_start=position, **into)
    else:
        group = Pages(buffers.sel_k, buffers.sel_v, pages.sel)
        into |= {"start": start, "seq_lens": pages.seq_lens, "num_pages": J}
        selected_parts_of_pages(q, group, blocks, **into)
    o = q.new_empty(B, 1, HQ, DV)
    launch(
        nsa_sum_step,
        (B * HQ,),
        part,
        lse,
        gates,
        o,
        cmp_splits,
        win_splits,
        sel_splits,
        DV,
        padded(DV),
        AT_ONCE,
        num_warps=SUM_WARPS,
    )
    return o, blocks
