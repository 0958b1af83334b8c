"""Attention over chosen blocks, KV-outer: each block meets all the queries that chose it, so K and
V are read once, not once a query.

B batch, T queries, S keys, Q query heads, G kv heads, H query heads per kv head, N slots, J blocks
a kv head, L tokens a block, E entries (row, kv head, slot). Entries are sorted by block; a tile of
M rows is the H heads of QS entries; each entry's softmax over its one block is a part, and a row's
parts are summed in the order of its slots. No atomics: bitwise repeatable. Rows (b, t) are taken a
chunk at a time, which bounds the parts' memory; the chunk is the sort key's highest digit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.decode import kernels as decode
from nsa.ops.interval import backward as interval_backward
from nsa.ops.interval import forward_kernels as interval_forward
from nsa.ops.interval.parts import Sums
from nsa.ops.kernels.common import (
    LOG2E,
    cdiv,
    load_rows,
    padded,
    precision,
    rows,
    starts,
    width_class,
)
from nsa.ops.kernels.launch import launch
from nsa.ops.kernels.tiles import rows_that_fit, sm_of, smaller
from nsa.ops.selected.triton import dense_tiles
from nsa.ops.selected.triton.block_lists import Grid, Lists
from nsa.ops.selected.triton.by_row import forward as forward_by_row
from nsa.routing.thresholds import SORT_MIN_ROWS
from nsa.settings import is_off

# of one chunk's parts, or PARTS_OF_Q times the queries' own bytes where that is more
PART_BYTES = 512 << 20
PARTS_OF_Q = 2
MIN_PROGRAMS = 1024


@triton.jit
def _row(flat, T, q0, Q0, G: tl.constexpr, N: tl.constexpr, RAGGED: tl.constexpr):
    """(row, b, position) of entries."""
    row = flat // (G * N)
    b = row // T
    pos = row - b * T + q0
    if RAGGED:
        pos = row - b * T + tl.load(Q0 + b).to(tl.int32)
    return row, b, pos


@triton.jit
def _run(KEY, begin, stop, base, TILE: tl.constexpr, TILE_P: tl.constexpr):
    """(list of entry ``begin``, one past its last entry before ``stop``)."""
    first = tl.load(KEY + begin).to(tl.int32)
    e = tl.arange(0, TILE_P)
    same = (begin + e < stop) & (e < TILE)
    same = same & (tl.load(KEY + begin + e, mask=same, other=-1).to(tl.int32) == first)
    return first - base, begin + tl.sum(same.to(tl.int32), 0)


@triton.jit
def nsa_selected_forward(
    Q,
    K,
    V,
    KEY,
    ORDER,
    PART,
    LSE_PART,
    Q0,
    e0,
    e1,
    base,
    T,
    S,
    q0,
    J,
    num_lists,
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
    L: tl.constexpr,
    LP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    QS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_P: tl.constexpr,
    M: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    RAGGED: tl.constexpr,
    PREC: tl.constexpr,
):
    """TILE neighbouring entries a program, of the chunk e0 .. e1 - 1 whose lists begin at ``base``;
    a run of one list shares its block.
    """
    begin = e0 + tl.program_id(0) * TILE
    stop = tl.minimum(begin + TILE, e1)
    m = tl.arange(0, M)
    dv = tl.arange(0, BDV)
    i = tl.arange(0, LP)
    head_at = (m % H).to(tl.int64) * sq_h  # may exceed 2^31
    current, end = _run(KEY, begin, stop, base, TILE, TILE_P)
    while (begin < stop) & (current < num_lists):
        bg = current // J
        g = (bg % G).to(tl.int64)
        c = (current - bg * J) * L + i
        inside = (i < L) & (c < S)
        k = load_rows(
            K, (bg // G).to(tl.int64) * sk_b + g * sk_g + c.to(tl.int64) * sk_s, inside, D, BD
        )
        v = load_rows(
            V, (bg // G).to(tl.int64) * sv_b + g * sv_g + c.to(tl.int64) * sv_s, inside, DV, BDV
        )
        for at in range(begin, end, QS):
            e = at + m // H
            live = (e < end) & (m < QS * H)
            flat = tl.load(ORDER + e, mask=live, other=0).to(tl.int32)
            row, b, pos = _row(flat, T, q0, Q0, G, N, RAGGED)
            q = load_rows(
                Q,
                b.to(tl.int64) * sq_b + (row - b * T).to(tl.int64) * sq_t + g * H * sq_h + head_at,
                live,
                D,
                BD,
            )
            s = tl.dot(q, tl.trans(k), input_precision=PREC) * scale_log2
            s = tl.where((c[None, :] <= pos[:, None]) & inside[None, :], s, float("-inf"))
            most = tl.max(s, 1)
            most = tl.where(most == float("-inf"), 0.0, most)
            p = tl.exp2(s - most[:, None])
            total = tl.sum(p, 1)
            some = total != 0  # NaN stays NaN
            o = tl.dot(p.to(v.dtype), v, input_precision=PREC) / tl.where(some, total, 1.0)[:, None]
            part = (flat.to(tl.int64) - e0) * H + m % H
            to, mask = PART + part[:, None] * DV + dv[None, :], live[:, None] & (dv < DV)[None, :]
            # what is gathered again stays in the L2
            tl.store(to, o.to(PART.dtype.element_ty), mask=mask, eviction_policy="evict_first")
            tl.store(
                LSE_PART + part,
                tl.where(some, most + tl.log2(tl.where(some, total, 1.0)), float("-inf")),
                mask=live,
            )
        begin = end
        if begin < stop:
            current, end = _run(KEY, begin, stop, base, TILE, TILE_P)


@triton.jit
def nsa_selected_sum(
    PART,
    LSE_PART,
    BLOCKS,
    O,
    LSE,
    first_row,
    T,
    full,
    J,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    DV: tl.constexpr,
    HP: tl.constexpr,
    BDV: tl.constexpr,
):
    """One (row, kv head) a program: o = sum over slots of 2^(lse_n - lse) o_n.

    The parts' loads wait for nothing but their block.
    """
    local = tl.program_id(0).to(tl.int64)
    at_row = first_row * G + local
    if (at_row // G) % T >= full:  # rows before that are done
        h = tl.arange(0, HP)
        dv = tl.arange(0, BDV)
        n_ = tl.arange(0, NP)
        chosen = tl.load(BLOCKS + at_row * N + n_, mask=n_ < N, other=-1)
        there = (h < H)[:, None] & ((chosen >= 0) & (chosen < J))[None, :]
        # [heads, slots]
        lses = tl.load(
            LSE_PART + (local * N + n_)[None, :] * H + h[:, None], mask=there, other=float("-inf")
        )
        most = tl.max(lses, 1)
        most = tl.where(most == float("-inf"), 0.0, most)
        total = tl.sum(tl.exp2(lses - most[:, None]), 1)
        acc = tl.zeros([HP, BDV], tl.float32)
        for n in tl.static_range(N):
            block = tl.load(BLOCKS + at_row * N + n)
            written = (h < H) & (block >= 0) & (block < J)
            at = (local * N + n) * H + h
            mask = written[:, None] & (dv < DV)[None, :]
            o = tl.load(
                PART + at[:, None] * DV + dv[None, :],
                mask=mask,
                other=0.0,
                eviction_policy="evict_first",
            ).to(tl.float32)
            lse = tl.load(LSE_PART + at, mask=written, other=float("-inf"))
            acc += tl.exp2(lse - most)[:, None] * o
        some = total != 0  # NaN stays NaN
        to = at_row * H + h
        o = acc / tl.where(some, total, 1.0)[:, None]
        tl.store(
            O + to[:, None] * DV + dv[None, :],
            o.to(O.dtype.element_ty),
            mask=(h < H)[:, None] & (dv < DV)[None, :],
        )
        tl.store(
            LSE + to,
            tl.where(some, most + tl.log2(tl.where(some, total, 1.0)), float("-inf")),
            mask=h < H,
        )


@triton.jit
def nsa_selected_backward(
    Q,
    K,
    V,
    DO,
    LSE,
    DELTA,
    KEY,
    ORDER,
    DQ_PART,
    DK_PART,
    DV_PART,
    Q0,
    e0,
    e1,
    base,
    T,
    S,
    q0,
    J,
    num_lists,
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
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    QS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_P: tl.constexpr,
    M: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    RAGGED: tl.constexpr,
    PREC: tl.constexpr,
):
    """TILE neighbouring entries a program.

    Each run of one list gives a part of its dK and dV, in slot (tile + list): unique, ascending.
    """
    tile = tl.program_id(0)
    begin = e0 + tile * TILE
    stop = tl.minimum(begin + TILE, e1)
    m = tl.arange(0, M)
    d = tl.arange(0, BD)
    dv_ = tl.arange(0, BDV)
    i = tl.arange(0, LP)
    head_at = (m % H).to(tl.int64) * sq_h  # may exceed 2^31
    current, end = _run(KEY, begin, stop, base, TILE, TILE_P)
    while (begin < stop) & (current < num_lists):
        bg = current // J
        g = (bg % G).to(tl.int64)
        c = (current - bg * J) * L + i
        inside = (i < L) & (c < S)
        k = load_rows(
            K, (bg // G).to(tl.int64) * sk_b + g * sk_g + c.to(tl.int64) * sk_s, inside, D, BD
        )
        v = load_rows(
            V, (bg // G).to(tl.int64) * sv_b + g * sv_g + c.to(tl.int64) * sv_s, inside, DV, BDV
        )
        dk = tl.zeros([LP, BD], tl.float32)
        dv = tl.zeros([LP, BDV], tl.float32)
        for at in range(begin, end, QS):
            e = at + m // H
            live = (e < end) & (m < QS * H)
            flat = tl.load(ORDER + e, mask=live, other=0).to(tl.int32)
            row, b, pos = _row(flat, T, q0, Q0, G, N, RAGGED)
            head = row.to(tl.int64) * (G * H) + g * H + m % H
            q = load_rows(
                Q,
                b.to(tl.int64) * sq_b + (row - b * T).to(tl.int64) * sq_t + g * H * sq_h + head_at,
                live,
                D,
                BD,
            )
            do = load_rows(DO, head * DV, live, DV, BDV)
            lse = tl.load(LSE + head, mask=live, other=float("inf"))
            lse = tl.where(lse == float("-inf"), float("inf"), lse)
            delta = tl.load(DELTA + head, mask=live, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision=PREC) * scale_log2
            p = tl.where(
                (c[None, :] <= pos[:, None]) & inside[None, :], tl.exp2(s - lse[:, None]), 0.0
            )
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PREC)
            ds = p * (tl.dot(do, tl.trans(v), input_precision=PREC) - delta[:, None]) * scale
            ds = ds.to(q.dtype)
            dk = tl.dot(tl.trans(ds), q, dk, input_precision=PREC)
            dq = tl.dot(ds, k, input_precision=PREC)
            to = DQ_PART + (((flat.to(tl.int64) - e0) * H + m % H) * D)[:, None] + d[None, :]
            tl.store(
                to,
                dq.to(DQ_PART.dtype.element_ty),
                mask=live[:, None] & (d < D)[None, :],
                eviction_policy="evict_first",
            )
        slot = ((tile + current).to(tl.int64) * L + i)[:, None]
        tl.store(DK_PART + slot * D + d[None, :], dk, mask=(i < L)[:, None] & (d < D)[None, :])
        tl.store(
            DV_PART + slot * DV + dv_[None, :], dv, mask=(i < L)[:, None] & (dv_ < DV)[None, :]
        )
        begin = end
        if begin < stop:
            current, end = _run(KEY, begin, stop, base, TILE, TILE_P)


@triton.jit
def _sum_list(
    PART,
    SO_FAR,
    X,
    DENSE,
    lo,
    hi,
    S,
    full,
    bg,
    j,
    sx_b,
    sx_s,
    sx_g,
    L: tl.constexpr,
    LP: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    ADD: tl.constexpr,
):
    """Sum parts lo .. hi - 1 to the rows of block j of X, with those of DENSE [B, full, G, D],
    unless it is None, and ADD those of SO_FAR, which lies as X.
    """
    i = tl.arange(0, LP)
    d = tl.arange(0, BD)
    acc = tl.zeros([LP, BD], tl.float32)
    inside = (i < L)[:, None] & (d < D)[None, :]
    part = PART + (lo.to(tl.int64) * L + i)[:, None] * D + d[None, :]
    for _ in range(lo, hi):
        acc += tl.load(part, mask=inside, other=0.0)
        part += L * D
    c = j * L + i
    at = (
        (bg // G).to(tl.int64) * sx_b
        + (bg % G) * sx_g
        + c.to(tl.int64)[:, None] * sx_s
        + d[None, :]
    )
    inside = inside & (c < S)[:, None]
    if DENSE is not None:
        dense = (
            DENSE
            + (((bg // G).to(tl.int64) * full + c.to(tl.int64)) * G + bg % G)[:, None] * D
            + d[None, :]
        )
        acc += tl.load(dense, mask=inside & (c < full)[:, None], other=0.0).to(tl.float32)
    if ADD:
        acc += tl.load(SO_FAR + at, mask=inside, other=0.0)
    tl.store(X + at, acc.to(X.dtype.element_ty), mask=inside)


@triton.jit
def nsa_selected_sum_kv(
    DK_PART,
    DV_PART,
    BOUND,
    DK_SO_FAR,
    DV_SO_FAR,
    DK,
    DV_,
    DENSE_K,
    DENSE_V,
    e0,
    base,
    S,
    full,
    J,
    sk_b,
    sk_s,
    sk_g,
    sv_b,
    sv_s,
    sv_g,
    G: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    ADD: tl.constexpr,
):
    """Sum a block's parts in their order; ADD what earlier chunks left.

    DENSE: what the first ``full`` rows gave, or None.
    """
    list_ = tl.program_id(0)
    first = tl.load(BOUND + base + list_) - e0
    last = tl.load(BOUND + base + list_ + 1) - e0
    lo = list_ + first // TILE
    hi = tl.where(last > first, list_ + (last - 1) // TILE + 1, lo)
    bg = list_ // J
    if tl.program_id(1) == 0:
        _sum_list(
            DK_PART,
            DK_SO_FAR,
            DK,
            DENSE_K,
            lo,
            hi,
            S,
            full,
            bg,
            list_ - bg * J,
            sk_b,
            sk_s,
            sk_g,
            L,
            LP,
            G,
            D,
            BD,
            ADD,
        )
    else:
        _sum_list(
            DV_PART,
            DV_SO_FAR,
            DV_,
            DENSE_V,
            lo,
            hi,
            S,
            full,
            bg,
            list_ - bg * J,
            sv_b,
            sv_s,
            sv_g,
            L,
            LP,
            G,
            DV,
            BDV,
            ADD,
        )


@triton.jit
def nsa_selected_sum_q(
    DQ_PART,
    BLOCKS,
    DQ,
    first_row,
    T,
    full,
    J,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    HP: tl.constexpr,
    BD: tl.constexpr,
    ADD: tl.constexpr,
):
    """One (row, kv head) a program: dq is the sum over its slots. ADD to what DQ holds."""
    local = tl.program_id(0).to(tl.int64)
    at_row = first_row * G + local
    if (at_row // G) % T >= full:  # rows before that are done
        h = tl.arange(0, HP)
        d = tl.arange(0, BD)
        acc = tl.zeros([HP, BD], tl.float32)
        for n in tl.static_range(N):
            block = tl.load(BLOCKS + at_row * N + n)
            at = (local * N + n) * H + h
            there = (h < H)[:, None] & (d < D)[None, :] & (block >= 0) & (block < J)
            acc += tl.load(
                DQ_PART + at[:, None] * D + d[None, :],
                mask=there,
                other=0.0,
                eviction_policy="evict_first",
            ).to(tl.float32)
        to = DQ + (at_row * H + h)[:, None] * D + d[None, :]
        mask = (h < H)[:, None] & (d < D)[None, :]
        if ADD:
            acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, acc.to(DQ.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes measured on an H200 (reports/kernels-log.md)."""

    M: int
    num_warps: int
    segments: int = 1  # tiles of M rows that a program takes
    num_stages: int = 1
    max_registers: int | None = None  # of a thread; fewer let more programs share a multiprocessor

    @property
    def options(self) -> dict[str, int]:
        """What Triton's launch takes."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}

    def entries(self, H: int, E: int) -> tuple[int, int, int]:
        """(rows M, entries a tile of M rows, entries a program): fewer where E entries would make
        too few programs.
        """
        return _entries(max(self.M, padded(H)), self.segments, H, E)


@dataclass(frozen=True, slots=True)
class RoleTiles:
    """Sizes of `nsa.ops.selected.triton.warp_roles`, for H of at most M heads."""

    M: int
    groups: int  # of four warps each that multiply: tiles in turns, and in the backward each tile
    stages: int  # tiles of M rows fetched ahead
    blocks: int  # of K and V held: of 2, the next list's arrives while this one's is in use
    segments: int  # tiles of M rows that a program takes
    registers: int  # of a thread at the start: 128 lets two programs share a multiprocessor
    fetch: int = 72  # registers of a thread that fetches; 40 spill
    multiply: int = 208  # and of one of the forward's second group; the first has the rest

    @property
    def options(self) -> dict[str, int]:
        """What Triton's launch takes."""
        return {"num_warps": 4, "maxnreg": self.registers}

    def entries(self, H: int, E: int) -> tuple[int, int, int]:
        """As `Tiles.entries`."""
        return _entries(self.M, self.segments, H, E)


