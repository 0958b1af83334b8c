"""Attention over an explicit mask, by which a cell's own is judged: the fp64 reference, and plain
softmax attention in the cell's dtype.

B batch, T rows, S keys: q [B, T, HQ, D], k [B, S, G, D], v [B, S, G, DV], keep broadcast to
[B, G, T, S].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa import oracle

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v, keep -> o


def reference_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """In fp64, by the oracle."""
    return oracle.attention(q, k, v, keep)[0]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Plain softmax attention in the inputs' dtype."""
    heads = q.shape[2] // k.shape[2]
    logits = torch.einsum("btghd,bsgd->bghts", q.unflatten(2, (-1, heads)), k) * q.shape[-1] ** -0.5
    keep = keep[:, :, None]
    p = (
        logits.masked_fill(~keep, -torch.inf)
        .softmax(-1)
        .masked_fill(~keep.any(-1, keepdim=True), 0.0)
    )
    return torch.einsum("bghts,bsgd->btghd", p, v).flatten(2, 3)
