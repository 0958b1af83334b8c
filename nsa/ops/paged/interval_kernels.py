"""The compressed branch and the window of a step over pages: `nsa.ops.decode.kernels` through a
table.

B batch, T queries, Q query heads, G kv heads, H query heads per kv head, P entries a page. Each
split leaves a normalised part and its lse (fp32, to base 2); the splits depend on shapes alone, and
are summed in their order: no atomics, bitwise repeatable.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.decode import kernels as contiguous
from nsa.ops.decode.kernels import leave, logits, more
from nsa.ops.kernels.common import LOG2E, load_rows, named_by, padded, precision, width_class
from nsa.ops.kernels.launch import launch
from nsa.ops.paged.key_ends import ends
from nsa.ops.paged.pages import KV, LayerPages, Pages

_BRANCH = {"BANDED": "_band"}  # as in nsa.ops.interval.tile_loads


@triton.jit(repr=named_by("nsa_interval_forward_pages", _BRANCH))
def nsa_interval_forward_pages(
    Q,
    K,
    V,
    TABLE,
    O,
    LSE,
    START,
    LEN,
    KS,
    VS,
    T,
    block,
    stride,
    width,
    sq_b,
    sq_t,
    sq_h,
    st_b,
    scale_log2,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BANDED: tl.constexpr,
    FP8: tl.constexpr,
    PREC: tl.constexpr,
):
    """All queries of one (b, kv head) over one split of the keys that any of them sees: an equal
    share, in tiles of whole pages or equal parts of one.
    """
    split = tl.program_id(0)
    g = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, M)
    live = i < T * H
    t = tl.minimum(i // H, T - 1)
    h = (i % H).to(tl.int64)
    seen = tl.minimum(t + tl.load(START + b).to(tl.int32) + 1, tl.load(LEN + b))
    hi = ends(seen, block, stride)
    lo = tl.zeros_like(hi)
    if BANDED:
        lo = tl.maximum(hi - width, 0)
    first = tl.min(lo, 0) // BC * BC
    last = tl.max(hi, 0)
    share = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), tl.num_programs(0)), BC) * BC
    begin = first + split * share
    end = tl.minimum(begin + share, last)
    q = load_rows(
        Q + b * sq_b, t.to(tl.int64) * sq_t + (g * H + h) * sq_h, live & (begin < end), D, BD
    )
    if FP8:
        scale_log2 *= tl.load(KS + g)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BDV], tl.float32)
    for c0 in range(begin, end, BC):
        page = tl.load(TABLE + b * st_b + c0 // P)
        c = c0 + tl.arange(0, BC)
        inside = (c < end) & (page >= 0)
        at = (page.to(tl.int64) * P + c % P) * G + g
        k = load_rows(K, at * D, inside, D, BD).to(q.dtype)
        v = load_rows(V, at * DV, inside, DV, BDV).to(q.dtype)
        kept = inside[None, :] & (c[None, :] >= lo[:, None]) & (c[None, :] < hi[:, None])
        m, l, acc = more(logits(q, k, kept, scale_log2, PREC), v, m, l, acc, PREC)
    if FP8:
        acc *= tl.load(VS + g)
    row = ((split * tl.num_programs(2) + b) * T + t) * (G * H) + g * H + h
    leave(O, LSE, row, live, m, l, acc, DV, BDV)


def interval(
    q: Tensor,
    group: Pages,
    pages: LayerPages,
    *,
    block: int,
    stride: int,
    width: int | None,
    scale: float,
) -> KV:
    """(o [B, T, HQ, DV], lse to base 2 [B, T, HQ]) of `few_queries` q [B, T, HQ, D]; as
    `nsa.ops.interval.forward_kernels.forward` of the keys that ``group`` holds.
    """
    (B, T, HQ, D), (P, G, DV) = q.shape, group.v.shape[1:]
    H, banded = HQ // G, width is not None
    most = max(1, pages.max_tokens if banded else (pages.max_tokens - block) // stride + 1)
    seen = most if width is None else min(most, width + T - 1)
    splits = contiguous.interval_splits(B * G, seen, banded=banded)
    into = q.new_empty(B, T, HQ, DV), q.new_empty(B, T, HQ, dtype=torch.float32)
    part = contiguous._parts(*into, splits)
    tiles = contiguous.TILES[min(3, width_class(q, DV) + (q.dtype == torch.float32))]
    scales = (None, None) if group.scales is None else group.scales
    launch(
        nsa_interval_forward_pages,
        (splits, G, B),
        q,
        group.k,
        group.v,
        group.table,
        *part,
        pages.start_B,
        pages.seq_lens,
        *scales,
        T,
        block,
        stride,
        width or 0,
        *q.stride()[:3],
        group.table.stride(0),
        scale * LOG2E,
        G,
        H,
        D,
        DV,
        P,
        padded(T * H),
        min(P, tiles[0]),
        padded(D),
        padded(DV),
        banded,
        group.scales is not None,
        precision(q),
        num_warps=tiles[1],
        num_stages=tiles[2],
    )
    contiguous.sum_interval(part, into, splits, banded=banded)
    return into
