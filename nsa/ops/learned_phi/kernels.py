"""phi = linear or mlp (arXiv 2502.11089, Eq. 7) of K and of V in one launch, and its gradients.

A block's tokens are read where they lie, so that no copy of K or V is made; products are summed in
fp32 over a whole block. No atomics: a weight's gradient is summed from parts of ranges of rows, in
their order, and a token's from the blocks that hold it.

B batch, S tokens, C blocks of l tokens with stride d, N chunks of d tokens, G kv heads, D head dim,
F features of the first product (D where there is no second), row: a block of one kv head, (b, c, g)
in that order, KW = l D columns of a weight, k: one of them. P = l / d.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import cdiv, padded, precision, rows
from nsa.ops.kernels.launch import launch
from nsa.ops.kernels.tiles import card_at
from nsa.routing.cards import HOPPER

Pair = tuple[Tensor, Tensor]  # of K and of V
PROGRAMS = 132  # multiprocessors of the GPU that the sizes here were chosen for
MOST_PARTS = 64  # of the gradients that every row adds to
MOST_RANGES = 16
SUM_ELEMENTS = 8192  # of a weight, summed by a program
SUM_DOWN = 1024


@triton.jit
def _of(k, v):
    """What a program of the second half of the grid takes instead: that of V."""
    return tl.where(tl.program_id(1) == 0, k, v)


@triton.jit
def _forward(
    X,
    UP,
    POSITION,
    DOWN,
    OUT,
    PRE,
    tile,
    num_rows,
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
    BF: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    MLP: tl.constexpr,
    PREC: tl.constexpr,
):
    m = tl.arange(0, BM)
    row = tile * BM + m
    live = row < num_rows
    filled = live
    if MLP:  # the last row of a tile is the position encoding, whose product all others add
        row = tile * (BM - 1) + m
        live = (row < num_rows) & (m < BM - 1)
        filled = live | (m == BM - 1)
    b = (row // G // C).to(tl.int64)
    at = X + b * s_b + (row % G).to(tl.int64) * s_g + (row // G % C).to(tl.int64) * stride * s_t
    d = tl.arange(0, BD)
    out = tl.zeros([BM, BD], tl.float32)
    for f0 in tl.static_range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        acc = tl.zeros([BM, BF], tl.float32)
        for k0 in range(0, KW, BK):
            k = k0 + tl.arange(0, BK)
            from_x = at[:, None] + ((k // D).to(tl.int64) * s_t + k % D)[None, :]
            if MLP:
                from_x = tl.where((m == BM - 1)[:, None], POSITION + k[None, :], from_x)
            x = tl.load(from_x, mask=filled[:, None] & (k < KW)[None, :], other=0.0)
            up = tl.load(
                UP + f[:, None] * KW + k[None, :],
                mask=(f < F)[:, None] & (k < KW)[None, :],
                other=0.0,
            )
            acc = tl.dot(x, tl.trans(up), acc, input_precision=PREC)
        to = row.to(tl.int64)[:, None] * F + f[None, :]
        mask = live[:, None] & (f < F)[None, :]
        if MLP:
            acc += tl.sum(tl.where((m == BM - 1)[:, None], acc, 0.0), 0)[None, :]
            tl.store(PRE + to, acc, mask=mask)
            hidden = (acc * tl.sigmoid(acc)).to(X.dtype.element_ty)
            down = tl.load(
                DOWN + d[:, None] * F + f[None, :],
                mask=(d < D)[:, None] & (f < F)[None, :],
                other=0.0,
            )
            out = tl.dot(hidden, tl.trans(down), out, input_precision=PREC)
        else:
            tl.store(OUT + to, acc.to(OUT.dtype.element_ty), mask=mask)
    if MLP:
        to_out = row.to(tl.int64)[:, None] * D + d[None, :]
        mask_out = live[:, None] & (d < D)[None, :]
        tl.store(OUT + to_out, out.to(OUT.dtype.element_ty), mask=mask_out)


@triton.jit
def nsa_phi(
    K,
    V,
    UP_K,
    UP_V,
    POSITION_K,
    POSITION_V,
    DOWN_K,
    DOWN_V,
    OUT_K,
    OUT_V,
    PRE_K,
    PRE_V,
    num_rows,
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
    BF: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    MLP: tl.constexpr,
    SAME: tl.constexpr,
    PREC: tl.constexpr,
):
    """PRE: the first product with its position's, before SiLU, fp32; of mlp alone."""
    if SAME:
        _forward(
            _of(K, V),
            _of(UP_K, UP_V),
            None if POSITION_K is None else _of(POSITION_K, POSITION_V),
            None if DOWN_K is None else _of(DOWN_K, DOWN_V),
            _of(OUT_K, OUT_V),
            None if PRE_K is None else _of(PRE_K, PRE_V),
            tl.program_id(0),
            num_rows,
            C,
            stride,
            _of(sk_b, sv_b),
            _of(sk_t, sv_t),
            _of(sk_g, sv_g),
            G,
            D,
            F,
            L * D,
            BM,
            BF,
            BK,
            BD,
            MLP,
            PREC,
        )
    elif tl.program_id(1) == 0:
        _forward(
            K,
            UP_K,
            POSITION_K,
            DOWN_K,
            OUT_K,
            PRE_K,
            tl.program_id(0),
            num_rows,
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
            BF,
            BK,
            BD,
            MLP,
            PREC,
        )
    else:
        _forward(
            V,
            UP_V,
            POSITION_V,
            DOWN_V,
            OUT_V,
            PRE_V,
            tl.program_id(0),
            num_rows,
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
            BF,
            BK,
            BDV,
            MLP,
            PREC,
        )


