"""The launches of a fused decode step: `append` stores its token, `attend` reads what is stored.

Numbers are those of the single operators (nsa.rope, nsa.gate, nsa.compression, nsa.ops.decode,
nsa.ops.scores, nsa.ops.gated_sum), rounded where those round, but for the order of a mean's sum and
of a log-sum-exp. No atomics, bitwise repeatable. Positions are read on the device alone, so that a
CUDA graph may hold the step.

Letters as in `nsa.ops.decode_step.shapes`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops.decode.kernels import (
    AT_ONCE,
    SUM_WARPS,
    TILES,
    interval_splits,
    selected_parts,
    selected_per_split,
)
from nsa.ops.decode_step.append_kernels import nsa_append_step
from nsa.ops.decode_step.choose_kernels import nsa_choose_step
from nsa.ops.decode_step.interval_kernels import nsa_interval_forward_both_split
from nsa.ops.decode_step.shapes import Buffers, Projected, StepGeometry, StepPages, held
from nsa.ops.decode_step.sum_kernels import nsa_sum_step
from nsa.ops.kernels.common import LOG2E, cdiv, padded, precision, width_class
from nsa.ops.kernels.launch import launch
from nsa.ops.paged.pages import Pages
from nsa.ops.paged.selected_kernels import selected_parts as selected_parts_of_pages
from nsa.ops.scores.kernels import CANDIDATES

LOGITS_AT_ONCE = 8192  # that a program of `nsa_choose_step` loads, 32 a thread
CHOOSE_WARPS = 8


def append(
    x: Projected, buffers: Buffers, geometry: StepGeometry, pages: StepPages | None = None
) -> tuple[Tensor, Tensor]:
    """Store the token, and the compressed block that it completes; (q [B, 1, Q, D] turned, gates
    [B, 1, Q, 3]). ``pages``: where the buffers are pools of pages.
    """
    (B, _, HQ, D), (G, DV) = x.q.shape, buffers.sel_v.shape[2:]
    q, gates = x.q.new_empty(x.q.shape), x.gates
    if gates is None:
        gates = x.q.new_empty(B, 1, HQ, 3)
    interleaved = geometry.rope == "interleaved"
    rows = held(buffers, pages)
    launch(
        nsa_append_step,
        (B, G, 3),
        x.q,
        x.k,
        x.v,
        x.turns,
        x.position,
        x.up,
        x.down,
        q,
        gates,
        buffers.sel_k,
        buffers.sel_v,
        buffers.win_k,
        buffers.win_v,
        buffers.raw_k,
        buffers.raw_v,
        buffers.cmp_k,
        buffers.cmp_v,
        *((None,) * 5 if pages is None else (*pages.tables, pages.seq_lens)),
        0 if pages is None else pages.sel.stride(0),
        rows.tokens + 1,
        rows.window,
        rows.blocks + 1,
        float(geometry.temperature),
        G,
        HQ // G,
        D,
        DV,
        x.k.shape[2] // G,
        geometry.block,
        geometry.stride,
        2 if interleaved else 1,
        1 if interleaved else D // 2,
        geometry.rope != "none",
        x.gates is None,
        padded(HQ // G, 1),
        padded(D // 2, 1),
        padded(D, 1),
        padded(DV, 1),
        padded(geometry.block, 1),
        0 if pages is None else buffers.sel_k.shape[1],
        num_warps=4 if D <= 128 else 8,
    )
    return q, gates


def attend(
    q: Tensor,
    gates: Tensor,
    position: Tensor,
    buffers: Buffers,
    geometry: StepGeometry,
    pages: StepPages | None = None,
) -> tuple[Tensor, Tensor]:
    """(o [B, 1, Q, DV], blocks int32 [B, 1, G, N]) of what the buffers hold; ``pages`` as in
    `append`.
    """
    (B, _, HQ, D), (G, DV) = q.shape, buffers.sel_v.shape[2:]
    (S, w, C), L = held(buffers, pages), geometry.sel_block
    N, H, start = geometry.num_selected, HQ // G, position
    if pages is not None:
        position = pages.last  # of a row that takes no token, the last that it has
    J, R, W = cdiv(S, L), L // geometry.stride, geometry.block // geometry.stride
    cmp_splits = interval_splits(B * G, C, banded=False)
    win_splits = interval_splits(B * G, w, banded=True)
    per_split = selected_per_split(B * G, N, buffers.sel_k, buffers.sel_v, L)
    sel_splits, before = cdiv(N, per_split), cmp_splits + win_splits
    part = q.new_empty(before + sel_splits, B, 1, HQ, DV, dtype=torch.float32)
    lse = q.new_empty(before + sel_splits, B, 1, HQ, dtype=torch.float32)
    left = q.new_empty(B, HQ, max(1, C), dtype=torch.float32)
    BC, num_warps, num_stages = TILES[min(3, width_class(q, DV) + (precision(q) == "ieee"))]
    page = 0 if pages is None else buffers.cmp_k.shape[1]
    launch(
        nsa_interval_forward_both_split,
        (G, B, before),
        q,
        buffers.cmp_k,
        buffers.cmp_v,
        buffers.win_k,
        buffers.win_v,
        part,
        lse,
        left,
        position,
        *((None, None) if pages is None else (pages.cmp, pages.win)),
        0 if pages is None else pages.cmp.stride(0),
        C,
        C + 1,
        w,
        cmp_splits,
        geometry.block,
        geometry.stride,
        geometry.scale * LOG2E,
        G,
        H,
        D,
        DV,
        padded(H),
        BC,
        padded(D),
        padded(DV),
        precision(q),
        page,
        page > 0 and page % BC == 0 and w % page == 0,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    score = q.new_empty(2, B * G, J, dtype=torch.float32)
    candidates = max(CANDIDATES, padded(N, 1))
    spare_s = q.new_empty(B * G, candidates, dtype=torch.float32)
    spare_j = q.new_empty(B * G, candidates, dtype=torch.int32)
    blocks = q.new_empty(B, 1, G, N, dtype=torch.int32)
    launch(
        nsa_choose_step,
        (B * G,),
        left,
        lse,
        score[0],
        score[1],
        spare_j,
        spare_s,
        blocks,
        position,
        B * HQ,
        C,
        cmp_splits,
        geometry.block,
        geometry.stride,
        J,
        L,
        geometry.num_initial,
        geometry.num_local,
        G,
        H,
        N,
        padded(N, 1),
        R,
        W,
        padded(H, 1),
        padded(cmp_splits, 1),
        max(min(LOGITS_AT_ONCE // padded(H, 1), padded(C, 1)), R),
        padded(J, 1),
        candidates,
        num_warps=CHOOSE_WARPS,
    )
    into: dict[str, Any] = {"part": (part[before:], lse[before:]), "per_split": per_split}
    into["scale"] = geometry.scale
    if pages is None:
        k, v = buffers.sel_k[:, :S], buffers.sel_v[:, :S]
        selected_parts(q, k, v, blocks, sel_block=L, q_start=position, **into)
    else:
        group = Pages(buffers.sel_k, buffers.sel_v, pages.sel)
        into |= {"start": start, "seq_lens": pages.seq_lens, "num_pages": J}
        selected_parts_of_pages(q, group, blocks, **into)
    o = q.new_empty(B, 1, HQ, DV)
    launch(
        nsa_sum_step,
        (B * HQ,),
        part,
        lse,
        gates,
        o,
        cmp_splits,
        win_splits,
        sel_splits,
        DV,
        padded(DV),
        AT_ONCE,
        num_warps=SUM_WARPS,
    )
    return o, blocks
