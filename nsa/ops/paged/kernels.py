"""A decode step over pages: what `nsa.ops.decode.kernels` does of contiguous rows, through a table.

A tile of keys lies within a page, so that it costs one load of an int32. A step of more rows than
one captured is the same launch: positions and lengths are read on the device.

B batch, T queries, Q query heads, G kv heads, H query heads per kv head, N slots, P entries a page.
Each split leaves a normalised part and its lse (fp32, to base 2); the splits depend on shapes
alone, and are summed in their order: no atomics, bitwise repeatable.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.decode import kernels as contiguous
from nsa.ops.decode.kernels import leave, logits, more
from nsa.ops.kernels.common import (
    LOG2E,
    cdiv,
    load_rows,
    named_by,
    padded,
    precision,
    rows,
    width_class,
)
from nsa.ops.kernels.launch import launch
from nsa.ops.paged.pages import KV, LayerPages, Pages
from nsa.ops.scores.kernels import CANDIDATES, choice_tile, nsa_choose, ranked

_BRANCH = {"BANDED": "_band"}  # as in nsa.ops.interval.tile_loads


@triton.jit
def _ends(seen, block, stride):
    """Keys that end within ``seen`` tokens."""
    return tl.where(seen < block, 0, (seen - block) // stride + 1)


@triton.jit
def _encode(x, S, head, inside, FP8: tl.constexpr):
    if FP8:
        s = tl.load(S + head, mask=inside, other=1.0)
        x = x.to(tl.float32) / s
        # else NaN becomes 448 on a GPU, and what it spoilt looks sound
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    return x


@triton.jit
def _copy(
    X,
    POOL,
    S,
    page,
    slot,
    ok,
    sx_g,
    sp_n,
    sp_s,
    G: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    FP8: tl.constexpr,
):
    """One entry [G, D] of X to its slot of a page."""
    i = tl.arange(0, W)
    head = i // D
    inside = (i < G * D) & ok
    x = tl.load(X + head.to(tl.int64) * sx_g + i % D, mask=inside, other=0.0)
    x = _encode(x, S, head, inside, FP8)
    tl.store(POOL + page.to(tl.int64) * sp_n + slot * sp_s + i, x, mask=inside)


@triton.jit
def nsa_append_pages(
    SEL_K,
    SEL_V,
    WIN_K,
    WIN_V,
    RAW_K,
    RAW_V,
    SEL_KP,
    SEL_VP,
    WIN_KP,
    WIN_VP,
    RAW_KP,
    RAW_VP,
    SEL_TABLE,
    WIN_TABLE,
    RAW_TABLE,
    SEL_KS,
    SEL_VS,
    WIN_KS,
    WIN_VS,
    START,
    LEN,
    T,
    st_b,
    s_sel_kb,
    s_sel_kt,
    s_sel_kg,
    s_sel_vb,
    s_sel_vt,
    s_sel_vg,
    s_win_kb,
    s_win_kt,
    s_win_kg,
    s_win_vb,
    s_win_vt,
    s_win_vg,
    s_raw_kb,
    s_raw_kt,
    s_raw_kg,
    s_raw_vb,
    s_raw_vt,
    s_raw_vg,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
    WV: tl.constexpr,
    FP8: tl.constexpr,
):
    """One token of one row a program, to the page of its group: 0 selected, 1 window, 2 raw."""
    b = (tl.program_id(0) // T).to(tl.int64)
    t = (tl.program_id(0) % T).to(tl.int64)
    group = tl.program_id(1)
    pos = tl.load(START + b).to(tl.int32) + t.to(tl.int32)
    ok = pos < tl.load(LEN + b)
    slot = pos % P
    at = b * st_b + pos // P
    nk, nv, sk, sv = P * G * D, P * G * DV, G * D, G * DV
    if group == 0:
        page = tl.load(SEL_TABLE + at, mask=ok, other=-1)
        ok = ok & (page >= 0)
        x = SEL_K + b * s_sel_kb + t * s_sel_kt
        _copy(x, SEL_KP, SEL_KS, page, slot, ok, s_sel_kg, nk, sk, G, D, W, FP8)
        x = SEL_V + b * s_sel_vb + t * s_sel_vt
        _copy(x, SEL_VP, SEL_VS, page, slot, ok, s_sel_vg, nv, sv, G, DV, WV, FP8)
    elif group == 1:
        page = tl.load(WIN_TABLE + at, mask=ok, other=-1)
        ok = ok & (page >= 0)
        x = WIN_K + b * s_win_kb + t * s_win_kt
        _copy(x, WIN_KP, WIN_KS, page, slot, ok, s_win_kg, nk, sk, G, D, W, FP8)
        x = WIN_V + b * s_win_vb + t * s_win_vt
        _copy(x, WIN_VP, WIN_VS, page, slot, ok, s_win_vg, nv, sv, G, DV, WV, FP8)
    else:
        page = tl.load(RAW_TABLE + at, mask=ok, other=-1)
        ok = ok & (page >= 0)
        x = RAW_K + b * s_raw_kb + t * s_raw_kt
        _copy(x, RAW_KP, SEL_KS, page, slot, ok, s_raw_kg, nk, sk, G, D, W, False)
        x = RAW_V + b * s_raw_vb + t * s_raw_vt
        _copy(x, RAW_VP, SEL_VS, page, slot, ok, s_raw_vg, nv, sv, G, DV, WV, False)


@triton.jit
def _mean(
    POOL,
    page,
    slot,
    inside,
    to,
    to_slot,
    g,
    L,
    G: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    at = ((page.to(tl.int64) * P + slot) * G + g) * D
    x = load_rows(POOL, at, inside, D, BD).to(tl.float32)
    d = tl.arange(0, BD)
    out = ((to.to(tl.int64) * P + to_slot) * G + g) * D
    tl.store(POOL + out + d, (tl.sum(x, 0) / L).to(POOL.dtype.element_ty), mask=d < D)


@triton.jit
def nsa_means_pages(
    K,
    V,
    RAW_TABLE,
    CMP_TABLE,
    START,
    LEN,
    st_b,
    block,
    stride,
    MOST: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    P: tl.constexpr,
    LP: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
):
    """The mean of one of the at most MOST blocks of a row that this step completes, one kv head a
    program. Raw tokens and blocks are pages of one pool.
    """
    b = (tl.program_id(0) // MOST).to(tl.int64)
    g = tl.program_id(1)
    index = _ends(tl.load(START + b).to(tl.int32), block, stride) + tl.program_id(0) % MOST
    if index < _ends(tl.load(LEN + b), block, stride):
        i = tl.arange(0, LP)
        token = index * stride + i
        page = tl.load(RAW_TABLE + b * st_b + token // P, mask=i < block, other=-1)
        inside = (i < block) & (page >= 0)
        to = tl.load(CMP_TABLE + b * st_b + index // P)
        if to >= 0:
            _mean(K, page, token % P, inside, to, index % P, g, block, G, P, D, BD)
            _mean(V, page, token % P, inside, to, index % P, g, block, G, P, DV, BDV)


@triton.jit(repr=named_by("nsa_interval_forward_pages", _BRANCH))
def nsa_interval_forward_pages(
    Q,
    K,
    V,
    TABLE,
    O,
    LSE,
    START,
    LEN,
    KS,
    VS,
    T,
    block,
    stride,
    width,
    sq_b,
    sq_t,
    sq_h,
    st_b,
    scale_log2,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BANDED: tl.constexpr,
    FP8: tl.constexpr,
    PREC: tl.constexpr,
):
    """All queries of one (b, kv head) over one split of the keys that any of them sees: an equal
    share, in tiles of whole pages or equal parts of one.
    """
    split = tl.program_id(0)
    g = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, M)
    live = i < T * H
    t = tl.minimum(i // H, T - 1)
    h = (i % H).to(tl.int64)
    seen = tl.minimum(t + tl.load(START + b).to(tl.int32) + 1, tl.load(LEN + b))
    hi = _ends(seen, block, stride)
    lo = tl.zeros_like(hi)
    if BANDED:
        lo = tl.maximum(hi - width, 0)
    first = tl.min(lo, 0) // BC * BC
    last = tl.max(hi, 0)
    share = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), tl.num_programs(0)), BC) * BC
    begin = first + split * share
    end = tl.minimum(begin + share, last)
    q = load_rows(
        Q + b * sq_b, t.to(tl.int64) * sq_t + (g * H + h) * sq_h, live & (begin < end), D, BD
    )
    if FP8:
        scale_log2 *= tl.load(KS + g)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BDV], tl.float32)
    for c0 in range(begin, end, BC):
        page = tl.load(TABLE + b * st_b + c0 // P)
        c = c0 + tl.arange(0, BC)
        inside = (c < end) & (page >= 0)
        at = (page.to(tl.int64) * P + c % P) * G + g
        k = load_rows(K, at * D, inside, D, BD).to(q.dtype)
        v = load_rows(V, at * DV, inside, DV, BDV).to(q.dtype)
        kept = inside[None, :] & (c[None, :] >= lo[:, None]) & (c[None, :] < hi[:, None])
        m, l, acc = more(logits(q, k, kept, scale_log2, PREC), v, m, l, acc, PREC)
    if FP8:
        acc *= tl.load(VS + g)
    row = ((split * tl.num_programs(2) + b) * T + t) * (G * H) + g * H + h
    leave(O, LSE, row, live, m, l, acc, DV, BDV)


@triton.jit
def nsa_scores_pages(
    Q,
    K,
    TABLE,
    LSE,
    SCORE,
    EDGE,
    START,
    LEN,
    T,
    C,
    block,
    stride,
    J,
    sq_b,
    sq_t,
    sq_h,
    st_b,
    scale_log2,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    PREC: tl.constexpr,
):
    """As `nsa_scores`, of one query (b, t) of a kv head and one tile of compressed keys: all heads
    are the rows of one product, and then summed.
    """
    c0 = tl.program_id(0) * BC
    at_row = tl.program_id(1)
    g = tl.program_id(2)
    b = (at_row // T).to(tl.int64)
    t = at_row % T
    pos = t + tl.load(START + b).to(tl.int32)
    # `nsa_choose` reads what ends at the position, of rows that hold no token there, too
    if c0 < tl.minimum(_ends(pos + 1, block, stride), C):
        hi = _ends(tl.minimum(pos + 1, tl.load(LEN + b)), block, stride)
        h = tl.arange(0, M)
        page = tl.load(TABLE + b * st_b + c0 // P)
        c = c0 + tl.arange(0, BC)
        k = load_rows(
            K, ((page.to(tl.int64) * P + c % P) * G + g) * D, (c < hi) & (page >= 0), D, BD
        )
        q = load_rows(
            Q + b * sq_b + t.to(tl.int64) * sq_t, (g * H + h).to(tl.int64) * sq_h, h < H, D, BD
        )
        lse = tl.load(LSE + at_row.to(tl.int64) * (G * H) + g * H + h, mask=h < H, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PREC) * scale_log2
        kept = (h < H)[:, None] & ((c < hi) & (page >= 0))[None, :]
        p = tl.sum(tl.where(kept, tl.exp2(s - lse[:, None]), 0.0), 0)
        i = tl.arange(0, R)
        own = tl.minimum(R - i, W).to(tl.float32)[None, :]
        p = tl.reshape(p, [BC // R, R])
        j = c0 // R + tl.arange(0, BC // R)
        at = (at_row.to(tl.int64) * G + g) * J + j
        tl.store(SCORE + at, ranked(tl.sum(p * own, 1)), mask=j < J)
        if W > 1:
            tl.store(EDGE + at, ranked(tl.sum(p * (W - own), 1)), mask=j < J)


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


COPY_WARPS, SCORE_WARPS = 1, 4


def append(pages: LayerPages, kv_sel: KV, kv_win: KV, kv_raw: KV) -> None:
    """Store this step's tokens, each kv [B, T, G, D]."""
    new = [rows(x) for x in (*kv_sel, *kv_win, *kv_raw)]
    (B, T, G, D), DV = new[0].shape, new[1].shape[3]
    fp8 = pages.sel.scales is not None
    scales = (*(pages.sel.scales or (None, None)), *(pages.win.scales or (None, None)))
    launch(
        nsa_append_pages,
        (B * T, 3),
        *new,
        *(x for group in (pages.sel, pages.win, pages.raw) for x in (group.k, group.v)),
        pages.sel.table,
        pages.win.table,
        pages.raw.table,
        *scales,
        pages.start_B,
        pages.seq_lens,
        T,
        pages.sel.table.stride(0),
        *(n for x in new for n in x.stride()[:3]),
        G,
        D,
        DV,
        pages.sel.k.shape[1],
        padded(G * D),
        padded(G * DV),
        fp8,
        num_warps=COPY_WARPS,
    )


