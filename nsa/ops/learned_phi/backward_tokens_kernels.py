"""The gradients of K's and V's tokens, each summed from the blocks that hold it. No atomics.

Letters as in `nsa.ops.learned_phi.pairs`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import cdiv, padded, precision
from nsa.ops.kernels.launch import launch
from nsa.ops.learned_phi.pairs import Pair, own_of
from nsa.ops.learned_phi.tile_sizes import launch_options, product_depth, rows_a_tile, tile_width


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
                own_of(DPRE_K, DPRE_V),
                own_of(UP_K, UP_V),
                own_of(DK, DV_),
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


def gradients_of_tokens(
    d_pre: Pair, k: Tensor, v: Tensor, up: Pair, *, block: int, stride: int
) -> Pair:
    (B, C, G, F), FV, (S, D), DV = d_pre[0].shape, d_pre[1].shape[3], k.shape[1::2], v.shape[3]
    d_x = k.new_empty(B, S, G, D), v.new_empty(B, S, G, DV)
    N, width = cdiv(S, stride), stride * max(D, DV)
    BN = tile_width(k, width)
    tiles = cdiv(width, BN)
    BM = rows_a_tile(B * N * G, 2 * tiles, k, 32)
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
        min(product_depth(k), padded(max(F, FV))),
        (D, F) == (DV, FV),
        precision(k),
        **launch_options(BM, k),
    )
    return d_x