def _entries(M: int, segments: int, H: int, E: int) -> tuple[int, int, int]:
    while segments > 1 and M // H * segments * MIN_PROGRAMS > E:
        segments //= 2
    return M, M // H, M // H * segments


# By width class; the first two measured in bf16.
FORWARD = (Tiles(64, 4, 3), Tiles(64, 4, 8, max_registers=128), Tiles(64, 8, 4), Tiles(32, 4, 4))
BACKWARD = (Tiles(128, 4, 32, 2), Tiles(64, 4, 128), Tiles(64, 8, 32), Tiles(32, 4, 32))
# By width class, on Hopper; None: those above. At 65,536 tokens the branch takes 1.88 ms forward
# (2.20 above) and 3.30 backward (3.59) at width 64, 28.97 backward (29.73) at 128, where no roles
# made the forward faster (reports/evidence/kernels-h200/variants-stores.txt).
FORWARD_ROLES: tuple[RoleTiles | None, ...] = (
    RoleTiles(128, 1, 4, 2, 32, 128),
    None,
    None,
    None,
)
BACKWARD_ROLES: tuple[RoleTiles | None, ...] = (
    RoleTiles(128, 2, 3, 2, 64, 168, 96),
    RoleTiles(128, 2, 1, 1, 32, 168),
    None,
    None,
)
# times as many rows as choose every block, up to which those are better off without lists
FULL_WORTH = 8


