"""RoPE of q and K in parts: the chunks of q, the branches of K.

B batch, T tokens of this rank, N heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nsa.rope import rotate


def rotated_parts(
    x: Tensor, turns: Tensor, *, kind: str, sizes: list[int], dim: int
) -> tuple[Tensor, ...]:
    """`nsa.rope.rotate` of x [B, T, N, D], split along ``dim``.

    In backward the parts' gradients are cast into one wide tensor, which is then turned back: split
    by autograd they would be put together first, which is another pass over memory.
    """
    if kind == "none" or torch.compiler.is_compiling():  # whose turns are real numbers
        return rotate(x, turns, kind=kind).split(sizes, dim)
    apply: Any = _RotatedParts.apply
    parts: tuple[Tensor, ...] = apply(x, turns, kind, sizes, dim)
    return parts


class _RotatedParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, turns: Tensor, kind: str, sizes: list[int], dim: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(turns)
        ctx.kind, ctx.sizes, ctx.dim, ctx.shape, ctx.dtype = kind, sizes, dim, x.shape, x.dtype
        return rotate(x, turns, kind=kind).split(sizes, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (turns,) = ctx.saved_tensors
        wide = torch.promote_types(ctx.dtype, torch.float32)
        d_rotated = gradients[0].new_empty(ctx.shape, dtype=wide)
        for part, gradient in zip(d_rotated.split(ctx.sizes, ctx.dim), gradients, strict=True):
            part.copy_(gradient)
        return rotate(d_rotated, turns.conj(), kind=ctx.kind).to(ctx.dtype), None, None, None, None
