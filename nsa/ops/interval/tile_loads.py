"""What the kernels of both directions load: the ends of the queries' intervals, tiles of rows, and
what the backward takes of a row. No kernel of its own.

B batch, T queries, C keys, Q query heads, G kv heads, H query heads per kv head. The query at
position p sees keys lo .. hi - 1: hi = (p + 1 - block) // stride + 1 (0 before the first block
ends), lo = max(first // stride, hi - width). The compressed branch is (block l, stride d, any
width); the sliding one (1, 1, w); full causal attention (1, 1, any). Both ends ascend with p, so
that a tile of queries has masked key tiles at its two ends only.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What a profiler shows: the sliding branch's launches, and those by the copy engine.
SHOWN_BY = {"BANDED": "_band", "COPY": "_copy"}


@triton.jit
def seen_keys(
    t,
    b,
    T,
    C,
    q0,
    block,
    stride,
    width,
    Q0,
    FIRST,
    RAGGED: tl.constexpr,
    DOCS: tl.constexpr,
    BANDED: tl.constexpr,
):
    """(lo, hi) of queries t; rows beyond T are given the last one's."""
    t = tl.minimum(t, T - 1)
    pos = t + q0
    if RAGGED:
        pos = t + tl.load(Q0 + b).to(tl.int32)
    end = tl.where(pos + 1 < block, 0, (pos + 1 - block) // stride + 1)
    lo = tl.zeros_like(pos)
    if DOCS:
        lo = tl.load(FIRST + t).to(tl.int32) // stride
    if BANDED:
        lo = tl.maximum(lo, end - width)
    return lo, tl.minimum(end, C)


@triton.jit
def load_tile(X, at, stride, inside, d, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr):
    """Rows ``at`` of X as [rows, BD]; 0 outside, which EVEN promises not to meet."""
    pointer = X + at.to(tl.int64)[:, None] * stride + d[None, :]
    if D == BD:
        if EVEN:
            return tl.load(pointer)
        return tl.load(pointer, mask=inside[:, None], other=0.0)
    return tl.load(pointer, mask=inside[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def load_tile_of(
    X,
    b,
    head,
    r0,
    end,
    stride,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BD: tl.constexpr,
    EVEN: tl.constexpr,
    COPY: tl.constexpr,
):
    """Rows r0 .. of X: of (b, head) by the copy engine, where X is a descriptor (COPY), else of the
    (b, head) that X points to.
    """
    if COPY:
        x = tl.reshape(X.load([b, r0, head, 0]), [ROWS, BD])
    else:
        at = r0 + tl.arange(0, ROWS)
        x = load_tile(X, at, stride, at < end, tl.arange(0, BD), D, BD, EVEN)
    return x


@triton.jit
def lse_and_delta(LSE, DELTA, row, live):
    """(lse, delta), with lse = +inf where a row sees nothing, so that all of its weights are 0."""
    lse = tl.load(LSE + row, mask=live, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse), tl.load(
        DELTA + row, mask=live, other=0.0
    )
