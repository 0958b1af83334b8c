"""Rotary position embedding per head; angles in fp32 (or wider)."""

from __future__ import annotations

import torch
from torch import Tensor


def angles(positions: Tensor, dim: int, *, base: float, scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Angles [..., dim / 2] of ``positions`` [...]: positions * scale * base^(-2i / dim)."""
    pairs = torch.arange(0, dim, 2, device=positions.device, dtype=dtype)
    return (positions.to(dtype) * scale)[..., None] * base ** (-pairs / dim)


def rotate(x: Tensor, angles_BTP: Tensor, *, kind: str) -> Tensor:
    """Rotate x [B, T, heads, D] by ``angles_BTP`` [B or 1, T, D / 2]; keeps x.dtype.

    ``interleaved`` turns pairs (2i, 2i + 1), ``half`` pairs (i, i + D/2) as Hugging Face's Llama does.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    theta = angles_BTP[:, :, None].to(wide)
    if kind == "interleaved":
        pairs = torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(theta), theta)).flatten(-2).to(x.dtype)
    cos, sin = theta.cos(), theta.sin()
    first, second = x.to(wide).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
