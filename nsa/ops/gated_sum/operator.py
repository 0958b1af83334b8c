"""The gated sum of the branches (arXiv 2502.11089, Eq. 5), and the operator of
``nsa.ops.gated_sum.kernels``.

B batch, T query tokens, Q query heads, D value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nsa.ops.operator import Backward, Gradients, call, define_operator


def gated_sum(gates_BTQN: Tensor, outputs_BTQD: Sequence[Tensor], columns: Sequence[int]) -> Tensor:
    """sum over branches of g_b * o_b; ``columns`` says which gate belongs to which output.

    Returns [B, T, HQ, DV].
    """
    gates_BTQN = gates_BTQN.to(outputs_BTQD[0].dtype)
    if torch.compiler.is_compiling():
        # The gates in memory of their own. The backward of a sigmoid keeps the sigmoid, that of the
        # products the columns: were those views of it, Inductor (torch 2.11 and 2.13) would write
        # the sigmoid's gradient over it as a saved tensor that nothing else needs, before the
        # products' gradients read the views. dq, dk and dv were then off by their own size.
        gates_BTQN = gates_BTQN.movedim(-1, 0).clone(memory_format=torch.contiguous_format)
        gates_BTQN = gates_BTQN.movedim(0, -1)
    gates_BTQ = gates_BTQN.unbind(-1)
    terms = [gates_BTQ[c][..., None] * o for c, o in zip(columns, outputs_BTQD, strict=True)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def fused_gated_sum(
    gates_BTQN: Tensor, outputs_BTQD: Sequence[Tensor], columns: Sequence[int]
) -> Tensor:
    """The same in one kernel each way, summed in fp32; where a branch is off, `gated_sum`."""
    if len(columns) < gates_BTQN.shape[-1]:
        return gated_sum(gates_BTQN, outputs_BTQD, columns)
    o: Tensor = call("gated_sum", gates_BTQN.to(outputs_BTQD[0].dtype), *outputs_BTQD)
    return o


def _forward(gates: Tensor, cmp: Tensor, sel: Tensor, win: Tensor) -> Tensor:
    from nsa.ops.gated_sum import kernels

    return kernels.forward(
        gates.contiguous(), (cmp.contiguous(), sel.contiguous(), win.contiguous())
    )


def _backward(
    do: Tensor, gates: Tensor, cmp: Tensor, sel: Tensor, win: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from nsa.ops.gated_sum import kernels

    return kernels.backward(
        do.contiguous(), gates.contiguous(), (cmp.contiguous(), sel.contiguous(), win.contiguous())
    )


def _fake_forward(gates: Tensor, cmp: Tensor, sel: Tensor, win: Tensor) -> Tensor:
    return cmp.new_empty(cmp.shape)


def _fake_backward(do: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, do: Tensor) -> Gradients:
    gradients: Gradients = call("gated_sum_backward", do, *ctx.saved_tensors)
    return gradients


define_operator(
    "gated_sum",
    "(Tensor gates, Tensor cmp, Tensor sel, Tensor win) -> Tensor",
    _forward,
    _fake_forward,
    Backward(
        "(Tensor do, Tensor gates, Tensor cmp, Tensor sel, Tensor win) -> (Tensor, Tensor, Tensor,"
        " Tensor)",
        _backward,
        _fake_backward,
        _save,
        _gradients,
    ),
)
