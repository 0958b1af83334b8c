"""The gated sum of the branches (arXiv 2502.11089, Eq. 5)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def gated_sum(gates_BTQN: Tensor, outputs_BTQD: Sequence[Tensor], columns: Sequence[int]) -> Tensor:
    """sum over branches of g_b * o_b; ``columns`` says which gate belongs to which output. Returns [B, T, HQ, DV]."""
    gates_BTQ = gates_BTQN.to(outputs_BTQD[0].dtype).unbind(-1)
    terms = [gates_BTQ[c][..., None] * o for c, o in zip(columns, outputs_BTQD, strict=True)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
