"""The operator of ``nsa.ops.kernels.interval`` and its gradient: attention over one interval of
keys a query.

B batch, T queries, C keys, Q query heads, G kv heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops.once import once

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? q_starts, Tensor? first"
_OPTIONS = "SymInt q_start, SymInt block, SymInt stride, SymInt? width, float scale"
_TAGS = (torch.Tag.pt2_compliant_tag,)
torch.library.define("nsa::interval", f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)", tags=_TAGS)
torch.library.define(
    "nsa::interval_backward",
    f"(Tensor do, Tensor o, Tensor lse, {_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    stride: int,
    width: int | None,
    q_start: int | Tensor,
    scale: float,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [B, T, Q, D], k [B, C, G, D], v [B, C, G, DV] -> (o [B, T, Q, DV], lse to base 2 [B, T, Q],
    fp32, without gradient).

    The query at position p sees keys lo .. hi - 1: hi = (p + 1 - block) // stride + 1, lo the later
    of first // stride and hi - width.
    ``first`` int64 [T] (B = 1): where each query's document begins, a multiple of ``stride``. A row
    that sees none is exactly 0.
    """
    q_starts = q_start if isinstance(q_start, Tensor) else None
    at = 0 if isinstance(q_start, Tensor) else q_start
    o, lse = torch.ops.nsa.interval(q, k, v, q_starts, first, at, block, stride, width, scale)
    return o, lse


def _start(q_starts: Tensor | None, q_start: int) -> int | Tensor:
    return q_start if q_starts is None else q_starts


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor | None,
    first: Tensor | None,
    q_start: int,
    block: int,
    stride: int,
    width: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from nsa.ops.kernels import interval

    at = _start(q_starts, q_start)
    return interval.forward(
        q, k, v, block=block, stride=stride, width=width, q_start=at, first=first, scale=scale
    )


def _backward(
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor | None,
    first: Tensor | None,
    q_start: int,
    block: int,
    stride: int,
    width: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from nsa.ops.kernels import interval, products

    do, at = do.contiguous(), _start(q_starts, q_start)
    delta = products.row_products(o, do)
    return interval.backward(
        do,
        q,
        k,
        v,
        lse,
        delta,
        block=block,
        stride=stride,
        width=width,
        q_start=at,
        first=first,
        scale=scale,
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
        return (None,) * 10
    o, lse, *inputs = ctx.saved_tensors
    return (*torch.ops.nsa.interval_backward(do, o, lse, *inputs, *ctx.options), *(None,) * 7)


torch.library.impl("nsa::interval", "default", _forward)
torch.library.impl("nsa::interval_backward", "default", _backward)
torch.library.register_fake("nsa::interval", _fake_forward)
torch.library.register_fake("nsa::interval_backward", _fake_backward)
torch.library.register_autograd("nsa::interval", _gradients, setup_context=_save)
