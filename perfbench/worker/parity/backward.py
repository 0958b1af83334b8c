"""The gradients of a dense upstream gradient: every row has a random one.

What `identities` and `key_blocks` judge, and what a digest (`at_length`) is of.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
SEED = 11


class DenseBackward:
    """``o`` [B, T, HQ, DV] of ``own`` at ``inputs``, with their strides; ``grads`` of ``upstream``,
    which is like o, by each input.
    """

    def __init__(self, own: Callable[[Tensors], Tensor], inputs: Tensors) -> None:
        self._own, self._inputs = own, inputs
        leaves, o = self._forward()
        generator = torch.Generator(o.device).manual_seed(SEED)
        upstream = torch.randn(o.shape, generator=generator, device=o.device)
        self.o, self.upstream = o.detach(), upstream.to(o.dtype)
        self.grads = self._backward(leaves, o, self.upstream)

    def of(self, upstream: Tensor) -> Tensors:
        """The gradients of another ``upstream``, by a forward of its own: a compiled backward gives
        its buffers away and runs once.
        """
        return self._backward(*self._forward(), upstream)

    def _forward(self) -> tuple[Tensors, Tensor]:
        leaves = {name: x.detach().requires_grad_() for name, x in self._inputs.items()}
        return leaves, self._own(leaves)

    @staticmethod
    def _backward(leaves: Tensors, o: Tensor, upstream: Tensor) -> Tensors:
        """The gradient by each leaf; 0 where a path loses it."""
        options = {"allow_unused": True, "materialize_grads": True}
        grads = torch.autograd.grad(o, list(leaves.values()), upstream, **options)
        return dict(zip(leaves, grads, strict=True))
