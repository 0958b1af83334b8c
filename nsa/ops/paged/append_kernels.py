"""What a step over pages stores of its tokens: a token is one entry of a page of each group, and of
the raw tokens a block's mean is made once it is complete.

B batch, T tokens a row, G kv heads, P entries a page.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.kernels.common import load_rows, padded, rows
from nsa.ops.kernels.launch import launch
from nsa.ops.paged.key_ends import ends
from nsa.ops.paged.pages import KV, LayerPages

COPY_WARPS = 1


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
    index = ends(tl.load(START + b).to(tl.int32), block, stride) + tl.program_id(0) % MOST
    if index < ends(tl.load(LEN + b), block, stride):
        i = tl.arange(0, LP)
        token = index * stride + i
        page = tl.load(RAW_TABLE + b * st_b + token // P, mask=i < block, other=-1)
        inside = (i < block) & (page >= 0)
        to = tl.load(CMP_TABLE + b * st_b + index // P)
        if to >= 0:
            _mean(K, page, token % P, inside, to, index % P, g, block, G, P, D, BD)
            _mean(V, page, token % P, inside, to, index % P, g, block, G, P, DV, BDV)


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
