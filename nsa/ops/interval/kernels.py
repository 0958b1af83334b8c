"""Attention over one interval of keys a query, FlashAttention style: the compressed and the sliding
branch.

B batch, T queries, C keys, Q query heads, G kv heads, H query heads per kv head. The query at
position p sees keys lo .. hi - 1: hi = (p + 1 - block) // stride + 1 (0 before the first block
ends), lo = max(first // stride, hi - width). The compressed branch is (block l, stride d, any
width); the sliding one (1, 1, w); full causal attention (1, 1, any). Both ends ascend with p, so
that a tile of queries has masked key tiles at its two ends only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.decode import kernels as decode
from nsa.ops.interval import parts
from nsa.ops.kernels import common
from nsa.ops.kernels.common import (
    LOG2E,
    cdiv,
    described,
    named_by,
    padded,
    precision,
    rows,
    starts,
    width_class,
)
from nsa.ops.kernels.launch import launch
from nsa.ops.kernels.tiles import sm_of, smaller
from nsa.routing.thresholds import GRID_LIMIT, SORT_MIN_ROWS
from nsa.settings import is_off

# What a profiler shows: the sliding branch's launches, and those by the copy engine.
_SHOWN = {"BANDED": "_band", "COPY": "_copy"}


@triton.jit
def _bounds(
    t,
    b,
    T,
    C,
    q0,
    block,
    stride,
    width,
    Q0,
    FIRST,
    RAGGED: tl.constexpr,
    DOCS: tl.constexpr,
    BANDED: tl.constexpr,
):
    """(lo, hi) of queries t; rows beyond T are given the last one's."""
    t = tl.minimum(t, T - 1)
    pos = t + q0
    if RAGGED:
        pos = t + tl.load(Q0 + b).to(tl.int32)
    end = tl.where(pos + 1 < block, 0, (pos + 1 - block) // stride + 1)
    lo = tl.zeros_like(pos)
    if DOCS:
        lo = tl.load(FIRST + t).to(tl.int32) // stride
    if BANDED:
        lo = tl.maximum(lo, end - width)
    return lo, tl.minimum(end, C)


@triton.jit
def _tile(X, at, stride, inside, d, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr):
    """Rows ``at`` of X as [rows, BD]; 0 outside, which EVEN promises not to meet."""
    pointer = X + at.to(tl.int64)[:, None] * stride + d[None, :]
    if D == BD:
        if EVEN:
            return tl.load(pointer)
        return tl.load(pointer, mask=inside[:, None], other=0.0)
    return tl.load(pointer, mask=inside[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _tile_of(
    X,
    b,
    head,
    r0,
    end,
    stride,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BD: tl.constexpr,
    EVEN: tl.constexpr,
    COPY: tl.constexpr,
):
    """Rows r0 .. of X: of (b, head) by the copy engine, where X is a descriptor (COPY), else of the
    (b, head) that X points to.
    """
    if COPY:
        x = tl.reshape(X.load([b, r0, head, 0]), [ROWS, BD])
    else:
        at = r0 + tl.arange(0, ROWS)
        x = _tile(X, at, stride, at < end, tl.arange(0, BD), D, BD, EVEN)
    return x


@triton.jit
def _step(
    q,
    K,
    V,
    b,
    g,
    c0,
    m,
    l,
    acc,
    lo,
    hi,
    C,
    sk_s,
    sv_s,
    scale_log2,
    D: tl.constexpr,
    DV: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    MASK: tl.constexpr,
    PREC: tl.constexpr,
    COPY: tl.constexpr,
):
    c = c0 + tl.arange(0, BC)
    k = _tile_of(K, b, g, c0, C, sk_s, D, BC, BD, not MASK, COPY)
    s = tl.dot(q, tl.trans(k), input_precision=PREC) * scale_log2
    if MASK:
        s = tl.where((c[None, :] >= lo[:, None]) & (c[None, :] < hi[:, None]), s, float("-inf"))
    new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(new == float("-inf"), 0.0, new) if MASK else new
    p = tl.exp2(s - safe[:, None])
    a = tl.exp2(m - safe)
    v = _tile_of(V, b, g, c0, C, sv_s, DV, BC, BDV, not MASK, COPY)
    acc = tl.dot(p.to(v.dtype), v, acc * a[:, None], input_precision=PREC)
    return new, l * a + tl.sum(p, 1), acc


@triton.jit(repr=named_by("nsa_interval_forward", _SHOWN))
def nsa_interval_forward(
    Q,
    K,
    V,
    O,
    LSE,
    Q0,
    FIRST,
    T,
    TO,
    C,
    q0,
    block,
    stride,
    width,
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
    H: tl.constexpr,
    HQ: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    RAGGED: tl.constexpr,
    DOCS: tl.constexpr,
    BANDED: tl.constexpr,
    PREC: tl.constexpr,
    COPY: tl.constexpr,
):
    t0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # the longest tiles first
    head = tl.program_id(1).to(tl.int64)  # its stride times it may exceed 2^31
    b_ = tl.program_id(2)
    b = b_.to(tl.int64)
    g = tl.program_id(1) // H
    t = t0 + tl.arange(0, BM)
    lo, hi = _bounds(t, b, T, C, q0, block, stride, width, Q0, FIRST, RAGGED, DOCS, BANDED)
    if not COPY:
        K += b * sk_b + g.to(tl.int64) * sk_g
        V += b * sv_b + g.to(tl.int64) * sv_g
    q = _tile(Q + b * sq_b + head * sq_h, t, sq_t, t < T, tl.arange(0, BD), D, BD, False)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)
    last = tl.max(hi, 0)
    inner = 0
    if DOCS or BANDED:
        inner = tl.cdiv(tl.max(lo, 0), BC) * BC
        for c0 in range(tl.min(lo, 0) // BC * BC, tl.minimum(inner, last), BC):
            m, l, acc = _step(
                q,
                K,
                V,
                b_,
                g,
                c0,
                m,
                l,
                acc,
                lo,
                hi,
                C,
                sk_s,
                sv_s,
                scale_log2,
                D,
                DV,
                BC,
                BD,
                BDV,
                True,
                PREC,
                COPY,
            )
    outer = tl.maximum(inner, tl.min(hi, 0) // BC * BC)
    for c0 in range(inner, outer, BC):
        m, l, acc = _step(
            q,
            K,
            V,
            b_,
            g,
            c0,
            m,
            l,
            acc,
            lo,
            hi,
            C,
            sk_s,
            sv_s,
            scale_log2,
            D,
            DV,
            BC,
            BD,
            BDV,
            False,
            PREC,
            COPY,
        )
    for c0 in range(outer, last, BC):
        m, l, acc = _step(
            q,
            K,
            V,
            b_,
            g,
            c0,
            m,
            l,
            acc,
            lo,
            hi,
            C,
            sk_s,
            sv_s,
            scale_log2,
            D,
            DV,
            BC,
            BD,
            BDV,
            True,
            PREC,
            COPY,
        )
    some = l != 0  # NaN stays NaN
    o = acc / tl.where(some, l, 1.0)[:, None]
    row = (b * TO + t) * HQ + head
    dv = tl.arange(0, BDV)
    tl.store(
        O + row[:, None] * DV + dv[None, :],
        o.to(O.dtype.element_ty),
        mask=(t < T)[:, None] & (dv < DV)[None, :],
    )
    tl.store(
        LSE + row, tl.where(some, m + tl.log2(tl.where(some, l, 1.0)), float("-inf")), mask=t < T
    )


@triton.jit
def _of_rows(LSE, DELTA, row, live):
    """(lse, delta), with lse = +inf where a row sees nothing, so that all of its weights are 0."""
    lse = tl.load(LSE + row, mask=live, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse), tl.load(
        DELTA + row, mask=live, other=0.0
    )


@triton.jit
def _step_q(
    q,
    do,
    K,
    V,
    b,
    g,
    c0,
    acc,
    lo,
    hi,
    lse,
    delta,
    C,
    sk_s,
    sv_s,
    scale_log2,
    D: tl.constexpr,
    DV: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    MASK: tl.constexpr,
    PREC: tl.constexpr,
    COPY: tl.constexpr,
):
    c = c0 + tl.arange(0, BC)
    k = _tile_of(K, b, g, c0, C, sk_s, D, BC, BD, not MASK, COPY)
    v = _tile_of(V, b, g, c0, C, sv_s, DV, BC, BDV, not MASK, COPY)
    p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PREC) * scale_log2 - lse[:, None])
    if MASK:
        p = tl.where((c[None, :] >= lo[:, None]) & (c[None, :] < hi[:, None]), p, 0.0)
    ds = p * (tl.dot(do, tl.trans(v), input_precision=PREC) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, acc, input_precision=PREC)


@triton.jit
def _keys_q(
    q,
    do,
    K,
    V,
    b,
    g,
    acc,
    lo,
    hi,
    lse,
    delta,
    C,
    sk_s,
    sv_s,
    scale_log2,
    D: tl.constexpr,
    DV: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BEGINS: tl.constexpr,
    PREC: tl.constexpr,
    COPY: tl.constexpr,
):
    """``acc`` with what keys lo .. hi - 1 add to dQ / scale. BEGINS: lo may be more than 0."""
    last = tl.max(hi, 0)
    inner = 0
    if BEGINS:
        inner = tl.cdiv(tl.max(lo, 0), BC) * BC
        for c0 in range(tl.min(lo, 0) // BC * BC, tl.minimum(inner, last), BC):
            acc = _step_q(
                q,
                do,
                K,
                V,
                b,
                g,
                c0,
                acc,
                lo,
                hi,
                lse,
                delta,
                C,
                sk_s,
                sv_s,
                scale_log2,
                D,
                DV,
                BC,
                BD,
                BDV,
                True,
                PREC,
                COPY,
            )
    outer = tl.maximum(inner, tl.min(hi, 0) // BC * BC)
    for c0 in range(inner, outer, BC):
        acc = _step_q(
            q,
            do,
            K,
            V,
            b,
            g,
            c0,
            acc,
            lo,
            hi,
            lse,
            delta,
            C,
            sk_s,
            sv_s,
            scale_log2,
            D,
            DV,
            BC,
            BD,
            BDV,
            False,
            PREC,
            COPY,
        )
    for c0 in range(outer, last, BC):
        acc = _step_q(
            q,
            do,
            K,
            V,
            b,
            g,
            c0,
            acc,
            lo,
            hi,
            lse,
            delta,
            C,
            sk_s,
            sv_s,
            scale_log2,
            D,
            DV,
            BC,
            BD,
            BDV,
            True,
            PREC,
            COPY,
        )
    return acc


@triton.jit(repr=named_by("nsa_interval_backward_q", _SHOWN))
def nsa_interval_backward_q(
    Q,
    K,
    V,
    DO,
    LSE,
    DELTA,
    DQ,
    Q0,
    FIRST,
    T,
    TO,
    C,
    q0,
    block,
    stride,
    width,
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
    H: tl.constexpr,
    HQ: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    RAGGED: tl.constexpr,
    DOCS: tl.constexpr,
    BANDED: tl.constexpr,
    PREC: tl.constexpr,
    ADD: tl.constexpr,
    COPY: tl.constexpr,
):
    """dQ of a tile of queries. ADD to what DQ holds."""
    t0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    head = tl.program_id(1).to(tl.int64)  # its stride times it may exceed 2^31
    b_ = tl.program_id(2)
    b = b_.to(tl.int64)
    g = tl.program_id(1) // H
    t = t0 + tl.arange(0, BM)
    live = t < T
    lo, hi = _bounds(t, b, T, C, q0, block, stride, width, Q0, FIRST, RAGGED, DOCS, BANDED)
    if not COPY:
        K += b * sk_b + g.to(tl.int64) * sk_g
        V += b * sv_b + g.to(tl.int64) * sv_g
    d = tl.arange(0, BD)
    q = _tile(Q + b * sq_b + head * sq_h, t, sq_t, live, d, D, BD, False)
    row = (b * TO + t) * HQ + head
    do = _tile(DO, row, DV, live, tl.arange(0, BDV), DV, BDV, False)
    lse, delta = _of_rows(LSE, DELTA, row, live)
    acc = tl.zeros([BM, BD], tl.float32)
    acc = _keys_q(
        q,
        do,
        K,
        V,
        b_,
        g,
        acc,
        lo,
        hi,
        lse,
        delta,
        C,
        sk_s,
        sv_s,
        scale_log2,
        D,
        DV,
        BC,
        BD,
        BDV,
        DOCS or BANDED,
        PREC,
        COPY,
    )
    acc *= scale
    to = DQ + row[:, None] * D + d[None, :]
    mask = live[:, None] & (d < D)[None, :]
    if ADD:
        acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, acc.to(DQ.dtype.element_ty), mask=mask)


@triton.jit(repr=named_by("nsa_interval_backward_q_both", {"COPY": "_copy"}))
def nsa_interval_backward_q_both(
    Q,
    K,
    V,
    K_BAND,
    V_BAND,
    DO,
    LSE,
    LSE_BAND,
    DELTA,
    DELTA_BAND,
    DQ,
    Q0,
    FIRST,
    T,
    C,
    C_BAND,
    q0,
    block,
    stride,
    width,
    block_band,
    sq_b,
    sq_t,
    sq_h,
    sk_b,
    sk_s,
    sk_g,
    sv_b,
    sv_s,
    sv_g,
    skb_b,
    skb_s,
    skb_g,
    svb_b,
    svb_s,
    svb_g,
    scale,
    scale_log2,
    H: tl.constexpr,
    HQ: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    RAGGED: tl.constexpr,
    DOCS: tl.constexpr,
    PREC: tl.constexpr,
    COPY: tl.constexpr,
):
    """dQ of a tile of queries from both of its intervals: blocks of keys (block, stride), and the
    last ``width`` keys of another K and V, the first of them at position ``block_band`` - 1.
    """
    t0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    head = tl.program_id(1).to(tl.int64)  # its stride times it may exceed 2^31
    b_ = tl.program_id(2)
    b = b_.to(tl.int64)
    g = tl.program_id(1) // H
    t = t0 + tl.arange(0, BM)
    live = t < T
    if not COPY:
        K += b * sk_b + g.to(tl.int64) * sk_g
        V += b * sv_b + g.to(tl.int64) * sv_g
        K_BAND += b * skb_b + g.to(tl.int64) * skb_g
        V_BAND += b * svb_b + g.to(tl.int64) * svb_g
    d = tl.arange(0, BD)
    q = _tile(Q + b * sq_b + head * sq_h, t, sq_t, live, d, D, BD, False)
    row = (b * T + t) * HQ + head
    do = _tile(DO, row, DV, live, tl.arange(0, BDV), DV, BDV, False)
    acc = tl.zeros([BM, BD], tl.float32)
    lo, hi = _bounds(t, b, T, C, q0, block, stride, width, Q0, FIRST, RAGGED, DOCS, False)
    lse, delta = _of_rows(LSE, DELTA, row, live)
    acc = _keys_q(
        q,
        do,
        K,
        V,
        b_,
        g,
        acc,
        lo,
        hi,
        lse,
        delta,
        C,
        sk_s,
        sv_s,
        scale_log2,
        D,
        DV,
        BC,
        BD,
        BDV,
        DOCS,
        PREC,
        COPY,
    )
    lo, hi = _bounds(t, b, T, C_BAND, q0, block_band, 1, width, Q0, FIRST, RAGGED, DOCS, True)
    lse, delta = _of_rows(LSE_BAND, DELTA_BAND, row, live)
    acc = _keys_q(
        q,
        do,
        K_BAND,
        V_BAND,
        b_,
        g,
        acc,
        lo,
        hi,
        lse,
        delta,
        C_BAND,
        skb_s,
        svb_s,
        scale_log2,
        D,
        DV,
        BC,
        BD,
        BDV,
        True,
        PREC,
        COPY,
    )
    tl.store(
        DQ + row[:, None] * D + d[None, :],
        (acc * scale).to(DQ.dtype.element_ty),
        mask=live[:, None] & (d < D)[None, :],
    )


@triton.jit
def _step_kv(
    k,
    v,
    Q,
    DO,
    LSE,
    DELTA,
    Q0,
    FIRST,
    t0,
    b,
    head,
    c,
    dk,
    dv,
    T,
    TO,
    C,
    q0,
    block,
    stride,
    width,
    sq_t,
    scale_log2,
    HQ: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    RAGGED: tl.constexpr,
    DOCS: tl.constexpr,
    BANDED: tl.constexpr,
    MASK: tl.constexpr,
    PREC: tl.constexpr,
    COPY: tl.constexpr,
):
    t = t0 + tl.arange(0, BM)
    live = t < T
    row = (b.to(tl.int64) * TO + t) * HQ + head
    q = _tile_of(Q, b, head, t0, T, sq_t, D, BM, BD, False, COPY)
    do = _tile_of(DO, b, head, t0, T, HQ * DV, DV, BM, BDV, False, COPY)
    lse, delta = _of_rows(LSE, DELTA, row, live)
    # [keys, queries]
    p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PREC) * scale_log2 - lse[None, :])
    if MASK:
        lo, hi = _bounds(t, b, T, C, q0, block, stride, width, Q0, FIRST, RAGGED, DOCS, BANDED)
        p = tl.where((c[:, None] >= lo[None, :]) & (c[:, None] < hi[None, :]), p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PREC)
    ds = p * (tl.dot(v, tl.trans(do), input_precision=PREC) - delta[None, :])
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PREC), dv


