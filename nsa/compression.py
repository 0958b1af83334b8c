"""phi: from tokens to compressed blocks (arXiv 2502.11089, Eq. 7). A partial tail is no block."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.blocks import BlockGrid
from nsa.config import NSAConfig


def compress(x: Tensor, *, config: NSAConfig) -> Tensor:
    """Compress x [B, S, G, D] into [B, C, G, D], C = BlockGrid.num_cmp(S); keeps x.dtype, sums in fp32 or wider.

    Block i is the mean of tokens [i * d, i * d + l). Raises ValueError unless x has four dimensions.
    """
    if x.ndim != 4:
        raise ValueError(f"compress got shape {tuple(x.shape)}; it takes [B, S, num_kv_heads, D]: unflatten the heads first")
    C = BlockGrid.of(config).num_cmp(x.shape[1])
    if C == 0:
        return x[:, :0]
    d, parts = config.cmp_stride, config.cmp_block // config.cmp_stride
    used = (C - 1) * d + config.cmp_block
    wide = torch.promote_types(x.dtype, torch.float32)
    # d divides l: a block is l/d neighbouring chunks, so each token is summed once.
    chunk_sums = x[:, :used].unflatten(1, (-1, d)).sum(2, dtype=wide)
    total = sum((chunk_sums[:, i : i + C] for i in range(1, parts)), start=chunk_sums[:, :C])
    return (total / config.cmp_block).to(x.dtype)
