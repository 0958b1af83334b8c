"""The best blocks of a row by their scores (Eq. 11, 12): forced ones, then by (score descending,
index ascending).

Letters as in ``nsa.ops.scores.kernels``. A program is a warp with one (row, kv head). Blocks, or
groups of GROUP of them, are a matrix of NC rows, a row a lane, so that a lane works alone along its
row; what lanes find goes through SPARE, packed as ``_key``.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Row strides are not specialized: were they known to be multiples of 4, four neighbours would go to
# one lane, and what is along a row through shared memory.
UNSPECIALIZED = ["J"]


@triton.jit
def visible(t, b, T, C, q0, block, stride, Q0, FIRST, RAGGED: tl.constexpr, DOCS: tl.constexpr):
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
def _key(score, j):
    """Larger for a larger score, and of equal ones for a lower index; at least 0, as scores are."""
    bits = score.to(tl.int32, bitcast=True).to(tl.int64)
    return (bits << 32) | (2147483647 - j).to(tl.int64)


@triton.jit
def _places(pos, lo, J, L, stride, num_initial, num_local):
    """What is forced: first_block .. initial_end - 1 and local_begin .. end - 1. What competes is
    between.
    """
    first_block = lo * stride // L
    end = tl.minimum(pos // L + 1, J)
    initial_end = tl.minimum(first_block + num_initial, end)
    local_begin = tl.minimum(tl.maximum(pos // L - num_local + 1, initial_end), end)
    return first_block, initial_end, local_begin, end


@triton.jit
def _least(best, need):
    """The need-th largest of ``best``, maxima of groups that a lane has each: at least ``need``
    scores reach it, and seldom many more.
    """
    reach = tl.sum((best[:, None] >= best[None, :]).to(tl.int32), 0)
    least = tl.max(tl.where(reach >= need, best, -1.0), 0)
    return tl.where(need > 0, tl.maximum(least, 0.0), float("inf"))


@triton.jit
def _slots(candidate):
    """Where candidates [lanes, n], 0 or 1, go, each lane's one after the other; in no order."""
    of_lane = tl.sum(candidate, 1)
    return (tl.cumsum(of_lane, 0) - of_lane)[:, None] + tl.cumsum(candidate, 1) - candidate


