"""Scores of the compressed keys of a step over pages, and the blocks that they choose.

B batch, T queries, Q query heads, G kv heads, H query heads per kv head, N slots, P entries a page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import LOG2E, cdiv, load_rows, padded, precision
from nsa.ops.kernels.launch import launch
from nsa.ops.paged.key_ends import ends
from nsa.ops.paged.pages import LayerPages
from nsa.ops.scores.kernels import CANDIDATES, choice_tile, nsa_choose, ranked

SCORE_WARPS = 4


@triton.jit
def nsa_scores_pages(
    Q,
    K,
    TABLE,
    LSE,
    SCORE,
    EDGE,
    START,
    LEN,
    T,
    C,
    block,
    stride,
    J,
    sq_b,
    sq_t,
    sq_h,
    st_b,
    scale_log2,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    PREC: tl.constexpr,
):
    """As `nsa_scores`, of one query (b, t) of a kv head and one tile of compressed keys: all heads
    are the rows of one product, and then summed.
    """
    c0 = tl.program_id(0) * BC
    at_row = tl.program_id(1)
    g = tl.program_id(2)
    b = (at_row // T).to(tl.int64)
    t = at_row % T
    pos = t + tl.load(START + b).to(tl.int32)
    # `nsa_choose` reads what ends at the position, of rows that hold no token there, too
    if c0 < tl.minimum(ends(pos + 1, block, stride), C):
        hi = ends(tl.minimum(pos + 1, tl.load(LEN + b)), block, stride)
        h = tl.arange(0, M)
        page = tl.load(TABLE + b * st_b + c0 // P)
        c = c0 + tl.arange(0, BC)
        k = load_rows(
            K, ((page.to(tl.int64) * P + c % P) * G + g) * D, (c < hi) & (page >= 0), D, BD
        )
        q = load_rows(
            Q + b * sq_b + t.to(tl.int64) * sq_t, (g * H + h).to(tl.int64) * sq_h, h < H, D, BD
        )
        lse = tl.load(LSE + at_row.to(tl.int64) * (G * H) + g * H + h, mask=h < H, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PREC) * scale_log2
        kept = (h < H)[:, None] & ((c < hi) & (page >= 0))[None, :]
        p = tl.sum(tl.where(kept, tl.exp2(s - lse[:, None]), 0.0), 0)
        i = tl.arange(0, R)
        own = tl.minimum(R - i, W).to(tl.float32)[None, :]
        p = tl.reshape(p, [BC // R, R])
        j = c0 // R + tl.arange(0, BC // R)
        at = (at_row.to(tl.int64) * G + g) * J + j
        tl.store(SCORE + at, ranked(tl.sum(p * own, 1)), mask=j < J)
        if W > 1:
            tl.store(EDGE + at, ranked(tl.sum(p * (W - own), 1)), mask=j < J)


def choose(
    q: Tensor,
    lse: Tensor,
    pages: LayerPages,
    *,
    block: int,
    stride: int,
    num_selected: int,
    forced: tuple[int, int],
    scale: float,
) -> Tensor:
    """Blocks int32 [B, T, G, N] as `nsa.ops.scores.choose` has them; ``lse`` as `interval` left it
    of the compressed keys, ``forced`` the numbers of initial and of local blocks.
    """
    (B, T, HQ, D), (P, G) = q.shape, pages.cmp.k.shape[1:3]
    J, R, W = -(-pages.max_tokens // P), P // stride, block // stride
    C = max(0, (pages.max_tokens - block) // stride + 1)
    H, BC = HQ // G, max(R, min(P, 64))
    score, edge = q.new_empty(2, B * T, G, J, dtype=torch.float32)
    candidates = max(CANDIDATES, padded(num_selected, 1))
    spare = q.new_empty(B * T * G, candidates, dtype=torch.int32)
    blocks = q.new_empty(B, T, G, num_selected, dtype=torch.int32)
    if C:
        launch(
            nsa_scores_pages,
            (cdiv(C, BC), B * T, G),
            q,
            pages.cmp.k,
            pages.cmp.table,
            lse,
            score,
            edge,
            pages.start_B,
            pages.seq_lens,
            T,
            C,
            block,
            stride,
            J,
            *q.stride()[:3],
            pages.cmp.table.stride(0),
            scale * LOG2E,
            G,
            H,
            D,
            P,
            R,
            W,
            padded(H),
            BC,
            padded(D),
            precision(q),
            num_warps=SCORE_WARPS,
        )
    launch(
        nsa_choose,
        (B * T * G,),
        score,
        edge,
        spare,
        blocks,
        pages.start_B,
        None,
        0,
        0,
        T,
        T,
        C,
        0,
        block,
        stride,
        J,
        P,
        *forced,
        G,
        num_selected,
        padded(num_selected, 1),
        R,
        *choice_tile(padded(J, 1), candidates),
        candidates,
        True,
        False,
        W > 1,
        num_warps=1,
    )
    return blocks
