"""One kernel: RMSNorm, up to three products with weights, and SiLU or a sum with what came in.

M rows (the batch), K inputs, N outputs. A program has all rows of few outputs, so that each weight
is read once; it normalises the rows anew, which lie in the L2.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import cdiv, padded, precision
from nsa.ops.kernels.launch import launch

OUTPUTS = 16  # of a program, the least of a dot: of m7c_125m's 1,536 to 96 programs
# inputs at a time, by how few rows there are: what fits the shared memory of an SM 8.9
INPUTS, INPUTS_OF_MANY = 256, 64
WARPS, STAGES = 4, 3


@triton.jit
def _tile(X, row, k, K, live):
    return tl.load(
        X + row[:, None] * K + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0
    )


@triton.jit(do_not_specialize=["M", "tiles0", "tiles1", "N0", "N1", "N2"])
def nsa_linear_step(
    X,
    NORM,
    W0,
    W1,
    W2,
    RESIDUAL,
    Y0,
    Y1,
    Y2,
    M,
    tiles0,
    tiles1,
    N0,
    N1,
    N2,
    eps,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NORMS: tl.constexpr,
    SILU: tl.constexpr,
    ADDS: tl.constexpr,
    PREC: tl.constexpr,
):
    """A tile of outputs of the first weight, or of the second or third behind it."""
    tile = tl.program_id(0)
    is0 = tile < tiles0
    is1 = tile < tiles0 + tiles1
    W = tl.where(is0, W0, tl.where(is1, W1, W2))
    Y = tl.where(is0, Y0, tl.where(is1, Y1, Y2))
    N = tl.where(is0, N0, tl.where(is1, N1, N2))
    at = tl.where(is0, tile, tl.where(is1, tile - tiles0, tile - tiles0 - tiles1))
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    n = at * BN + tl.arange(0, BN)
    live = row < M
    kind = X.dtype.element_ty
    scale = tl.full([BM], 1.0, tl.float32)
    if NORMS:
        squares = tl.zeros([BM], tl.float32)
        for k0 in tl.static_range(0, K, BK):  # whose loads wait together
            wide = _tile(X, row, k0 + tl.arange(0, BK), K, live).to(tl.float32)
            squares += tl.sum(wide * wide, 1)
        scale = tl.rsqrt(squares / K + eps)
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x = _tile(X, row, k, K, live)
        if NORMS:
            w = tl.load(NORM + k, mask=k < K, other=0).to(tl.float32)
            x = (x.to(tl.float32) * scale[:, None] * w[None, :]).to(kind)
        weight = _tile(W, n, k, K, n < N)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision=PREC)
    y = acc.to(kind).to(tl.float32)
    inside = live[:, None] & (n < N)[None, :]
    to = row[:, None] * N + n[None, :]
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    if ADDS:
        y += tl.load(RESIDUAL + to, mask=inside, other=0).to(tl.float32)
    tl.store(Y + to, y.to(kind), mask=inside)


def apply(
    x: Tensor,
    weights: Sequence[Tensor],
    *,
    norm: Tensor | None,
    eps: float,
    silu: bool,
    residual: Tensor | None,
) -> list[Tensor]:
    """As `nsa.ops.linear_step.apply`; all are contiguous."""
    M, K = x.numel() // x.shape[-1], x.shape[-1]
    made = [x.new_empty(*x.shape[:-1], w.shape[0]) for w in weights]
    three = [weights[min(i, len(weights) - 1)] for i in range(3)]
    outputs = [made[min(i, len(made) - 1)] for i in range(3)]
    counts = [w.shape[0] for w in weights] + [0, 0]
    tiles = [cdiv(count, OUTPUTS) for count in counts[:3]]
    BM = min(64, padded(M))
    launch(
        nsa_linear_step,
        (sum(tiles), cdiv(M, BM)),
        x,
        norm,
        *three,
        residual,
        *outputs,
        M,
        tiles[0],
        tiles[1],
        *counts[:3],
        float(eps),
        K,
        BM,
        OUTPUTS,
        INPUTS if BM == 16 and x.element_size() == 2 else INPUTS_OF_MANY,
        norm is not None,
        silu,
        residual is not None,
        precision(x),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return made
