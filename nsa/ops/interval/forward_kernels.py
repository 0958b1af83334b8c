"""The forward over one interval of keys a query, FlashAttention style: the compressed and the
sliding branch.

Letters and intervals as in `nsa.ops.interval.tile_loads`. Calls of few queries go to
`nsa.ops.decode.kernels`, some on Hopper to `nsa.ops.interval.roles`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.decode import kernels as decode
from nsa.ops.interval import roles
from nsa.ops.interval.tile_loads import SHOWN_BY, load_tile, load_tile_of, seen_keys
from nsa.ops.interval.tile_sizes import RoleSizes, tiles_of
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
from nsa.ops.kernels.shares import of_all


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
    k = load_tile_of(K, b, g, c0, C, sk_s, D, BC, BD, not MASK, COPY)
    s = tl.dot(q, tl.trans(k), input_precision=PREC) * scale_log2
    if MASK:
        s = tl.where((c[None, :] >= lo[:, None]) & (c[None, :] < hi[:, None]), s, float("-inf"))
    new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(new == float("-inf"), 0.0, new) if MASK else new
    p = tl.exp2(s - safe[:, None])
    a = tl.exp2(m - safe)
    v = load_tile_of(V, b, g, c0, C, sv_s, DV, BC, BDV, not MASK, COPY)
    acc = tl.dot(p.to(v.dtype), v, acc * a[:, None], input_precision=PREC)
    return new, l * a + tl.sum(p, 1), acc


@triton.jit(repr=named_by("nsa_interval_forward", SHOWN_BY))
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
    lo, hi = seen_keys(t, b, T, C, q0, block, stride, width, Q0, FIRST, RAGGED, DOCS, BANDED)
    if not COPY:
        K += b * sk_b + g.to(tl.int64) * sk_g
        V += b * sv_b + g.to(tl.int64) * sv_g
    q = load_tile(Q + b * sq_b + head * sq_h, t, sq_t, t < T, tl.arange(0, BD), D, BD, False)
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
    role_sizes: RoleSizes | None = None,
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
    if tiles is None and into is None and decode.few_queries(of_all(T), HQ // G):
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
    if Q0 is None and first is None and tiles is None:
        t = role_sizes or roles.forward_sizes(q, k, v, width, scale, work=work or q.numel())
        if t is not None:
            roles.forward(q, k, v, (o, lse), t, (q0, block, stride, width), scale)
            return o, lse
    config = dict(tiles or tiles_of("forward", q, DV, width))
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
