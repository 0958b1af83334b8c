"""Attention of few queries: a decode step.

All heads of a kv head share one tile, and the keys are split over many programs.

B batch, T queries, C or S keys, Q query heads, G kv heads, H query heads per kv head, N slots, L
tokens a block, P splits. Each split leaves a normalised part and its lse (fp32, to base 2), which
are summed in the order of the splits: no atomics, bitwise repeatable. P depends on shapes alone.
Which keys a split takes depends on the positions, on the device, so that a CUDA graph may hold it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import (
    LOG2E,
    cdiv,
    load_rows,
    named_by,
    padded,
    precision,
    starts,
    width_class,
)
from nsa.ops.kernels.launch import launch
from nsa.settings import is_off

MAX_ROWS = 64  # of a tile: T * H
PROGRAMS = 264  # that fill a GPU: two on each of an H200's 132 multiprocessors
# where a program's tiles take little shared memory, several share a multiprocessor
SMALL_PROGRAMS = 1024
LEAST_KEYS, LEAST_KEYS_BANDED = 128, 64  # a split, so that its part is worth the sum
AT_ONCE = 32  # parts that a program sums at a time

_BRANCH = {"BANDED": "_band"}  # as in nsa.ops.interval.tile_loads


@triton.jit
def _seen(
    t,
    b,
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
    """(lo, hi) of queries t: as in the kernel of many queries (nsa.ops.interval.tile_loads)."""
    pos = t + q0
    if RAGGED:
        pos = t + tl.load(Q0 + b).to(tl.int32)
    end = tl.where(pos + 1 < block, 0, (pos + 1 - block) // stride + 1)
    lo = tl.zeros_like(end)
    if DOCS:
        lo = tl.load(FIRST + t).to(tl.int32) // stride
    if BANDED:
        lo = tl.maximum(lo, end - width)
    return lo, tl.minimum(end, C)


@triton.jit
def logits(q, k, kept, scale_log2, PREC: tl.constexpr):
    """Of one tile of keys, to base 2; -inf where not ``kept``."""
    return tl.where(kept, tl.dot(q, tl.trans(k), input_precision=PREC) * scale_log2, float("-inf"))


@triton.jit
def more(s, v, m, l, acc, PREC: tl.constexpr):
    """Update the running softmax (m, l, acc) with the logits ``s`` of one tile of keys."""
    new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - safe[:, None])
    a = tl.exp2(m - safe)
    return (
        new,
        l * a + tl.sum(p, 1),
        tl.dot(p.to(v.dtype), v, acc * a[:, None], input_precision=PREC),
    )


@triton.jit
def leave(O, LSE, row, live, m, l, acc, DV: tl.constexpr, BDV: tl.constexpr):
    """Store o and lse of each row: 0 and -inf where it saw nothing."""
    dv = tl.arange(0, BDV)
    some = l != 0  # NaN stays NaN
    o = acc / tl.where(some, l, 1.0)[:, None]
    tl.store(
        O + row[:, None] * DV + dv[None, :],
        o.to(O.dtype.element_ty),
        mask=live[:, None] & (dv < DV)[None, :],
    )
    tl.store(
        LSE + row, tl.where(some, m + tl.log2(tl.where(some, l, 1.0)), float("-inf")), mask=live
    )


# A number that grows with the sequence is a variant only where it is 1 or a multiple of 16: it
# would compile amid a generation.
@triton.jit(repr=named_by("nsa_interval_forward", _BRANCH, "_split"), do_not_specialize=["C", "q0"])
def nsa_interval_forward_split(
    Q,
    K,
    V,
    O,
    LSE,
    Q0,
    FIRST,
    T,
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
    D: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    RAGGED: tl.constexpr,
    DOCS: tl.constexpr,
    BANDED: tl.constexpr,
    PREC: tl.constexpr,
):
    """All queries of one (b, kv head) over one split: an equal share, in tiles, of the keys that
    any of them sees.
    """
    split = tl.program_id(0)
    g_ = tl.program_id(1)
    g = g_.to(tl.int64)  # its stride times it may exceed 2^31
    b = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, M)
    live = i < T * H
    t = tl.minimum(i // H, T - 1)
    h = (i % H).to(tl.int64)
    lo, hi = _seen(t, b, C, q0, block, stride, width, Q0, FIRST, RAGGED, DOCS, BANDED)
    first = tl.min(lo, 0)
    last = tl.max(hi, 0)
    share = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), tl.num_programs(0)), BC) * BC
    begin = first + split * share
    end = tl.minimum(begin + share, last)
    q = load_rows(
        Q + b * sq_b, t.to(tl.int64) * sq_t + (g * H + h) * sq_h, live & (begin < end), D, BD
    )
    K += b * sk_b + g * sk_g
    V += b * sv_b + g * sv_g
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BDV], tl.float32)
    for c0 in range(begin, end, BC):
        c = c0 + tl.arange(0, BC)
        k = load_rows(K, c.to(tl.int64) * sk_s, c < end, D, BD)
        v = load_rows(V, c.to(tl.int64) * sv_s, c < end, DV, BDV)
        kept = (c[None, :] >= lo[:, None]) & (c[None, :] < tl.minimum(hi, end)[:, None])
        m, l, acc = more(logits(q, k, kept, scale_log2, PREC), v, m, l, acc, PREC)
    row = ((split * tl.num_programs(2) + b) * T + t) * (tl.num_programs(1) * H) + g * H + h
    leave(O, LSE, row, live, m, l, acc, DV, BDV)


@triton.jit(do_not_specialize=["S", "q0", "J"])
def nsa_selected_forward_split(
    Q,
    K,
    V,
    BLOCKS,
    O,
    LSE,
    Q0,
    T,
    S,
    q0,
    J,
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
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    PER: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    RAGGED: tl.constexpr,
    PREC: tl.constexpr,
):
    """One (row, kv head) over PER of its slots."""
    at_row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = (at_row // G).to(tl.int32)
    g = at_row % G
    b = row // T
    pos = row - b * T + q0
    if RAGGED:
        pos = row - b * T + tl.load(Q0 + b).to(tl.int32)
    h = tl.arange(0, M)
    i = tl.arange(0, LP)
    q = load_rows(
        Q + b.to(tl.int64) * sq_b + (row - b * T).to(tl.int64) * sq_t,
        (g * H + h) * sq_h,
        h < H,
        D,
        BD,
    )
    K += b.to(tl.int64) * sk_b + g * sk_g
    V += b.to(tl.int64) * sv_b + g * sv_g
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BDV], tl.float32)
    for at in range(PER):
        n = split * PER + at
        block = tl.load(BLOCKS + at_row * N + n, mask=n < N, other=-1)
        c = block * L + i
        kept = (block >= 0) & (block < J) & (i < L) & (c < S) & (c <= pos)
        k = load_rows(K, c.to(tl.int64) * sk_s, kept, D, BD)
        v = load_rows(V, c.to(tl.int64) * sv_s, kept, DV, BDV)
        m, l, acc = more(logits(q, k, kept[None, :], scale_log2, PREC), v, m, l, acc, PREC)
    leave(
        O,
        LSE,
        (split.to(tl.int64) * tl.num_programs(0) + at_row) * H + h,
        h < H,
        m,
        l,
        acc,
        DV,
        BDV,
    )


@triton.jit
def summed(
    PART,
    LSE_PART,
    row,
    num_rows,
    num_splits,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """(sum over splits of 2^(lse_n - lse) o_n, lse [1]) of one ``row`` of ``num_rows``."""
    dv = tl.arange(0, BDV)
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([BDV], tl.float32)
    for n0 in range(0, num_splits, AT_ONCE):
        n = n0 + tl.arange(0, AT_ONCE)
        at = n.to(tl.int64) * num_rows + row
        lse = tl.load(LSE_PART + at, mask=n < num_splits, other=float("-inf"))
        o = tl.load(
            PART + at[:, None] * DV + dv[None, :],
            mask=(n < num_splits)[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        new = tl.maximum(m, tl.max(lse, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        a = tl.exp2(m - safe)
        w = tl.exp2(lse - safe)
        l = l * a + tl.sum(w, 0)
        acc = acc * a + tl.sum(w[:, None] * o, 0)
        m = new
    some = l != 0  # NaN stays NaN
    safe = tl.where(some, l, 1.0)
    return acc / safe, tl.where(some, m + tl.log2(safe), float("-inf"))


@triton.jit
def _sum(
    PART, LSE_PART, O, LSE, num_splits, DV: tl.constexpr, BDV: tl.constexpr, AT_ONCE: tl.constexpr
):
    """One row (b, t, head) a program."""
    row, dv = tl.program_id(0).to(tl.int64), tl.arange(0, BDV)
    o, lse = summed(PART, LSE_PART, row, tl.num_programs(0), num_splits, DV, BDV, AT_ONCE)
    tl.store(O + row * DV + dv, o.to(O.dtype.element_ty), mask=dv < DV)
    tl.store(LSE + row + tl.arange(0, 1), lse)


@triton.jit(repr=named_by("nsa_interval_sum", _BRANCH), do_not_specialize=["num_splits"])
def nsa_interval_sum(
    PART,
    LSE_PART,
    O,
    LSE,
    num_splits,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BANDED: tl.constexpr,
):
    """BANDED is for the name that a profiler shows."""
    _sum(PART, LSE_PART, O, LSE, num_splits, DV, BDV, AT_ONCE)


@triton.jit(do_not_specialize=["num_splits"])
def nsa_selected_sum_splits(
    PART, LSE_PART, O, LSE, num_splits, DV: tl.constexpr, BDV: tl.constexpr, AT_ONCE: tl.constexpr
):
    _sum(PART, LSE_PART, O, LSE, num_splits, DV, BDV, AT_ONCE)


# By width class: keys a tile, warps, stages.
TILES = ((64, 4, 3), (64, 4, 3), (32, 4, 2), (32, 8, 1))
SELECTED_WARPS = 4
PREFETCHED_BYTES = 1 << 15  # of a block's K and V: up to here, the next slot's are read ahead
SUM_WARPS = 1


def few_queries(T: int, H: int) -> bool:
    """Whether T queries with H heads a kv head are served here: where they fit one tile.

    A tile of one head, as many queries have, would be padding but for T rows, and every head would
    read K and V again; packed, no program does more than one of those, and there are H times fewer,
    whatever the batch is.
    """
    return 0 < T * H <= MAX_ROWS and not is_off("split")


def interval_splits(tiles: int, keys: int, *, banded: bool) -> int:
    """The number of splits of at most ``keys`` keys that the queries of each of ``tiles`` (b, kv
    head) see.
    """
    return max(
        1, min(PROGRAMS // max(1, tiles), cdiv(keys, LEAST_KEYS_BANDED if banded else LEAST_KEYS))
    )


def few_rows(rows: int) -> bool:
    """Whether ``rows`` (b, t, kv head) of the selected branch are served here: where a program each
    would not fill a GPU.
    """
    return rows <= PROGRAMS and not is_off("split")


def slots_per_split(rows: int, N: int, *, small: bool) -> int:
    """How many of the N slots of each of ``rows`` (b, t, kv head) a split takes: a power of two,
    since each value is a variant to compile; N or more means no split.
    """
    return padded(cdiv(N, max(1, (SMALL_PROGRAMS if small else PROGRAMS) // max(1, rows))), 1)


def _parts(o: Tensor, lse: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Room for each split's o and lse, fp32 [P, ...]; of one split, o and lse themselves."""
    if splits == 1:
        return o, lse
    return o.new_empty(splits, *o.shape, dtype=torch.float32), lse.new_empty(splits, *lse.shape)