@triton.jit
def _hidden(
    DOUT,
    PRE,
    DOWN,
    DPRE,
    POSITION_PART,
    DOWN_PART,
    part,
    num_rows,
    rows_per_part,
    D: tl.constexpr,
    F: tl.constexpr,
    BM: tl.constexpr,
    BF: tl.constexpr,
    BD: tl.constexpr,
    PREC: tl.constexpr,
):
    f = tl.program_id(2) * BF + tl.arange(0, BF)
    d = tl.arange(0, BD)
    down = tl.load(
        DOWN + d[:, None] * F + f[None, :], mask=(d < D)[:, None] & (f < F)[None, :], other=0.0
    )
    d_position = tl.zeros([BF], tl.float32)
    d_down = tl.zeros([BD, BF], tl.float32)
    first = part * rows_per_part
    for m0 in range(first, tl.minimum(first + rows_per_part, num_rows), BM):
        row = (m0 + tl.arange(0, BM)).to(tl.int64)
        live = row < num_rows
        d_out = tl.load(
            DOUT + row[:, None] * D + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0
        )
        at = row[:, None] * F + f[None, :]
        mask = live[:, None] & (f < F)[None, :]
        pre = tl.load(PRE + at, mask=mask, other=0.0)
        # what autograd keeps between the two products: rounded to the tokens' dtype
        d_hidden = tl.dot(d_out, down, input_precision=PREC).to(DPRE.dtype.element_ty)
        s = tl.sigmoid(pre)
        d_pre = d_hidden.to(tl.float32) * (s * (1 + pre * (1 - s)))
        tl.store(DPRE + at, d_pre.to(DPRE.dtype.element_ty), mask=mask)
        d_position += tl.sum(tl.where(mask, d_pre, 0.0), 0)
        hidden = (pre * s).to(d_out.dtype)
        d_down = tl.dot(tl.trans(d_out), hidden, d_down, input_precision=PREC)
    tl.store(POSITION_PART + part * F + f, d_position, mask=f < F)
    to = DOWN_PART + (part * D + d)[:, None] * F + f[None, :]
    tl.store(to, d_down, mask=(d < D)[:, None] & (f < F)[None, :])


