"""Block scores (Eq. 8 to 10) and the best of them (Eq. 11, 12).

Nothing of size [T, C] a head is ever written.

B batch, T queries, C compressed blocks, Q query heads, G kv heads, H query heads per kv head, J
selection blocks, N slots. R = l' / d compressed blocks begin within a selection block, W = l / d
sub-chunks make a compressed block; W <= R, R a power of two. A chunk of rows (b, t) is scored, then
its best blocks are taken: scores of all rows would be T x J numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
from nsa.ops.kernels.shares import of_all
from nsa.ops.kernels.tiles import card_at, sm_of
from nsa.routing.thresholds import GRID_LIMIT
from nsa.settings import is_off

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


@dataclass(frozen=True, slots=True)
class PassingTiles:
    """Sizes of `nsa.ops.scores.passing_keys`."""

    BM: int  # queries, whose heads all stay in shared memory
    BC: int  # compressed keys
    stages: int  # tiles of keys held
    registers: int | None = None  # of a thread; None: as many as the compiler wants
    score_bytes: int = 1 << 27  # of one chunk's scores: whole rows
    # Three programs on each of an H200's 132 multiprocessors. Chunks are no smaller than that, up
    # to `most_bytes` of scores: at 1,048,576 tokens 1.66 GB.
    programs: int = 396
    most_bytes: int = 1 << 31

    @property
    def options(self) -> dict[str, int]:
        """What Triton's launch takes."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.BM // 16, **limit}


# By width class, on Hopper, measured in bf16 (reports/kernels-log.md): 8,192 tokens of A take as
# long either way.
PASSING: tuple[PassingTiles | None, ...] = (PassingTiles(64, 64, 3), None, None, None)
PASSING_MIN_ROWS = 16_384  # (b, t, kv head)
# Registers of a thread of `nsa_choose`, by the most blocks of a row: without a limit 141, and 14
# warps a multiprocessor instead of 32. Beyond, a thread holds more scores than that.
CHOICE_REGISTERS, CHOICE_REGISTERS_TO = 64, 1024
# Scores of a row that `nsa_choose` holds, 128 a lane; of a longer row it reads a quarter as many at
# once. Held, 8,192 would lie on the stack (2,200 bytes a thread, by ptxas of Triton 3.6.0).
MOST_HELD = 4096


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
def _competing(AT, EDGE_AT, j, j0, seen, R: tl.constexpr, EDGED: tl.constexpr):
    """Scores of blocks j0 + j of a row, -1 of those that are forced or beyond. ``seen``: the first
    and one past the last that compete, the first visible block, one past the last visible
    compressed one.
    """
    initial_end, local_begin, first_block, hi = seen
    competes = (j0 + j >= initial_end) & (j0 + j < local_begin)
    score = _score_at(AT + j0, EDGE_AT + j0, j0 + j, competes, first_block, hi, R, EDGED)
    return tl.where(competes, score, -1.0)


