"""The gradients of the weights: parts of ranges of rows, summed in their order. No atomics.

Letters as in `nsa.ops.learned_phi.pairs`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import cdiv, padded, precision
from nsa.ops.kernels.launch import launch
from nsa.ops.learned_phi.pairs import Pair, contiguous_pair, own_of
from nsa.ops.learned_phi.tile_sizes import PROGRAMS, launch_options, tile_width

MOST_RANGES = 16
SUM_ELEMENTS = 8192  # of a weight, summed by a program
SUM_DOWN = 1024


@triton.jit
def _weights(
    X,
    DPRE,
    PART,
    part,
    num_rows,
    rows_per_part,
    C,
    stride,
    s_b,
    s_t,
    s_g,
    G: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    KW: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BF: tl.constexpr,
    PREC: tl.constexpr,
):
    k = tl.program_id(0) * BN + tl.arange(0, BN)
    from_k = (k // D).to(tl.int64) * s_t + k % D
    for f0 in tl.static_range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        acc = tl.zeros([BF, BN], tl.float32)
        first = part * rows_per_part
        for m0 in range(first, tl.minimum(first + rows_per_part, num_rows), BM):
            row = m0 + tl.arange(0, BM)
            live = row < num_rows
            b = (row // G // C).to(tl.int64)
            at = b * s_b + (row % G).to(tl.int64) * s_g
            at += (row // G % C).to(tl.int64) * stride * s_t
            x = tl.load(
                X + at[:, None] + from_k[None, :],
                mask=live[:, None] & (k < KW)[None, :],
                other=0.0,
            )
            d_pre = tl.load(
                DPRE + row.to(tl.int64)[:, None] * F + f[None, :],
                mask=live[:, None] & (f < F)[None, :],
                other=0.0,
            )
            acc = tl.dot(tl.trans(d_pre), x, acc, input_precision=PREC)
        to = PART + (part * F + f).to(tl.int64)[:, None] * KW + k[None, :]
        tl.store(to, acc, mask=(f < F)[:, None] & (k < KW)[None, :])


@triton.jit
def nsa_phi_backward_weights(
    K,
    V,
    DPRE_K,
    DPRE_V,
    PART_K,
    PART_V,
    num_rows,
    rows_per_part,
    C,
    stride,
    sk_b,
    sk_t,
    sk_g,
    sv_b,
    sv_t,
    sv_g,
    G: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    F: tl.constexpr,
    FV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BF: tl.constexpr,
    SAME: tl.constexpr,
    PREC: tl.constexpr,
):
    """PART [parts, F, KW]: a part of the rows, BN columns a program."""
    part = tl.program_id(2)
    if SAME:
        _weights(
            own_of(K, V),
            own_of(DPRE_K, DPRE_V),
            own_of(PART_K, PART_V),
            part,
            num_rows,
            rows_per_part,
            C,
            stride,
            own_of(sk_b, sv_b),
            own_of(sk_t, sv_t),
            own_of(sk_g, sv_g),
            G,
            D,
            F,
            L * D,
            BM,
            BN,
            BF,
            PREC,
        )
    elif tl.program_id(1) == 0:
        _weights(
            K,
            DPRE_K,
            PART_K,
            part,
            num_rows,
            rows_per_part,
            C,
            stride,
            sk_b,
            sk_t,
            sk_g,
            G,
            D,
            F,
            L * D,
            BM,
            BN,
            BF,
            PREC,
        )
    else:
        _weights(
            V,
            DPRE_V,
            PART_V,
            part,
            num_rows,
            rows_per_part,
            C,
            stride,
            sv_b,
            sv_t,
            sv_g,
            G,
            DV,
            FV,
            L * DV,
            BM,
            BN,
            BF,
            PREC,
        )


@triton.jit
def _sum(
    PART,
    POSITION_PART,
    DOWN_PART,
    UP,
    POSITION,
    DUP,
    DPOSITION,
    DDOWN,
    ranges,
    parts,
    F: tl.constexpr,
    D: tl.constexpr,
    KW: tl.constexpr,
    FP: tl.constexpr,
    COLUMNS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    MLP: tl.constexpr,
):
    tile = tl.program_id(0)
    if tile < tl.cdiv(KW, COLUMNS):
        k = tile * COLUMNS + tl.arange(0, COLUMNS)
        f = tl.arange(0, FP)
        at = f[:, None] * KW + k[None, :]
        mask = (f < F)[:, None] & (k < KW)[None, :]
        acc = tl.zeros([FP, COLUMNS], tl.float32)
        for r in range(ranges):
            acc += tl.load(PART + r * (F * KW) + at, mask=mask, other=0.0)
        if MLP:
            d_encoding = tl.zeros([FP], tl.float32)
            for first in range(0, parts, 16):
                n = first + tl.arange(0, 16)
                there = (n < parts)[:, None] & (f < F)[None, :]
                d_encoding += tl.sum(
                    tl.load(POSITION_PART + n[:, None] * F + f[None, :], mask=there, other=0.0), 0
                )
            position = tl.load(POSITION + k, mask=k < KW, other=0.0).to(tl.float32)
            acc += d_encoding[:, None] * position[None, :]
            up = tl.load(UP + at, mask=mask, other=0.0).to(tl.float32)
            d_position = tl.sum(d_encoding[:, None] * up, 0)
            tl.store(DPOSITION + k, d_position.to(DPOSITION.dtype.element_ty), mask=k < KW)
        tl.store(DUP + at, acc.to(DUP.dtype.element_ty), mask=mask)
    else:
        if MLP:
            e = (tile - tl.cdiv(KW, COLUMNS)) * ELEMENTS + tl.arange(0, ELEMENTS)
            total = tl.zeros([ELEMENTS], tl.float32)
            for r in range(parts):
                total += tl.load(DOWN_PART + r * (D * F) + e, mask=e < D * F, other=0.0)
            tl.store(DDOWN + e, total.to(DDOWN.dtype.element_ty), mask=e < D * F)


@triton.jit
def nsa_phi_backward_sum(
    PART_K,
    PART_V,
    POSITION_PART_K,
    POSITION_PART_V,
    DOWN_PART_K,
    DOWN_PART_V,
    UP_K,
    UP_V,
    POSITION_K,
    POSITION_V,
    DUP_K,
    DUP_V,
    DPOSITION_K,
    DPOSITION_V,
    DDOWN_K,
    DDOWN_V,
    ranges,
    parts,
    L: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    F: tl.constexpr,
    FV: tl.constexpr,
    FP: tl.constexpr,
    FVP: tl.constexpr,
    COLUMNS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    SAME: tl.constexpr,
    MLP: tl.constexpr,
):
    """The weights' gradients from their parts, in the order of rows.

    up @ position is added to every row: its gradient, once it is summed over the rows, goes to both
    as that of one more row.
    """
    if SAME:
        _sum(
            own_of(PART_K, PART_V),
            None if POSITION_PART_K is None else own_of(POSITION_PART_K, POSITION_PART_V),
            None if DOWN_PART_K is None else own_of(DOWN_PART_K, DOWN_PART_V),
            own_of(UP_K, UP_V),
            None if POSITION_K is None else own_of(POSITION_K, POSITION_V),
            own_of(DUP_K, DUP_V),
            None if DPOSITION_K is None else own_of(DPOSITION_K, DPOSITION_V),
            None if DDOWN_K is None else own_of(DDOWN_K, DDOWN_V),
            ranges,
            parts,
            F,
            D,
            L * D,
            FP,
            COLUMNS,
            ELEMENTS,
            MLP,
        )
    elif tl.program_id(1) == 0:
        _sum(
            PART_K,
            POSITION_PART_K,
            DOWN_PART_K,
            UP_K,
            POSITION_K,
            DUP_K,
            DPOSITION_K,
            DDOWN_K,
            ranges,
            parts,
            F,
            D,
            L * D,
            FP,
            COLUMNS,
            ELEMENTS,
            MLP,
        )
    else:
        _sum(
            PART_V,
            POSITION_PART_V,
            DOWN_PART_V,
            UP_V,
            POSITION_V,
            DUP_V,
            DPOSITION_V,
            DDOWN_V,
            ranges,
            parts,
            FV,
            DV,
            L * DV,
            FVP,
            COLUMNS,
            ELEMENTS,
            MLP,
        )


def gradients_of_weights(
    d_pre: Pair,
    k: Tensor,
    v: Tensor,
    up: Pair,
    encoding: tuple[Pair, Pair, Pair, Pair] | None = None,
    *,
    block: int,
    stride: int,
) -> Any:
    """The gradient of ``up``, alone of linear; with an ``encoding`` (position, down, parts of the
    gradients of up @ position and of down) those of up's two factors, in mlp's order.
    """
    (B, C, G, F), FV, D, DV = d_pre[0].shape, d_pre[1].shape[3], k.shape[3], v.shape[3]
    num_rows, width, BM = B * C * G, block * max(D, DV), 64 if k.element_size() == 2 else 32
    BN = tile_width(k, width)
    ranges = max(1, min(MOST_RANGES, PROGRAMS // cdiv(width, BN), cdiv(num_rows, BM)))
    per_part = cdiv(cdiv(num_rows, BM), ranges) * BM
    ranges = cdiv(num_rows, per_part)
    part = tuple(x.new_empty(ranges, *x.shape, dtype=torch.float32) for x in up)
    BF = tile_width(k, F, FV)
    launch(
        nsa_phi_backward_weights,
        (cdiv(width, BN), 2, ranges),
        k,
        v,
        *d_pre,
        *part,
        num_rows,
        per_part,
        C,
        stride,
        *k.stride()[:3],
        *v.stride()[:3],
        G,
        block,
        D,
        DV,
        F,
        FV,
        BM,
        BN,
        BF,
        (D, F) == (DV, FV),
        precision(k),
        **launch_options(BF, k),
    )
    d_up = torch.empty_like(up[0]), torch.empty_like(up[1])
    FP, FVP = padded(F), padded(FV)
    columns, in_down, parts = max(16, SUM_ELEMENTS // max(FP, FVP)), 0, 0
    given: tuple[Tensor | None, ...] = (None,) * 10
    d_position = d_down = None
    if encoding is not None:
        position, down, position_part, down_part = encoding
        d_position, d_down = (
            (x.new_empty(x.shape), y.new_empty(y.shape)) for x, y in (position, down)
        )
        in_down, parts = cdiv(max(F * D, FV * DV), SUM_DOWN), position_part[0].shape[0]
        given = (*position_part, *down_part, *contiguous_pair(position), *d_position, *d_down)
    launch(
        nsa_phi_backward_sum,
        (max(cdiv(block * D, columns), cdiv(block * DV, columns)) + in_down, 2),
        *part,
        *given[:4],
        *up,
        *given[4:6],
        *d_up,
        *given[6:],
        ranges,
        parts,
        block,
        D,
        DV,
        F,
        FV,
        FP,
        FVP,
        columns,
        SUM_DOWN,
        (D, F) == (DV, FV),
        encoding is not None,
        num_warps=4,
    )
    return d_up if encoding is None else (d_up, d_position, d_down)
