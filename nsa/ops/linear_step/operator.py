"""The operator of ``nsa.ops.linear_step.kernels``. No gradient.

B batch, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nsa.ops.operator import call, define_operator


def apply(
    x: Tensor,
    weights: Sequence[Tensor],
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    silu: bool = False,
    residual: Tensor | None = None,
) -> list[Tensor]:
    """x [B, 1, K] times each of up to three ``weights`` [N, K]: [B, 1, N] each, in x's dtype.

    ``norm`` [K]: of x's RMSNorm (with ``eps``), which comes first. ``silu`` and ``residual`` [B, 1,
    N] are of what comes out. Rounded where the modules one by one round.
    """
    made: list[Tensor] = call("linear_step", x, norm, list(weights), residual, eps, silu)
    return made


def _run(
    x: Tensor,
    norm: Tensor | None,
    weights: list[Tensor],
    residual: Tensor | None,
    eps: float,
    silu: bool,
) -> list[Tensor]:
    from nsa.ops.linear_step import kernels

    return kernels.apply(x, weights, norm=norm, eps=eps, silu=silu, residual=residual)


def _fake(x: Tensor, norm: object, weights: list[Tensor], *_: object) -> list[Tensor]:
    return [x.new_empty(*x.shape[:2], w.shape[0]) for w in weights]


define_operator(
    "linear_step",
    "(Tensor x, Tensor? norm, Tensor[] weights, Tensor? residual, float eps, bool silu) ->"
    " Tensor[]",
    _run,
    _fake,
)
