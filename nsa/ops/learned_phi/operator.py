"""The operators of ``nsa.ops.learned_phi.forward_kernels`` and their gradients, of ``backward``:
phi = linear and phi = mlp (arXiv 2502.11089, Eq. 7) of K and V together.

B batch, S tokens, C compressed blocks of l tokens, G kv heads, D head dim, F hidden features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops.operator import Backward, Gradients, call, define_operator

Pair = tuple[Tensor, Tensor]  # of K and of V


def linear(k: Tensor, v: Tensor, weight: Pair, *, block: int, stride: int) -> Pair:
    """k [B, S, G, D] and v [B, S, G, DV] with weights [D, l D] and [DV, l DV] of their dtype -> [B,
    C, G, D] and [B, C, G, DV], as `nsa.compress` has it; S >= block.
    """
    k_cmp, v_cmp = call("phi_linear", k, v, *weight, block, stride)
    return k_cmp, v_cmp


def mlp(
    k: Tensor, v: Tensor, up: Pair, position: Pair, down: Pair, *, block: int, stride: int
) -> Pair:
    """The same with ``up`` [F, l D], ``position`` [l, D] and ``down`` [D, F]; F of K and of V may
    differ.
    """
    k_cmp, v_cmp, *_ = call("phi_mlp", k, v, *up, *position, *down, block, stride)
    return k_cmp, v_cmp


def _num_blocks(x: Tensor, block: int, stride: int) -> int:
    return (x.shape[1] - block) // stride + 1


def _fake_phi(k: Tensor, v: Tensor, C: int) -> Pair:
    return k.new_empty(k.shape[0], C, *k.shape[2:]), v.new_empty(v.shape[0], C, *v.shape[2:])


def _forward_linear(
    k: Tensor, v: Tensor, weight_k: Tensor, weight_v: Tensor, block: int, stride: int
) -> Pair:
    from nsa.ops.learned_phi import forward_kernels

    return forward_kernels.forward(k, v, (weight_k, weight_v), block=block, stride=stride)[0]


def _fake_linear(k: Tensor, v: Tensor, wk: Tensor, wv: Tensor, block: int, stride: int) -> Pair:
    return _fake_phi(k, v, _num_blocks(k, block, stride))


def _backward_linear(
    dk_cmp: Tensor,
    dv_cmp: Tensor,
    k: Tensor,
    v: Tensor,
    weight_k: Tensor,
    weight_v: Tensor,
    block: int,
    stride: int,
) -> tuple[Tensor, ...]:
    from nsa.ops.learned_phi import backward

    found = backward.backward(
        (dk_cmp, dv_cmp), k, v, (weight_k, weight_v), block=block, stride=stride
    )
    return tuple(x for pair in found for x in pair)


def _fake_backward_linear(dk: Tensor, dv: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:4])


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    *tensors, ctx.block, ctx.stride = inputs
    ctx.save_for_backward(*tensors)


def _gradients_linear(ctx: Any, dk: Tensor, dv: Tensor) -> Gradients:
    kept = ctx.saved_tensors
    return *call("phi_linear_backward", dk, dv, *kept, ctx.block, ctx.stride), None, None


def _forward_mlp(
    k: Tensor,
    v: Tensor,
    up_k: Tensor,
    up_v: Tensor,
    position_k: Tensor,
    position_v: Tensor,
    down_k: Tensor,
    down_v: Tensor,
    block: int,
    stride: int,
) -> tuple[Tensor, ...]:
    from nsa.ops.learned_phi import forward_kernels

    pairs = ((up_k, up_v), (position_k, position_v), (down_k, down_v))
    out, pre = forward_kernels.forward(k, v, *pairs, block=block, stride=stride)
    assert pre is not None
    return *out, *pre


def _fake_mlp(k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    up_k, up_v, *_, block, stride = rest
    out = _fake_phi(k, v, _num_blocks(k, block, stride))
    return *out, *(
        x.new_empty(*x.shape[:3], up.shape[0], dtype=torch.float32)
        for x, up in zip(out, (up_k, up_v), strict=True)
    )


def _backward_mlp(
    dk_cmp: Tensor,
    dv_cmp: Tensor,
    pre_k: Tensor,
    pre_v: Tensor,
    k: Tensor,
    v: Tensor,
    up_k: Tensor,
    up_v: Tensor,
    position_k: Tensor,
    position_v: Tensor,
    down_k: Tensor,
    down_v: Tensor,
    block: int,
    stride: int,
) -> tuple[Tensor, ...]:
    from nsa.ops.learned_phi import backward

    found = backward.backward(
        (dk_cmp, dv_cmp),
        k,
        v,
        (up_k, up_v),
        (position_k, position_v),
        (down_k, down_v),
        (pre_k, pre_v),
        block=block,
        stride=stride,
    )
    return tuple(x for pair in found for x in pair)


def _fake_backward_mlp(dk: Tensor, dv: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[2:10])


def _save_mlp(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[2:])
    *tensors, ctx.block, ctx.stride = inputs
    ctx.save_for_backward(*output[2:], *tensors)


def _gradients_mlp(ctx: Any, dk: Tensor, dv: Tensor, *_: Tensor) -> Gradients:
    kept = ctx.saved_tensors
    return *call("phi_mlp_backward", dk, dv, *kept, ctx.block, ctx.stride), None, None


_GRID = "SymInt block, SymInt stride"
_OF_LINEAR = f"Tensor k, Tensor v, Tensor weight_k, Tensor weight_v, {_GRID}"
_OF_MLP = (
    "Tensor k, Tensor v, Tensor up_k, Tensor up_v, Tensor position_k, Tensor position_v, Tensor"
    f" down_k, Tensor down_v, {_GRID}"
)


def _tensors(number: int) -> str:
    return f"({', '.join(['Tensor'] * number)})"


define_operator(
    "phi_linear",
    f"({_OF_LINEAR}) -> {_tensors(2)}",
    _forward_linear,
    _fake_linear,
    Backward(
        f"(Tensor dk, Tensor dv, {_OF_LINEAR}) -> {_tensors(4)}",
        _backward_linear,
        _fake_backward_linear,
        _save_linear,
        _gradients_linear,
    ),
)
define_operator(
    "phi_mlp",
    f"({_OF_MLP}) -> {_tensors(4)}",
    _forward_mlp,
    _fake_mlp,
    Backward(
        f"(Tensor dk, Tensor dv, Tensor pre_k, Tensor pre_v, {_OF_MLP}) -> {_tensors(8)}",
        _backward_mlp,
        _fake_backward_mlp,
        _save_mlp,
        _gradients_mlp,
    ),
)
