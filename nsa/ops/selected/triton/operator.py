"""The operator of ``nsa.ops.selected.triton.forward`` and its gradient, of ``backward``.

B batch, T query tokens, S key tokens, Q query heads, G kv heads, N blocks a row, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops.operator import (
    Backward,
    Gradients,
    call,
    define_operator,
    fake_attention,
    int_and_tensor,
)

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor blocks, Tensor? q_starts"
_OPTIONS = "SymInt q_start, SymInt sel_block, SymInt full, float scale, bool keeps"


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
    num_full_rows: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nsa.ops.selected.AttendFn``; ``fa2`` serves nothing here. Third are the queries' lists
    that the gradient takes, too: empty where it makes its own.
    """
    del fa2
    at, q_starts = int_and_tensor(q_start)
    # a compiled condition on a length would be compiled anew for others
    keeps = torch.compiler.is_compiling() or _leaves_lists(q, v, blocks, sel_block, scale)
    o, lse, lists = call(
        "selected_triton", q, k, v, blocks, q_starts, at, sel_block, num_full_rows, scale, keeps
    )
    return o, lse, lists


def _leaves_lists(q: Tensor, v: Tensor, blocks: Tensor, sel_block: int, scale: float) -> bool:
    from nsa.ops.selected.triton import list_calls

    return list_calls.leaves_lists(q, v, blocks, sel_block, scale)


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
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from nsa.ops.selected.triton import forward

    at = q_start if q_starts is None else q_starts
    lists = _room(q, v, blocks, sel_block, keeps)
    o, lse = forward.forward(
        q,
        k,
        v,
        blocks,
        sel_block=sel_block,
        q_start=at,
        scale=scale,
        full=full,
        lists=lists if keeps else None,
    )
    return o, lse, lists


def _room(q: Tensor, v: Tensor, blocks: Tensor, sel_block: int, keeps: bool) -> Tensor:
    from nsa.ops.selected.triton import chunks

    size = chunks.grid_of(q, v, blocks, sel_block).room if keeps else 0
    return q.new_empty(size, dtype=torch.int32)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, _, sel_block, _, _, keeps = rest
    return *fake_attention(q, k, v), _room(q, v, blocks, sel_block, keeps)


def _backward(
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    lists: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    q_starts: Tensor | None,
    q_start: int,
    sel_block: int,
    full: int,
    scale: float,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from nsa.ops.kernels import products
    from nsa.ops.selected.triton import backward, list_calls

    do, at = do.contiguous(), q_start if q_starts is None else q_starts
    return backward.backward(
        do,
        q,
        k,
        v,
        blocks,
        lse,
        products.row_products(o, do),
        sel_block=sel_block,
        q_start=at,
        scale=scale,
        full=full,
        lists=list_calls.lists_left(lists, q, v, blocks, sel_block, scale),
    )


def _fake_backward(
    do: Tensor, o: Tensor, lse: Tensor, lists: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:5])
    ctx.options = inputs[5:]


def _gradients(ctx: Any, do: Tensor | None, *_: Tensor | None) -> Gradients:
    if do is None:
        return (None,) * 10
    found = call("selected_triton_backward", do, *ctx.saved_tensors, *ctx.options)
    return (*found, *(None,) * 7)


define_operator(
    "selected_triton",
    f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    Backward(
        f"(Tensor do, Tensor o, Tensor lse, Tensor lists, {_INPUTS}, {_OPTIONS}) -> (Tensor,"
        " Tensor, Tensor)",
        _backward,
        _fake_backward,
        _save,
        _gradients,
    ),
)