@triton.jit
def _queries_kv(
    heads_at,
    range_at,
    tile_at,
    Q,
    K,
    V,
    DO,
    LSE,
    DELTA,
    DK,
    DV_,
    Q0,
    FIRST,
    T,
    TO,
    C,
    q0,
    block,
    stride,
    width,
    per_split,
    num_splits,
    batches,
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
    HP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    RAGGED: tl.constexpr,
    DOCS: tl.constexpr,
    BANDED: tl.constexpr,
    PREC: tl.constexpr,
    COPY: tl.constexpr,
):
    """dK, dV of a tile of keys from HP query heads and one range of queries, to part [range, heads
    / HP].
    """
    part = heads_at // G  # of the heads of g
    g_ = heads_at % G
    g = g_.to(tl.int64)
    split = range_at % num_splits
    b_ = range_at // num_splits
    b = b_.to(tl.int64)
    c0 = tile_at * BC
    HQ: tl.constexpr = G * H
    if RAGGED:
        q0 = tl.load(Q0 + b).to(tl.int32)
    c = c0 + tl.arange(0, BC)
    d = tl.arange(0, BD)
    dv_ = tl.arange(0, BDV)
    k = _tile(K + b * sk_b + g * sk_g, c, sk_s, c < C, d, D, BD, False)
    v = _tile(V + b * sv_b + g * sv_g, c, sv_s, c < C, dv_, DV, BDV, False)
    dk = tl.zeros([BC, BD], tl.float32)
    dv = tl.zeros([BC, BDV], tl.float32)
    # the first query that sees a key of the tile
    first = tl.maximum(0, c0 * stride + block - 1 - q0)
    begin = tl.maximum(first // BM * BM, split * per_split)
    stop = tl.minimum(T, (split + 1) * per_split)
    if BANDED:
        stop = tl.minimum(stop, (tl.minimum(c0 + BC, C) - 1 + width) * stride + block - 1 - q0)
    all_see = stop  # from here on, every query sees all of the tile
    if not (DOCS or BANDED):
        all_see = tl.cdiv(tl.maximum(0, (c0 + BC - 1) * stride + block - 1 - q0), BM) * BM
        all_see = tl.where(
            c0 + BC > C, stop, tl.minimum(tl.maximum(begin, all_see), tl.maximum(begin, stop))
        )
    for i in range(HP):
        head = g_ * H + part * HP + i
        Q_ = Q
        DO_ = DO
        if not COPY:
            Q_ = Q + b * sq_b + head.to(tl.int64) * sq_h
            DO_ = DO + (b * TO * HQ + head) * DV
        for t0 in range(begin, all_see, BM):
            dk, dv = _step_kv(
                k,
                v,
                Q_,
                DO_,
                LSE,
                DELTA,
                Q0,
                FIRST,
                t0,
                b_,
                head,
                c,
                dk,
                dv,
                T,
                TO,
                C,
                q0,
                block,
                stride,
                width,
                sq_t,
                scale_log2,
                HQ,
                D,
                DV,
                BM,
                BD,
                BDV,
                False,
                DOCS,
                BANDED,
                True,
                PREC,
                COPY,
            )
        for t0 in range(all_see, stop, BM):
            dk, dv = _step_kv(
                k,
                v,
                Q_,
                DO_,
                LSE,
                DELTA,
                Q0,
                FIRST,
                t0,
                b_,
                head,
                c,
                dk,
                dv,
                T,
                TO,
                C,
                q0,
                block,
                stride,
                width,
                sq_t,
                scale_log2,
                HQ,
                D,
                DV,
                BM,
                BD,
                BDV,
                False,
                DOCS,
                BANDED,
                False,
                PREC,
                COPY,
            )
    slot = ((split * (H // HP) + part) * batches + b) * C + c
    at = slot * G + g
    tl.store(
        DK + at[:, None] * D + d[None, :],
        (dk * scale).to(DK.dtype.element_ty),
        mask=(c < C)[:, None] & (d < D)[None, :],
    )
    tl.store(
        DV_ + at[:, None] * DV + dv_[None, :],
        dv.to(DV_.dtype.element_ty),
        mask=(c < C)[:, None] & (dv_ < DV)[None, :],
    )


@triton.jit(repr=named_by("nsa_interval_backward_kv", _SHOWN))
def nsa_interval_backward_kv(
    Q,
    K,
    V,
    DO,
    LSE,
    DELTA,
    DK,
    DV_,
    Q0,
    FIRST,
    T,
    TO,
    C,
    q0,
    block,
    stride,
    width,
    per_split,
    num_splits,
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
    HP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    RAGGED: tl.constexpr,
    DOCS: tl.constexpr,
    BANDED: tl.constexpr,
    PREC: tl.constexpr,
    COPY: tl.constexpr,
):
    """`_queries_kv`, the longest tiles first."""
    per_tile: tl.constexpr = G * (H // HP)
    # as many tiles lie in the first dimension as the third has no room for
    folds = tl.num_programs(0) // per_tile
    _queries_kv(
        tl.program_id(0) % per_tile,
        tl.program_id(1),
        tl.program_id(2) * folds + tl.program_id(0) // per_tile,
        Q,
        K,
        V,
        DO,
        LSE,
        DELTA,
        DK,
        DV_,
        Q0,
        FIRST,
        T,
        TO,
        C,
        q0,
        block,
        stride,
        width,
        per_split,
        num_splits,
        tl.num_programs(1) // num_splits,
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
        G,
        H,
        HP,
        D,
        DV,
        BM,
        BC,
        BD,
        BDV,
        RAGGED,
        DOCS,
        BANDED,
        PREC,
        COPY,
    )


@triton.jit
def nsa_interval_backward_kv_both(
    Q,
    K,
    V,
    K_BAND,
    V_BAND,
    DO,
    LSE,
    LSE_BAND,
    DELTA,
    DELTA_BAND,
    DK,
    DV_,
    DK_BAND,
    DV_BAND,
    Q0,
    FIRST,
    T,
    C,
    C_BAND,
    q0,
    block,
    stride,
    width,
    block_band,
    per_split,
    num_splits,
    batches,
    num_programs,
    sq_b,
    sq_t,
    sq_h,
    sk_b,
    sk_s,
    sk_g,
    sv_b,
    sv_s,
    sv_g,
    skb_b,
    skb_s,
    skb_g,
    svb_b,
    svb_s,
    svb_g,
    scale,
    scale_log2,
    G: tl.constexpr,
    H: tl.constexpr,
    HP: tl.constexpr,
    HP_BAND: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    RAGGED: tl.constexpr,
    DOCS: tl.constexpr,
    PREC: tl.constexpr,
):
    """`_queries_kv` of blocks of keys (block, stride) by the first ``num_programs``, whose first
    tiles are the longest; then of another K and V, of which a query sees the last ``width``, and
    the first lies at position ``block_band`` - 1.
    """
    program = tl.program_id(0)
    of_band = program - num_programs
    per_tile: tl.constexpr = G * (H // HP)
    per_tile_band: tl.constexpr = G * (H // HP_BAND)
    ranges = num_splits * batches
    if program < num_programs:
        _queries_kv(
            program % per_tile,
            program // per_tile % ranges,
            program // per_tile // ranges,
            Q,
            K,
            V,
            DO,
            LSE,
            DELTA,
            DK,
            DV_,
            Q0,
            FIRST,
            T,
            T,
            C,
            q0,
            block,
            stride,
            width,
            per_split,
            num_splits,
            batches,
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
            G,
            H,
            HP,
            D,
            DV,
            BM,
            BC,
            BD,
            BDV,
            RAGGED,
            DOCS,
            False,
            PREC,
            False,
        )
    else:
        _queries_kv(
            of_band % per_tile_band,
            of_band // per_tile_band % batches,
            of_band // per_tile_band // batches,
            Q,
            K_BAND,
            V_BAND,
            DO,
            LSE_BAND,
            DELTA_BAND,
            DK_BAND,
            DV_BAND,
            Q0,
            FIRST,
            T,
            T,
            C_BAND,
            q0,
            block_band,
            1,
            width,
            T,
            1,
            batches,
            sq_b,
            sq_t,
            sq_h,
            skb_b,
            skb_s,
            skb_g,
            svb_b,
            svb_s,
            svb_g,
            scale,
            scale_log2,
            G,
            H,
            HP_BAND,
            D,
            DV,
            BM,
            BC,
            BD,
            BDV,
            RAGGED,
            DOCS,
            True,
            PREC,
            False,
        )


def _tiles(BM: int, BC: int, num_warps: int, num_stages: int) -> dict[str, int]:
    return {"BM": BM, "BC": BC, "num_warps": num_warps, "num_stages": num_stages}


# By kernel and width class; without a window and with one. Measured on an H200
# (reports/kernels-log.md): classes 0 and 1, in bf16.
_SMALL, _LEAST = _tiles(64, 32, 4, 2), _tiles(32, 32, 4, 1)
TILES = {
    "forward": (
        (_tiles(64, 128, 4, 2), _tiles(64, 64, 4, 2)),
        (_tiles(64, 64, 4, 3), _tiles(64, 64, 4, 3)),
        (_SMALL, _SMALL),
        (_LEAST, _LEAST),
    ),
    "backward_q": (
        (_tiles(64, 64, 4, 3), _tiles(64, 64, 4, 3)),
        (_tiles(128, 64, 8, 3), _tiles(64, 64, 4, 2)),
        (_SMALL, _SMALL),
        (_LEAST, _LEAST),
    ),
    "backward_kv": (
        (_tiles(128, 64, 4, 2), _tiles(128, 64, 4, 2)),
        (_tiles(64, 64, 4, 2), _tiles(64, 64, 4, 2)),
        (_tiles(32, 64, 8, 1), _tiles(32, 64, 8, 1)),
        (_LEAST, _LEAST),
    ),
}


@dataclass(frozen=True, slots=True)
class RoleSizes:
    """Sizes of `nsa.ops.interval.warp_roles`."""

    BC: int  # keys of a tile
    stages: int  # tiles of keys held
    groups: int  # of four warps, each with 64 queries of a head
    registers: int  # of a thread at the start
    attend: int  # and of one that attends, but of the first group, which has the rest
    fetch: int = 24


# By width class, on Hopper, without a window. At 65,536 tokens .886 ms at width 64 (1.001 by
# Triton's kernel) and 7.39 at 128 (8.72).
FORWARD_ROLES: tuple[RoleSizes | None, ...] = (
    RoleSizes(128, 2, 3, 128, 160),
    RoleSizes(128, 2, 2, 168, 240),
    None,
    None,
)


@dataclass(frozen=True, slots=True)
class BackwardRoleSizes:
    """Sizes of `nsa.ops.interval.warp_roles_backward`."""

    BM: int  # queries of a tile
    stages: int  # tiles of queries held
    groups: int  # of four warps, each with 64 keys
    ahead: bool  # products of keys and the next tile before this one's gradients
    kept: bool  # K and V in registers
    registers: int  # of a thread at the start
    differentiate: int  # and of one that differentiates, but of the first group: it has the rest
    fetch: int = 24


# dK and dV by width class, on Hopper, without a window and with one. Not measured yet: Triton's
# kernel serves all.
BACKWARD_KV_ROLES: tuple[tuple[BackwardRoleSizes | None, BackwardRoleSizes | None], ...] = (
    (None, None),
    (None, None),
    (None, None),
    (None, None),
)


def _grid_kv(parts: int, ranges: int, tiles: int) -> tuple[int, int, int]:
    """The grid of the gradients of keys: ``tiles`` in its third dimension, and where they do not
    fit there, in the first as well.
    """
    folds = max(1, cdiv(tiles, GRID_LIMIT))  # no key, no tile
    return parts * folds, ranges, cdiv(tiles, folds)


def _tiles_of(kernel: str, q: Tensor, DV: int, width: int | None) -> dict[str, int]:
    of_class = width_class(q, DV)
    # fp32 tiles of class 1 are not those that bf16 was measured with: exact products take more
    # registers
    if q.dtype == torch.float32:
        of_class = max(2, of_class)
    measured = TILES[kernel][of_class][width is not None]
    return {**measured, **smaller(f"interval_{kernel}", of_class, q.device)}


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    stride: int,
    width: int | None,
    q_start: int | Tensor,
    first: Tensor | None,
    scale: float,
    into: tuple[Tensor, Tensor] | None = None,
    work: int | None = None,
    tiles: dict[str, int] | None = None,
    roles: RoleSizes | None = None,
) -> tuple[Tensor, Tensor]:
    """q [B, T, Q, D], k [B, C, G, D], v [B, C, G, DV] -> (o [B, T, Q, DV], lse to base 2 [B, T, Q]
    fp32).

    ``into``: contiguous o and lse of T or more rows; those beyond T are left as they are. ``work``
    as in `described`: of the whole call, where q is a part of it, so that a proof of that call
    covers the part.
    """
    q, k, v = rows(q), rows(k), rows(v)
    (B, T, HQ, D), (C, G, DV) = q.shape, v.shape[1:]
    o, lse = into or (q.new_empty(B, T, HQ, DV), q.new_empty(B, T, HQ, dtype=torch.float32))
    if tiles is None and into is None and decode.few_queries(T, HQ // G):
        decode.interval(
            q,
            k,
            v,
            into=(o, lse),
            block=block,
            stride=stride,
            width=width,
            q_start=q_start,
            first=first,
            scale=scale,
        )
        return o, lse
    q0, Q0 = starts(q_start)
    if Q0 is None and first is None and width is None and tiles is None:
        t = roles or _role_sizes(q, k, v, scale, work=work or q.numel())
        if t is not None:
            _forward_by_roles(q, k, v, (o, lse), t, (q0, block, stride), scale)
            return o, lse
    config = dict(tiles or _tiles_of("forward", q, DV, width))
    BM, BC = config.pop("BM"), config.pop("BC")
    keys, copy = described(BC, k, v, work=work or q.numel())
    launch(
        nsa_interval_forward,
        (cdiv(T, BM), HQ, B),
        q,
        *keys,
        o,
        lse,
        Q0,
        first,
        T,
        lse.shape[1],
        C,
        q0,
        block,
        stride,
        width or 0,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        scale * LOG2E,
        HQ // G,
        HQ,
        D,
        DV,
        BM,
        BC,
        padded(D),
        padded(DV),
        Q0 is not None,
        first is not None,
        width is not None,
        precision(q),
        copy,
        **config,
    )
    return o, lse


def _role_sizes(q: Tensor, k: Tensor, v: Tensor, scale: float, *, work: int) -> RoleSizes | None:
    """Those of `nsa.ops.interval.warp_roles` where it computes these: groups of heads that it
    divides, and what `_roles_take`.
    """
    t = FORWARD_ROLES[min(3, width_class(q, v.shape[3]) + (q.dtype == torch.float32))]
    if t is None or not scale > 0 or q.shape[2] // k.shape[2] % t.groups:
        return None
    return t if _roles_take(t.BC, q, k, v, work=work) else None


def _roles_take(
    tile_rows: int, q: Tensor, k: Tensor, v: Tensor, *others: Tensor, work: int
) -> bool:
    """Whether kernels with roles compute these: on Hopper, as many rows as the other steps with
    roles, of 64 or 128 elements of 2 bytes, and what the copy engine takes.
    """
    sm = sm_of(q.device)
    if is_off("roles") or sm is None or sm[0] != 9 or q.element_size() != 2:
        return False
    if q.shape[0] * q.shape[1] * k.shape[2] < SORT_MIN_ROWS:
        return False
    if not (q.shape[3] == v.shape[3] in (64, 128)):
        return False
    return described(tile_rows, q, k, v, *others, work=work)[1]


@lru_cache(maxsize=64)
def _layout(tile: tuple[int, ...], dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for(
        tile, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    )


def _by_roles(x: Tensor, tile_rows: int) -> Any:
    """x [B, L, heads, D] in tiles of ``tile_rows`` rows of one head, as Gluon's copies take it."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    unit = 16 // x.element_size()
    # the stride of a dimension of size 1 is never used, and may be anything
    strides = [
        unit if size == 1 else stride
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ]
    tile = (1, tile_rows, 1, x.shape[3])
    return TensorDescriptor(x, list(x.shape), [*strides, 1], list(tile), _layout(tile, x.dtype))


def _forward_by_roles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    into: tuple[Tensor, Tensor],
    t: RoleSizes,
    where: tuple[int, int, int],
    scale: float,
) -> None:
    from nsa.ops.interval import warp_roles  # Triton's Gluon, for it alone

    (B, T, HQ, D), (C, G) = q.shape, k.shape[1:3]
    tensors = [_by_roles(x, n) for x, n in ((q, 64), (k, t.BC), (v, t.BC))]
    launch(
        warp_roles.nsa_interval_forward_roles,
        (cdiv(T, 64), HQ // t.groups, B),
        *tensors,
        *into,
        T,
        into[1].shape[1],
        C,
        *where,
        scale * LOG2E,
        HQ // G,
        HQ,
        D,
        t.BC,
        t.stages,
        t.groups,
        t.attend,
        t.fetch,
        num_warps=4,
        maxnreg=t.registers,
    )


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    dq: Tensor | None = None,
    adds: bool = False,
    tiles_q: dict[str, int] | None = None,
    tiles_kv: dict[str, int] | None = None,
    sums: parts.Sums | None = None,
    **geometry: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: `backward_q` and `backward_kv`, whose arguments these are."""
    dq = backward_q(do, q, k, v, lse, delta, dq=dq, adds=adds, tiles=tiles_q, **geometry)
    dk, dv = backward_kv(do, q, k, v, lse, delta, tiles=tiles_kv, sums=sums, **geometry)
    return dq, dk, dv


def backward_q(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    block: int,
    stride: int,
    width: int | None,
    q_start: int | Tensor,
    first: Tensor | None,
    scale: float,
    dq: Tensor | None = None,
    adds: bool = False,
    work: int | None = None,
    tiles: dict[str, int] | None = None,
) -> Tensor:
    """q's gradient, in its dtype: it goes into ``dq``, where that is given, or is added to it
    (``adds``).

    ``delta`` [B, T, Q] fp32 is o . do. Where do is the gradient of gate * o, take log2 gate off the
    lse: a weight then has the gate as a factor. do, lse, delta and dq are contiguous and may have
    more rows than q: those are neither read nor written. ``work`` as in `forward`.
    """
    q, k, v = rows(q), rows(k), rows(v)
    (B, T, HQ, D), (C, G, DV) = q.shape, v.shape[1:]
    assert dq is not None or lse.shape[1] == T, "rows of dq lie as those of lse"
    dq = q.new_empty(B, T, HQ, D) if dq is None else dq
    q0, Q0 = starts(q_start)
    config = dict(tiles or _tiles_of("backward_q", q, DV, width))
    BM, BC = config.pop("BM"), config.pop("BC")
    keys, copy = described(BC, k, v, work=work or q.numel())
    launch(
        nsa_interval_backward_q,
        (cdiv(T, BM), HQ, B),
        q,
        *keys,
        do,
        lse,
        delta,
        dq,
        Q0,
        first,
        T,
        lse.shape[1],
        C,
        q0,
        block,
        stride,
        width or 0,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        scale,
        scale * LOG2E,
        HQ // G,
        HQ,
        D,
        DV,
        BM,
        BC,
        padded(D),
        padded(DV),
        Q0 is not None,
        first is not None,
        width is not None,
        precision(q),
        adds,
        copy,
        **config,
    )
    return dq


def backward_q_of_two(
    do: Tensor,
    q: Tensor,
    cmp: tuple[Tensor, Tensor],
    win: tuple[Tensor, Tensor],
    lse: tuple[Tensor, Tensor],
    delta: tuple[Tensor, Tensor],
    *,
    block: int,
    stride: int,
    window: int,
    win_begin: int,
    q_start: int | Tensor,
    first: Tensor | None,
    scale: float,
    tiles: dict[str, int] | None = None,
) -> Tensor:
    """q's gradient from the compressed branch and the window together, rounded once: `backward_q`
    of both, in one launch where one size of tiles is the best of both.

    ``lse`` and ``delta`` of (compressed, window), as in `backward_q`. The window's keys begin at
    position ``win_begin``.
    """
    q, *kv = (rows(x) for x in (q, *cmp, *win))
    (B, T, HQ, D), (_, G, DV) = q.shape, kv[1].shape[1:]
    config = dict(tiles or _tiles_of("backward_q", q, DV, None))
    if _differ(first, win_begin) or (
        tiles is None and config != _tiles_of("backward_q", q, DV, window)
    ):
        where: dict[str, Any] = {"q_start": q_start, "scale": scale}
        grid: dict[str, Any] = {"block": block, "stride": stride, "width": None, "first": first}
        band = _band(window, win_begin, first)
        dq = backward_q(do, q, kv[0], kv[1], lse[0], delta[0], **grid, **where)
        return backward_q(do, q, kv[2], kv[3], lse[1], delta[1], dq=dq, adds=True, **band, **where)
    dq = q.new_empty(B, T, HQ, D)
    q0, Q0 = starts(q_start)
    BM, BC = config.pop("BM"), config.pop("BC")
    keys, copy = described(BC, *kv, work=q.numel())
    launch(
        nsa_interval_backward_q_both,
        (cdiv(T, BM), HQ, B),
        q,
        *keys,
        do,
        *lse,
        *delta,
        dq,
        Q0,
        first,
        T,
        kv[1].shape[1],
        kv[3].shape[1],
        q0,
        block,
        stride,
        window,
        1 + win_begin,
        *q.stride()[:3],
        *(n for x in kv for n in x.stride()[:3]),
        scale,
        scale * LOG2E,
        HQ // G,
        HQ,
        D,
        DV,
        BM,
        BC,
        padded(D),
        padded(DV),
        Q0 is not None,
        first is not None,
        precision(q),
        copy,
        **config,
    )
    return dq


def backward_kv(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    block: int,
    stride: int,
    width: int | None,
    q_start: int | Tensor,
    first: Tensor | None,
    scale: float,
    work: int | None = None,
    tiles: dict[str, int] | None = None,
    roles: BackwardRoleSizes | None = None,
    sums: parts.Sums | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v, each in its dtype; sums of fp32 parts in a fixed order.

    With ``sums`` they hold nothing until its `launch`. The rest as in `backward_q`.
    """
    q, k, v = rows(q), rows(k), rows(v)
    (B, T, HQ, D), (C, G, DV) = q.shape, v.shape[1:]
    H = HQ // G
    q0, Q0 = starts(q_start)
    if Q0 is None and first is None and tiles is None:
        t = roles or _backward_role_sizes(do[:, :T], q, k, v, width, work=work or q.numel())
        if t is not None:
            where = (q0, block, stride, width)
            parts_kv = _backward_kv_by_roles(do[:, :T], q, k, v, (lse, delta), t, where, scale)
            return _summed(*parts_kv, dtype=k.dtype, sums=sums)
    config = dict(tiles or _tiles_of("backward_kv", q, DV, width))
    BM, BC = config.pop("BM"), config.pop("BC")
    heads, per_split, splits = _plan_kv(q, k, BM, BC, banded=width is not None)
    dk, dv = _room_kv(k, v, splits * (H // heads))
    (queries, gradients), copy = described(BM, q, do[:, :T], work=work or q.numel())
    launch(
        nsa_interval_backward_kv,
        _grid_kv(G * (H // heads), B * splits, cdiv(C, BC)),
        queries,
        k,
        v,
        gradients,
        lse,
        delta,
        dk,
        dv,
        Q0,
        first,
        T,
        lse.shape[1],
        C,
        q0,
        block,
        stride,
        width or 0,
        per_split,
        splits,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        scale,
        scale * LOG2E,
        G,
        H,
        heads,
        D,
        DV,
        BM,
        BC,
        padded(D),
        padded(DV),
        Q0 is not None,
        first is not None,
        width is not None,
        precision(q),
        copy,
        **config,
    )
    return _summed(dk, dv, dtype=k.dtype, sums=sums)


def _summed(
    dk: Tensor, dv: Tensor, *, dtype: torch.dtype, sums: parts.Sums | None
) -> tuple[Tensor, Tensor]:
    """Of parts [parts, ...]; with ``sums`` they hold nothing until its `launch`."""
    wanted = parts.Sums() if sums is None else sums
    found = wanted.of(dk, dv, dtype=dtype)
    if sums is None:
        wanted.launch()
    return found


def _backward_role_sizes(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, width: int | None, *, work: int
) -> BackwardRoleSizes | None:
    """Those of `nsa.ops.interval.warp_roles_backward` where it computes these."""
    of_class = min(3, width_class(q, v.shape[3]) + (q.dtype == torch.float32))
    t = BACKWARD_KV_ROLES[of_class][width is not None]
    return t if t is not None and _roles_take(t.BM, q, k, v, do, work=work) else None


def _backward_kv_by_roles(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_rows: tuple[Tensor, Tensor],
    t: BackwardRoleSizes,
    where: tuple[int, int, int, int | None],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Parts of dK and of dV, as `nsa_interval_backward_kv` stores them. ``of_rows``: lse, delta."""
    from nsa.ops.interval import warp_roles_backward  # Triton's Gluon, for it alone

    (B, T, HQ, D), (C, G) = q.shape, k.shape[1:3]
    q0, block, stride, width = where
    H, BC = HQ // G, 64 * t.groups
    heads, per_split, splits = _plan_kv(q, k, t.BM, BC, banded=width is not None, alone=True)
    dk, dv = _room_kv(k, v, splits * (H // heads))
    launch(
        warp_roles_backward.nsa_interval_backward_kv_roles,
        _grid_kv(G * (H // heads), B * splits, cdiv(C, BC)),
        *(_by_roles(x, t.BM) for x in (q, do)),
        *(_by_roles(x, 64) for x in (k, v)),
        *of_rows,
        dk,
        dv,
        T,
        of_rows[0].shape[1],
        C,
        q0,
        block,
        stride,
        width or 0,
        per_split,
        splits,
        scale,
        scale * LOG2E,
        G,
        H,
        heads,
        D,
        t.BM,
        t.stages,
        t.groups,
        t.ahead,
        t.kept,
        width is not None,
        t.differentiate,
        t.fetch,
        num_warps=4,
        maxnreg=t.registers,
    )
    return dk, dv


def _differ(first: Tensor | None, win_begin: int) -> bool:
    """Whether documents begin at other keys of the window than of the compressed branch."""
    return first is not None and win_begin != 0


def _band(window: int, win_begin: int, first: Tensor | None) -> dict[str, Any]:
    """The window's interval, of keys that begin at position ``win_begin``: key c ends there + c."""
    if first is not None and win_begin:
        first = (first - win_begin).clamp(min=0)
    return {"block": 1 + win_begin, "stride": 1, "width": window, "first": first}


def _plan_kv(
    q: Tensor, k: Tensor, BM: int, BC: int, *, banded: bool, alone: bool = False
) -> tuple[int, int, int]:
    """(query heads a program, queries a range, ranges) of the gradients of keys."""
    (B, T, HQ, _), (C, G) = q.shape, k.shape[1:3]
    heads, splits = parts.heads_and_ranges(
        cdiv(C, BC) * B * G, HQ // G, T, pairs=B * HQ * T * C // 2, banded=banded, alone=alone
    )
    per_split = cdiv(cdiv(T, min(splits, max(1, GRID_LIMIT // B))), BM) * BM
    return heads, per_split, cdiv(T, per_split)


def _room_kv(k: Tensor, v: Tensor, num_parts: int) -> tuple[Tensor, Tensor]:
    """Room for parts of dK and dV, [parts, ...]: fp32 where there are several."""
    kept = torch.float32 if num_parts > 1 else k.dtype
    return k.new_empty(num_parts, *k.shape, dtype=kept), v.new_empty(
        num_parts, *v.shape, dtype=kept
    )


def backward_kv_of_two(
    do: Tensor,
    q: Tensor,
    cmp: tuple[Tensor, Tensor],
    win: tuple[Tensor, Tensor],
    lse: tuple[Tensor, Tensor],
    delta: tuple[Tensor, Tensor],
    *,
    block: int,
    stride: int,
    window: int,
    win_begin: int,
    q_start: int | Tensor,
    first: Tensor | None,
    scale: float,
    sums: parts.Sums,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Gradients of ``cmp`` and of ``win``: `backward_kv` of both. They hold nothing until
    ``sums.launch()``.

    In one launch where q is small, so that neither fills a GPU, and the best tiles are of one size.
    """
    q, *kv = (rows(x) for x in (q, *cmp, *win))
    (B, T, HQ, D), (C, G, DV) = q.shape, kv[1].shape[1:]
    config = _tiles_of("backward_kv", q, DV, None)
    is_large = q.numel() >= common.COPY_MIN_ELEMENTS
    apart = is_large or _differ(first, win_begin)
    if apart or config != _tiles_of("backward_kv", q, DV, window):
        where: dict[str, Any] = {"q_start": q_start, "scale": scale, "sums": sums}
        grid: dict[str, Any] = {"block": block, "stride": stride, "width": None, "first": first}
        band = _band(window, win_begin, first)
        return (
            backward_kv(do, q, kv[0], kv[1], lse[0], delta[0], **grid, **where),
            backward_kv(do, q, kv[2], kv[3], lse[1], delta[1], **band, **where),
        )
    H, C_BAND = HQ // G, kv[3].shape[1]
    q0, Q0 = starts(q_start)
    BM, BC = config.pop("BM"), config.pop("BC")
    heads, per_split, splits = _plan_kv(q, kv[0], BM, BC, banded=False)
    heads_band, _, _ = _plan_kv(q, kv[2], BM, BC, banded=True)  # one range
    d_cmp = _room_kv(kv[0], kv[1], splits * (H // heads))
    d_win = _room_kv(kv[2], kv[3], H // heads_band)
    num_programs = cdiv(C, BC) * B * splits * G * (H // heads)
    launch(
        nsa_interval_backward_kv_both,
        (num_programs + cdiv(C_BAND, BC) * B * G * (H // heads_band),),
        q,
        *kv,
        do,
        *lse,
        *delta,
        *d_cmp,
        *d_win,
        Q0,
        first,
        T,
        C,
        C_BAND,
        q0,
        block,
        stride,
        window,
        1 + win_begin,
        per_split,
        splits,
        B,
        num_programs,
        *q.stride()[:3],
        *(n for x in kv for n in x.stride()[:3]),
        scale,
        scale * LOG2E,
        G,
        H,
        heads,
        heads_band,
        D,
        DV,
        BM,
        BC,
        padded(D),
        padded(DV),
        Q0 is not None,
        first is not None,
        precision(q),
        **config,
    )
    return sums.of(*d_cmp, dtype=q.dtype), sums.of(*d_win, dtype=q.dtype)
