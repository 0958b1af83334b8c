"""The best blocks of a decode step's row of scores, by a program of several warps; `nsa_choose` of
`nsa.ops.scores` is for many rows, a warp each.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
