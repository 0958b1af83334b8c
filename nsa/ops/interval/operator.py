"""The operator of ``nsa.ops.interval.forward_kernels`` and its gradient, of ``backward``: attention
over one interval of keys a query.

B batch, T queries, C keys, Q query heads, G kv heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from nsa.ops.operator import call, define_operator, fake_attention, int_and_tensor, of_attention

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? q_starts, Tensor? first"
_OPTIONS = "SymInt q_start, SymInt block, SymInt stride, SymInt? width, float scale"


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
    at, q_starts = int_and_tensor(q_start)
    o, lse = call("interval", q, k, v, q_starts, first, at, block, stride, width, scale)
    return o, lse


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
    from nsa.ops.interval import forward_kernels

    return forward_kernels.forward(
        q,
        k,
        v,
        block=block,
        stride=stride,
        width=width,
        q_start=q_start if q_starts is None else q_starts,
        first=first,
        scale=scale,
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
    from nsa.ops.interval import backward
    from nsa.ops.kernels import products

    do = do.contiguous()
    return backward.backward(
        do,
        q,
        k,
        v,
        lse,
        products.row_products(o, do),
        block=block,
        stride=stride,
        width=width,
        q_start=q_start if q_starts is None else q_starts,
        first=first,
        scale=scale,
    )


define_operator(
    "interval",
    f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward,
    fake_attention,
    of_attention(
        f"(Tensor do, Tensor o, Tensor lse, {_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
        _backward,
        "interval",
        num_inputs=10,
    ),
)