def means(pages: LayerPages, T: int, *, block: int, stride: int) -> None:
    """The mean of each block that this step's T tokens a row complete, from the raw tokens' pages,
    which hold those tokens already.
    """
    k, v = pages.raw.k, pages.raw.v
    most = (T - 1) // stride + 1
    (P, G, D), DV = k.shape[1:], v.shape[3]
    launch(
        nsa_means_pages,
        (pages.seq_lens.shape[0] * most, G),
        k,
        v,
        pages.raw.table,
        pages.cmp.table,
        pages.start_B,
        pages.seq_lens,
        pages.raw.table.stride(0),
        block,
        stride,
        most,
        G,
        D,
        DV,
        P,
        padded(block),
        padded(D),
        padded(DV),
        num_warps=COPY_WARPS,
    )


def interval(
    q: Tensor,
    group: Pages,
    pages: LayerPages,
    *,
    block: int,
    stride: int,
    width: int | None,
    scale: float,
) -> KV:
    """(o [B, T, HQ, DV], lse to base 2 [B, T, HQ]) of `few_queries` q [B, T, HQ, D]; as
    `nsa.ops.interval.forward_kernels.forward` of the keys that ``group`` holds.
    """
    (B, T, HQ, D), (P, G, DV) = q.shape, group.v.shape[1:]
    H, banded = HQ // G, width is not None
    most = max(1, pages.max_tokens if banded else (pages.max_tokens - block) // stride + 1)
    seen = most if width is None else min(most, width + T - 1)
    splits = contiguous.interval_splits(B * G, seen, banded=banded)
    into = q.new_empty(B, T, HQ, DV), q.new_empty(B, T, HQ, dtype=torch.float32)
    part = contiguous._parts(*into, splits)
    tiles = contiguous.TILES[min(3, width_class(q, DV) + (q.dtype == torch.float32))]
    scales = (None, None) if group.scales is None else group.scales
    launch(
        nsa_interval_forward_pages,
        (splits, G, B),
        q,
        group.k,
        group.v,
        group.table,
        *part,
        pages.start_B,
        pages.seq_lens,
        *scales,
        T,
        block,
        stride,
        width or 0,
        *q.stride()[:3],
        group.table.stride(0),
        scale * LOG2E,
        G,
        H,
        D,
        DV,
        P,
        padded(T * H),
        min(P, tiles[0]),
        padded(D),
        padded(DV),
        banded,
        group.scales is not None,
        precision(q),
        num_warps=tiles[1],
        num_stages=tiles[2],
    )
    contiguous.sum_interval(part, into, splits, banded=banded)
    return into


def choose(
    q: Tensor,
    lse: Tensor,
    pages: LayerPages,
    *,
    block: int,
    stride: int,
    num_selected: int,
    forced: tuple[int, int],
    scale: float,
) -> Tensor:
    """Blocks int32 [B, T, G, N] as `nsa.ops.scores.choose` has them; ``lse`` as `interval` left it
    of the compressed keys, ``forced`` the numbers of initial and of local blocks.
    """
    (B, T, HQ, D), (P, G) = q.shape, pages.cmp.k.shape[1:3]
    J, R, W = -(-pages.max_tokens // P), P // stride, block // stride
    C = max(0, (pages.max_tokens - block) // stride + 1)
    H, BC = HQ // G, max(R, min(P, 64))
    score, edge = q.new_empty(2, B * T, G, J, dtype=torch.float32)
    candidates = max(CANDIDATES, padded(num_selected, 1))
    spare = q.new_empty(B * T * G, candidates, dtype=torch.int32)
    blocks = q.new_empty(B, T, G, num_selected, dtype=torch.int32)
    if C:
        launch(
            nsa_scores_pages,
            (cdiv(C, BC), B * T, G),
            q,
            pages.cmp.k,
            pages.cmp.table,
            lse,
            score,
            edge,
            pages.start_B,
            pages.seq_lens,
            T,
            C,
            block,
            stride,
            J,
            *q.stride()[:3],
            pages.cmp.table.stride(0),
            scale * LOG2E,
            G,
            H,
            D,
            P,
            R,
            W,
            padded(H),
            BC,
            padded(D),
            precision(q),
            num_warps=SCORE_WARPS,
        )
    launch(
        nsa_choose,
        (B * T * G,),
        score,
        edge,
        spare,
        blocks,
        pages.start_B,
        None,
        0,
        0,
        T,
        T,
        C,
        0,
        block,
        stride,
        J,
        P,
        *forced,
        G,
        num_selected,
        padded(num_selected, 1),
        R,
        *choice_tile(padded(J, 1), candidates),
        candidates,
        True,
        False,
        W > 1,
        num_warps=1,
    )
    return blocks


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
