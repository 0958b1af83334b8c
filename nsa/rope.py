"""Rotary position embedding per head; angles in fp32 (or wider).

B batch, T tokens, N heads, D head dim, P = D / 2 pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def angles(
    positions: Tensor, dim: int, *, base: float, scale: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Angles [..., dim / 2] of ``positions`` [...]: positions * scale * base^(-2i / dim)."""
    pairs = torch.arange(0, dim, 2, device=positions.device, dtype=dtype)
    return (positions.to(dtype) * scale)[..., None] * base ** (-pairs / dim)


def turns(angles_BTP: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(i * angle), complex [B or 1, T, 1, P], for `rotate` of tensors of ``dtype``; made once,
    it serves q, k and every layer.

    Inside torch.compile (cos, sin) instead, real [B or 1, T, 1, P, 2]: Inductor has no code for
    complex numbers.
    """
    theta_BT1P = angles_BTP[:, :, None].to(_wide(dtype))
    if torch.compiler.is_compiling():
        return torch.stack([theta_BT1P.cos(), theta_BT1P.sin()], -1)
    return torch.polar(torch.ones_like(theta_BT1P), theta_BT1P)


def rotate(x: Tensor, by: Tensor, *, kind: str) -> Tensor:
    """Rotate x [B, T, N, D] by its ``turns``, or by angles [B or 1, T, P]; keeps x.dtype.

    ``interleaved`` turns pairs (2i, 2i + 1), ``half`` pairs (i, i + D/2) as Hugging Face's Llama
    does, and ``none`` turns nothing.
    """
    if kind == "none":
        return x
    wide = _wide(x.dtype)
    by = turns(by, x.dtype) if by.ndim == 3 else by
    # last dimension: the two halves of a pair, which are one complex number
    pairs = (
        x.unflatten(-1, (-1, 2))
        if kind == "interleaved"
        else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    )
    pairs = pairs.to(wide, memory_format=torch.contiguous_format).contiguous()
    # Inductor fuses real numbers alone; these are the same products and sums
    if torch.compiler.is_compiling():
        (a, b), (cos, sin) = pairs.unbind(-1), _real(by).to(wide).unbind(-1)
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1)
    elif x.numel() == 0:
        turned = pairs  # an empty tensor's strides do not form complex numbers
    else:
        turn = (by if by.is_complex() else torch.view_as_complex(by)).to(wide.to_complex())
        turned = torch.view_as_real(torch.view_as_complex(pairs) * turn)
    if kind == "half":
        turned = turned.transpose(-1, -2)
    return turned.to(x.dtype, memory_format=torch.contiguous_format).flatten(-2)


def _real(turns: Tensor) -> Tensor:
    return torch.view_as_real(turns) if turns.is_complex() else turns


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