def _of_class(kernel: str, tiles: tuple[Tiles, ...], q: Tensor, DV: int) -> Tiles:
    of_class = min(3, width_class(q, DV) + (q.dtype == torch.float32))
    changes = smaller(kernel, of_class, q.device)
    return replace(tiles[of_class], **changes) if changes else tiles[of_class]


def _backward_tiles(q: Tensor, DV: int, L: int, H: int) -> Tiles:
    t = _of_class("selected_backward", BACKWARD, q, DV)
    M = rows_that_fit(t.M, padded(H), padded(L), (padded(q.shape[3]), padded(DV)), q)
    return t if M == t.M else replace(t, M=M)


def roles_take(q: Tensor, k: Tensor, v: Tensor, *, sel_block: int, M: int) -> bool:
    """Whether `nsa.ops.selected.triton.warp_roles` computes these: rows of 64 or 128 elements of 2
    bytes at multiples of 16 bytes, blocks of 64 keys, groups of at most M heads.
    """
    return (
        q.element_size() == 2
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] in (64, 128)
        and sel_block == 64
        and q.shape[2] // k.shape[2] <= M
        and not any(x.data_ptr() % 16 for x in (q, k, v))
        and not any(stride % 8 for x in (q, k, v) for stride in x.stride()[:-1])
    )