@triton.jit
def nsa_phi_backward_hidden(
    DOUT_K,
    DOUT_V,
    PRE_K,
    PRE_V,
    DOWN_K,
    DOWN_V,
    DPRE_K,
    DPRE_V,
    POSITION_PART_K,
    POSITION_PART_V,
    DOWN_PART_K,
    DOWN_PART_V,
    num_rows,
    rows_per_part,
    D: tl.constexpr,
    DV: tl.constexpr,
    F: tl.constexpr,
    FV: tl.constexpr,
    BM: tl.constexpr,
    BF: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    SAME: tl.constexpr,
    PREC: tl.constexpr,
):
    """The gradient before SiLU, and of a part of the rows those of ``down`` and of up @ position.

    One of the programs of each (rows of a part, K or V, tile of F).
    """
    part = tl.program_id(0)
    if SAME:
        _hidden(
            _of(DOUT_K, DOUT_V),
            _of(PRE_K, PRE_V),
            _of(DOWN_K, DOWN_V),
            _of(DPRE_K, DPRE_V),
            _of(POSITION_PART_K, POSITION_PART_V),
            _of(DOWN_PART_K, DOWN_PART_V),
            part,
            num_rows,
            rows_per_part,
            D,
            F,
            BM,
            BF,
            BD,
            PREC,
        )
    elif tl.program_id(1) == 0:
        _hidden(
            DOUT_K,
            PRE_K,
            DOWN_K,
            DPRE_K,
            POSITION_PART_K,
            DOWN_PART_K,
            part,
            num_rows,
            rows_per_part,
            D,
            F,
            BM,
            BF,
            BD,
            PREC,
        )
    else:
        _hidden(
            DOUT_V,
            PRE_V,
            DOWN_V,
            DPRE_V,
            POSITION_PART_V,
            DOWN_PART_V,
            part,
            num_rows,
            rows_per_part,
            DV,
            FV,
            BM,
            BF,
            BDV,
            PREC,
        )


