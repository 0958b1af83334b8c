"""The gated sum of three branches (arXiv 2502.11089, Eq. 5) as one function of autograd: the
operator of ``nsa.ops.joint_backward.kernels``.

The forward is the gated sum of the branches' outputs. The backward computes all three branches at
once, so that neither each branch's share of the gradient nor the sum of three dQ goes through
memory; what needs the outputs themselves is an operator of its own, after which they are dropped.
B batch, T queries, Q query heads, G kv heads, N slots, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nsa.ops.operator import Backward, Gradients, call, define_operator, int_and_tensor

KV = tuple[Tensor, Tensor]
Joined = tuple[Any, ...]  # the arguments of the operator
# Few arguments, in lists: torch.library looks at each of a schema's as often as there are any.
_INPUTS = (
    "Tensor gates, Tensor q, Tensor[] kv, Tensor blocks, Tensor[] saved, Tensor? q_starts, Tensor?"
    " first, SymInt[] sizes, float scale"
)
_OF_GATES = "Tensor do, Tensor gates, Tensor[] saved"
_OF_REST = (
    "Tensor do, Tensor q, Tensor[] kv, Tensor blocks, Tensor delta, Tensor lse_gated, Tensor lists,"
    " Tensor? q_starts, Tensor? first, SymInt[] sizes, float scale"
)
_NUM_GRADIENTS = 7  # of q, of each of kv


def arguments(
    gates: Tensor,
    q: Tensor,
    cmp: KV,
    sel: KV,
    win: KV,
    blocks: Tensor,
    outputs: tuple[Tensor, ...],
    lse: tuple[Tensor, ...],
    lists: Tensor,
    *,
    block: int,
    stride: int,
    sel_block: int,
    window: int,
    q_start: int | Tensor,
    scale: float,
    first: Tensor | None,
    num_full_rows: int,
    win_begin: int = 0,
) -> Joined:
    """What `attend` takes: gates [B, T, Q, 3] in the order cmp, sel, win, and the rest of a call.

    ``outputs`` [B, T, Q, DV] and ``lse`` to base 2 [B, T, Q] fp32 are what the branches left of the
    same q, k and v, as constants, and ``lists`` what the selected one did besides, or an empty
    tensor; ``num_full_rows`` as in `nsa.ops.selected.AttendFn`. ``win`` begins at position
    ``win_begin``.
    """
    at, q_starts = int_and_tensor(q_start)
    sizes = [at, block, stride, sel_block, window, num_full_rows, win_begin]
    kv, saved = [*cmp, *sel, *win], [*outputs, *lse, lists]
    gates = gates.to(outputs[0].dtype)
    return gates, q, kv, blocks, saved, q_starts, first, sizes, scale


def attend(joined: Joined) -> Tensor:
    """`arguments` -> o [B, T, Q, DV], the sum of gate * output, with every gradient."""
    o: Tensor = call("joined", *joined)
    return o


def _forward(
    gates: Tensor, q: Tensor, kv: list[Tensor], blocks: Tensor, saved: list[Tensor], *_: object
) -> Tensor:
    from nsa.ops.gated_sum import kernels

    o_cmp, o_sel, o_win = (x.contiguous() for x in saved[:3])
    return kernels.forward(gates.contiguous(), (o_cmp, o_sel, o_win))


def gradients(
    do: Tensor, gates: Tensor, saved: list[Tensor], rest: Sequence[Any], options: Sequence[Any]
) -> list[Tensor]:
    """Gradients of the gates, of q, and of k and v of cmp, sel and win.

    ``rest``: (q, kv, blocks, lists, q_starts, first). ``saved``, outputs and lse of the branches,
    is emptied: the first of two operators alone needs them, and at 65,536 tokens they would add
    .3 to 3 GiB to what the second takes.
    """
    delta, lse_gated, dgates = call("gate_products", do, gates, saved)
    saved.clear()
    q, kv, blocks, lists, q_starts, first = rest
    found = call(
        "joined_backward",
        do,
        q,
        kv,
        blocks,
        delta,
        lse_gated,
        lists,
        q_starts,
        first,
        *options,
    )
    return [dgates, *found]


def _gate_products(do: Tensor, gates: Tensor, saved: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    from nsa.ops.kernels import products

    o_cmp, o_sel, o_win, *lse = (x.contiguous() for x in saved)
    outputs = (o_cmp, o_sel, o_win)
    return products.gate_products(
        do.contiguous(), gates.contiguous(), outputs, (lse[0], lse[1], lse[2])
    )


def _fake_gate_products(
    do: Tensor, gates: Tensor, saved: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    delta, lse_gated = (do.new_empty(3, *do.shape[:-1], dtype=torch.float32) for _ in range(2))
    return delta, lse_gated, gates.new_empty(gates.shape)


def _backward(
    do: Tensor,
    q: Tensor,
    kv: list[Tensor],
    blocks: Tensor,
    delta: Tensor,
    lse_gated: Tensor,
    lists: Tensor,
    q_starts: Tensor | None,
    first: Tensor | None,
    sizes: list[int],
    scale: float,
) -> tuple[Tensor, ...]:
    from nsa.ops.joint_backward import kernels
    from nsa.ops.selected.triton import list_calls

    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = kv
    q_start, block, stride, sel_block, window, num_full_rows, win_begin = sizes
    geometry = kernels.Geometry(
        block,
        stride,
        sel_block,
        window,
        scale,
        q_start if q_starts is None else q_starts,
        first,
        num_full_rows,
        win_begin,
    )
    branches = ((k_cmp, v_cmp), (k_sel, v_sel), (k_win, v_win))
    return kernels.backward(
        do.contiguous(),
        q,
        *branches,
        blocks,
        delta,
        lse_gated,
        geometry,
        list_calls.lists_left(lists.contiguous(), q, v_sel, blocks, sel_block, scale),
    )


def _fake_forward(
    gates: Tensor, q: Tensor, kv: list[Tensor], blocks: Tensor, saved: list[Tensor], *_: object
) -> Tensor:
    return saved[0].new_empty(saved[0].shape)


def _fake_backward(do: Tensor, q: Tensor, kv: list[Tensor], *_: object) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, *kv))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gates, q, kv, blocks, saved, q_starts, first, *ctx.options = inputs
    ctx.save_for_backward(gates, q, *kv, blocks, *saved, q_starts, first)


def _gradients(ctx: Any, do: Tensor) -> Gradients:
    kept = ctx.saved_tensors  # once: a checkpoint gives each of them no second time
    gates, q, *kv, blocks = kept[:9]
    *saved, lists, q_starts, first = kept[9:]
    num_saved, rest = len(saved) + 1, (q, kv, blocks, lists, q_starts, first)
    dgates, dq, *dkv = gradients(do, gates, saved, rest, ctx.options)
    return dgates, dq, dkv, None, [None] * num_saved, None, None, None, None


define_operator(
    "gate_products",
    f"({_OF_GATES}) -> (Tensor, Tensor, Tensor)",
    _gate_products,
    _fake_gate_products,
)
define_operator(
    "joined",
    f"({_INPUTS}) -> Tensor",
    _forward,
    _fake_forward,
    Backward(
        f"({_OF_REST}) -> ({', '.join(['Tensor'] * _NUM_GRADIENTS)})",
        _backward,
        _fake_backward,
        _save,
        _gradients,
    ),
)
