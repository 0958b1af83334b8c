"""dK and dV over one interval of keys a query: a program has a tile of keys, and passes over the
queries that see them, in parts by range of queries and by heads.

Letters and intervals as in `nsa.ops.interval.tile_loads`; how many parts there are, and their sums,
in `nsa.ops.interval.parts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.interval import parts, roles
from nsa.ops.interval.tile_loads import SHOWN_BY, load_tile, load_tile_of, lse_and_delta, seen_keys
from nsa.ops.interval.tile_sizes import BackwardRoleSizes, tiles_of
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
    q = load_tile_of(Q, b, head, t0, T, sq_t, D, BM, BD, False, COPY)
    do = load_tile_of(DO, b, head, t0, T, HQ * DV, DV, BM, BDV, False, COPY)
    lse, delta = lse_and_delta(LSE, DELTA, row, live)
    # [keys, queries]
    p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PREC) * scale_log2 - lse[None, :])
    if MASK:
        lo, hi = seen_keys(t, b, T, C, q0, block, stride, width, Q0, FIRST, RAGGED, DOCS, BANDED)
        p = tl.where((c[:, None] >= lo[None, :]) & (c[:, None] < hi[None, :]), p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PREC)
    ds = p * (tl.dot(v, tl.trans(do), input_precision=PREC) - delta[None, :])
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PREC), dv


@triton.jit
def queries_kv(
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
    k = load_tile(K + b * sk_b + g * sk_g, c, sk_s, c < C, d, D, BD, False)
    v = load_tile(V + b * sv_b + g * sv_g, c, sv_s, c < C, dv_, DV, BDV, False)
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


@triton.jit(repr=named_by("nsa_interval_backward_kv", SHOWN_BY))
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
    """`queries_kv`, the longest tiles first."""
    per_tile: tl.constexpr = G * (H // HP)
    # as many tiles lie in the first dimension as the third has no room for
    folds = tl.num_programs(0) // per_tile
    queries_kv(
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
    role_sizes: BackwardRoleSizes | None = None,
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
        t = role_sizes or roles.backward_kv_sizes(do[:, :T], q, k, v, width, work=work or q.numel())
        if t is not None:
            where = (q0, block, stride, width)
            found = roles.backward_kv(do[:, :T], q, k, v, (lse, delta), t, where, scale)
            return _summed(*found, dtype=k.dtype, sums=sums)
    config = dict(tiles or tiles_of("backward_kv", q, DV, width))
    BM, BC = config.pop("BM"), config.pop("BC")
    heads, per_split, splits = parts.plan(q, k, BM, BC, banded=width is not None)
    dk, dv = parts.room(k, v, splits * (H // heads))
    (queries, gradients), copy = described(BM, q, do[:, :T], work=work or q.numel())
    launch(
        nsa_interval_backward_kv,
        parts.grid(G * (H // heads), B * splits, cdiv(C, BC)),
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
