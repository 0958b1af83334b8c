"""Tokens of other chunks next to a rank's own: those before them for the window, and behind them
for the compressed blocks that begin in them.

B batch, L tokens of a chunk, G kv heads, D head dim, l compressed block, d its stride.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.parallel.gather import WantedItems
from nsa.parallel.zigzag import Zigzag


def tokens_before(x: Tensor, count: int, place: Zigzag) -> tuple[Tensor, WantedItems]:
    """What a `Gathering` takes for the ``count`` tokens before each own chunk of x [B, 2 L, G, D]
    (as many as there are). They may lie on several ranks.
    """
    chunks = x.chunk(2, 1)
    kept = min(count, chunks[0].shape[1])
    tails = torch.cat([chunk[:, chunk.shape[1] - kept :] for chunk in chunks], 1)
    return tails, WantedItems(tuple((max(0, c * kept - count), c * kept) for c in place.own))


def tokens_behind(x: Tensor, count: int, place: Zigzag) -> tuple[Tensor, WantedItems]:
    """What a `Gathering` takes for the ``count`` tokens behind each own chunk of x [B, 2 L, G, D]
    (``count`` <= L; the last chunk has none).
    """
    heads = torch.cat([chunk[:, :count] for chunk in x.chunk(2, 1)], 1)
    end = place.num_chunks * count
    ranges = tuple((min(end, (c + 1) * count), min(end, (c + 2) * count)) for c in place.own)
    return heads, WantedItems(ranges)


def with_before(x: Tensor, halos: Sequence[Tensor]) -> list[Tensor]:
    """Each own chunk of x [B, 2 L, G, D] behind its halo: [B, h + L, G, D]."""
    return [torch.cat(pair, 1) for pair in zip(halos, x.chunk(2, 1), strict=True)]


def with_behind(x: Tensor, halos: Sequence[Tensor]) -> list[Tensor]:
    """Each own chunk of x [B, 2 L, G, D] before its halo: [B, L + h, G, D]."""
    return [torch.cat(pair, 1) for pair in zip(x.chunk(2, 1), halos, strict=True)]
