"""phi: from tokens to compressed blocks (arXiv 2502.11089, Eq. 7). A partial tail is dropped.

B batch, S tokens, G kv heads, D head dim, C compressed blocks, N chunks of d tokens, F features of
a projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor, nn

from nsa.blocks import BlockGrid
from nsa.config import NSAConfig
from nsa.ops.exporting import is_exporting

POSITION_STD = 0.02


def compress(x: Tensor, *, config: NSAConfig, params: Mapping[str, Tensor] | None = None) -> Tensor:
    """Compress x [B, S, G, D] into [B, C, G, D] (Eq. 7), C = BlockGrid.num_cmp(S); keeps x.dtype.

    Block i is phi of tokens [i * d, i * d + l), with the same ``params`` for every kv head (shapes:
    ``param_shapes``):

    - ``mean``: their mean, summed in fp32 or wider; takes no params.
    - ``linear``: weight @ flat, without a bias, where flat[token * D + j] is the block's token at
    feature j.
    - ``mlp``: down @ SiLU(up @ flat), flat being taken of tokens + position.

    A learned phi is computed in x.dtype, as a projection is (autocast's dtype under autocast),
    whatever dtype its params are kept in; SiLU and the sums over a block's chunks are in fp32 or
    wider. With C = 0 every gradient is 0, not None. Raises ValueError unless x is floating with
    four dimensions and ``params`` are those of config.phi, before anything runs.
    """
    if x.ndim != 4:
        raise ValueError(
            f"compress got x {tuple(x.shape)}; wanted [B, S, num_kv_heads, D]; unflatten the heads"
            " first"
        )
    if not x.is_floating_point():
        raise ValueError(
            f"compress got x of {x.dtype}; wanted a floating dtype, in which means are kept; cast"
            " it first"
        )
    checked = checked_params(x, config, params)
    C = BlockGrid.of(config).num_cmp(x.shape[1])
    if config.phi == "mean":
        return _mean(x, C, config)
    if config.phi == "linear":
        return _project_blocks(x, checked["weight"], C, config).to(x.dtype)
    up, down = checked["up"], checked["down"]
    # up @ (tokens + position) = up @ tokens + up @ position: the second is one vector for all
    # blocks, and an encoding much smaller than the tokens is not lost to rounding in their sum.
    encoding_F = nn.functional.linear(checked["position"].to(x.dtype).flatten(), up.to(x.dtype))
    hidden_BCGF = nn.functional.silu(_project_blocks(x, up, C, config) + encoding_F)
    hidden_BCGF, down = hidden_BCGF.to(x.dtype), down.to(x.dtype)
    if is_exporting():  # a number of blocks that is not known must come last
        return nn.functional.linear(hidden_BCGF.transpose(1, 2), down).transpose(1, 2).to(x.dtype)
    return nn.functional.linear(hidden_BCGF, down).to(x.dtype)


def param_shapes(
    config: NSAConfig, dim: int, hidden: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Name and shape of config.phi's tensors for head dim ``dim``; mlp's ``hidden`` is
    config.phi_hidden, else ``dim``.
    """
    flat = config.cmp_block * dim
    hidden = config.phi_hidden or hidden or dim
    if config.phi == "linear":
        return {"weight": (dim, flat)}
    if config.phi == "mlp":
        return {"position": (config.cmp_block, dim), "up": (hidden, flat), "down": (dim, hidden)}
    return {}


def _mean(x_BSGD: Tensor, C: int, config: NSAConfig) -> Tensor:
    if C == 0:
        return x_BSGD[:, :0]
    # d divides l: a block is l/d neighbouring chunks, so each token is summed once.
    sums_BNGD = _chunks(x_BSGD, C, config).sum(-1, dtype=_wide(x_BSGD))
    total_BCGD = reduce(
        torch.add, (sums_BNGD[:, i : i + C] for i in range(config.cmp_block // config.cmp_stride))
    )
    return (total_BCGD / config.cmp_block).to(x_BSGD.dtype)


def _project_blocks(x_BSGD: Tensor, weight: Tensor, C: int, config: NSAConfig) -> Tensor:
    """weight [F, l * D] @ every block's flattened tokens: [B, C, G, F] in fp32 or wider.

    Block i is the chunks i .. i + l/d - 1, so part p of the weight meets each chunk once, and chunk
    i + p's product goes to block i. That reads one regrouped copy of x, and not the l/d copies that
    unfolded blocks would take.
    """
    chunks_BNGK = _chunks(x_BSGD, C, config).transpose(3, 4).flatten(3)  # K = d * D
    parts_FK = enumerate(weight.to(x_BSGD.dtype).split(chunks_BNGK.shape[-1], dim=1))
    shifted_BCGF = (
        nn.functional.linear(chunks_BNGK, part_FK)[:, p : p + C].to(_wide(x_BSGD))
        for p, part_FK in parts_FK
    )
    return reduce(torch.add, shifted_BCGF)


def _chunks(x_BSGD: Tensor, C: int, config: NSAConfig) -> Tensor:
    """The chunks that blocks are made of, a view [B, N, G, D, d]: N = S // d, or none where no
    block is whole.
    """
    if C == 0:
        return x_BSGD[:, :0, :, :, None].expand(-1, -1, -1, -1, config.cmp_stride)
    # unfold and not a slice of whole chunks: that one is contiguous for some S only, where
    # torch.compile compiles again.
    return x_BSGD.unfold(1, config.cmp_stride, config.cmp_stride)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def checked_params(
    x: Tensor, config: NSAConfig, params: Mapping[str, Tensor] | None
) -> Mapping[str, Tensor]:
    """``params`` if they are config.phi's for x [B, S, G, D] and its device, else ValueError."""
    if config.phi == "mean":
        if params is not None:
            raise ValueError(
                f"phi='mean' got params {sorted(params)}; it wants none; pass params=None, or set"
                " NSAConfig.phi to the map they are of"
            )
        return {}
    if params is None or set(params) != set(param_shapes(config, x.shape[3])):
        got = "no params" if params is None else f"params {sorted(params)}"
        raise ValueError(
            f"phi={config.phi!r} got {got}; wanted {param_shapes(config, x.shape[3])};"
            " nsa.compression.Phi(config, D).params() has them"
        )
    up = params.get("up")
    wanted = param_shapes(
        config, x.shape[3], up.shape[0] if isinstance(up, Tensor) and up.ndim == 2 else None
    )
    for name, shape in wanted.items():
        tensor = params[name]
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
            got = (
                f"shape {tuple(tensor.shape)}"
                if isinstance(tensor, Tensor)
                else type(tensor).__name__
            )
            raise ValueError(
                f"phi={config.phi!r} got params[{name!r}] of {got}; wanted a tensor of shape"
                f" {shape} for head dim {x.shape[3]} and cmp_block={config.cmp_block}; K and V have"
                " params of their own: take nsa.compression.Phi(config, D).params()"
            )
        if not tensor.is_floating_point() or tensor.device != x.device:
            raise ValueError(
                f"phi={config.phi!r} got params[{name!r}] of {tensor.dtype} on {tensor.device};"
                f" wanted a floating dtype on {x.device}, where x is; cast or move the module"
            )
    return params


class Phi(nn.Module):
    """config.phi for K or for V of head dim ``dim``: x [B, S, G, dim] -> [B, C, G, dim], x's dtype
    kept.

    K and V each need one of their own. ``mean`` has no parameters; ``linear`` and ``mlp`` have
    those that ``param_shapes`` names, with ``config.phi_hidden`` (else ``dim``) as mlp's hidden
    width. Raises ValueError unless dim >= 1, and as ``nsa.compress`` does.
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
        """``linear`` is initialised to the exact mean, so training starts from mean pooling.

        ``mlp`` cannot: a hidden layer as wide as the head holds no identity through SiLU. Its
        matrices are uniform within fan_in ** -0.5, which keeps the output at the tokens' own
        scale. Its position encoding is normal with std 0.02: small next to the tokens, yet
        different at each position.
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