@triton.jit
def _score_at(AT, EDGE_AT, j, inside, first_block, hi, R: tl.constexpr, EDGED: tl.constexpr):
    """Scores of blocks j of a row, at AT; what no visible compressed block reaches was not written,
    and is 0.
    """
    score = tl.load(AT, mask=inside & (j < (hi + R - 1) // R), other=0.0)
    if EDGED:
        reached = (j > first_block) & (j < (hi + R) // R)
        score += tl.load(EDGE_AT, mask=inside & reached, other=0.0)
    return score


@triton.jit
def _one_by_one(
    SCORE,
    EDGE,
    SPARE,
    first_block,
    initial_end,
    local_begin,
    hi,
    need,
    R: tl.constexpr,
    EDGED: tl.constexpr,
):
    """The ``need`` best keys, each the largest below the one before."""
    last = (local_begin * 0).to(tl.int64) + 9223372036854775807
    for n in range(need):
        best = (local_begin * 0).to(tl.int64) - 1
        for j0 in range(initial_end, local_begin, 256):
            j = j0 + tl.arange(0, 256)
            inside = j < local_begin
            score = _score_at(SCORE + j, EDGE + j, j, inside, first_block, hi, R, EDGED)
            key = _key(score, j)
            best = tl.maximum(best, tl.max(tl.where(inside & (key < last), key, -1), 0))
        tl.store(SPARE + n, best)
        last = best


@triton.jit
def _take(
    SPARE,
    out,
    found,
    first_block,
    initial_end,
    local_begin,
    end,
    N: tl.constexpr,
    NP: tl.constexpr,
    NC: tl.constexpr,
):
    """Store the forced blocks and the best of the ``found`` keys of SPARE; together at most NC."""
    num_first = initial_end - first_block
    num_forced = num_first + end - local_begin
    count = num_forced + found
    i = tl.arange(0, NC)
    key = tl.load(SPARE + i - num_forced, mask=(i >= num_forced) & (i < count), other=-1)
    own = tl.where(i < num_first, first_block + i, local_begin + i - num_first)
    key = tl.where(i < num_forced, _key(tl.full([NC], float("inf"), tl.float32), own), key)
    j = 2147483647 - (key & 2147483647).to(tl.int32)
    taken = (i < count) & (tl.sum((key[:, None] > key[None, :]).to(tl.int32), 0) < N)
    j = tl.where(taken, j, 2147483647)
    place = tl.sum((j[:, None] < j[None, :]).to(tl.int32), 0)
    tl.store(out + place, j, mask=taken)
    n = tl.arange(0, NP)
    tl.store(out + n, tl.full([NP], -1, tl.int32), mask=(n < N) & (n >= count))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def nsa_choose(
    SCORE,
    EDGE,
    SPARE,
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
    BJ: tl.constexpr,
    NC: tl.constexpr,
    RAGGED: tl.constexpr,
    DOCS: tl.constexpr,
    EDGED: tl.constexpr,
):
    """By all scores; what a block adds to the next is in EDGE, if EDGED."""
    at = tl.program_id(0).to(tl.int64)
    row = (at // G).to(tl.int32)
    b = b0 + row // rows_of_b
    t = t0 + row % rows_of_b
    pos, lo, hi = visible(t, b, T, C, q0, block, stride, Q0, FIRST, RAGGED, DOCS)
    SCORE += at * J
    EDGE += at * J - 1
    SPARE += at * NC
    first_block, initial_end, local_begin, end = _places(
        pos, lo, J, L, stride, num_initial, num_local
    )
    num_forced = initial_end - first_block + end - local_begin
    need = N - num_forced
    i = tl.arange(0, NC)
    of_row = tl.arange(0, BJ // NC)[None, :] * NC  # constants, in an address
    j = of_row + i[:, None]
    competes = (j >= initial_end) & (j < local_begin)
    score = _score_at(
        (SCORE + i)[:, None] + of_row,
        (EDGE + i)[:, None] + of_row,
        j,
        competes,
        first_block,
        hi,
        R,
        EDGED,
    )
    score = tl.where(competes, score, -1.0)
    candidate = (score >= _least(tl.max(score, 1), need)).to(tl.int32)
    found = tl.sum(tl.sum(candidate, 1), 0)
    if num_forced + found > NC:
        _one_by_one(SCORE, EDGE, SPARE, first_block, initial_end, local_begin, hi, need, R, EDGED)
        found = need
    else:
        tl.store(SPARE + _slots(candidate), _key(score, j), mask=candidate != 0)
    tl.debug_barrier()
    out = BLOCKS + ((b.to(tl.int64) * T + t) * G + at % G) * N
    _take(SPARE, out, found, first_block, initial_end, local_begin, end, N, NP, NC)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def nsa_choose_of_groups(
    SCORE,
    MOST,
    SPARE,
    SPARE_GROUP,
    BLOCKS,
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
    BG: tl.constexpr,
    GROUP: tl.constexpr,
    NC: tl.constexpr,
):
    """By the maxima of GROUP neighbours in MOST, of what is not forced: few groups' scores are
    read. At least one block is local, so that every score that competes was written.
    """
    at = tl.program_id(0).to(tl.int64)
    row = (at // G).to(tl.int32)
    b = b0 + row // rows_of_b
    t = t0 + row % rows_of_b
    pos, lo, hi = visible(t, b, T, C, q0, block, stride, None, None, False, False)
    SCORE += at * J
    MOST += at * (J // GROUP)
    SPARE += at * NC
    SPARE_GROUP += at * NC
    first_block, initial_end, local_begin, end = _places(
        pos, lo, J, L, stride, num_initial, num_local
    )
    num_forced = initial_end - first_block + end - local_begin
    need = N - num_forced
    i = tl.arange(0, NC)
    of_row = tl.arange(0, BG // NC)[None, :] * NC  # constants, in an address
    group = of_row + i[:, None]
    begins = group * GROUP
    most = tl.load(
        (MOST + i)[:, None] + of_row,
        mask=(begins < local_begin) & (begins + GROUP > initial_end),
        other=-1.0,
    )
    least = _least(tl.max(most, 1), need)
    candidate = (most >= least).to(tl.int32)
    groups = tl.sum(tl.sum(candidate, 1), 0)
    found = NC + 1
    if groups <= NC:
        tl.store(SPARE_GROUP + _slots(candidate), group, mask=candidate != 0)
        tl.debug_barrier()
        first = tl.load(SPARE_GROUP + i, mask=i < groups, other=0)[:, None] * GROUP
        j = first + tl.arange(0, GROUP)[None, :]
        competes = (i < groups)[:, None] & (j >= initial_end) & (j < local_begin)
        score = tl.load(SCORE + j, mask=competes, other=-1.0)
        reaches = (score >= least).to(tl.int32)
        found = tl.sum(tl.sum(reaches, 1), 0)
        if num_forced + found <= NC:
            tl.store(SPARE + _slots(reaches), _key(score, j), mask=reaches != 0)
    if num_forced + found > NC:
        _one_by_one(SCORE, SCORE, SPARE, first_block, initial_end, local_begin, hi, need, R, False)
        found = need
    tl.debug_barrier()
    out = BLOCKS + ((b.to(tl.int64) * T + t) * G + at % G) * N
    _take(SPARE, out, found, first_block, initial_end, local_begin, end, N, NP, NC)
