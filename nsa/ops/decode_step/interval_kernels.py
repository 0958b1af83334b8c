"""The compressed branch and the window in one launch, each in splits of its keys.

Letters as in `nsa.ops.decode_step.shapes`; PAGE as in `nsa.ops.decode_step.row_addresses`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.decode.kernels import leave, logits, more
from nsa.ops.kernels.common import load_rows


@triton.jit
def _pages_of_tile(TABLE, c0, end, newest, lap, num_win, BC: tl.constexpr, PAGE: tl.constexpr):
    """Pages of the tile of keys from ``c0`` on: of its keys up to ``newest``, and of those behind,
    which are of the lap before; -1 where there are none. One load a lap, not one a key, through
    which no key is fetched ahead.
    """
    here = tl.load(TABLE + (c0 + lap) // PAGE, mask=(c0 < end) & (c0 <= newest), other=-1)
    behind = (c0 < end) & (c0 + BC > newest + 1) & (lap > 0)
    before = tl.load(TABLE + (c0 + lap - num_win) // PAGE, mask=behind, other=-1)
    return here, before


@triton.jit(do_not_specialize=["st_b", "C", "num_cmp", "num_win", "cmp_splits"])
def nsa_interval_forward_both_split(
    Q,
    CMP_K,
    CMP_V,
    WIN_K,
    WIN_V,
    O,
    LSE,
    LOGITS,
    POS,
    CMP_TABLE,
    WIN_TABLE,
    st_b,
    C,
    num_cmp,
    num_win,
    cmp_splits,
    block,
    stride,
    scale_log2,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    PREC: tl.constexpr,
    PAGE: tl.constexpr,
    TILED: tl.constexpr,
):
    """One (b, kv head) over one split of the compressed keys, or of the window's ring, whose splits
    come behind: an equal share, in tiles, of the keys that the token sees. Of compressed keys the
    logits are left, too, fp32 to base 2 [B, Q, C]. Of pages, the window's keys are those of the
    ring of as many rows, in its order. TILED: a tile lies within a page, and a lap of the ring is
    whole pages.
    """
    # compressed keys first: one row's splits next to one another would give half of the
    # multiprocessors those of windows alone
    g = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    pos = tl.load(POS + b).to(tl.int32)
    is_cmp = split < cmp_splits
    hi = tl.minimum(tl.where(pos + 1 < block, 0, (pos + 1 - block) // stride + 1), C)
    last = tl.where(is_cmp, hi, tl.minimum(pos + 1, num_win))
    own = tl.where(is_cmp, split, split - cmp_splits)
    splits = tl.where(is_cmp, cmp_splits, tl.num_programs(2) - cmp_splits)
    share = tl.cdiv(tl.cdiv(last, splits), BC) * BC
    begin = own * share
    end = tl.minimum(begin + share, last)
    h = tl.arange(0, M)
    head = (b * G + g) * H + h
    q = load_rows(Q, head * D, (h < H) & (begin < end), D, BD)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BDV], tl.float32)
    # one loop for both, since two would take the shared memory of both
    K = tl.where(is_cmp, CMP_K, WIN_K)
    V = tl.where(is_cmp, CMP_V, WIN_V)
    if PAGE:
        TABLE = tl.where(is_cmp, CMP_TABLE, WIN_TABLE) + b * st_b
        # slots of the ring behind the newest token's hold the lap before
        newest = tl.where(is_cmp, C, pos % num_win)
        lap = tl.where(is_cmp, 0, pos - pos % num_win)
        if TILED:
            here, before = _pages_of_tile(TABLE, begin, end, newest, lap, num_win, BC, PAGE)
    else:
        first = b * tl.where(is_cmp, num_cmp, num_win) * G + g
    for c0 in range(begin, end, BC):
        c = c0 + tl.arange(0, BC)
        kept = c < end
        if PAGE:
            if TILED:
                page = tl.where(c <= newest, here, before)
                slot = c % PAGE
                # a tile ahead, so that the next tile's keys do not wait for the table
                here, before = _pages_of_tile(TABLE, c0 + BC, end, newest, lap, num_win, BC, PAGE)
            else:
                i = c + tl.where(c <= newest, lap, lap - num_win)
                page = tl.load(TABLE + i // PAGE, mask=kept, other=-1)
                slot = i % PAGE
            kept = kept & (page >= 0)
            at = (page.to(tl.int64) * PAGE + slot) * G + g
        else:
            at = first + c.to(tl.int64) * G
        k = load_rows(K, at * D, kept, D, BD)
        v = load_rows(V, at * DV, kept, DV, BDV)
        s = logits(q, k, kept[None, :], scale_log2, PREC)
        left = (h < H)[:, None] & (c < end)[None, :] & is_cmp
        tl.store(LOGITS + head[:, None] * C + c[None, :], s, mask=left)
        m, l, acc = more(s, v, m, l, acc, PREC)
    row = split.to(tl.int64) * tl.num_programs(1) * (G * H) + head
    leave(O, LSE, row, h < H, m, l, acc, DV, BDV)
