"""Adapters of PyTorch's FlexAttention: full causal attention, and the window.

On a GPU it is compiled for its mask; on a CPU it runs unfused, with a forward alone. Block masks
are written out by the 128 x 128 blocks that a causal band has, since `create_block_mask` makes the
whole [T, T] first.

T tokens, J blocks of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128


def causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """o [B, T, HQ, DV] of full causal attention."""
    return _attend(q, k, v, None, scale)


def windowed(q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float) -> Tensor:
    """o [B, T, HQ, DV] where a token sees itself and ``window`` - 1 tokens before it."""
    return _attend(q, k, v, window, scale)


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
    mask = block_mask(q.shape[1], window, q.device)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    run: Any = flex_attention  # it runs unfused where it is not compiled
    if q.is_cuda:
        run = _compiled()
    o: Tensor = run(*heads_first, block_mask=mask, scale=scale, enable_gqa=q.shape[2] != k.shape[2])
    return o.transpose(1, 2)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    """For each shape and set of gradients anew; beyond the limit an error, never unfused."""
    torch._dynamo.config.recompile_limit = 64  # proofs and steps of one cell have some ten
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


@lru_cache(maxsize=8)
def block_mask(tokens: int, window: int | None, device: torch.device) -> BlockMask:
    """The mask of a causal band of ``window`` tokens, or of all before; blocks that it fills are
    not masked by element.
    """
    first = torch.arange(-(-tokens // BLOCK), device=device) * BLOCK
    # from a query of block i to a key of block j: the least and the most that it is further on
    least, most = (first[:, None] - first + side for side in (1 - BLOCK, BLOCK - 1))
    reach = tokens if window is None else window
    touched = (most >= 0) & (least < reach)
    full = (least >= 0) & (most < reach)

    def keep(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        return seen if window is None else seen & (query - key < window)

    return BlockMask.from_kv_blocks(
        *_listed(touched & ~full),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=keep,
        seq_lengths=(tokens, tokens),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(how many, which first) of a boolean [J, J] a row, both int32 [1, 1, J(, J)]."""
    counts = blocks.sum(-1, dtype=torch.int32)
    order = (~blocks).to(torch.int8).argsort(dim=-1, stable=True).to(torch.int32)
    return counts[None, None].contiguous(), order[None, None].contiguous()
