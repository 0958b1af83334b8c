"""The forward by lists: the part of each entry, and the sum of a row's parts.

Letters and entries as in `nsa.ops.selected.triton.entries`. Some on Hopper go to
`nsa.ops.selected.triton.warp_roles` for their parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.kernels.common import load_rows
from nsa.ops.selected.triton.entries import row_of, run_of


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
    current, end = run_of(KEY, begin, stop, base, TILE, TILE_P)
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
            row, b, pos = row_of(flat, T, q0, Q0, G, N, RAGGED)
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
            current, end = run_of(KEY, begin, stop, base, TILE, TILE_P)


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