def _role_tiles(
    table: tuple[RoleTiles | None, ...], q: Tensor, k: Tensor, v: Tensor, sel_block: int
) -> RoleTiles | None:
    t = table[min(3, width_class(q, v.shape[-1]) + (q.dtype == torch.float32))]
    if t is None or is_off("roles") or not roles_take(q, k, v, sel_block=sel_block, M=t.M):
        return None
    sm = sm_of(q.device)
    return t if sm is not None and sm[0] == 9 else None


def sorts(rows: int) -> bool:
    """Whether a forward of so many (b, t, kv head) goes by lists."""
    return rows >= SORT_MIN_ROWS and not is_off("lists")


def leaves_lists(q: Tensor, v: Tensor, blocks: Tensor, sel_block: int, scale: float) -> bool:
    """Whether the forward of these goes by lists, and so not by dense tiles."""
    goes = sorts(q.shape[0] * q.shape[1] * v.shape[2])
    return goes and not dense_tiles.serves(q, v, blocks, sel_block, scale)


def lists_left(
    lists: Tensor | None, q: Tensor, v: Tensor, blocks: Tensor, sel_block: int, scale: float
) -> Tensor | None:
    """``lists`` as the operator's forward returned them, None where it went without."""
    if lists is None or not lists.numel():
        return None
    return lists if leaves_lists(q, v, blocks, sel_block, scale) else None


