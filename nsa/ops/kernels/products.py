"""o . dO, row by row: what a softmax's gradient takes off, and a gate's own gradient.

Of one branch, or of three in one pass.

DV value dim; rows are (b, t, head), contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.kernels.common import cdiv, padded
from nsa.ops.kernels.launch import launch


@triton.jit
def nsa_row_products(O, DO, DELTA, num_rows, DV: tl.constexpr, R: tl.constexpr, BDV: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    dv = tl.arange(0, BDV)
    mask = (r < num_rows)[:, None] & (dv < DV)[None, :]
    o = tl.load(O + r[:, None] * DV + dv[None, :], mask=mask, other=0.0).to(tl.float32)
    do = tl.load(DO + r[:, None] * DV + dv[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(DELTA + r, tl.sum(o * do, 1), mask=r < num_rows)


@triton.jit
def _gate_product(
    O, LSE, do, GATE, DELTA, LSE_GATED, DGATE, r, live, at, mask, num_rows, n: tl.constexpr
):
    delta = tl.sum(tl.load(O + at, mask=mask, other=0.0).to(tl.float32) * do, 1)
    tl.store(DELTA + n * num_rows + r, delta, mask=live)
    tl.store(DGATE + r * 3 + n, delta.to(DGATE.dtype.element_ty), mask=live)
    lse = tl.load(LSE + r, mask=live, other=0.0)
    gated = lse - tl.log2(tl.load(GATE + r * 3 + n, mask=live, other=1.0).to(tl.float32))
    tl.store(
        LSE_GATED + n * num_rows + r,
        tl.where(lse == float("-inf"), float("-inf"), gated),
        mask=live,
    )


@triton.jit
def nsa_gate_products(
    A,
    B,
    C,
    LSE_A,
    LSE_B,
    LSE_C,
    DO,
    GATE,
    DELTA,
    LSE_GATED,
    DGATE,
    num_rows,
    DV: tl.constexpr,
    R: tl.constexpr,
    BDV: tl.constexpr,
):
    """Of branch n: o . dO to DELTA [3, rows] and DGATE [rows, 3], and lse - log2 gate to LSE_GATED
    [3, rows]: +inf for a gate of 0.
    """
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    dv = tl.arange(0, BDV)
    live = r < num_rows
    at = r[:, None] * DV + dv[None, :]
    mask = live[:, None] & (dv < DV)[None, :]
    many = tl.cast(num_rows, tl.int64)
    do = tl.load(DO + at, mask=mask, other=0.0).to(tl.float32)
    _gate_product(A, LSE_A, do, GATE, DELTA, LSE_GATED, DGATE, r, live, at, mask, many, 0)
    _gate_product(B, LSE_B, do, GATE, DELTA, LSE_GATED, DGATE, r, live, at, mask, many, 1)
    _gate_product(C, LSE_C, do, GATE, DELTA, LSE_GATED, DGATE, r, live, at, mask, many, 2)


def row_products(o: Tensor, do: Tensor) -> Tensor:
    """delta [B, T, Q] fp32 of contiguous o and do [B, T, Q, DV]."""
    DV = o.shape[-1]
    delta = o.new_empty(o.shape[:-1], dtype=torch.float32)
    launch(
        nsa_row_products,
        (cdiv(delta.numel(), 64),),
        o,
        do,
        delta,
        delta.numel(),
        DV,
        64,
        padded(DV),
    )
    return delta


def gate_products(
    do: Tensor,
    gates: Tensor,
    outputs: tuple[Tensor, Tensor, Tensor],
    lse: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """(delta, lse - log2 gate), both fp32 [3, B, T, Q], and the gates' gradient; a gate below 0
    makes its row NaN.

    Contiguous do and outputs [B, T, Q, DV], gates [B, T, Q, 3], lse to base 2 [B, T, Q] fp32.
    """
    DV = do.shape[-1]
    delta = do.new_empty(3, *do.shape[:-1], dtype=torch.float32)
    lse_gated = torch.empty_like(delta)  # an operator's outputs share no memory
    dgates, num_rows, BDV = torch.empty_like(gates), do.numel() // DV, padded(DV)
    R = max(1, 4096 // BDV)
    launch(
        nsa_gate_products,
        (cdiv(num_rows, R),),
        *outputs,
        *lse,
        do,
        gates,
        delta,
        lse_gated,
        dgates,
        num_rows,
        DV,
        R,
        BDV,
        num_warps=4,
    )
    return delta, lse_gated, dgates
