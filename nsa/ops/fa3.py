"""FA-3's attention over a cache, from the package fa3-fwd. The only importer of it."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

KV = tuple[Tensor, Tensor]


def cached(q: Tensor, new: KV, cache: KV, *, position: int | Tensor, scale: float) -> Tensor:
    """Store the chunk's k [B, T, G, D] and v [B, T, G, D] in ``cache`` at ``position`` (an int, or
    int32 [B]), and attend to all up to each query: q [B, T, HQ, D] -> o [B, T, HQ, D]. One kernel
    stores and attends; another sums, where it splits the keys.
    """
    module = importlib.import_module("fa3_fwd_interface")
    if isinstance(position, int):
        position = torch.full((q.shape[0],), position, dtype=torch.int32, device=q.device)
    o: Tensor = module.flash_attn_with_kvcache(
        q, *cache, *new, cache_seqlens=position, softmax_scale=scale, causal=True
    )
    return o