def grid_of(q: Tensor, v: Tensor, blocks: Tensor, sel_block: int) -> Grid:
    """Sizes of the lists of a call, forward and backward; symbolic sizes make no guard."""
    (B, T, HQ, D), (S, G, DV), N = q.shape, v.shape[1:], blocks.shape[3]
    row_bytes = N * HQ * max(D, DV) * q.element_size()
    most = torch.sym_max(PART_BYTES, PARTS_OF_Q * q.numel() * q.element_size()) // row_bytes
    step = torch.sym_max(1, torch.sym_min(B * T, most))
    # as many chunks, of one size: the fourth of 65,536 rows would have one row, others 21,845
    step = cdiv(B * T, cdiv(B * T, step))
    return Grid(B, T, G, N, cdiv(S, sel_block), step)


def _role_sizes(
    t: RoleTiles, q: Tensor, k: Tensor, v: Tensor, sel_block: int, tile: tuple[int, int, int]
) -> tuple[tuple[int, ...], bool]:
    """(the constants of both kernels with roles from the width of a row on, whether row (b, t) of q
    is t rows after row (b, 0) and b T after row 0).
    """
    if not roles_take(q, k, v, sel_block=sel_block, M=t.M):
        raise ValueError(
            f"tiles={t} with q {tuple(q.shape)} {q.dtype}, strides {q.stride()}, sel_block="
            f"{sel_block}: roles want rows of 64 or 128 elements of 2 bytes at multiples of 16 "
            "bytes and blocks of 64 keys; give Tiles, or none"
        )
    M, QS, TILE = tile
    sizes = (q.shape[3], QS, padded(QS, 8), TILE, M, t.stages, t.blocks)
    return sizes, q.shape[0] == 1 or q.stride(0) == q.shape[1] * q.stride(1)


