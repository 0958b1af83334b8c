"""The backward of the compressed branch and of the window in merged launches: one for the dQ of
both, one for the dK and dV of both. Where one does not pay, a launch for each branch.

Letters and intervals as in `nsa.ops.interval.tile_loads`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.interval import parts
from nsa.ops.interval.backward_kv_kernels import backward_kv, queries_kv
from nsa.ops.interval.backward_q_kernels import backward_q, keys_q
from nsa.ops.interval.tile_loads import load_tile, lse_and_delta, seen_keys
from nsa.ops.interval.tile_sizes import tiles_of
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
)
from nsa.ops.kernels.launch import launch


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
    q = load_tile(Q + b * sq_b + head * sq_h, t, sq_t, live, d, D, BD, False)
    row = (b * T + t) * HQ + head
    do = load_tile(DO, row, DV, live, tl.arange(0, BDV), DV, BDV, False)
    acc = tl.zeros([BM, BD], tl.float32)
    lo, hi = seen_keys(t, b, T, C, q0, block, stride, width, Q0, FIRST, RAGGED, DOCS, False)
    lse, delta = lse_and_delta(LSE, DELTA, row, live)
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
        DOCS,
        PREC,
        COPY,
    )
    lo, hi = seen_keys(t, b, T, C_BAND, q0, block_band, 1, width, Q0, FIRST, RAGGED, DOCS, True)
    lse, delta = lse_and_delta(LSE_BAND, DELTA_BAND, row, live)
    acc = keys_q(
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
    """`queries_kv` of blocks of keys (block, stride) by the first ``num_programs``, whose first
    tiles are the longest; then of another K and V, of which a query sees the last ``width``, and
    the first lies at position ``block_band`` - 1.
    """
    program = tl.program_id(0)
    of_band = program - num_programs
    per_tile: tl.constexpr = G * (H // HP)
    per_tile_band: tl.constexpr = G * (H // HP_BAND)
    ranges = num_splits * batches
    if program < num_programs:
        queries_kv(
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
        queries_kv(
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
    config = dict(tiles or tiles_of("backward_q", q, DV, None))
    if _differ(first, win_begin) or (
        tiles is None and config != tiles_of("backward_q", q, DV, window)
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


def _differ(first: Tensor | None, win_begin: int) -> bool:
    """Whether documents begin at other keys of the window than of the compressed branch."""
    return first is not None and win_begin != 0


def _band(window: int, win_begin: int, first: Tensor | None) -> dict[str, Any]:
    """The window's interval, of keys that begin at position ``win_begin``: key c ends there + c."""
    if first is not None and win_begin:
        first = (first - win_begin).clamp(min=0)
    return {"block": 1 + win_begin, "stride": 1, "width": window, "first": first}


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
    config = tiles_of("backward_kv", q, DV, None)
    is_large = q.numel() >= common.COPY_MIN_ELEMENTS
    apart = is_large or _differ(first, win_begin)
    if apart or config != tiles_of("backward_kv", q, DV, window):
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
    heads, per_split, splits = parts.plan(q, kv[0], BM, BC, banded=False)
    heads_band, _, _ = parts.plan(q, kv[2], BM, BC, banded=True)  # one range
    d_cmp = parts.room(kv[0], kv[1], splits * (H // heads))
    d_win = parts.room(kv[2], kv[3], H // heads_band)
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
