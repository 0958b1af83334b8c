"""The output of a step: the gated sum of the branches, each over its splits.

Letters as in `nsa.ops.decode_step.shapes`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.decode.kernels import summed


@triton.jit(do_not_specialize=["cmp_splits", "win_splits", "sel_splits"])
def nsa_sum_step(
    PART,
    LSE_PART,
    GATE,
    O,
    cmp_splits,
    win_splits,
    sel_splits,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One head of one row: the gated sum of the branches, each summed over its splits and rounded.

    Splits lie in the order cmp, win, sel.
    """
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    dv = tl.arange(0, BDV)
    kind = O.dtype.element_ty
    win = cmp_splits.to(tl.int64) * rows
    sel = (cmp_splits + win_splits).to(tl.int64) * rows
    cmp_o, _ = summed(PART, LSE_PART, row, rows, cmp_splits, DV, BDV, AT_ONCE)
    sel_o, _ = summed(PART + sel * DV, LSE_PART + sel, row, rows, sel_splits, DV, BDV, AT_ONCE)
    win_o, _ = summed(PART + win * DV, LSE_PART + win, row, rows, win_splits, DV, BDV, AT_ONCE)
    o = tl.load(GATE + row * 3).to(tl.float32) * cmp_o.to(kind).to(tl.float32)
    o += tl.load(GATE + row * 3 + 1).to(tl.float32) * sel_o.to(kind).to(tl.float32)
    o += tl.load(GATE + row * 3 + 2).to(tl.float32) * win_o.to(kind).to(tl.float32)
    tl.store(O + row * DV + dv, o.to(kind), mask=dv < DV)
