"""Tokens of other chunks next to a rank's own: those before them for the window, and behind them
for the compressed blocks that begin in them.

B batch, L tokens of a chunk, G kv heads, D head dim, l compressed block, d its stride.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nsa.parallel.gather import WantedItems
from nsa.parallel.words import copy_words
from nsa.parallel.zigzag import Zigzag, halves


class Chunks:
    """``chunks``: the own ones of x [B, 2 L, G, D], each [B, L, G, D]; ``edges`` [B, 2, h, G, D]:
    ``rows`` of both, which a `Gathering` takes for halos of others.

    In backward the gradients meet in one tensor: those of a chunk and of slices of it would be
    tensors of x's size each, and sums of these.
    """

    def __init__(self, x: Tensor, rows: slice) -> None:
        apply: Any = _Chunks.apply
        *chunks, self.edges = apply(x, rows)
        self.chunks: list[Tensor] = chunks

    def before(self, halos: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Each chunk before its halo: [B, L + h, G, D]."""
        return _joined(list(zip(self.chunks, halos, strict=True)))

    def behind(self, halos: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Each chunk behind its halo: [B, h + L, G, D]."""
        return _joined(list(zip(halos, self.chunks, strict=True)))


def for_window(x: Tensor, count: int, place: Zigzag) -> tuple[Chunks, WantedItems]:
    """Chunks of x [B, 2 L, G, D], and what this rank wants of all edges: the ``count`` tokens
    before each of its chunks (as many as there are). They may lie on several ranks.
    """
    L = x.shape[1] // 2
    kept = min(count, L)
    ranges = tuple((max(0, c * kept - count), c * kept) for c in place.own)
    return Chunks(x, slice(L - kept, L)), WantedItems(ranges)


def for_blocks(x: Tensor, count: int, place: Zigzag) -> tuple[Chunks, WantedItems]:
    """Chunks of x [B, 2 L, G, D], and what this rank wants of all edges: the ``count`` <= L tokens
    behind each of its chunks (the last chunk has none).
    """
    end = place.num_chunks * count
    ranges = tuple((min(end, (c + 1) * count), min(end, (c + 2) * count)) for c in place.own)
    return Chunks(x, slice(count)), WantedItems(ranges)


def _joined(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    apply: Any = _Join.apply
    joined: tuple[Tensor, ...] = apply(*chain(*pairs))
    return joined


class _Chunks(torch.autograd.Function):
    """x -> both chunks and rows of them, all views."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: slice) -> tuple[Tensor, ...]:
        ctx.rows, every = rows, halves(x)
        return every[:, 0], every[:, 1], every[:, :, rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, early: Tensor, late: Tensor, edges: Tensor) -> Any:
        dx = torch.cat([early, late], 1)
        halves(dx)[:, :, ctx.rows].add_(edges)
        return dx, None


class _Join(torch.autograd.Function):
    """torch.cat along the tokens of each pair, by two copies. Its kernel took .037 ms for a chunk
    of 16 MiB and a halo on an H200, 0.9 TB/s (reports/evidence/context-parallel-h200/scaling.txt);
    no GPU has timed the copies.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.sizes, joined = [], []
        for pair in zip(tensors[::2], tensors[1::2], strict=True):
            first, second = sizes = [x.shape[1] for x in pair]
            ctx.sizes.append(sizes)
            room = pair[0].new_empty(pair[0].shape[0], first + second, *pair[0].shape[2:])
            copy_words(room[:, :first], pair[0])
            copy_words(room[:, first:], pair[1])
            joined.append(room)
        return tuple(joined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        parts = (x.split(sizes, 1) for x, sizes in zip(gradients, ctx.sizes, strict=True))
        return tuple(chain(*parts))
