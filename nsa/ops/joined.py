"""The gated sum of three branches (arXiv 2502.11089, Eq. 5) as one function of autograd: the operator of ``nsa.ops.kernels.joined``.

Forward it is the gated sum of what the branches' kernels left. Backward it goes through all three at once, which spares each
branch's share of the gradient, and the sum of three dQ, a way through memory.
B batch, T queries, Q query heads, G kv heads, N slots, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops.once import once

KV = tuple[Tensor, Tensor]
_INPUTS = (
    "Tensor gates, Tensor q, Tensor k_cmp, Tensor v_cmp, Tensor k_sel, Tensor v_sel, Tensor k_win, Tensor v_win, Tensor blocks, "
    "Tensor o_cmp, Tensor o_sel, Tensor o_win, Tensor lse_cmp, Tensor lse_sel, Tensor lse_win, Tensor? q_starts, Tensor? first"
)
_OPTIONS = "SymInt q_start, SymInt block, SymInt stride, SymInt sel_block, SymInt window, SymInt full, float scale"
_TAGS = (torch.Tag.pt2_compliant_tag,)
_NUM_TENSORS, _NUM_OPTIONS, _NUM_GRADIENTS = 17, 7, 8  # gradients: of the first so many inputs
torch.library.define("nsa::joined", f"({_INPUTS}, {_OPTIONS}) -> Tensor", tags=_TAGS)
torch.library.define(
    "nsa::joined_backward", f"(Tensor do, {_INPUTS}, {_OPTIONS}) -> ({', '.join(['Tensor'] * _NUM_GRADIENTS)})", tags=_TAGS
)


def attend(
    gates: Tensor, q: Tensor, cmp: KV, sel: KV, win: KV, blocks: Tensor, outputs: tuple[Tensor, ...], lse: tuple[Tensor, ...], *,
    block: int, stride: int, sel_block: int, window: int, q_start: int | Tensor, scale: float, first: Tensor | None, full: int,
) -> Tensor:  # fmt: skip
    """gates [B, T, Q, 3] in the order cmp, sel, win -> o [B, T, Q, DV], the sum of gate * output, with every gradient.

    ``outputs`` [B, T, Q, DV] and ``lse`` to base 2 [B, T, Q] fp32 are what the branches left of the same q, k and v, as constants;
    ``full`` as in `nsa.ops.selected.triton.attend_with_lse`.
    """
    q_starts = q_start if isinstance(q_start, Tensor) else None
    at = 0 if isinstance(q_start, Tensor) else q_start
    gates = gates.to(outputs[0].dtype)
    o: Tensor = torch.ops.nsa.joined(
        gates, q, *cmp, *sel, *win, blocks, *outputs, *lse, q_starts, first, at, block, stride, sel_block, window, full, scale
    )
    return o


def _forward(gates: Tensor, *rest: Any) -> Tensor:
    from nsa.ops.kernels import combine

    o_cmp, o_sel, o_win = (x.contiguous() for x in rest[8:11])
    return combine.forward(gates.contiguous(), (o_cmp, o_sel, o_win))


def _backward(do: Tensor, *given: Any) -> tuple[Tensor, ...]:
    from nsa.ops.kernels import joined

    gates, q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, blocks, *left, q_starts, first = given[:_NUM_TENSORS]
    q_start, block, stride, sel_block, window, full, scale = given[_NUM_TENSORS:]
    o_cmp, o_sel, o_win, *lse = (x.contiguous() for x in left)
    geometry = joined.Geometry(block, stride, sel_block, window, scale, q_start if q_starts is None else q_starts, first, full)
    kv = ((k_cmp, v_cmp), (k_sel, v_sel), (k_win, v_win))
    return joined.backward(do, gates, q, *kv, blocks, (o_cmp, o_sel, o_win), (lse[0], lse[1], lse[2]), geometry)


def _fake_forward(gates: Tensor, *rest: Any) -> Tensor:
    return rest[8].new_empty(rest[8].shape)


def _fake_backward(do: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in given[:_NUM_GRADIENTS])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TENSORS])
    ctx.options = inputs[_NUM_TENSORS:]


@once
def _gradients(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.nsa.joined_backward(do, *ctx.saved_tensors, *ctx.options)
    return (*gradients, *(None,) * (_NUM_TENSORS - _NUM_GRADIENTS + _NUM_OPTIONS))


torch.library.impl("nsa::joined", "default", _forward)
torch.library.impl("nsa::joined_backward", "default", _backward)
torch.library.register_fake("nsa::joined", _fake_forward)
torch.library.register_fake("nsa::joined_backward", _fake_backward)
torch.library.register_autograd("nsa::joined", _gradients, setup_context=_save)
