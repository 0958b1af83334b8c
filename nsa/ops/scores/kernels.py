"""Block scores (Eq. 8 to 10) and the best of them (Eq. 11, 12).

Nothing of size [T, C] a head is ever written.

B batch, T queries, C compressed blocks, Q query heads, G kv heads, H query heads per kv head, J
selection blocks, N slots. R = l' / d compressed blocks begin within a selection block, W = l / d
sub-chunks make a compressed block; W <= R, R a power of two. A chunk of rows (b, t) is scored, then
its best blocks are taken, so that scores stay in the L2.
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
from nsa.ops.kernels.tiles import card_at, sm_of
from nsa.ops.scores.choice import nsa_choose, nsa_choose_of_groups, visible
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

    BM: int  # queries
    BC: int  # compressed keys
    stages: int  # tiles of keys held
    ring: int | None = None  # heads of the queries held; None: all, which then stay
    warps: int = 4  # more than 16 rows need go across the keys
    registers: int | None = None  # of a thread; None: as many as the compiler wants
    programs: int = 396  # that an H200 runs at a time
    score_bytes: int = 1 << 27  # of one chunk's scores

    @property
    def options(self) -> dict[str, int]:
        """What Triton's launch takes."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, **limit}


# By width class, on Hopper, measured in bf16 (reports/kernels-log.md): 8,192 tokens of A take as
# long either way.
PASSING: tuple[PassingTiles | None, ...] = (
    PassingTiles(64, 64, 2, registers=168),
    None,
    None,
    None,
)
PASSING_MIN_ROWS = 16_384  # (b, t, kv head)
# Registers of a thread of `nsa_choose`, by the most blocks of a row: without a limit 141, and 14
# warps a multiprocessor instead of 32. Beyond, a thread holds more scores than that.
CHOICE_REGISTERS, CHOICE_REGISTERS_TO = 64, 1024