# every key up to the query
FULL: dict[str, Any] = {"block": 1, "stride": 1, "width": None, "q_start": 0, "first": None}


def rows_in_full(full: int, T: int) -> int:
    """How many of the ``full`` first rows of a sequence, which chose every block, are computed
    without lists: none where they are few of T.
    """
    return full if 0 < full < T <= FULL_WORTH * full else 0


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    sel_block: int,
    q_start: int | Tensor,
    scale: float,
    full: int = 0,
    lists: Tensor | None = None,
    tiles: Tiles | RoleTiles | None = None,
    by_row: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """q [B, T, Q, D], k [B, S, G, D], v [B, S, G, DV], blocks [B, T, G, N] -> (o [B, T, Q, DV], lse
    to base 2 [B, T, Q] fp32).

    ``full``: a promise that queries at positions below it chose every block up to their own, and
    that q_start is 0. ``lists`` int32 [grid_of(...).room]: where the lists are left for `backward`,
    where there are any (`sorts`).
    """
    as_tiles = by_row is None and tiles is None and not is_off("lists")
    if as_tiles and dense_tiles.serves(q, v, blocks, sel_block, scale):
        return dense_tiles.forward(
            q, k, v, blocks, sel_block=sel_block, q_start=q_start, scale=scale
        )
    q, k, v, blocks = rows(q), rows(k), rows(v), blocks.contiguous()
    (B, T, HQ, D), (S, G, DV), N = q.shape, v.shape[1:], blocks.shape[3]
    H, J, L = HQ // G, -(-S // sel_block), sel_block
    o, lse = q.new_empty(B, T, HQ, DV), q.new_empty(B, T, HQ, dtype=torch.float32)
    q0, Q0 = starts(q_start)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], scale * LOG2E)
    tail = (padded(D), padded(DV), Q0 is not None, precision(q))
    if not sorts(B * T * G) if by_row is None else by_row:
        if by_row is None and decode.few_rows(B * T * G):
            decode.selected(
                q, k, v, blocks, into=(o, lse), sel_block=L, q_start=q_start, scale=scale
            )
            return o, lse
        forward_by_row(q, k, v, blocks, into=(o, lse), sel_block=L, q_start=q_start, scale=scale)
        return o, lse
    if full := rows_in_full(full, T):
        interval_forward.forward(
            q[:, :full],
            k[:, :full],
            v[:, :full],
            scale=scale,
            into=(o, lse),
            work=q.numel(),
            **FULL,
        )
    t = tiles or _role_tiles(FORWARD_ROLES, q, k, v, L)
    t = t or _of_class("selected_forward", FORWARD, q, DV)
    M, QS, TILE = t.entries(H, blocks.numel())
    kernel: Any = nsa_selected_forward
    sizes: tuple[Any, ...] = (padded(L), D, DV, QS, TILE, padded(TILE), M, *tail)
    if isinstance(t, RoleTiles):
        from nsa.ops.selected.triton import warp_roles  # Triton's Gluon, for it alone

        common, one_stride = _role_sizes(t, q, k, v, L, (M, QS, TILE))
        kernel = warp_roles.nsa_selected_forward_roles
        sizes = (*common, t.groups, t.fetch, t.multiply, Q0 is not None, one_stride)
    step = grid_of(q, v, blocks, L).rows_per_chunk
    made = Lists.of(blocks, J, step, full=full, into=lists)
    part = q.new_empty(step * G * N * H, DV)
    lse_part = q.new_empty(step * G * N * H, dtype=torch.float32)
    for number, r0 in enumerate(range(0, B * T, step)):
        n = min(step, B * T - r0)
        e0, e1 = r0 * G * N, (r0 + n) * G * N
        launch(
            kernel,
            (cdiv(e1 - e0, TILE),),
            q,
            k,
            v,
            made.key_E,
            made.order_E,
            part,
            lse_part,
            Q0,
            e0,
            e1,
            number * (made.num_lists + 1),
            T,
            S,
            q0,
            J,
            made.num_lists,
            *strides,
            G,
            H,
            N,
            L,
            *sizes,
            **t.options,
        )
        launch(
            nsa_selected_sum,
            (n * G,),
            part,
            lse_part,
            blocks,
            o,
            lse,
            r0,
            T,
            full,
            J,
            G,
            H,
            N,
            padded(N, 1),
            DV,
            padded(H, 1),
            padded(DV),
            num_warps=4 if H * DV > 512 else 1,
        )
    return o, lse


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    sel_block: int,
    q_start: int | Tensor,
    scale: float,
    full: int = 0,
    dq: Tensor | None = None,
    lists: Tensor | None = None,
    sums: Sums | None = None,
    tiles: Tiles | RoleTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each in its dtype, that of q added to ``dq`` where it is given.

    ``do``, ``lse`` and ``delta`` as in `nsa.ops.interval.backward.backward`; ``full`` as in
    `forward`, and so ``lists``, which it left, unless it was without; None: they are made here.
    ``sums``: of other branches, which are launched here.
    """
    if tiles is None and dense_tiles.serves(q, v, blocks, sel_block, scale, backward=True):
        return dense_tiles.backward(
            do,
            q,
            k,
            v,
            blocks,
            lse,
            delta,
            sel_block=sel_block,
            q_start=q_start,
            scale=scale,
            dq=dq,
            sums=sums,
        )
    q, k, v, blocks = rows(q), rows(k), rows(v), blocks.contiguous()
    (B, T, HQ, D), (S, G, DV), N = q.shape, v.shape[1:], blocks.shape[3]
    H, J, L = HQ // G, -(-S // sel_block), sel_block
    adds = dq is not None
    dq = q.new_empty(B, T, HQ, D) if dq is None else dq
    q0, Q0 = starts(q_start)
    t = tiles or _role_tiles(BACKWARD_ROLES, q, k, v, L) or _backward_tiles(q, DV, L, H)
    M, QS, TILE = t.entries(H, blocks.numel())
    kernel: Any = nsa_selected_backward
    options = t.options
    sizes: tuple[Any, ...] = (padded(L), D, DV, QS, TILE, padded(TILE), M)
    sizes = (*sizes, padded(D), padded(DV), Q0 is not None, precision(q))
    if isinstance(t, RoleTiles):
        from nsa.ops.selected.triton import warp_roles  # Triton's Gluon, for it alone

        common, one_stride = _role_sizes(t, q, k, v, L, (M, QS, TILE))
        kernel = warp_roles.nsa_selected_backward_roles
        sizes = (*common, 4 * t.groups, t.fetch, Q0 is not None, one_stride)
        options = {**options, "num_warps": 4 * t.groups}
    grid, full = grid_of(q, v, blocks, L), rows_in_full(full, T)
    step = grid.rows_per_chunk
    made = Lists.of(blocks, J, step, full=full) if lists is None else Lists.in_(lists, grid)
    dk, dv = k.new_empty(B, S, G, D), v.new_empty(B, S, G, DV)
    so_far = (dk, dv)
    if step < B * T:  # sums of several chunks are kept in fp32
        so_far = (
            torch.empty_like(dk, dtype=torch.float32),
            torch.empty_like(dv, dtype=torch.float32),
        )
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], scale, scale * LOG2E)
    dense: tuple[Tensor | None, Tensor | None] = (None, None)
    if full:
        few = (q[:, :full], k[:, :full], v[:, :full])
        dense = interval_backward.backward(
            do, *few, lse, delta, scale=scale, dq=dq, adds=adds, sums=sums, work=q.numel(), **FULL
        )[1:]
    if sums is not None:
        sums.launch()  # whose parts are freed before those of this branch are made
    slots = cdiv(step * G * N, TILE) + made.num_lists
    dq_part = q.new_empty(step * G * N * H, D)
    dk_part, dv_part = (q.new_empty(slots, L, n, dtype=torch.float32) for n in (D, DV))
    for number, r0 in enumerate(range(0, B * T, step)):
        n = min(step, B * T - r0)
        e0, e1 = r0 * G * N, (r0 + n) * G * N
        base = number * (made.num_lists + 1)
        launch(
            kernel,
            (cdiv(e1 - e0, TILE),),
            q,
            k,
            v,
            do,
            lse,
            delta,
            made.key_E,
            made.order_E,
            dq_part,
            dk_part,
            dv_part,
            Q0,
            e0,
            e1,
            base,
            T,
            S,
            q0,
            J,
            made.num_lists,
            *strides,
            G,
            H,
            N,
            L,
            *sizes,
            **options,
        )
        launch(
            nsa_selected_sum_kv,
            (made.num_lists, 2),
            dk_part,
            dv_part,
            made.bound,
            *so_far,
            *((dk, dv) if r0 + n == B * T else so_far),
            *dense,
            e0,
            base,
            S,
            full,
            J,
            *dk.stride()[:3],
            *dv.stride()[:3],
            G,
            L,
            padded(L),
            D,
            DV,
            TILE,
            padded(D),
            padded(DV),
            number > 0,
        )
        dense = (None, None)  # only once
        launch(
            nsa_selected_sum_q,
            (n * G,),
            dq_part,
            blocks,
            dq,
            r0,
            T,
            full,
            J,
            G,
            H,
            N,
            D,
            padded(H, 1),
            padded(D),
            adds,
            num_warps=4 if H * D > 512 else 1,
        )
    return dq, dk, dv