# J unspecialized: were it known to be a multiple of 4, four neighbours would go to one lane, and
# the maxima of groups would go through shared memory
@triton.jit(do_not_specialize=["J"])
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
    TILE: tl.constexpr,
    HELD: tl.constexpr,
    NC: tl.constexpr,
    RAGGED: tl.constexpr,
    DOCS: tl.constexpr,
    EDGED: tl.constexpr,
):
    """One (row, kv head) a program: forced blocks, then the best by (score descending, index
    ascending); ascending, -1 padded.

    Blocks are a matrix of NC columns, a column a lane, so that what is done by columns is done by
    each lane alone. HELD: a tile is a whole row, whose scores are read once. Others are read twice,
    for the least score that is a candidate's and for the candidates.
    """
    at = tl.program_id(0).to(tl.int64)
    row = (at // G).to(tl.int32)
    b = b0 + row // rows_of_b
    t = t0 + row % rows_of_b
    pos, lo, hi = _visible(t, b, T, C, q0, block, stride, Q0, FIRST, RAGGED, DOCS)
    first_block = lo * stride // L
    cur = pos // L
    SCORE += at * J
    EDGE += at * J - 1
    SPARE += at * NC
    # forced: first_block .. initial_end - 1 and local_begin .. end - 1; what competes is between
    end = tl.minimum(cur + 1, J)
    initial_end = tl.minimum(first_block + num_initial, end)
    local_begin = tl.minimum(tl.maximum(cur - num_local + 1, initial_end), end)
    num_first = initial_end - first_block
    num_forced = num_first + end - local_begin
    need = N - num_forced
    i = tl.arange(0, NC)
    of_row = tl.arange(0, TILE // NC)[None, :] * NC  # constants, in an address
    j = of_row + i[:, None]
    at_j, edge_at_j = (SCORE + i)[:, None] + of_row, (EDGE + i)[:, None] + of_row
    seen = initial_end, local_begin, first_block, hi
    if HELD:
        score = _competing(at_j, edge_at_j, j, 0, seen, R, EDGED)
        best = tl.max(score, 1)
    else:
        best = tl.full([NC], -1.0, tl.float32)
        for j0 in range(initial_end // TILE * TILE, local_begin, TILE):
            best = tl.maximum(best, tl.max(_competing(at_j, edge_at_j, j, j0, seen, R, EDGED), 1))
    # The need-th largest maximum of NC interleaved groups: at least `need` scores reach it, and
    # seldom many more.
    reach = tl.sum((best[:, None] >= best[None, :]).to(tl.int32), 0)
    least = tl.max(tl.where(reach >= need, best, -1.0), 0)
    least = tl.where(need > 0, tl.maximum(least, 0.0), float("inf"))
    if HELD:
        of_lane = tl.sum((score >= least).to(tl.int32), 1)
        count = tl.sum(of_lane, 0)
        if num_forced + count > NC:
            for n in range(need):
                highest = tl.max(tl.max(score, 1), 0)
                hit = tl.min(tl.min(tl.where(score == highest, j, 2147483647), 1), 0)
                tl.store(SPARE + n, hit)
                score = tl.where(j == hit, -1.0, score)
            count = need
        else:
            # in no order: each lane's one after the other
            candidate = (score >= least).to(tl.int32)
            spare = (tl.cumsum(of_lane, 0) - of_lane)[:, None] + tl.cumsum(candidate, 1) - candidate
            tl.store(SPARE + spare, j, mask=candidate != 0)
    else:
        count = 0
        for j0 in range(initial_end // TILE * TILE, local_begin, TILE):
            score = _competing(at_j, edge_at_j, j, j0, seen, R, EDGED)
            candidate = (score >= least).to(tl.int32)
            of_lane = tl.sum(candidate, 1)
            spare = (tl.cumsum(of_lane, 0) - of_lane)[:, None] + tl.cumsum(candidate, 1) - candidate
            spare += count
            tl.store(SPARE + spare, j0 + j, mask=(candidate != 0) & (spare < NC))
            count += tl.sum(of_lane, 0)
        if num_forced + count > NC:
            tl.debug_barrier()  # what was stored above is stored anew
            before, before_j = float("inf"), -1
            for n in range(need):
                highest, hit = -1.0, 2147483647
                for j0 in range(initial_end // TILE * TILE, local_begin, TILE):
                    score = _competing(at_j, edge_at_j, j, j0, seen, R, EDGED)
                    left = (score < before) | ((score == before) & (j0 + j > before_j))
                    score = tl.where(left, score, -1.0)
                    top = tl.max(tl.max(score, 1), 0)
                    at_top = tl.min(tl.min(tl.where(score == top, j0 + j, 2147483647), 1), 0)
                    hit = tl.where(top > highest, at_top, hit)
                    highest = tl.maximum(highest, top)
                tl.store(SPARE + n, hit)
                before, before_j = highest, hit
            count = need
    tl.debug_barrier()
    count += num_forced
    found = (i >= num_forced) & (i < count)
    cj = tl.load(SPARE + i - num_forced, mask=found, other=0)
    cs = _score_at(SCORE + cj, EDGE + cj, cj, found, first_block, hi, R, EDGED)
    own = tl.where(i < num_first, first_block + i, local_begin + i - num_first)
    cj = tl.where(i < num_forced, own, cj)
    cs = tl.where(i < num_forced, float("inf"), cs)
    # a score is at least 0: its bits are in its order
    key = (cs.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (2147483647 - cj).to(tl.int64)
    key = tl.where(i < count, key, -1)
    taken = (i < count) & (tl.sum((key[:, None] > key[None, :]).to(tl.int32), 0) < N)
    cj = tl.where(taken, cj, 2147483647)
    place = tl.sum((cj[:, None] < cj[None, :]).to(tl.int32), 0)
    out = BLOCKS + ((b.to(tl.int64) * T + t) * G + at % G) * N
    tl.store(out + place, cj, mask=taken)
    n = tl.arange(0, NP)
    tl.store(out + n, tl.full([NP], -1, tl.int32), mask=(n < N) & (n >= count))


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
    passing: PassingTiles | None = None,
    score_bytes: int = SCORE_BYTES,
    num_warps: int = 1,
    candidates: int = CANDIDATES,
    choice_registers: int = CHOICE_REGISTERS,
    most_held: int = MOST_HELD,
) -> Tensor:
    """q [B, T, Q, D], k_cmp [B, C, G, D], lse to base 2 [B, T, Q] -> blocks int32 [B, T, G, N]."""
    q, k = rows(q), rows(k_cmp)
    (B, T, HQ, D), (C, G) = q.shape, k.shape[1:3]
    J, R, W = -(-kv_len // sel_block), sel_block // stride, block // stride
    blocks = q.new_empty(B, T, G, num_selected, dtype=torch.int32)
    q0, Q0 = starts(q_start)
    flags = (Q0 is not None, first is not None)
    t = None
    if tiles is None and not any(flags) and (R, W) == (4, 2) and num_local > 0:
        t = passing or _passing_tiles(q, k)
    if t is not None:
        from nsa.ops.scores import passing_keys  # Triton's Gluon, for it alone

        BM, BC, score_bytes, J, W = t.BM, t.BC, t.score_bytes, cdiv(J, 32) * 32, 1
    else:
        config = dict(tiles or TILES[min(3, width_class(q, D) + (q.dtype == torch.float32))])
        BM, BC = config.pop("BM"), max(config.pop("BC"), R)
        (queries,), copy = described(BM, q, work=q.numel())
    row_bytes = J * G * 4
    most = max(BM, score_bytes // row_bytes // BM * BM)
    if t is not None:
        most = max(most, min(t.programs // G, t.most_bytes // row_bytes // BM) * BM)
    if most < T:  # chunks of one size: a small one leaves a GPU idle
        most = cdiv(cdiv(T, cdiv(T, most)), BM) * BM
    score = q.new_empty(1 + (W > 1), min(B * T, most), G, J, dtype=torch.float32)
    BJ, candidates = padded(J, 1), max(candidates, padded(num_selected, 1))
    spare = q.new_empty(score.shape[1] * G, candidates, dtype=torch.int32)
    geometry = (T, C, q0, block, stride, J)
    for b0, t0, batches, n in _chunks(B, T, most, GRID_LIMIT // G):
        seen = C if Q0 is not None else max(0, min(C, (q0 + t0 + n - block) // stride + 1))
        if seen and t is not None:
            launch(
                passing_keys.nsa_scores_roles,
                (cdiv(n, BM), G * batches),
                q,
                k,
                lse,
                score,
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
                BM,
                BC,
                t.stages,
                BM // 16,
                **t.options,
            )
        elif seen:
            launch(
                nsa_scores,
                (cdiv(n, BM), cdiv(seen, BC), G * batches),
                queries,
                k,
                lse,
                score[0],
                score[-1],
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
        reach = BJ if Q0 is not None else min(BJ, padded(-(-(q0 + t0 + n) // sel_block), 1))
        launch(
            nsa_choose,
            (batches * n * G,),
            score[0],
            score[-1],
            spare,
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
            *choice_tile(reach, candidates, most_held),
            candidates,
            *flags,
            W > 1,
            num_warps=num_warps,
            **({} if reach > CHOICE_REGISTERS_TO else {"maxnreg": choice_registers}),
        )
    return blocks


def choice_tile(num_blocks: int, candidates: int, most_held: int = MOST_HELD) -> tuple[int, bool]:
    """(TILE, HELD) of `nsa_choose` for rows of ``num_blocks``, a power of two."""
    if num_blocks <= most_held:
        return max(num_blocks, candidates), True
    return max(candidates, most_held // 4), False


def passing_takes(q: Tensor, k: Tensor, t: PassingTiles) -> bool:
    """Whether `nsa.ops.scores.passing_keys` computes these: rows of 64 or 128 elements of 2 bytes
    at multiples of 16 bytes, an even number of query heads a kv head, which fit.
    """
    H, D = q.shape[2] // k.shape[2], q.shape[3]
    return (
        q.element_size() == 2
        and D in (64, 128)
        and H % 2 == 0
        and H * t.BM * (2 * D + 4) + t.stages * t.BC * 2 * D <= card_at(q.device).shared_bytes
        and not any(x.data_ptr() % 16 for x in (q, k))
        and not any(stride % 8 for x in (q, k) for stride in x.stride()[:-1])
    )


def _passing_tiles(q: Tensor, k: Tensor) -> PassingTiles | None:
    t = PASSING[min(3, width_class(q, q.shape[3]) + (q.dtype == torch.float32))]
    many = of_all(q.shape[0] * q.shape[1] * k.shape[2]) >= PASSING_MIN_ROWS
    if t is None or not many or is_off("roles") or not passing_takes(q, k, t):
        return None
    sm = sm_of(q.device)
    return t if sm is not None and sm[0] == 9 else None


def _chunks(B: int, T: int, most: int, most_batches: int) -> Iterator[tuple[int, int, int, int]]:
    """(first b, first t, how many b, how many t of each), at most ``most`` rows together, of at
    most ``most_batches``.
    """
    batches, n = max(1, min(B, most // T, most_batches)), min(T, most)
    for b0 in range(0, B, batches):
        for t0 in range(0, T, n):
            yield b0, t0, min(batches, B - b0), min(n, T - t0)
