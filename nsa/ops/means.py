"""The operator of ``nsa.ops.kernels.means``: phi = mean (arXiv 2502.11089, Eq. 7) of K and V
together.

B batch, S tokens, C compressed blocks, G kv heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops.once import Gradients, once

_TAGS = (torch.Tag.pt2_compliant_tag,)
torch.library.define(
    "nsa::means",
    "(Tensor k, Tensor v, SymInt block, SymInt stride) -> (Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "nsa::means_backward",
    "(Tensor dk, Tensor dv, SymInt tokens, SymInt block, SymInt stride) -> (Tensor, Tensor)",
    tags=_TAGS,
)


def means(k: Tensor, v: Tensor, *, block: int, stride: int) -> tuple[Tensor, Tensor]:
    """k [B, S, G, D], v [B, S, G, DV] -> [B, C, G, D] and [B, C, G, DV] in their dtype, as
    `nsa.compress` has it; S >= block.
    """
    k_cmp, v_cmp = torch.ops.nsa.means(k, v, block, stride)
    return k_cmp, v_cmp


def _forward(k: Tensor, v: Tensor, block: int, stride: int) -> tuple[Tensor, Tensor]:
    from nsa.ops.kernels import means

    return means.forward(k, v, block=block, stride=stride)


def _backward(
    dk: Tensor, dv: Tensor, tokens: int, block: int, stride: int
) -> tuple[Tensor, Tensor]:
    from nsa.ops.kernels import means

    return means.backward(dk, dv, tokens=tokens, block=block, stride=stride)


def _fake_forward(k: Tensor, v: Tensor, block: int, stride: int) -> tuple[Tensor, Tensor]:
    C = (k.shape[1] - block) // stride + 1
    return k.new_empty(k.shape[0], C, *k.shape[2:]), v.new_empty(v.shape[0], C, *v.shape[2:])


def _fake_backward(dk: Tensor, dv: Tensor, tokens: int, *_: object) -> tuple[Tensor, Tensor]:
    return dk.new_empty(dk.shape[0], tokens, *dk.shape[2:]), dv.new_empty(
        dv.shape[0], tokens, *dv.shape[2:]
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    k, _, *grid = inputs
    ctx.options = (k.shape[1], *grid)


@once
def _gradients(ctx: Any, dk: Tensor, dv: Tensor) -> Gradients:
    return *torch.ops.nsa.means_backward(dk, dv, *ctx.options), None, None


torch.library.impl("nsa::means", "default", _forward)
torch.library.impl("nsa::means_backward", "default", _backward)
torch.library.register_fake("nsa::means", _fake_forward)
torch.library.register_fake("nsa::means_backward", _fake_backward)
torch.library.register_autograd("nsa::means", _gradients, setup_context=_save)