def sum_interval(
    part: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor], splits: int, *, banded: bool
) -> None:
    """Sum each split's (o, lse) of ``part`` into those of all splits, o [B, T, Q, DV] and lse
    [B, T, Q], contiguous. Of one split, ``part`` is ``into`` itself: see `_parts`.
    """
    if splits > 1:
        DV = into[0].shape[3]
        launch(
            nsa_interval_sum,
            (into[1].numel(),),
            *part,
            *into,
            splits,
            DV,
            padded(DV),
            AT_ONCE,
            banded,
            num_warps=SUM_WARPS,
        )


def sum_selected(part: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor], splits: int) -> None:
    """As `sum_interval`, of the selected branch."""
    if splits > 1:
        DV = into[0].shape[3]
        launch(
            nsa_selected_sum_splits,
            (into[1].numel(),),
            *part,
            *into,
            splits,
            DV,
            padded(DV),
            AT_ONCE,
            num_warps=SUM_WARPS,
        )


def interval(
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
    into: tuple[Tensor, Tensor],
    splits: int | None = None,
    tiles: tuple[int, int, int] | None = None,
) -> None:
    """As `nsa.ops.interval.forward_kernels.forward`, of `few_queries`, into contiguous (o, lse);
    last dimensions are contiguous.
    """
    (B, T, HQ, D), (C, G, DV) = q.shape, v.shape[1:]
    H, banded = HQ // G, width is not None
    splits = splits or interval_splits(
        B * G, C if width is None else min(C, width + T - 1), banded=banded
    )
    part = _parts(*into, splits)
    BC, num_warps, num_stages = (
        tiles or TILES[min(3, width_class(q, DV) + (q.dtype == torch.float32))]
    )
    q0, Q0 = starts(q_start)
    launch(
        nsa_interval_forward_split,
        (splits, G, B),
        q,
        k,
        v,
        *part,
        Q0,
        first,
        T,
        C,
        q0,
        block,
        stride,
        width or 0,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        scale * LOG2E,
        H,
        D,
        DV,
        padded(T * H),
        BC,
        padded(D),
        padded(DV),
        Q0 is not None,
        first is not None,
        banded,
        precision(q),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    sum_interval(part, into, splits, banded=banded)


def selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    sel_block: int,
    q_start: int | Tensor,
    scale: float,
    into: tuple[Tensor, Tensor],
    per_split: int | None = None,
    tiles: tuple[int, int] | None = None,
) -> None:
    """As `nsa.ops.selected.triton.forward.forward`, of `few_rows`, into contiguous (o, lse); blocks
    are contiguous, too.
    """
    (B, T), G, N = q.shape[:2], v.shape[2], blocks.shape[3]
    per_split = per_split or selected_per_split(B * T * G, N, k, v, sel_block)
    splits = cdiv(N, per_split)
    part = _parts(*into, splits)
    selected_parts(
        q,
        k,
        v,
        blocks,
        part=part,
        per_split=per_split,
        sel_block=sel_block,
        q_start=q_start,
        scale=scale,
        tiles=tiles,
    )
    sum_selected(part, into, splits)


