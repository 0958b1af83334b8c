"""What a rank's chunks need of their neighbours: tokens before them for the window, and behind them
for the compressed blocks that begin in them.

B batch, L tokens of a chunk, G kv heads, D head dim, l compressed block, d its stride.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from nsa.parallel.gather import gather
from nsa.parallel.zigzag import Zigzag


def with_tokens_before(
    x: Tensor, count: int, place: Zigzag, group: dist.ProcessGroup
) -> list[Tensor]:
    """Each own chunk of x [B, 2 L, G, D] behind the ``count`` tokens before it (as many as there
    are): [B, up to count + L, G, D]. They may lie on several ranks.
    """
    chunks = x.chunk(2, 1)
    kept = min(count, chunks[0].shape[1])
    tails = torch.cat([chunk[:, chunk.shape[1] - kept :] for chunk in chunks], 1)
    ranges = [(max(0, c * kept - count), c * kept) for c in place.own]
    before = gather(tails, ranges, group)
    return [torch.cat(pair, 1) for pair in zip(before, chunks, strict=True)]


def with_tokens_behind(
    x: Tensor, count: int, place: Zigzag, group: dist.ProcessGroup
) -> list[Tensor]:
    """Each own chunk of x [B, 2 L, G, D] and the ``count`` tokens behind it (``count`` <= L; the
    last chunk has none): [B, L or L + count, G, D].
    """
    chunks = x.chunk(2, 1)
    heads = torch.cat([chunk[:, :count] for chunk in chunks], 1)
    end = place.num_chunks * count
    ranges = [(min(end, (c + 1) * count), min(end, (c + 2) * count)) for c in place.own]
    behind = gather(heads, ranges, group)
    return [torch.cat(pair, 1) for pair in zip(chunks, behind, strict=True)]
