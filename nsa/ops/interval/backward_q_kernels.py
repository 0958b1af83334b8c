"""dQ over one interval of keys a query: a program has a tile of queries, and passes over the keys
that they see.

Letters and intervals as in `nsa.ops.interval.tile_loads`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.interval.tile_loads import SHOWN_BY, load_tile, load_tile_of, lse_and_delta, seen_keys
from nsa.ops.interval.tile_sizes import tiles_of
from nsa.ops.kernels.common import (
    LOG2E,
    cdiv,
    described,
    named_by,
    padded,
    precision,
    rows,
    starts,
)
from nsa.ops.kernels.launch import launch


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
    k = load_tile_of(K, b, g, c0, C, sk_s, D, BC, BD, not MASK, COPY)
    v = load_tile_of(V, b, g, c0, C, sv_s, DV, BC, BDV, not MASK, COPY)
    p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PREC) * scale_log2 - lse[:, None])
    if MASK:
        p = tl.where((c[None, :] >= lo[:, None]) & (c[None, :] < hi[:, None]), p, 0.0)
    ds = p * (tl.dot(do, tl.trans(v), input_precision=PREC) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, acc, input_precision=PREC)


@triton.jit
def keys_q(
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


@triton.jit(repr=named_by("nsa_interval_backward_q", SHOWN_BY))
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
    lo, hi = seen_keys(t, b, T, C, q0, block, stride, width, Q0, FIRST, RAGGED, DOCS, BANDED)
    if not COPY:
        K += b * sk_b + g.to(tl.int64) * sk_g
        V += b * sv_b + g.to(tl.int64) * sv_g
    d = tl.arange(0, BD)
    q = load_tile(Q + b * sq_b + head * sq_h, t, sq_t, live, d, D, BD, False)
    row = (b * TO + t) * HQ + head
    do = load_tile(DO, row, DV, live, tl.arange(0, BDV), DV, BDV, False)
    lse, delta = lse_and_delta(LSE, DELTA, row, live)
    acc = tl.zeros([BM, BD], tl.float32)
    acc = keys_q(
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
    config = dict(tiles or tiles_of("backward_q", q, DV, width))
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