def _block_bytes(k: Tensor, v: Tensor, sel_block: int) -> int:
    """Of K and V of one block, as a program loads them."""
    return padded(sel_block) * (padded(k.shape[3]) + padded(v.shape[3])) * k.element_size()


def selected_per_split(rows: int, N: int, k: Tensor, v: Tensor, sel_block: int) -> int:
    """Slots that a split of `selected` takes, of ``rows`` (b, t, kv head) with N slots each."""
    small = 2 * _block_bytes(k, v, sel_block) <= PREFETCHED_BYTES
    return min(N, slots_per_split(rows, N, small=small))


def selected_tiles(H: int, k: Tensor, v: Tensor, sel_block: int) -> tuple[int, int]:
    """(warps, stages) of the kernels of the selected branch, of H query heads per kv head."""
    ahead = _block_bytes(k, v, sel_block) <= PREFETCHED_BYTES
    return max(SELECTED_WARPS, padded(H) // 16), 2 if ahead else 1


def selected_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    part: tuple[Tensor, Tensor],
    per_split: int,
    sel_block: int,
    q_start: int | Tensor,
    scale: float,
    tiles: tuple[int, int] | None = None,
) -> None:
    """Each split's o and lse of `selected` into ``part``, [P, B, T, Q, DV] and [P, B, T, Q]."""
    (B, T, HQ, D), (S, G, DV), N = q.shape, v.shape[1:], blocks.shape[3]
    H, J, L = HQ // G, -(-S // sel_block), sel_block
    splits = cdiv(N, per_split)
    num_warps, num_stages = tiles or selected_tiles(H, k, v, L)
    q0, Q0 = starts(q_start)
    launch(
        nsa_selected_forward_split,
        (B * T * G, splits),
        q,
        k,
        v,
        blocks,
        *part,
        Q0,
        T,
        S,
        q0,
        J,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        scale * LOG2E,
        G,
        H,
        N,
        per_split,
        L,
        padded(L),
        D,
        DV,
        padded(H),
        padded(D),
        padded(DV),
        Q0 is not None,
        precision(q),
        num_warps=num_warps,
        num_stages=num_stages,
    )
