"""The backward of one branch: dQ of `nsa.ops.interval.backward_q_kernels`, then dK and dV of
`nsa.ops.interval.backward_kv_kernels`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa.ops.interval import parts
from nsa.ops.interval.backward_kv_kernels import backward_kv
from nsa.ops.interval.backward_q_kernels import backward_q


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    dq: Tensor | None = None,
    adds: bool = False,
    tiles_q: dict[str, int] | None = None,
    tiles_kv: dict[str, int] | None = None,
    sums: parts.Sums | None = None,
    **geometry: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: `backward_q` and `backward_kv`, whose arguments these are."""
    dq = backward_q(do, q, k, v, lse, delta, dq=dq, adds=adds, tiles=tiles_q, **geometry)
    dk, dv = backward_kv(do, q, k, v, lse, delta, tiles=tiles_kv, sums=sums, **geometry)
    return dq, dk, dv
