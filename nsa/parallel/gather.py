"""All-gather of what each rank's two chunks hold, under way while others compute, and its gradient
by one ordered reduce-scatter.

B batch, P ranks, n items of a chunk (tokens, or compressed blocks), R items of a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Range = tuple[int, int]
# torch 2.13 renamed it, and warns at each call by the old name; 2.11 knows that one alone
_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True, slots=True)
class ItemRows:
    """Where the items of all ranks go, where they do not simply follow one another: B = 1.

    ``at`` int64 [P, 2 n]: the row of each item of each rank, in 0 .. number - 1; ``number`` for
    those that have none. Rows that no item has are 0.
    """

    at: Tensor
    number: int


@dataclass(frozen=True, slots=True)
class WantedItems:
    """What this rank wants of a gathered tensor: ``ranges`` (begin, end) of all chunks in order, or
    of their ``rows``.
    """

    ranges: tuple[Range, ...]
    rows: ItemRows | None = None

    def room(self, like: Tensor, shape: torch.Size, ranks: int) -> Tensor:
        """For all items in order, or for all rows and one that is dropped; ``shape`` [B, 2 n, ...]
        of what each rank gives.
        """
        B, items, *rest = shape
        number = ranks * items if self.rows is None else self.rows.number + 1
        return like.new_empty(B, number, *rest)

    def lay_out(self, received: Tensor, room: Tensor) -> None:
        """``received`` [P, B, 2 n, ...] of the ranks into `room`."""
        if self.rows is not None:
            room.zero_().index_copy_(1, self.rows.at.flatten(), received.flatten(0, 2)[None])
            return
        P, _, items, *_ = received.shape
        pairs = received.unflatten(2, (2, items // 2))
        every = room.unflatten(1, (2 * P, items // 2))
        every[:, :P] = pairs[:, :, 0].transpose(0, 1)
        every[:, P:] = pairs[:, :, 1].flip(0).transpose(0, 1)

    def by_rank(self, room: Tensor, ranks: int) -> Tensor:
        """The way back: [P, B, 2 n, ...]."""
        if self.rows is None:
            return by_rank(room, ranks)
        at = self.rows.at
        return room[0].index_select(0, at.flatten()).unflatten(0, (ranks, 1, at.shape[1]))


class Gathering:
    """One all-gather of several tensors, which begins here. Every rank of ``group`` must make it,
    with tensors of the same shapes in the same order; what each wants of them may differ.

    ``shards``: (own [B, 2 n, ...], of this rank's chunks r and 2P - 1 - r (`nsa.parallel.zigzag`),
    what it wants). ``promised``: of each shard a tensor [B, R, ...] a range, part of autograd's
    graph at once, whose contents are there after `wait`.

    The gradient of own is that of the sum over all ranks of what they make of it: contributions are
    rounded to own's dtype once a rank, and added up in rank order, in fp32 or wider, so that two
    runs are bitwise equal. Those of a gathering travel together, and gatherings in the reverse
    order of their making, on every rank.
    """

    def __init__(
        self, shards: Sequence[tuple[Tensor, WantedItems]], group: dist.ProcessGroup
    ) -> None:
        P = dist.get_world_size(group)
        sent = torch.cat([own.detach().flatten() for own, _ in shards])
        received = sent.new_empty(P, sent.numel())
        work: Any = None
        if sent.numel():  # else nobody has any
            work = _gather_into(received.flatten(), sent, group=group, async_op=True)
        rooms = [wanted.room(own, own.shape, P) for own, wanted in shards]
        # no version of what autograd has seen: it has not read the contents that arrive later
        self._under_way: Any = (work, sent, received, list(shards), [room.data for room in rooms])
        kinds = tuple((own.shape, own.dtype, wanted) for own, wanted in shards)
        apply: Any = _Gather.apply
        found = list(apply(kinds, group, rooms, *(own for own, _ in shards)))
        self.promised = [tuple(found.pop(0) for _ in wanted.ranges) for _, wanted in shards]

    def wait(self) -> list[tuple[Tensor, ...]]:
        """`promised`, filled."""
        if self._under_way is not None:
            work, _, received, shards, rooms = self._under_way
            self._under_way = None
            if work is not None:
                work.wait()
            parts = received.split([own.numel() for own, _ in shards], 1)
            for (own, wanted), part, room in zip(shards, parts, rooms, strict=True):
                wanted.lay_out(part.to(own.dtype).reshape(len(part), *own.shape), room)
        return self.promised


def gather(own: Tensor, ranges: Sequence[Range], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """The items ``ranges`` of all chunks in order, of one tensor: [B, R, ...] each, as `Gathering`
    has them.
    """
    return Gathering([(own, WantedItems(tuple(ranges)))], group).wait()[0]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kinds: tuple[tuple[torch.Size, torch.dtype, WantedItems], ...],
        group: dist.ProcessGroup,
        rooms: list[Tensor],
        *own: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.kinds, ctx.group = kinds, group
        return tuple(
            room[:, begin:end]
            for room, (_, _, wanted) in zip(rooms, kinds, strict=True)
            for begin, end in wanted.ranges
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        P, left = dist.get_world_size(ctx.group), list(gradients)
        parts = []
        for shape, dtype, wanted in ctx.kinds:
            wide = torch.promote_types(dtype, torch.float32)
            total = wanted.room(gradients[0].new_empty(0, dtype=wide), shape, P).zero_()
            for begin, end in wanted.ranges:
                total[:, begin:end] += left.pop(0)
            parts.append(wanted.by_rank(total, P).to(dtype).flatten(1))
        sent = torch.cat(parts, 1)
        received = torch.empty_like(sent)
        if sent.numel():
            dist.all_to_all_single(received.flatten(), sent.flatten(), group=ctx.group)
        sums = [
            ordered_sum(x.to(dtype), torch.promote_types(dtype, torch.float32)).view(shape)
            for x, (shape, dtype, _) in zip(
                received.split([x.shape[1] for x in parts], 1), ctx.kinds, strict=True
            )
        ]
        return None, None, None, *sums


def by_rank(every: Tensor, P: int) -> Tensor:
    """The way back: [B, 2P n, ...] -> [P, B, 2 n, ...]."""
    chunks = every.unflatten(1, (2 * P, every.shape[1] // (2 * P)))
    early, late = chunks[:, :P], chunks[:, P:].flip(1)
    return torch.stack([early, late], 2).transpose(0, 1).flatten(2, 3).contiguous()


def ordered_sum(parts: Tensor, wide: torch.dtype) -> Tensor:
    """The sum of ``parts`` [P, ...] from rank 0 on, added up in ``wide``, in parts' dtype."""
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' ``x``, added up in rank order in fp32 or wider: the same bits on every
    rank and in every run.
    """
    received = x.new_empty(dist.get_world_size(group), x.numel())
    _gather_into(received.flatten(), x.flatten(), group=group)
    return ordered_sum(received, torch.promote_types(x.dtype, torch.float32)).view_as(x)
