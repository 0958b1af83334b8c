"""Adapter of fla-core's NSA: compressed blocks that do not overlap and are the selection blocks,
groups of query heads that are a power of two from 16 on, one K and V for all branches.

Its own function returns o alone, and takes the window from flash-attn 2; here its parts are called
one by one, so that the blocks it chose are proved, and the window is FlexAttention's.
"""

from __future__ import annotations

import importlib

from torch import Tensor

from nsa.config import NSAConfig
from perfbench.worker.peers import flex


def attend(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *, config: NSAConfig, scale: float
) -> tuple[Tensor, Tensor]:
    """(o [B, T, HQ, DV], blocks int32 [B, T, G, N] in the order of their scores)."""
    nsa = importlib.import_module("fla.ops.nsa.parallel")
    pooling = importlib.import_module("fla.ops.utils.pooling")
    size, tokens = config.sel_block, q.shape[1]
    k_cmp, v_cmp = pooling.mean_pooling(k, size), pooling.mean_pooling(v, size)
    o_cmp, lse = nsa.parallel_nsa_compression(
        q=q, k=k_cmp, v=v_cmp, TK=tokens, block_size=size, scale=scale
    )
    count = config.num_selected_for(tokens)
    ranked = nsa.parallel_nsa_topk(
        q=q, k=k_cmp, TK=tokens, lse=lse, block_counts=count, block_size=size, scale=scale
    )
    # it ranks a power of two of them, and attends to all that it is given, whatever the count
    blocks = ranked[..., :count].contiguous()
    o_sel = nsa.ParallelNSAFunction.apply(q, k, v, blocks, count, size, scale, None)
    o_win = flex.windowed(q, k, v, window=config.window, scale=scale)
    parts = (o_cmp, o_sel, o_win)
    o = sum(gates[..., i, None] * part for i, part in enumerate(parts))
    assert isinstance(o, Tensor)
    return o, blocks
