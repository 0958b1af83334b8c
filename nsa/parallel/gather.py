"""All-gather of what each rank's two chunks hold, under way while others compute, and its gradient
by one ordered reduce-scatter.

B batch, P ranks, n items of a chunk (tokens, or compressed blocks), R items of a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nsa.parallel.words import copy_words
from nsa.parallel.zigzag import halves, holder

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
        """For all items in order, or for all rows and one that is dropped; ``shape`` [B, 2, n, ...]
        of what each rank gives.
        """
        B, _, n, *rest = shape
        number = ranks * 2 * n if self.rows is None else self.rows.number + 1
        return like.new_empty(B, number, *rest)

    def lay_out(self, received: Tensor, room: Tensor) -> None:
        """``received`` [P, B, 2, n, ...] of the ranks into `room`: the chunks that a range is of,
        or all rows.
        """
        if self.rows is not None:
            items = received.flatten(0, 3)[None].to(room.dtype)
            room.zero_().index_copy_(1, self.rows.at.flatten(), items)
            return
        P, _, _, n, *_ = received.shape
        for c in range(2 * P):
            begin, end = c * n, (c + 1) * n
            if any(begin < last and first < end for first, last in self.ranges):
                rank, half = holder(c, P)
                room[:, begin:end] = received[rank, :, half]

    def give_back(self, parts: Sequence[Tensor], into: Tensor) -> None:
        """The way back of `lay_out`: gradients [B, R, ...] of the ranges, in the order of these,
        are added up in ``into`` [P, B, 2, n, ...]; each item is rounded once.
        """
        P, _, _, n, *rest = into.shape
        if self.rows is not None:
            room = parts[0].new_empty(1, self.rows.number + 1, *rest)
            self._add_up(parts, room)
            found = room[0].index_select(0, self.rows.at.flatten())
            into.copy_(found.view_as(into))
            return
        # a halo is a small part of the items: one launch instead of one for each other chunk
        is_sparse = sum(last - first for first, last in self.ranges) < P * n
        if is_sparse:
            into.zero_()
        for c in range(2 * P):
            rank, half = holder(c, P)
            self._add_up(parts, into[rank, :, half], begin=c * n, is_zero=is_sparse)

    def _add_up(
        self, parts: Sequence[Tensor], into: Tensor, *, begin: int = 0, is_zero: bool = False
    ) -> None:
        """Items from ``begin`` on of ``parts`` into all of ``into``, which ``is_zero``, or holds
        anything.
        """
        end = begin + into.shape[1]
        inner = {edge for one in self.ranges for edge in one if begin < edge < end}
        for a, b in pairwise(sorted({begin, end} | inner)):
            room, found = into[:, a - begin : b - begin], []
            for part, (first, last) in zip(parts, self.ranges, strict=True):
                if first <= a and b <= last:
                    found.append(part[:, a - first : b - first])
            assert len(found) <= 2, "two chunks have two ranges"
            if len(found) == 2:  # a sum of two is rounded once
                torch.add(*found, out=room)
            elif found:
                room.copy_(found[0])
            elif not is_zero:
                room.zero_()


Kind = tuple[torch.Size, torch.dtype, WantedItems]


class OwnItems:
    """Tensors [B, 2, n, ...] of this rank's chunks that one `Gathering` will send: in backward,
    what the ranks give back is awaited where this was made. Made early, the wait is late.
    """

    def __init__(self, *own: Tensor) -> None:
        self.under_way: list[Any] = []
        awaited: Any = _Awaited.apply
        self.tensors: tuple[Tensor, ...] = awaited(self.under_way, *own)


class Gathering:
    """One all-gather of several tensors, which begins here. Every rank of ``group`` must make it,
    with tensors of the same shapes in the same order; what each wants of them may differ.

    ``own`` [B, 2, n, ...] are of this rank's chunks r and 2P - 1 - r (`nsa.parallel.zigzag`), and
    of this gathering alone.

    The gradient of own is that of the sum over all ranks of what they make of it: contributions are
    rounded to own's dtype once a rank, and added up in rank order, in fp32 or wider, so that two
    runs are bitwise equal. Those of a gathering travel together, and gatherings in the reverse
    order of their promises, on every rank.
    """

    def __init__(
        self, own: OwnItems, wanted: Sequence[WantedItems], group: dist.ProcessGroup
    ) -> None:
        self._own, self._wanted, self._group = own, wanted, group
        self._promised: list[tuple[Tensor, ...]] = []
        tensors, P = own.tensors, dist.get_world_size(group)
        sizes = [x.numel() for x in tensors]
        sent = tensors[0].new_empty(sum(sizes), dtype=_common([x.dtype for x in tensors]))
        for x, part in zip(tensors, sent.split(sizes), strict=True):
            copy_words(part.view(x.shape), x.detach())
        received = sent.new_empty(P, sent.numel())
        work: Any = None
        if sent.numel():  # else nobody has any
            work = _gather_into(received.flatten(), sent, group=group, async_op=True)
        parts = [
            part.view(P, *x.shape)
            for x, part in zip(tensors, received.split(sizes, 1), strict=True)
        ]
        self._under_way: Any = (work, sent, parts)

    def promise(self) -> list[tuple[Tensor, ...]]:
        """Of each of own what is wanted of it, a tensor [B, R, ...] a range, part of autograd's
        graph from now on; the contents are there after `wait`.
        """
        if not self._promised:
            tensors, P = self._own.tensors, dist.get_world_size(self._group)
            pairs = list(zip(tensors, self._wanted, strict=True))
            rooms = [one.room(x, x.shape, P) for x, one in pairs]
            # no version of what autograd has seen: it has not read the contents that arrive later
            self._rooms = [room.data for room in rooms]
            kinds = tuple((x.shape, x.dtype, one) for x, one in pairs)
            apply: Any = _Gather.apply
            found = list(apply(kinds, self._group, self._own.under_way, rooms, *tensors))
            self._promised = [tuple(found.pop(0) for _ in one.ranges) for one in self._wanted]
        return self._promised

    def wait(self) -> list[tuple[Tensor, ...]]:
        """`promise`, filled."""
        promised = self.promise()
        if self._under_way is not None:
            work, _, parts = self._under_way
            self._under_way = None
            if work is not None:
                work.wait()
            for one, part, room in zip(self._wanted, parts, self._rooms, strict=True):
                one.lay_out(part, room)
        return promised


def gather(own: Tensor, ranges: Sequence[Range], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """The items ``ranges`` of all chunks in order, of one tensor [B, 2 n, ...]: [B, R, ...] each,
    as `Gathering` has them.
    """
    return Gathering(OwnItems(halves(own)), [WantedItems(tuple(ranges))], group).wait()[0]


class _Gather(torch.autograd.Function):
    """Backward sends what `_Awaited` then waits for, in the list that both have."""

    @staticmethod
    def forward(
        ctx: Any,
        kinds: tuple[Kind, ...],
        group: dist.ProcessGroup,
        under_way: list[Any],
        rooms: list[Tensor],
        *own: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.kinds, ctx.group, ctx.under_way = kinds, group, under_way
        return tuple(
            room[:, begin:end]
            for room, (_, _, wanted) in zip(rooms, kinds, strict=True)
            for begin, end in wanted.ranges
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        P, left = dist.get_world_size(ctx.group), list(gradients)
        sizes = [shape.numel() for shape, _, _ in ctx.kinds]
        common = _common([dtype for _, dtype, _ in ctx.kinds])
        sent = gradients[0].new_empty(P, sum(sizes), dtype=common)
        for (shape, _, wanted), part in zip(ctx.kinds, sent.split(sizes, 1), strict=True):
            parts = [left.pop(0) for _ in wanted.ranges]
            wanted.give_back(parts, part.view(P, *shape))
        received = torch.empty_like(sent)
        work: Any = None
        if sent.numel():
            flat = received.flatten(), sent.flatten()
            work = dist.all_to_all_single(*flat, group=ctx.group, async_op=True)
        ctx.under_way.append((work, sent, received.split(sizes, 1)))
        zero = sent.new_zeros(())  # `_Awaited` has the gradients
        nothing = (zero.to(dtype).expand(shape) for shape, dtype, _ in ctx.kinds)
        return None, None, None, None, *nothing


class _Awaited(torch.autograd.Function):
    """Own tensors as they are; their gradient is the ordered sum of what the ranks sent."""

    @staticmethod
    def forward(ctx: Any, under_way: list[Any], *own: Tensor) -> tuple[Tensor, ...]:
        ctx.under_way, ctx.kinds = under_way, [(x.shape, x.dtype) for x in own]
        return tuple(x.view_as(x) for x in own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *nothing: Tensor) -> Any:
        assert ctx.under_way, "gradients of what is gathered are sent before they are awaited"
        work, _, received = ctx.under_way.pop()
        if work is not None:
            work.wait()
        return None, *(
            ordered_sum(part.to(dtype), torch.promote_types(dtype, torch.float32)).view(shape)
            for part, (shape, dtype) in zip(received, ctx.kinds, strict=True)
        )


def _common(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    return reduce(torch.promote_types, dtypes)


def by_rank(every: Tensor, P: int) -> Tensor:
    """What each rank holds of all chunks in order: [B, 2P n, ...] -> [P, B, 2 n, ...]."""
    chunks = every.unflatten(1, (2 * P, every.shape[1] // (2 * P)))
    early, late = chunks[:, :P], chunks[:, P:].flip(1)
    return torch.stack([early, late], 2).transpose(0, 1).flatten(2, 3).contiguous()


def ordered_sum(parts: Tensor, wide: torch.dtype) -> Tensor:
    """The sum of ``parts`` [P, ...] from rank 0 on, added up in ``wide``, in parts' dtype."""
    if len(parts) == 2:  # one rounding either way
        return parts[0] + parts[1]
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
