"""The operator of ``nsa.ops.means.kernels``: phi = mean (arXiv 2502.11089, Eq. 7) of K and V
together.

B batch, S tokens, C compressed blocks, G kv heads, D head dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa.ops.operator import Backward, Gradients, call, define_operator


def means(k: Tensor, v: Tensor, *, block: int, stride: int) -> tuple[Tensor, Tensor]:
    """k [B, S, G, D], v [B, S, G, DV] -> [B, C, G, D] and [B, C, G, DV] in their dtype, as
    `nsa.compress` has it; S >= block.
    """
    k_cmp, v_cmp = call("means", k, v, block, stride)
    return k_cmp, v_cmp


def _forward(k: Tensor, v: Tensor, block: int, stride: int) -> tuple[Tensor, Tensor]:
    from nsa.ops.means import kernels

    return kernels.forward(k, v, block=block, stride=stride)


def _backward(
    dk: Tensor, dv: Tensor, tokens: int, block: int, stride: int
) -> tuple[Tensor, Tensor]:
    from nsa.ops.means import kernels

    return kernels.backward(dk, dv, tokens=tokens, block=block, stride=stride)


def _fake_forward(k: Tensor, v: Tensor, block: int, stride: int) -> tuple[Tensor, Tensor]:
    C = (k.shape[1] - block) // stride + 1
    return k.new_empty(k.shape[0], C, *k.shape[2:]), v.new_empty(v.shape[0], C, *v.shape[2:])


def _fake_backward(dk: Tensor, dv: Tensor, tokens: int, *_: object) -> tuple[Tensor, Tensor]:
    return dk.new_empty(dk.shape[0], tokens, *dk.shape[2:]), dv.new_empty(
        dv.shape[0], tokens, *dv.shape[2:]
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    k, _, *grid = inputs
    ctx.options = (k.shape[1], *grid)


def _gradients(ctx: Any, dk: Tensor, dv: Tensor) -> Gradients:
    return *call("means_backward", dk, dv, *ctx.options), None, None


define_operator(
    "means",
    "(Tensor k, Tensor v, SymInt block, SymInt stride) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
    Backward(
        "(Tensor dk, Tensor dv, SymInt tokens, SymInt block, SymInt stride) -> (Tensor, Tensor)",
        _backward,
        _fake_backward,
        _save,
        _gradients,
    ),
)
