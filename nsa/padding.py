"""Padded batches (attention_mask), packed to the left of their rows, as `num_tokens` has them.

A token's position is then the number of tokens before it in its row, wherever the padding lies:
left, right or between. Nothing is read on the host, but for a cache, whose lengths are known there.

B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nsa import checks


@dataclass(frozen=True, slots=True)
class Padding:
    """The way from padded rows [B, T, ...] to rows whose tokens come first, and back.

    ``order_BT``: which token each place takes. ``place_BT``: where each token went.
    ``absent_BT``: places of the padded rows that hold none. ``count_B``: tokens of each row.
    """

    order_BT: Tensor
    place_BT: Tensor
    absent_BT: Tensor
    count_B: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor, x: Tensor) -> Self:
        """Of x [B, T, ...]; ValueError for a mask that is not [B, T], bool or whole numbers."""
        checks.attention_mask(attention_mask, x)
        present_BT = attention_mask != 0
        order_BT = (~present_BT).to(torch.uint8).argsort(dim=1, stable=True)
        return cls(order_BT, order_BT.argsort(dim=1), ~present_BT, present_BT.sum(1))

    def pack(self, x: Tensor) -> Tensor:
        """Tokens first, then 0."""
        return _taken(_cleared(x, self.absent_BT), self.order_BT)

    def restore(self, x: Tensor) -> Tensor:
        """Back to the padded rows, 0 where there is no token; x may hold fewer places than T."""
        rows = _taken(x, self.place_BT.clamp(max=x.shape[1] - 1))
        return _cleared(rows, self.absent_BT)


def call_padded(
    call: Callable[..., Tensor], x: Tensor, attention_mask: Tensor, *, cache: object = None
) -> Tensor:
    """``call(x, cache=, num_tokens=)`` of the tokens of x [B, T, ...]; its result [B, T, ...], 0
    where there is no token.

    ValueError for a mask that does not fit and, with a cache, for one without any token.
    """
    padding = Padding.of(attention_mask, x)
    packed = padding.pack(x)
    if cache is None:
        return padding.restore(call(packed, num_tokens=padding.count_B))
    counts: list[int] = padding.count_B.tolist()  # a cache's lengths are the host's
    if not any(counts):
        raise ValueError(
            f"attention_mask of {len(counts)} rows holds no token; wanted one at least for a cache;"
            " leave such a chunk out"
        )
    return padding.restore(call(packed[:, : max(counts)], cache=cache, num_tokens=counts))


def _cleared(x: Tensor, absent_BT: Tensor) -> Tensor:
    return x.masked_fill(absent_BT.view(*x.shape[:2], *[1] * (x.ndim - 2)), 0)


def _taken(x: Tensor, index_BT: Tensor) -> Tensor:
    index = index_BT.view(*index_BT.shape, *[1] * (x.ndim - 2))
    return torch.take_along_dim(x, index, dim=1)
