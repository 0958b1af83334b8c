"""The blocks that a step attends to: their scores, from the logits that the compressed branch left.

Letters as in `nsa.ops.decode_step.shapes`; the best of them by `nsa.ops.decode_step.best_blocks`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.decode_step.best_blocks import take_best
from nsa.ops.scores.kernels import ranked


@triton.jit(do_not_specialize=["num_rows", "C", "cmp_splits", "J"])
def nsa_choose_step(
    LOGITS,
    LSE,
    SCORE,
    EDGE,
    SPARE_J,
    SPARE_S,
    BLOCKS,
    POS,
    num_rows,
    C,
    cmp_splits,
    block,
    stride,
    J,
    L,
    num_initial,
    num_local,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    BH: tl.constexpr,
    BS: tl.constexpr,
    BC: tl.constexpr,
    BJ: tl.constexpr,
    NC: tl.constexpr,
):
    """One (b, kv head): the compressed branch's log-sum-exp from those of its splits, the scores
    from its logits, and the best blocks (nsa.ops.scores).
    """
    at = tl.program_id(0).to(tl.int64)
    b = at // G
    pos = tl.load(POS + b).to(tl.int32)
    hi = tl.minimum(tl.where(pos + 1 < block, 0, (pos + 1 - block) // stride + 1), C)
    h = tl.arange(0, BH)
    n = tl.arange(0, BS)
    parts = tl.load(
        LSE + n.to(tl.int64)[:, None] * num_rows + (at * H + h)[None, :],
        mask=(n < cmp_splits)[:, None] & (h < H)[None, :],
        other=float("-inf"),
    )
    m = tl.max(parts, 0)
    safe = tl.where(m == float("-inf"), 0.0, m)
    total = tl.sum(tl.exp2(parts - safe[None, :]), 0)
    lse = safe + tl.log2(tl.where(total == 0, 1.0, total))
    i = tl.arange(0, R)
    own = tl.minimum(R - i, W).to(tl.float32)[None, :]
    for c0 in range(0, hi, BC):
        c = c0 + tl.arange(0, BC)
        # all heads at once: one after another, each would wait for its own load
        seen = (h < H)[:, None] & (c < hi)[None, :]
        s = tl.load(LOGITS + (at * H + h)[:, None] * C + c[None, :], mask=seen, other=float("-inf"))
        p = tl.sum(tl.where(seen, tl.exp2(s - lse[:, None]), 0.0), 0)
        p = tl.reshape(p, [BC // R, R])
        j = c0 // R + tl.arange(0, BC // R)
        tl.store(SCORE + at * J + j, ranked(tl.sum(p * own, 1)), mask=j < J)
        if W > 1:
            tl.store(EDGE + at * J + j, ranked(tl.sum(p * (W - own), 1)), mask=j < J)
    tl.debug_barrier()
    take_best(
        SCORE,
        EDGE,
        SPARE_J,
        SPARE_S,
        BLOCKS + at * N,
        at,
        pos // L,
        hi,
        0,
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
