"""Path `triton`: block-sparse kernels, forward and backward.

The operators of ``nsa.ops.kernels.selected``.

B batch, T query tokens, S key tokens, Q query heads, G kv heads, N blocks a row, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops.once import once

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor blocks, Tensor? q_starts"
_OPTIONS = "SymInt q_start, SymInt sel_block, SymInt full, float scale"
_TAGS = (torch.Tag.pt2_compliant_tag,)
torch.library.define(
    "nsa::selected_triton", f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)", tags=_TAGS
)
torch.library.define(
    "nsa::selected_triton_backward",
    f"(Tensor do, Tensor o, Tensor lse, {_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    sel_block: int,
    q_start: int | Tensor,
    scale: float,
    fa2: str | None,
) -> Tensor:
    """See ``nsa.ops.selected.AttendFn``; ``fa2`` serves nothing here."""
    return attend_with_lse(q, k, v, blocks, sel_block=sel_block, q_start=q_start, scale=scale)[0]


def attend_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    sel_block: int,
    q_start: int | Tensor,
    scale: float,
    full: int = 0,
) -> tuple[Tensor, Tensor]:
    """(o, lse to base 2 [B, T, HQ], fp32, without gradient).

    ``full``: a promise that queries at positions below it chose every block up to their own, and
    that q_start is 0.
    """
    q_starts = q_start if isinstance(q_start, Tensor) else None
    at = 0 if isinstance(q_start, Tensor) else q_start
    o, lse = torch.ops.nsa.selected_triton(q, k, v, blocks, q_starts, at, sel_block, full, scale)
    return o, lse


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    q_starts: Tensor | None,
    q_start: int,
    sel_block: int,
    full: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from nsa.ops.kernels import selected

    at = q_start if q_starts is None else q_starts
    return selected.forward(
        q, k, v, blocks, sel_block=sel_block, q_start=at, scale=scale, full=full
    )


def _backward(
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    q_starts: Tensor | None,
    q_start: int,
    sel_block: int,
    full: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from nsa.ops.kernels import products, selected

    do, at = do.contiguous(), q_start if q_starts is None else q_starts
    delta = products.row_products(o, do)
    return selected.backward(
        do, q, k, v, blocks, lse, delta, sel_block=sel_block, q_start=at, scale=scale, full=full
    )


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(
    do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:5])
    ctx.options = inputs[5:]


@once
def _gradients(ctx: Any, do: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * 9
    o, lse, *inputs = ctx.saved_tensors
    return (
        *torch.ops.nsa.selected_triton_backward(do, o, lse, *inputs, *ctx.options),
        *(None,) * 6,
    )


torch.library.impl("nsa::selected_triton", "default", _forward)
torch.library.impl("nsa::selected_triton_backward", "default", _backward)
torch.library.register_fake("nsa::selected_triton", _fake_forward)
torch.library.register_fake("nsa::selected_triton_backward", _fake_backward)
torch.library.register_autograd("nsa::selected_triton", _gradients, setup_context=_save)
