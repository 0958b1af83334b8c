"""The backward of phi = mlp between its two products: the gradient before SiLU, and in parts of the
rows those of ``down`` and of up @ position.

Letters as in `nsa.ops.learned_phi.pairs`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa.ops.kernels.common import cdiv, padded, precision
from nsa.ops.kernels.launch import launch
from nsa.ops.learned_phi.pairs import Pair, own_of

MOST_PARTS = 64  # of the gradients that every row adds to


@triton.jit
def _hidden(
    DOUT,
    PRE,
    DOWN,
    DPRE,
    POSITION_PART,
    DOWN_PART,
    part,
    num_rows,
    rows_per_part,
    D: tl.constexpr,
    F: tl.constexpr,
    BM: tl.constexpr,
    BF: tl.constexpr,
    BD: tl.constexpr,
    PREC: tl.constexpr,
):
    f = tl.program_id(2) * BF + tl.arange(0, BF)
    d = tl.arange(0, BD)
    down = tl.load(
        DOWN + d[:, None] * F + f[None, :], mask=(d < D)[:, None] & (f < F)[None, :], other=0.0
    )
    d_position = tl.zeros([BF], tl.float32)
    d_down = tl.zeros([BD, BF], tl.float32)
    first = part * rows_per_part
    for m0 in range(first, tl.minimum(first + rows_per_part, num_rows), BM):
        row = (m0 + tl.arange(0, BM)).to(tl.int64)
        live = row < num_rows
        d_out = tl.load(
            DOUT + row[:, None] * D + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0
        )
        at = row[:, None] * F + f[None, :]
        mask = live[:, None] & (f < F)[None, :]
        pre = tl.load(PRE + at, mask=mask, other=0.0)
        # what autograd keeps between the two products: rounded to the tokens' dtype
        d_hidden = tl.dot(d_out, down, input_precision=PREC).to(DPRE.dtype.element_ty)
        s = tl.sigmoid(pre)
        d_pre = d_hidden.to(tl.float32) * (s * (1 + pre * (1 - s)))
        tl.store(DPRE + at, d_pre.to(DPRE.dtype.element_ty), mask=mask)
        d_position += tl.sum(tl.where(mask, d_pre, 0.0), 0)
        hidden = (pre * s).to(d_out.dtype)
        d_down = tl.dot(tl.trans(d_out), hidden, d_down, input_precision=PREC)
    tl.store(POSITION_PART + part * F + f, d_position, mask=f < F)
    to = DOWN_PART + (part * D + d)[:, None] * F + f[None, :]
    tl.store(to, d_down, mask=(d < D)[:, None] & (f < F)[None, :])


@triton.jit
def nsa_phi_backward_hidden(
    DOUT_K,
    DOUT_V,
    PRE_K,
    PRE_V,
    DOWN_K,
    DOWN_V,
    DPRE_K,
    DPRE_V,
    POSITION_PART_K,
    POSITION_PART_V,
    DOWN_PART_K,
    DOWN_PART_V,
    num_rows,
    rows_per_part,
    D: tl.constexpr,
    DV: tl.constexpr,
    F: tl.constexpr,
    FV: tl.constexpr,
    BM: tl.constexpr,
    BF: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    SAME: tl.constexpr,
    PREC: tl.constexpr,
):
    """The gradient before SiLU, and of a part of the rows those of ``down`` and of up @ position.

    One of the programs of each (rows of a part, K or V, tile of F).
    """
    part = tl.program_id(0)
    if SAME:
        _hidden(
            own_of(DOUT_K, DOUT_V),
            own_of(PRE_K, PRE_V),
            own_of(DOWN_K, DOWN_V),
            own_of(DPRE_K, DPRE_V),
            own_of(POSITION_PART_K, POSITION_PART_V),
            own_of(DOWN_PART_K, DOWN_PART_V),
            part,
            num_rows,
            rows_per_part,
            D,
            F,
            BM,
            BF,
            BD,
            PREC,
        )
    elif tl.program_id(1) == 0:
        _hidden(
            DOUT_K,
            PRE_K,
            DOWN_K,
            DPRE_K,
            POSITION_PART_K,
            DOWN_PART_K,
            part,
            num_rows,
            rows_per_part,
            D,
            F,
            BM,
            BF,
            BD,
            PREC,
        )
    else:
        _hidden(
            DOUT_V,
            PRE_V,
            DOWN_V,
            DPRE_V,
            POSITION_PART_V,
            DOWN_PART_V,
            part,
            num_rows,
            rows_per_part,
            DV,
            FV,
            BM,
            BF,
            BDV,
            PREC,
        )


def gradients_of_hidden(d_out: Pair, pre: Pair, down: Pair) -> tuple[Pair, Pair, Pair]:
    """(the gradients before SiLU, in d_out's dtype; parts of those of up @ position, fp32 [parts,
    F]; parts of those of ``down``, fp32 [parts, D, F]).
    """
    (D, F), (DV, FV) = (x.shape for x in down)
    x, BM = d_out[0], 64 if d_out[0].element_size() == 2 else 32
    num_rows = x.numel() // D
    per_part = cdiv(cdiv(num_rows, BM), MOST_PARTS) * BM
    parts = cdiv(num_rows, per_part)
    d_pre = x.new_empty(pre[0].shape), x.new_empty(pre[1].shape)
    position_part, down_part = (
        (
            x.new_empty(parts, *(n for n in one), dtype=torch.float32),
            x.new_empty(parts, *(n for n in other), dtype=torch.float32),
        )
        for one, other in (((F,), (FV,)), ((D, F), (DV, FV)))
    )
    BF = min(BM, padded(max(F, FV)))
    launch(
        nsa_phi_backward_hidden,
        (parts, 2, cdiv(max(F, FV), BF)),
        *d_out,
        *(x.contiguous() for x in pre),
        *(x.contiguous() for x in down),
        *d_pre,
        *position_part,
        *down_part,
        num_rows,
        per_part,
        D,
        DV,
        F,
        FV,
        BM,
        BF,
        padded(D),
        padded(DV),
        (D, F) == (DV, FV),
        precision(x),
        num_warps=8 if padded(max(D, DV)) > 64 else 4,
        num_stages=1,
    )
    return d_pre, position_part, down_part
