"""phi = mean (Eq. 7) of K and of V in one launch, and its gradients in another.

Sums in fp32, in the order of the tokens.

B batch, S tokens, C blocks of l tokens with stride d, G kv heads, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import cdiv, padded, rows
from nsa.ops.kernels.launch import launch

BLOCKS, TOKENS = 8, 32  # a program
AT_ONCE = tl.constexpr(8)  # loads that wait for nothing


@triton.jit
def _mean(
    X,
    OUT,
    tile,
    b,
    g,
    C,
    block,
    stride,
    s_b,
    s_t,
    s_g,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    i = tile * BLOCKS + tl.arange(0, BLOCKS)
    d = tl.arange(0, BD)
    inside = (i < C)[:, None] & (d < D)[None, :]
    at = X + b * s_b + g * s_g + i.to(tl.int64)[:, None] * stride * s_t + d[None, :]
    acc = tl.zeros([BLOCKS, BD], tl.float32)
    for first in range(0, block, AT_ONCE):
        for j in tl.static_range(AT_ONCE):
            acc += tl.load(at, mask=inside & (first + j < block), other=0.0).to(tl.float32)
            at += s_t
    to = OUT + ((b * C + i)[:, None] * G + g) * D + d[None, :]
    tl.store(to, (acc / block).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def nsa_means(
    K,
    V,
    OUT_K,
    OUT_V,
    B,
    C,
    block,
    stride,
    sk_b,
    sk_t,
    sk_g,
    sv_b,
    sv_t,
    sv_g,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    tile = tl.program_id(0) // (B * G)
    b = (tl.program_id(0) // G % B).to(tl.int64)
    g = (tl.program_id(0) % G).to(tl.int64)
    if tl.program_id(1) == 0:
        _mean(K, OUT_K, tile, b, g, C, block, stride, sk_b, sk_t, sk_g, G, D, BD, BLOCKS)
    else:
        _mean(V, OUT_V, tile, b, g, C, block, stride, sv_b, sv_t, sv_g, G, DV, BDV, BLOCKS)


@triton.jit
def _spread(
    DOUT,
    DX,
    tile,
    b,
    g,
    S,
    C,
    block,
    stride,
    parts,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    TOKENS: tl.constexpr,
):
    t = tile * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, BD)
    acc = tl.zeros([TOKENS, BD], tl.float32)
    for part in range(parts):  # of a block that begins so many strides before
        i = t // stride - part
        there = (i >= 0) & (i < C) & (t - i * stride < block)
        at = DOUT + ((b * C + i)[:, None] * G + g) * D + d[None, :]
        acc += tl.load(at, mask=there[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    to = DX + ((b * S + t)[:, None] * G + g) * D + d[None, :]
    tl.store(to, (acc / block).to(DX.dtype.element_ty), mask=(t < S)[:, None] & (d < D)[None, :])


@triton.jit
def nsa_means_backward(
    DOUT_K,
    DOUT_V,
    DK,
    DV_,
    B,
    S,
    C,
    block,
    stride,
    parts,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tile = tl.program_id(0) // (B * G)
    b = (tl.program_id(0) // G % B).to(tl.int64)
    g = (tl.program_id(0) % G).to(tl.int64)
    if tl.program_id(1) == 0:
        _spread(DOUT_K, DK, tile, b, g, S, C, block, stride, parts, G, D, BD, TOKENS)
    else:
        _spread(DOUT_V, DV_, tile, b, g, S, C, block, stride, parts, G, DV, BDV, TOKENS)


def forward(k: Tensor, v: Tensor, *, block: int, stride: int) -> tuple[Tensor, Tensor]:
    """k [B, S, G, D] and v [B, S, G, DV], S >= block -> their means [B, C, G, D] and [B, C, G, DV],
    in their dtype.
    """
    k, v = rows(k), rows(v)
    (B, S, G, D), DV = k.shape, v.shape[3]
    C = (S - block) // stride + 1
    k_cmp, v_cmp = k.new_empty(B, C, G, D), v.new_empty(B, C, G, DV)
    launch(
        nsa_means,
        (cdiv(C, BLOCKS) * B * G, 2),
        k,
        v,
        k_cmp,
        v_cmp,
        B,
        C,
        block,
        stride,
        *k.stride()[:3],
        *v.stride()[:3],
        G,
        D,
        DV,
        padded(D),
        padded(DV),
        BLOCKS,
    )
    return k_cmp, v_cmp


def backward(
    dk_cmp: Tensor, dv_cmp: Tensor, *, tokens: int, block: int, stride: int
) -> tuple[Tensor, Tensor]:
    """Gradients of the means -> those of k and v, of ``tokens`` tokens."""
    dk_cmp, dv_cmp = dk_cmp.contiguous(), dv_cmp.contiguous()
    (B, C, G, D), DV = dk_cmp.shape, dv_cmp.shape[3]
    dk, dv = dk_cmp.new_empty(B, tokens, G, D), dv_cmp.new_empty(B, tokens, G, DV)
    launch(
        nsa_means_backward,
        (cdiv(tokens, TOKENS) * B * G, 2),
        dk_cmp,
        dv_cmp,
        dk,
        dv,
        B,
        tokens,
        C,
        block,
        stride,
        cdiv(block, stride),
        G,
        D,
        DV,
        padded(D),
        padded(DV),
        TOKENS,
    )
    return dk, dv