@triton.jit
def _tokens(
    DPRE,
    UP,
    DX,
    tile,
    first,
    S,
    C,
    N,
    num_chunks,
    stride,
    G: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BF: tl.constexpr,
    PREC: tl.constexpr,
):
    chunk = tile * BM + tl.arange(0, BM)
    g = chunk % G
    n = chunk // G % N
    b = (chunk // G // N).to(tl.int64)
    live = chunk < num_chunks
    x = first + tl.arange(0, BN)  # feature x % D of a chunk's token x // D
    width = stride * D
    f = tl.arange(0, BF)
    acc = tl.zeros([BM, BN], tl.float32)
    for step in range(P * tl.cdiv(F, BF)):  # of a block that begins ``p`` chunks before
        p = step // tl.cdiv(F, BF)
        f_at = step % tl.cdiv(F, BF) * BF + f
        i = n - p
        there = live & (i >= 0) & (i < C)
        d_pre = tl.load(
            DPRE + ((b * C + i) * G + g)[:, None] * F + f_at[None, :],
            mask=there[:, None] & (f_at < F)[None, :],
            other=0.0,
        )
        up = tl.load(
            UP + f_at[:, None] * (P * width) + (p * width + x)[None, :],
            mask=(f_at < F)[:, None] & (x < width)[None, :],
            other=0.0,
        )
        acc = tl.dot(d_pre, up, acc, input_precision=PREC)
    t = n[:, None] * stride + (x // D)[None, :]
    to = ((b * S)[:, None] + t) * (G * D) + (g * D)[:, None] + (x % D)[None, :]
    mask = live[:, None] & (x < width)[None, :] & (t < S)
    tl.store(DX + to, acc.to(DX.dtype.element_ty), mask=mask)


@triton.jit
def nsa_phi_backward_tokens(
    DPRE_K,
    DPRE_V,
    UP_K,
    UP_V,
    DK,
    DV_,
    S,
    C,
    N,
    num_chunks,
    stride,
    tiles,
    G: tl.constexpr,
    P: tl.constexpr,
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
    """A program: BN features of BM chunks of tokens; neighbours have the same chunks."""
    tile, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BN
    if SAME:
        if first < stride * D:
            _tokens(
                _of(DPRE_K, DPRE_V),
                _of(UP_K, UP_V),
                _of(DK, DV_),
                tile,
                first,
                S,
                C,
                N,
                num_chunks,
                stride,
                G,
                P,
                D,
                F,
                BM,
                BN,
                BF,
                PREC,
            )
    elif tl.program_id(1) == 0:
        if first < stride * D:
            _tokens(
                DPRE_K,
                UP_K,
                DK,
                tile,
                first,
                S,
                C,
                N,
                num_chunks,
                stride,
                G,
                P,
                D,
                F,
                BM,
                BN,
                BF,
                PREC,
            )
    else:
        if first < stride * DV:
            _tokens(
                DPRE_V,
                UP_V,
                DV_,
                tile,
                first,
                S,
                C,
                N,
                num_chunks,
                stride,
                G,
                P,
                DV,
                FV,
                BM,
                BN,
                BF,
                PREC,
            )


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
            _of(K, V),
            _of(DPRE_K, DPRE_V),
            _of(PART_K, PART_V),
            part,
            num_rows,
            rows_per_part,
            C,
            stride,
            _of(sk_b, sv_b),
            _of(sk_t, sv_t),
            _of(sk_g, sv_g),
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
            _of(PART_K, PART_V),
            None if POSITION_PART_K is None else _of(POSITION_PART_K, POSITION_PART_V),
            None if DOWN_PART_K is None else _of(DOWN_PART_K, DOWN_PART_V),
            _of(UP_K, UP_V),
            None if POSITION_K is None else _of(POSITION_K, POSITION_V),
            _of(DUP_K, DUP_V),
            None if DPOSITION_K is None else _of(DPOSITION_K, DPOSITION_V),
            None if DDOWN_K is None else _of(DDOWN_K, DDOWN_V),
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


def _rows_a_tile(num_rows: int, others: int, x: Tensor, least: int) -> int:
    """The most rows of a tile with which there are enough programs for a GPU."""
    M = 128
    while least < M and (num_rows + M - 1) // M * others < PROGRAMS:
        M //= 2
    return min(M, 64) if _is_small(x) or x.dtype == torch.float32 else M


def _is_small(x: Tensor) -> bool:
    return card_at(x.device).shared_bytes < HOPPER.shared_bytes


def _options(M: int, x: Tensor, *, wide: bool = False) -> dict[str, Any]:
    """``wide``: a program gathers two products."""
    num_warps = 8 if M == 128 or wide else 4
    return {"num_warps": num_warps, "num_stages": 2 if _is_small(x) else 3}


def _depth(x: Tensor) -> int:
    """Elements that a step of a product takes: 128 bytes."""
    return 128 // x.element_size()


def _width(x: Tensor, *sizes: int) -> int:
    """Of a tile: up to 128 columns of the widest of ``sizes``, 64 where memory is little."""
    return min(padded(max(sizes)), 64 if _is_small(x) or x.dtype == torch.float32 else 128)


def forward(
    k: Tensor,
    v: Tensor,
    up: Pair,
    position: Pair | None = None,
    down: Pair | None = None,
    *,
    block: int,
    stride: int,
) -> tuple[Pair, Pair | None]:
    """k [B, S, G, D] and v [B, S, G, DV], S >= block, with up [F, l D] -> (phi of both, [B, C, G,
    D] and [B, C, G, DV] in their dtype; of mlp what `backward` takes, [B, C, G, F] fp32).

    ``position`` [l, D] and ``down`` [D, F] are mlp's, of linear None and F = D. All of one dtype.
    """
    k, v, mlp = rows(k), rows(v), down is not None
    (B, S, G, D), DV = k.shape, v.shape[3]
    C, (F, FV) = (S - block) // stride + 1, (x.shape[0] for x in up)
    out = k.new_empty(B, C, G, D), v.new_empty(B, C, G, DV)
    pre: Pair | None = None
    if mlp:
        pre = (
            k.new_empty(B, C, G, F, dtype=torch.float32),
            v.new_empty(B, C, G, FV, dtype=torch.float32),
        )
    num_rows, BD = B * C * G, padded(max(D, DV))
    BM = _rows_a_tile(num_rows, 2, k, 16)
    wide = mlp and BD * k.element_size() > 256
    if wide:
        BM = min(BM, 64)
    launch(
        nsa_phi,
        (cdiv(num_rows, BM - mlp), 2),
        k,
        v,
        *(x.contiguous() for x in up),
        *_both(position),
        *_both(down),
        *out,
        *(pre or (None, None)),
        num_rows,
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
        _width(k, F, FV),
        _depth(k),
        padded(D),
        padded(DV),
        mlp,
        (D, F) == (DV, FV),
        precision(k),
        **_options(BM, k, wide=wide),
    )
    return out, pre


def _both(pair: Pair | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if pair is None else (pair[0].contiguous(), pair[1].contiguous())


def backward(
    d_out: Pair,
    k: Tensor,
    v: Tensor,
    up: Pair,
    position: Pair | None = None,
    down: Pair | None = None,
    pre: Pair | None = None,
    *,
    block: int,
    stride: int,
) -> tuple[Pair, ...]:
    """Gradients of (k, v) and of ``up``, and of ``position`` and ``down`` of mlp, each a pair;
    ``pre`` as `forward` left it.
    """
    k, v, (d_k, d_v) = rows(k), rows(v), (x.contiguous() for x in d_out)
    up = (up[0].contiguous(), up[1].contiguous())
    if position is None or down is None or pre is None:
        d_up = _of_weights((d_k, d_v), k, v, up, block=block, stride=stride)
        return _of_tokens((d_k, d_v), k, v, up, block=block, stride=stride), d_up
    d_pre, position_part, down_part = _of_hidden((d_k, d_v), pre, down)
    d_x = _of_tokens(d_pre, k, v, up, block=block, stride=stride)
    encoding = position, down, position_part, down_part
    return d_x, *_of_weights(d_pre, k, v, up, encoding, block=block, stride=stride)


def _of_hidden(d_out: Pair, pre: Pair, down: Pair) -> tuple[Pair, Pair, Pair]:
    """(the gradients before SiLU, in d_out's dtype; parts of those of up @ position, fp32 [parts,
    F]; parts of those of ``down``, fp32 [parts, D, F]).
    """
    (D, F), (DV, FV) = (x.shape for x in down)
    x, BM = d_out[0], 64 if d_out[0].element_size() == 2 else 32
    num_rows = x.numel() // D
    per_part = cdiv(cdiv(num_rows, BM), MOST_PARTS) * BM
    parts = cdiv(num_rows, per_part)
    d_pre = x.new_empty(pre[0].shape), x.new_empty(pre[1].shape)
    position_part, down_part = (
        (
            x.new_empty(parts, *(n for n in one), dtype=torch.float32),
            x.new_empty(parts, *(n for n in other), dtype=torch.float32),
        )
        for one, other in (((F,), (FV,)), ((D, F), (DV, FV)))
    )
    BF = min(BM, padded(max(F, FV)))
    launch(
        nsa_phi_backward_hidden,
        (parts, 2, cdiv(max(F, FV), BF)),
        *d_out,
        *(x.contiguous() for x in pre),
        *(x.contiguous() for x in down),
        *d_pre,
        *position_part,
        *down_part,
        num_rows,
        per_part,
        D,
        DV,
        F,
        FV,
        BM,
        BF,
        padded(D),
        padded(DV),
        (D, F) == (DV, FV),
        precision(x),
        num_warps=8 if padded(max(D, DV)) > 64 else 4,
        num_stages=1,
    )
    return d_pre, position_part, down_part


def _of_tokens(d_pre: Pair, k: Tensor, v: Tensor, up: Pair, *, block: int, stride: int) -> Pair:
    (B, C, G, F), FV, (S, D), DV = d_pre[0].shape, d_pre[1].shape[3], k.shape[1::2], v.shape[3]
    d_x = k.new_empty(B, S, G, D), v.new_empty(B, S, G, DV)
    N, width = cdiv(S, stride), stride * max(D, DV)
    BN = _width(k, width)
    tiles = cdiv(width, BN)
    BM = _rows_a_tile(B * N * G, 2 * tiles, k, 32)
    launch(
        nsa_phi_backward_tokens,
        (cdiv(B * N * G, BM) * tiles, 2),
        *d_pre,
        *up,
        *d_x,
        S,
        C,
        N,
        B * N * G,
        stride,
        tiles,
        G,
        block // stride,
        D,
        DV,
        F,
        FV,
        BM,
        BN,
        min(_depth(k), padded(max(F, FV))),
        (D, F) == (DV, FV),
        precision(k),
        **_options(BM, k),
    )
    return d_x


def _of_weights(
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
    BN = _width(k, width)
    ranges = max(1, min(MOST_RANGES, PROGRAMS // cdiv(width, BN), cdiv(num_rows, BM)))
    per_part = cdiv(cdiv(num_rows, BM), ranges) * BM
    ranges = cdiv(num_rows, per_part)
    part = tuple(x.new_empty(ranges, *x.shape, dtype=torch.float32) for x in up)
    BF = _width(k, F, FV)
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
        **_options(BF, k),
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
        given = (*position_part, *down_part, *_both(position), *d_position, *d_down)
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
