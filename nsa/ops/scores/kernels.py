"""Block scores (Eq. 8 to 10) and the best of them (Eq. 11, 12).

Nothing of size [T, C] a head is ever written.

B batch, T queries, C compressed blocks, Q query heads, G kv heads, H query heads per kv head, J
selection blocks, N slots. R = l' / d compressed blocks begin within a selection block, W = l / d
sub-chunks make a compressed block; W <= R, R a power of two. A chunk of rows (b, t) is scored, then
its best blocks are taken, so that scores stay in the L2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import (
    LOG2E,
    cdiv,
    described,
    named_by,
    padded,
    precision,
    rows,
    starts,
    width_class,
)
from nsa.ops.kernels.launch import launch
from nsa.routing.thresholds import GRID_LIMIT

SCORE_BYTES = 1 << 25  # of one chunk's scores
# that are ranked by counting, or as many as there are slots; a row with more takes its slots one by
# one
CANDIDATES = 32


# By width class, the first two measured on an H200 (reports/kernels-log.md).
TILES = (
    {"BM": 64, "BC": 128, "num_warps": 4, "num_stages": 4},
    {"BM": 64, "BC": 128, "num_warps": 4, "num_stages": 3},
    {"BM": 64, "BC": 64, "num_warps": 4, "num_stages": 2},
    {"BM": 32, "BC": 32, "num_warps": 4, "num_stages": 1},
)


@triton.jit
def _visible(t, b, T, C, q0, block, stride, Q0, FIRST, RAGGED: tl.constexpr, DOCS: tl.constexpr):
    """(position, first visible compressed block, one past the last)."""
    pos = t + q0
    if RAGGED:
        pos = t + tl.load(Q0 + b).to(tl.int32)
    lo = tl.zeros_like(pos)
    if DOCS:
        lo = tl.load(FIRST + t).to(tl.int32) // stride
    hi = tl.where(pos + 1 < block, 0, (pos + 1 - block) // stride + 1)
    return pos, lo, tl.minimum(hi, C)


@triton.jit
def ranked(score):
    """NaN as 0 and infinity as a number. NaN compares with nothing: `nsa_choose` would take more
    than N blocks, and store them beyond the row. Asked there, this took 40 % longer.
    """
    return tl.minimum(tl.where(score >= 0, score, 0.0), 1e38)


@triton.jit(repr=named_by("nsa_scores", {"COPY": "_copy"}))
def nsa_scores(
    Q,
    K,
    LSE,
    SCORE,
    EDGE,
    Q0,
    FIRST,
    b0,
    t0,
    n,
    T,
    C,
    q0,
    block,
    stride,
    J,
    sq_b,
    sq_t,
    sq_h,
    sk_b,
    sk_c,
    sk_g,
    scale_log2,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    RAGGED: tl.constexpr,
    DOCS: tl.constexpr,
    PREC: tl.constexpr,
    COPY: tl.constexpr,
):
    """Sum of p over a group's heads for queries t0 .. t0 + n - 1 of some b: what is a block's own,
    and its edge on the next.
    """
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    row = row0 + tl.arange(0, BM)
    c0 = tl.program_id(1) * BC
    g = (tl.program_id(2) % G).to(tl.int64)
    batch = tl.program_id(2) // G
    live = row < n
    b = (b0 + batch).to(tl.int64)
    t = t0 + tl.minimum(row, n - 1)
    _, lo, hi = _visible(t, b, T, C, q0, block, stride, Q0, FIRST, RAGGED, DOCS)
    if (c0 < tl.max(hi, 0)) & (c0 + BC > tl.min(lo, 0)):
        c = c0 + tl.arange(0, BC)
        d = tl.arange(0, BD)
        k = tl.load(
            K + b * sk_b + g * sk_g + c.to(tl.int64)[:, None] * sk_c + d[None, :],
            mask=(c < C)[:, None] & (d < D)[None, :],
            other=0.0,
        )
        k = tl.trans(k)
        p = tl.zeros([BM, BC], tl.float32)
        for h in range(H):
            head = g * H + h
            if COPY:  # rows beyond n are another chunk's, or 0: they are not stored
                q = tl.reshape(Q.load([b0 + batch, t0 + row0, head.to(tl.int32), 0]), [BM, BD])
            else:
                at = Q + b * sq_b + head * sq_h + t.to(tl.int64)[:, None] * sq_t + d[None, :]
                q = tl.load(at, mask=live[:, None] & (d < D)[None, :], other=0.0)
            lse = tl.load(LSE + (b * T + t) * (G * H) + head)
            p += tl.exp2(tl.dot(q, k, input_precision=PREC) * scale_log2 - lse[:, None])
        # a row that sees none has lse = -inf: p = inf
        p = tl.where((c[None, :] >= lo[:, None]) & (c[None, :] < hi[:, None]), p, 0.0)
        i = tl.arange(0, R)
        own = tl.minimum(R - i, W).to(tl.float32)[None, None, :]
        p = tl.reshape(p, [BM, BC // R, R])
        j = c0 // R + tl.arange(0, BC // R)
        at = ((batch * n + row).to(tl.int64) * G + g)[:, None] * J + j[None, :]
        inside = live[:, None] & (j < J)[None, :]
        tl.store(SCORE + at, ranked(tl.sum(p * own, 2)), mask=inside)
        if W > 1:
            tl.store(EDGE + at, ranked(tl.sum(p * (W - own), 2)), mask=inside)


@triton.jit
def take_best(
    SCORE,
    EDGE,
    SPARE_J,
    SPARE_S,
    out,
    at,
    cur,
    hi,
    first_block,
    J,
    num_initial,
    num_local,
    N: tl.constexpr,
    NP: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    BJ: tl.constexpr,
    NC: tl.constexpr,
):
    """The N blocks of row ``at`` of the scores to ``out``, ascending and -1 padded: those forced up
    to block ``cur``, then the best by (score descending, index ascending). ``hi``: one past the
    last compressed block that the query sees.
    """
    j = tl.arange(0, BJ)
    allowed = (j >= first_block) & (j <= cur) & (j < J)
    forced = allowed & ((j < first_block + num_initial) | (j > cur - num_local))
    # what no visible compressed block reaches was not written, and is 0
    score = tl.load(SCORE + at * J + j, mask=allowed & (j * R < hi), other=0.0)
    if W > 1:
        score += tl.load(
            EDGE + at * J + j - 1, mask=allowed & (j > first_block) & (j * R - 1 < hi), other=0.0
        )
    need = N - tl.sum(forced.to(tl.int32), 0)
    score = tl.where(allowed & (forced == 0), score, -1.0)
    if BJ > NC:
        # The need-th largest maximum of NC interleaved groups: at least `need` scores reach it, and
        # seldom many more.
        best = tl.max(tl.reshape(score, [BJ // NC, NC]), 0)
        i = tl.arange(0, NC)
        better = (best[None, :] > best[:, None]) | (
            (best[None, :] == best[:, None]) & (i[None, :] < i[:, None])
        )
        least = tl.max(tl.where(tl.sum(better.to(tl.int32), 1) == need - 1, best, -1.0), 0)
        least = tl.where(need > 0, least, float("inf"))
        candidate = forced | ((score >= 0) & (score >= least))
        count = tl.sum(candidate.to(tl.int32), 0)
        if count <= NC:
            spare = at * NC + tl.cumsum(candidate.to(tl.int32), 0) - 1
            tl.store(SPARE_J + spare, j, mask=candidate)
            tl.store(SPARE_S + spare, tl.where(forced, float("inf"), score), mask=candidate)
            tl.debug_barrier()
            cj = tl.load(SPARE_J + at * NC + i, mask=i < count, other=2147483647)
            cs = tl.load(SPARE_S + at * NC + i, mask=i < count, other=-1.0)
            better = (cs[None, :] > cs[:, None]) | (
                (cs[None, :] == cs[:, None]) & (cj[None, :] < cj[:, None])
            )
            taken = (i < count) & (tl.sum(better.to(tl.int32), 1) < N)
            tl.store(out + tl.cumsum(taken.to(tl.int32), 0) - 1, cj, mask=taken)
        else:
            candidate = forced
            for _ in range(need):
                highest = tl.max(score, 0)
                hit = tl.min(tl.where((score == highest) & (score >= 0), j, 2147483647), 0)
                candidate = candidate | (j == hit)
                score = tl.where(j == hit, -1.0, score)
            tl.store(out + tl.cumsum(candidate.to(tl.int32), 0) - 1, j, mask=candidate)
            count = tl.sum(candidate.to(tl.int32), 0)
    else:
        score = tl.where(forced, float("inf"), score)
        better = (score[None, :] > score[:, None]) | (
            (score[None, :] == score[:, None]) & (j[None, :] < j[:, None])
        )
        taken = allowed & (tl.sum(better.to(tl.int32), 1) < N)
        tl.store(out + tl.cumsum(taken.to(tl.int32), 0) - 1, j, mask=taken)
        count = tl.sum(taken.to(tl.int32), 0)
    n = tl.arange(0, NP)
    tl.store(out + n, tl.full([NP], -1, tl.int32), mask=(n < N) & (n >= count))


@triton.jit
def nsa_choose(
    SCORE,
    EDGE,
    SPARE_J,
    SPARE_S,
    BLOCKS,
    Q0,
    FIRST,
    b0,
    t0,
    rows_of_b,
    T,
    C,
    q0,
    block,
    stride,
    J,
    L,
    num_initial,
    num_local,
    G: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    BJ: tl.constexpr,
    NC: tl.constexpr,
    RAGGED: tl.constexpr,
    DOCS: tl.constexpr,
):
    """One (row, kv head) a program: forced blocks, then the best by (score descending, index
    ascending); ascending, -1 padded.
    """
    at = tl.program_id(0).to(tl.int64)
    row = (at // G).to(tl.int32)
    b = b0 + row // rows_of_b
    t = t0 + row % rows_of_b
    pos, lo, hi = _visible(t, b, T, C, q0, block, stride, Q0, FIRST, RAGGED, DOCS)
    first_block = lo * stride // L
    out = BLOCKS + ((b.to(tl.int64) * T + t) * G + at % G) * N
    take_best(
        SCORE,
        EDGE,
        SPARE_J,
        SPARE_S,
        out,
        at,
        pos // L,
        hi,
        first_block,
        J,
        num_initial,
        num_local,
        N,
        NP,
        R,
        W,
        BJ,
        NC,
    )


def choose(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    *,
    block: int,
    stride: int,
    sel_block: int,
    num_selected: int,
    num_initial: int,
    num_local: int,
    kv_len: int,
    q_start: int | Tensor,
    first: Tensor | None,
    scale: float,
    tiles: dict[str, int] | None = None,
    score_bytes: int = SCORE_BYTES,
    num_warps: int = 1,
    candidates: int = CANDIDATES,
) -> Tensor:
    """q [B, T, Q, D], k_cmp [B, C, G, D], lse to base 2 [B, T, Q] -> blocks int32 [B, T, G, N]."""
    q, k = rows(q), rows(k_cmp)
    (B, T, HQ, D), (C, G) = q.shape, k.shape[1:3]
    J, R, W = -(-kv_len // sel_block), sel_block // stride, block // stride
    blocks = q.new_empty(B, T, G, num_selected, dtype=torch.int32)
    config = dict(tiles or TILES[min(3, width_class(q, D) + (q.dtype == torch.float32))])
    BM, BC = config.pop("BM"), max(config.pop("BC"), R)
    most = max(BM, score_bytes // (J * G * 4) // BM * BM)
    score, edge = q.new_empty(2, min(B * T, most), G, J, dtype=torch.float32)
    BJ, candidates = padded(J, 1), max(candidates, padded(num_selected, 1))
    spare = q.new_empty(2, score.shape[0] * G, candidates, dtype=torch.int32)
    q0, Q0 = starts(q_start)
    geometry, flags = (T, C, q0, block, stride, J), (Q0 is not None, first is not None)
    (queries,), copy = described(BM, q, work=q.numel())
    for b0, t0, batches, n in _chunks(B, T, most, GRID_LIMIT // G):
        seen = C if Q0 is not None else max(0, min(C, (q0 + t0 + n - block) // stride + 1))
        if seen:
            launch(
                nsa_scores,
                (cdiv(n, BM), cdiv(seen, BC), G * batches),
                queries,
                k,
                lse,
                score,
                edge,
                Q0,
                first,
                b0,
                t0,
                n,
                *geometry,
                *q.stride()[:3],
                *k.stride()[:3],
                scale * LOG2E,
                G,
                HQ // G,
                D,
                R,
                W,
                BM,
                BC,
                padded(D),
                *flags,
                precision(q),
                copy,
                **config,
            )
        reach = BJ if Q0 is not None else padded(-(-(q0 + t0 + n) // sel_block), 1)
        launch(
            nsa_choose,
            (batches * n * G,),
            score,
            edge,
            spare[0],
            spare[1].view(torch.float32),
            blocks,
            Q0,
            first,
            b0,
            t0,
            n,
            *geometry,
            sel_block,
            num_initial,
            num_local,
            G,
            num_selected,
            padded(num_selected, 1),
            R,
            W,
            min(BJ, reach),
            candidates,
            *flags,
            num_warps=num_warps,
        )
    return blocks


def _chunks(B: int, T: int, most: int, most_batches: int) -> Iterator[tuple[int, int, int, int]]:
    """(first b, first t, how many b, how many t of each), at most ``most`` rows together, of at
    most ``most_batches``.
    """
    batches, n = max(1, min(B, most // T, most_batches)), min(T, most)
    for b0 in range(0, B, batches):
        for t0 in range(0, T, n):
            yield b0, t0, min(batches, B - b0), min(n, T - t0)
