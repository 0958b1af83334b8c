"""Phi: the parameters of one compression map (arXiv 2502.11089, Eq. 7)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nsa.compression import compress, param_shapes
from nsa.config import NSAConfig

POSITION_STD = 0.02


class Phi(nn.Module):
    """config.phi for K or for V of head dim ``dim``: x [B, S, G, dim] -> [B, C, G, dim], x's dtype
    kept.

    K and V each need one of their own. ``mean`` has no parameters; ``linear`` and ``mlp`` have
    those that
    ``nsa.compression.param_shapes`` names, with ``config.phi_hidden`` (else ``dim``) as mlp's
    hidden width. Raises ValueError unless dim >= 1, and as ``nsa.compress`` does.
    """

    def __init__(self, config: NSAConfig, dim: int) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(
                f"Phi got dim={dim}; wanted a head dim >= 1; pass head_dim for K and v_head_dim"
                " for V"
            )
        self.config, self.dim = config, dim
        for name, shape in param_shapes(config, dim).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """``linear`` begins as the mean exactly, so training begins at mean pooling and departs
        from it only to gain.

        ``mlp`` cannot: a hidden layer as wide as the head holds no identity through SiLU. Its
        matrices are uniform within fan_in ** -0.5, which keeps the output within the tokens' own
        scale, and its position encoding is normal with std
        0.02, so that at first the tokens speak and not their places, while no two places are alike.
        """
        for name, parameter in self.named_parameters(recurse=False):
            if name == "weight":
                identity = torch.eye(self.dim, dtype=parameter.dtype, device=parameter.device)
                parameter.copy_(identity.repeat(1, self.config.cmp_block) / self.config.cmp_block)
            elif name == "position":
                nn.init.normal_(parameter, std=POSITION_STD)
            else:
                bound = parameter.shape[1] ** -0.5
                nn.init.uniform_(parameter, -bound, bound)

    def params(self) -> dict[str, Tensor] | None:
        """What ``nsa.compress`` takes as ``params``: None for mean."""
        return {name: getattr(self, name) for name in param_shapes(self.config, self.dim)} or None

    def forward(self, x_BSGD: Tensor) -> Tensor:
        return compress(x_BSGD, config=self.config, params=self.params())

    def extra_repr(self) -> str:
        return (
            f"{self.config.phi}, dim={self.dim}, cmp_block={self.config.cmp_block},"
            f" cmp_stride={self.config.cmp_stride}"
        )
