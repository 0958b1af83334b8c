"""The gated sum of three branches (Eq. 5), and its gradients in one pass.

Q query heads, DV value dim; rows are (b, t, head), contiguous. gates [rows, 3].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import cdiv, padded
from nsa.ops.kernels.launch import launch


@triton.jit
def nsa_gated_sum(GATE, A, B, C, O, num_rows, DV: tl.constexpr, R: tl.constexpr, BDV: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    dv = tl.arange(0, BDV)
    live = r < num_rows
    at = r[:, None] * DV + dv[None, :]
    mask = live[:, None] & (dv < DV)[None, :]
    acc = tl.zeros([R, BDV], tl.float32)
    acc += tl.load(GATE + r * 3, mask=live, other=0.0).to(tl.float32)[:, None] * tl.load(
        A + at, mask=mask, other=0.0
    ).to(tl.float32)
    acc += tl.load(GATE + r * 3 + 1, mask=live, other=0.0).to(tl.float32)[:, None] * tl.load(
        B + at, mask=mask, other=0.0
    ).to(tl.float32)
    acc += tl.load(GATE + r * 3 + 2, mask=live, other=0.0).to(tl.float32)[:, None] * tl.load(
        C + at, mask=mask, other=0.0
    ).to(tl.float32)
    tl.store(O + at, acc.to(O.dtype.element_ty), mask=mask)


@triton.jit
def _one(GATE, X, DX, DGATE, do, r, live, at, mask, n: tl.constexpr):
    gate = tl.load(GATE + r * 3 + n, mask=live, other=0.0).to(tl.float32)
    x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(DX + at, (gate[:, None] * do).to(DX.dtype.element_ty), mask=mask)
    tl.store(DGATE + r * 3 + n, tl.sum(x * do, 1).to(DGATE.dtype.element_ty), mask=live)


@triton.jit
def nsa_gated_sum_backward(
    GATE,
    A,
    B,
    C,
    DO,
    DGATE,
    DA,
    DB,
    DC,
    num_rows,
    DV: tl.constexpr,
    R: tl.constexpr,
    BDV: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    dv = tl.arange(0, BDV)
    live = r < num_rows
    at = r[:, None] * DV + dv[None, :]
    mask = live[:, None] & (dv < DV)[None, :]
    do = tl.load(DO + at, mask=mask, other=0.0).to(tl.float32)
    _one(GATE, A, DA, DGATE, do, r, live, at, mask, 0)
    _one(GATE, B, DB, DGATE, do, r, live, at, mask, 1)
    _one(GATE, C, DC, DGATE, do, r, live, at, mask, 2)


def forward(gates: Tensor, outputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """gates [..., 3], outputs [..., DV], contiguous -> o [..., DV] in the outputs' dtype; summed in
    fp32.
    """
    o = torch.empty_like(outputs[0])
    DV = o.shape[-1]
    num_rows, BDV = o.numel() // DV, padded(DV)
    R = max(1, 4096 // BDV)
    launch(
        nsa_gated_sum, (cdiv(num_rows, R),), gates, *outputs, o, num_rows, DV, R, BDV, num_warps=4
    )
    return o


def backward(
    do: Tensor, gates: Tensor, outputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the gates and of each output."""
    DV = do.shape[-1]
    num_rows, BDV = do.numel() // DV, padded(DV)
    R = max(1, 4096 // BDV)
    dgates, (da, db, dc) = torch.empty_like(gates), (torch.empty_like(x) for x in outputs)
    launch(
        nsa_gated_sum_backward,
        (cdiv(num_rows, R),),
        gates,
        *outputs,
        do,
        dgates,
        da,
        db,
        dc,
        num_rows,
        DV,
        R,
        BDV,
        num_warps=4,
    )
    return dgates, da, db, dc
