"""A backward that has no derivative of its own: asked for one, it is an error, never a silent 0.

PyTorch's `once_differentiable` notices a second derivative by the incoming gradient alone, and not
by what else the gradients depend on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gradient = Tensor | list[Tensor] | list[None] | None
Gradients = tuple[Gradient, ...]


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise RuntimeError(
            "got a request to differentiate twice through NSA's kernels, whose gradients have none"
            " of their own; wanted one derivative; drop create_graph"
        )


def once(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """``backward`` of an operator, without a graph of its own; where one was asked for
    (create_graph), its gradients refuse to go on.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *gradients: Tensor | None) -> Gradients:
        wanted = torch.is_grad_enabled()
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not wanted:
            return found
        return tuple(_refusing(x) for x in found)

    return wrapped


def _refusing(found: Any) -> Any:
    if isinstance(found, list):  # of an input that is a list
        return [_refusing(x) for x in found]
    return None if found is None else _Refused.apply(found.detach().requires_grad_())
