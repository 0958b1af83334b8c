"""A learned phi of K and V together: tensors, the kernels, and what the oracle makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa.ops import learned_phi
from tests import oracle
from tests.cases import randn

NAMES = {
    "linear": ("k", "v", "weight_k", "weight_v"),
    "mlp": ("k", "v", "up_k", "up_v", "position_k", "position_v", "down_k", "down_v"),
}
LEARNED = tuple(NAMES)
Shape = tuple[int, int, int, int, int]  # B, S, G, D, DV


def tensors_of(
    phi: str, shape: Shape, block: int, *, hidden: tuple[int, int] | None = None, **options: Any
) -> list[Tensor]:
    """In the order of NAMES; weights so large that SiLU bends."""
    B, S, G, *dims = shape
    kv = [randn(B, S, G, d, seed=i, **options) for i, d in enumerate(dims)]
    if phi == "linear":
        flat = [randn(d, block * d, seed=2 + i, **options) for i, d in enumerate(dims)]
        return [*kv, *(x * x.shape[1] ** -0.5 for x in flat)]
    up = [
        randn(f, block * d, seed=2 + i, **options)
        for i, (f, d) in enumerate(zip(hidden or dims, dims, strict=True))
    ]
    position = [randn(block, d, seed=4 + i, **options) for i, d in enumerate(dims)]
    down = [
        randn(d, f, seed=6 + i, **options)
        for i, (f, d) in enumerate(zip(hidden or dims, dims, strict=True))
    ]
    up, down = ([x * x.shape[1] ** -0.5 for x in one] for one in (up, down))
    return [*kv, *up, *position, *down]


def by_kernel(phi: str, block: int, stride: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def found(k: Tensor, v: Tensor, *params: Tensor) -> tuple[Tensor, Tensor]:
        pairs = list(zip(params[::2], params[1::2], strict=True))
        return getattr(learned_phi, phi)(k, v, *pairs, block=block, stride=stride)

    return found


def by_oracle(phi: str, block: int, stride: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def wanted(k: Tensor, v: Tensor, *params: Tensor) -> tuple[Tensor, Tensor]:
        of_k, of_v = params[::2], params[1::2]
        if phi == "linear":
            return (
                oracle.compress_linear(k, *of_k, block, stride),
                oracle.compress_linear(v, *of_v, block, stride),
            )
        (up_k, at_k, down_k), (up_v, at_v, down_v) = of_k, of_v
        return (
            oracle.compress_mlp(k, at_k, up_k, down_k, block, stride),
            oracle.compress_mlp(v, at_v, up_v, down_v, block, stride),
        )

    return wanted


def both(f: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """K's and V's result in one tensor, so that both have a gradient at once."""
    return lambda *x: torch.cat([y.flatten(2) for y in f(*x)], -1)
