"""A block of TinyLM in a step of one token a row, in nine launches: its norms, projections and MLP
next to the attention of `nsa.fused_step`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nsa import checks, fused_step
from nsa.attention import NSAAttention
from nsa.decode import NSACache, one_step
from nsa.gate import SoftmaxGate
from nsa.ops import linear_step
from nsa.routing import Route, is_one_block
from nsa.shared_positions import Layout

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def route_of(
    block: Any, x: Tensor, *, cache: NSACache | None, layout: Layout, num_tokens: object
) -> Route | None:
    """The Route of the block's attention where `step` serves it for x [B, 1, M]; None where the
    modules one by one do: other modules or dtypes than a TinyLM's own, hooks, autocast, gradients,
    too many rows.
    """
    if torch.compiler.is_compiling():  # which fuses them itself
        return None
    attention = block.attention
    if not isinstance(cache, NSACache) or num_tokens is not None:
        return None
    if one_step.against(cache, x.shape[1]) or not _is_own(block):
        return None
    if (
        type(attention.gate) is not SoftmaxGate
        or attention.sinks is not None
        or x.dtype not in DTYPES
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled(x.device.type)
        or any(p.dtype != x.dtype or not p.is_contiguous() for p in block.parameters())
    ):
        return None
    route: Route = attention.route_of_step(x, cache)
    own = (x, *block.parameters())
    fits = is_one_block(route, attention.config, x.shape[0])
    fits = fits and fused_step.serves(route, attention.config, cache, layout, *own)
    return route if fits else None


def step(block: Any, x: Tensor, route: Route, cache: NSACache, layout: Layout) -> Tensor:
    """The block's x [B, 1, M] of a step that `route_of` has a Route for."""
    attention, mlp, dim = block.attention, block.mlp, block.attention.head_dim
    x = x.contiguous()
    weights = [p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    q, k, v = linear_step.apply(x, weights, **_norm(block.attention_norm))
    heads = (
        q.unflatten(-1, (attention.num_heads, dim)),
        k.unflatten(-1, (-1, dim)),
        v.unflatten(-1, (-1, attention.v_head_dim)),
    )
    checks.no_gradient(*heads)
    o = fused_step.attend(route, cache, layout, heads, (attention.gate, x))
    (x,) = linear_step.apply(o.flatten(2), [attention.o_proj.weight], residual=x)
    (hidden,) = linear_step.apply(x, [mlp[0].weight], silu=True, **_norm(block.mlp_norm))
    (x,) = linear_step.apply(hidden, [mlp[2].weight], residual=x)
    return x


def _norm(norm: nn.RMSNorm) -> dict[str, Any]:
    """What `linear_step.apply` takes of the module."""
    wide = torch.finfo(torch.float32).eps  # nn.RMSNorm's own, where it is given none
    return {"norm": norm.weight, "eps": wide if norm.eps is None else norm.eps}


def _is_plain(norm: nn.Module, dim: int) -> bool:
    """An RMSNorm that has a weight: without one, `linear_step.apply` would not normalise."""
    return type(norm) is nn.RMSNorm and norm.weight is not None and norm.weight.shape == (dim,)


def _is_own(block: Any) -> bool:
    """Whether the modules are those that TinyLM makes, and a call of each is its forward alone."""
    attention, mlp = block.attention, block.mlp
    if type(attention) is not NSAAttention or type(mlp) is not nn.Sequential or len(mlp) != 3:
        return False
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return (
        all(type(one) is nn.Linear and one.bias is None for one in (*projections, mlp[0], mlp[2]))
        and all(_is_plain(norm, attention.dim) for norm in (block.attention_norm, block.mlp_norm))
        and type(mlp[1]) is nn.SiLU
        and not any(checks.is_hooked(one) for one in block.modules() if one is not block)
    )