@triton.jit
def _ranked(score):
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
    _, lo, hi = visible(t, b, T, C, q0, block, stride, Q0, FIRST, RAGGED, DOCS)
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
        tl.store(SCORE + at, _ranked(tl.sum(p * own, 2)), mask=inside)
        if W > 1:
            tl.store(EDGE + at, _ranked(tl.sum(p * (W - own), 2)), mask=inside)


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
) -> Tensor:
    """q [B, T, Q, D], k_cmp [B, C, G, D], lse to base 2 [B, T, Q] -> blocks int32 [B, T, G, N]."""
    q, k = rows(q), rows(k_cmp)
    (B, T, HQ, D), (C, G) = q.shape, k.shape[1:3]
    J, R, W = -(-kv_len // sel_block), sel_block // stride, block // stride
    blocks = q.new_empty(B, T, G, num_selected, dtype=torch.int32)
    q0, Q0 = starts(q_start)
    flags = (Q0 is not None, first is not None)
    candidates = max(candidates, padded(num_selected, 1))
    slots = (sel_block, num_initial, num_local, G, num_selected, padded(num_selected, 1), R)
    if tiles is None and not any(flags) and (R, W) == (4, 2) and num_local > 0:
        t = passing or _passing_tiles(q, k)
        if t is not None:
            _choose_passing(q, k, lse, blocks, t, (C, q0, block, stride), slots, candidates, scale)
            return blocks
    config = dict(tiles or TILES[min(3, width_class(q, D) + (q.dtype == torch.float32))])
    BM, BC = config.pop("BM"), max(config.pop("BC"), R)
    most = max(BM, score_bytes // (J * G * 4) // BM * BM)
    score, edge = q.new_empty(2, min(B * T, most), G, J, dtype=torch.float32)
    BJ = padded(J, 1)
    spare = q.new_empty(score.shape[0] * G, candidates, dtype=torch.int64)
    geometry = (T, C, q0, block, stride, J)
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
        reach = BJ if Q0 is not None else min(BJ, padded(-(-(q0 + t0 + n) // sel_block), 1))
        launch(
            nsa_choose,
            (batches * n * G,),
            score,
            edge,
            spare,
            blocks,
            Q0,
            first,
            b0,
            t0,
            n,
            *geometry,
            *slots,
            max(reach, candidates),
            candidates,
            *flags,
            W > 1,
            num_warps=num_warps,
            **({} if reach > CHOICE_REGISTERS_TO else {"maxnreg": choice_registers}),
        )
    return blocks


def _choose_passing(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    blocks: Tensor,
    t: PassingTiles,
    of_keys: tuple[int, int, int, int],
    slots: tuple[int, ...],
    candidates: int,
    scale: float,
) -> None:
    """Fill ``blocks``. A chunk's rows of scores are as long as its last query's."""
    from nsa.ops.scores import passing_keys  # Triton's Gluon, for it alone

    (B, T, HQ, D), G, q0 = q.shape, k.shape[2], of_keys[1]
    H = HQ // G
    group = t.BC // (t.warps * 16 // t.BM) // 16  # blocks of a row in a thread
    wave = t.BM * max(1, t.programs // G)
    chunks = list(_passing_chunks(B, T, q0, slots[0], t, G=G, wave=wave))
    size = max(batches * n * J for _, _, batches, n, J in chunks) * G
    score, most = (q.new_empty(size // n, dtype=torch.float32) for n in (1, group))
    rows_at_once = max(batches * n for _, _, batches, n, _ in chunks) * G
    spare = q.new_empty(rows_at_once, candidates, dtype=torch.int64)
    spare_group = q.new_empty(rows_at_once, candidates, dtype=torch.int32)
    for b0, t0, batches, n, J in chunks:
        launch(
            passing_keys.nsa_scores_roles,
            (cdiv(n, t.BM), G * batches),
            q,
            k,
            lse,
            score,
            most,
            b0,
            t0,
            n,
            T,
            *of_keys,
            J,
            *slots[:3],
            *q.stride()[:3],
            *k.stride()[:3],
            scale * LOG2E,
            G,
            H,
            D,
            t.BM,
            t.BC,
            t.stages,
            t.ring or H,
            t.warps,
            **t.options,
        )
        launch(
            nsa_choose_of_groups,
            (batches * n * G,),
            score,
            most,
            spare,
            spare_group,
            blocks,
            b0,
            t0,
            n,
            T,
            *of_keys,
            J,
            *slots,
            max(padded(J // group, 1), candidates),
            group,
            candidates,
            num_warps=1,
            maxnreg=64,
        )


def _passing_chunks(
    B: int, T: int, q0: int, L: int, t: PassingTiles, *, G: int, wave: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """(first b, first t, how many b, how many t of each, blocks of a row of scores), at most
    ``t.score_bytes`` together: whole sequences, or from the last queries on as many of one as fill
    the GPU whole times, and at last the rest.
    """
    unit = max(32, t.BC // 4)

    def row(end: int) -> int:
        return cdiv(cdiv(q0 + end, L), unit) * unit

    def most_rows(end: int) -> int:
        return t.score_bytes // (row(end) * G * 4)

    if most_rows(T) >= T:
        batches = max(1, min(B, most_rows(T) // T, GRID_LIMIT // G))
        for b0 in range(0, B, batches):
            yield b0, 0, min(batches, B - b0), T, row(T)
        return
    for b in range(B):
        end = T
        while end:
            n = most_rows(end)
            n = n // wave * wave or max(t.BM, n)
            begin = 0 if end <= most_rows(end) else cdiv(max(0, end - n), t.BM) * t.BM
            yield b, begin, 1, end - begin, row(end)
            end = begin


def passing_takes(q: Tensor, k: Tensor, t: PassingTiles) -> bool:
    """Whether `nsa.ops.scores.passing_keys` computes these: rows of 64 or 128 elements of 2 bytes
    at multiples of 16 bytes, an even number of query heads a kv head, which fit.
    """
    H, D = q.shape[2] // k.shape[2], q.shape[3]
    held = H if t.ring is None else t.ring
    return (
        q.element_size() == 2
        and D in (64, 128)
        and H % 2 == 0
        and (held == H or (H % held == 0 and held >= 4 and t.stages == 2))
        and 2 * D * (held * t.BM + t.stages * t.BC) + 4 * H * t.BM <= card_at(q.device).shared_bytes
        and not any(x.data_ptr() % 16 for x in (q, k))
        and not any(stride % 8 for x in (q, k) for stride in x.stride()[:-1])
    )


def _passing_tiles(q: Tensor, k: Tensor) -> PassingTiles | None:
    t = PASSING[min(3, width_class(q, q.shape[3]) + (q.dtype == torch.float32))]
    many = q.shape[0] * q.shape[1] * k.shape[2] >= PASSING_MIN_ROWS
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
