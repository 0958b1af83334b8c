"""phi = linear or mlp (arXiv 2502.11089, Eq. 7) of K and of V in one launch.

A block's tokens are read where they lie, so that no copy of K or V is made; products are summed in
fp32 over a whole block. Letters as in `nsa.ops.learned_phi.pairs`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import cdiv, padded, precision, rows
from nsa.ops.kernels.launch import launch
from nsa.ops.learned_phi.pairs import Pair, contiguous_pair, own_of
from nsa.ops.learned_phi.tile_sizes import launch_options, product_depth, rows_a_tile, tile_width


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
            own_of(K, V),
            own_of(UP_K, UP_V),
            None if POSITION_K is None else own_of(POSITION_K, POSITION_V),
            None if DOWN_K is None else own_of(DOWN_K, DOWN_V),
            own_of(OUT_K, OUT_V),
            None if PRE_K is None else own_of(PRE_K, PRE_V),
            tl.program_id(0),
            num_rows,
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
    BM = rows_a_tile(num_rows, 2, k, 16)
    wide = mlp and BD * k.element_size() > 256
    if wide:
        BM = min(BM, 64)
    launch(
        nsa_phi,
        (cdiv(num_rows, BM - mlp), 2),
        k,
        v,
        *(x.contiguous() for x in up),
        *contiguous_pair(position),
        *contiguous_pair(down),
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
        tile_width(k, F, FV),
        product_depth(k),
        padded(D),
        padded(DV),
        mlp,
        (D, F) == (DV, FV),
        precision(k),
        **launch_options(BM, k, wide=wide),
    )
    return out, pre
