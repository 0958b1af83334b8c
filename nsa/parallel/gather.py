"""All-gather of what each rank's two chunks hold, and its gradient by one ordered reduce-scatter.

B batch, P ranks, n items of a chunk (tokens, or compressed blocks), R items of a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Range = tuple[int, int]
# torch 2.13 renamed it, and warns at each call by the old name; 2.11 knows that one alone
_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def gather(own: Tensor, ranges: Sequence[Range], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """The items ``ranges`` (begin, end) of all chunks in order: a tensor [B, R, ...] each.

    ``own`` [B, 2 n, ...] holds this rank's chunks r and 2P - 1 - r (`nsa.parallel.zigzag`). Every
    rank of ``group`` must call it, with the same shape; the ranges may differ. The gradient of
    ``own`` is that of the sum over all ranks of what they make of it: contributions are rounded
    to own's dtype once a rank, and added up in rank order, in fp32 or wider, so that two runs are
    bitwise equal.
    """
    if own.shape[1] == 0:  # nobody has any
        return tuple(own[:, :0] for _ in ranges)
    apply: Any = _Gather.apply
    found: tuple[Tensor, ...] = apply(own, tuple(ranges), group)
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, ranges: tuple[Range, ...], group: dist.ProcessGroup
    ) -> tuple[Tensor, ...]:
        ctx.ranges, ctx.group, ctx.shape, ctx.dtype = ranges, group, own.shape, own.dtype
        every = in_order(_all_gather(own, group))
        return tuple(every[:, begin:end] for begin, end in ranges)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        P = dist.get_world_size(ctx.group)
        B, items, *rest = ctx.shape
        wide = torch.promote_types(ctx.dtype, torch.float32)
        total = gradients[0].new_zeros(B, P * items, *rest, dtype=wide)
        for (begin, end), gradient in zip(ctx.ranges, gradients, strict=True):
            total[:, begin:end] += gradient
        return _reduce_scatter(by_rank(total, P).to(ctx.dtype), wide, ctx.group), None, None


def in_order(shards: Tensor) -> Tensor:
    """[P, B, 2 n, ...] of the ranks -> [B, 2P n, ...], chunk 0 first."""
    P, B, items, *rest = shards.shape
    pairs = shards.unflatten(2, (2, items // 2))
    every = shards.new_empty(B, 2 * P, items // 2, *rest)
    every[:, :P] = pairs[:, :, 0].transpose(0, 1)
    every[:, P:] = pairs[:, :, 1].flip(0).transpose(0, 1)
    return every.flatten(1, 2)


def by_rank(every: Tensor, P: int) -> Tensor:
    """The way back: [B, 2P n, ...] -> [P, B, 2 n, ...]."""
    chunks = every.unflatten(1, (2 * P, -1))
    early, late = chunks[:, :P], chunks[:, P:].flip(1)
    return torch.stack([early, late], 2).transpose(0, 1).flatten(2, 3).contiguous()


def ordered_sum(parts: Tensor, wide: torch.dtype) -> Tensor:
    """The sum of ``parts`` [P, ...] from rank 0 on, added up in ``wide``, in parts' dtype."""
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def _all_gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    P = dist.get_world_size(group)
    shards = own.new_empty(P, *own.shape)
    _gather_into(shards.flatten(0, 1), own.contiguous(), group=group)
    return shards


def _reduce_scatter(parts: Tensor, wide: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    """parts [P, ...], one for each rank -> the sum over ranks of this rank's."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received.flatten(0, 1), parts.flatten(0, 1), group=group)
    return ordered_sum(received, wide)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' ``x``, added up in rank order in fp32 or wider: the same bits on every
    rank and in every run.
    """
    return ordered_sum(
        _all_gather(x[None], group)[:, 0], torch.promote_types(x.dtype, torch.float32)
    )
