"""A launch plan: what one recorded call of an operator made and launched, in a form that repeats it
on other tensors of the same layout.

A workspace is freed after the last launch that reads it, never later than the body does. A plan
holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from nsa.ops.kernels import launch as door
from nsa.ops.kernels.call_recorder import CallRecorder, Layout, Place, Refused, layout_of

MOST_MAPS = 32  # addresses of a tensor of a plan: memory of PyTorch's comes back at few

_data_ptr = Tensor.data_ptr


class TensorMaps:
    """Tensor maps of ``descriptor``, which has no tensor, by address, as ``make`` makes them."""

    def __init__(self, make: Callable[[Any, Any], list[Any]], meta: Any, descriptor: Any) -> None:
        self._make, self._meta, self._like = make, meta, descriptor
        self._made: dict[int, list[Any]] = {}

    def at(self, address: int) -> list[Any]:
        found = self._made.get(address)
        if found is None:
            if len(self._made) >= MOST_MAPS:
                self._made.clear()
            one = copy(self._like)
            one.base = SimpleNamespace(data_ptr=lambda: address)
            found = self._made[address] = self._make(one, self._meta)
        return found


class PlannedLaunch(NamedTuple):
    """A launch: ``run`` on ``grid``, with those of the addresses that ``take`` takes, tensor
    ``maps`` in place of some of them (the last first), and ``fixed`` arguments.

    The memory made before it (number, layout, offsets besides 0 of what launches read), and the
    numbers of what is freed behind it.
    """

    makes: tuple[tuple[int, Layout, tuple[int, ...]], ...]
    run: Callable[..., None]
    grid: tuple[int, int, int]
    between: tuple[Any, ...]
    take: Callable[[Sequence[Any]], tuple[Any, ...]]
    maps: tuple[tuple[int, TensorMaps], ...]
    fixed: tuple[Any, ...]
    frees: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What a call makes, launches and returns: the memory ``outputs``, as ``wrap`` has them.

    Addresses are in one list: none, those of inputs, those ``within`` inputs, those in memory, in
    the order in which it is made; what no launch reads is made ``last``. ``constants``, ``hooks``,
    ``kinds`` of the kernels: what has to be the same, lists that have to be empty, classes.
    """

    within: tuple[Place, ...]
    steps: tuple[PlannedLaunch, ...]
    last: tuple[tuple[int, Layout], ...]
    outputs: tuple[int, ...]
    wrap: Callable[[list[Tensor]], Any]
    empty: Callable[..., Tensor]
    constants: door.Globals
    hooks: tuple[Sequence[Any], ...]
    kinds: frozenset[type]

    def holds(self) -> bool:
        """Whether the kernels are as they were."""
        for kind in self.kinds:
            if not door.goes_straight(kind):
                return False
        for names, name, value in self.constants:
            if names.get(name) is not value:
                return False
        return not any(self.hooks)

    def repeat(self, addresses: Sequence[int], stream: int) -> Any:
        """The result of a call, for the ``addresses`` of its inputs."""
        at: list[Any] = [None, *addresses]
        for i, offset in self.within:
            at.append(addresses[i] + offset)
        held: dict[int, Tensor] = {}
        empty, as_one = self.empty, door.AS_ONE
        for makes, run, grid, between, take, maps, fixed, frees in self.steps:
            for number, layout, offsets in makes:
                held[number] = empty(*layout)
                address = _data_ptr(held[number])
                at.append(address)
                for offset in offsets:
                    at.append(address + offset)
            values: Sequence[Any] = take(at)
            if maps:
                values = [*values]
                for i, one in maps:
                    values[i : i + 1] = one.at(values[i])
            if as_one:
                run(*grid, stream, *between, (*values, *fixed))
            else:
                run(*grid, stream, *between, *values, *fixed)
            for number in frees:
                del held[number]
        for number, layout in self.last:
            held[number] = empty(*layout)
        return self.wrap([held[number] for number in self.outputs])


def plan_of(recorder: CallRecorder, result: Any, device: torch.device) -> LaunchPlan:
    """What repeats the call that was recorded; raises Refused."""
    if recorder.why is not None:
        raise recorder.why
    launches = [step for step in recorder.steps if not isinstance(step, int)]
    if not launches:
        raise Refused("nothing is launched")
    layouts, outputs = _outputs(recorder, result)
    read = {place for _, places in launches for place in places if place is not None}
    last_reads = {n: i for i, (_, places) in enumerate(launches) for n, _ in filter(None, places)}
    within = sorted(p for p in read if p[0] < recorder.num_inputs and p[1])
    order: list[Place | None] = [None, *((i, 0) for i in range(recorder.num_inputs)), *within]
    steps: list[PlannedLaunch] = []
    makes: list[tuple[int, Layout, tuple[int, ...]]] = []
    for step in recorder.steps:
        if not isinstance(step, int):
            frees = [n for n in layouts if n not in outputs and last_reads.get(n) == len(steps)]
            steps.append(_step(tuple(makes), *step, order, tuple(frees)))
            makes = []
        elif step in last_reads:
            offsets = sorted(n for number, n in read if number == step and n)
            order += [(step, n) for n in (0, *offsets)]
            makes.append((step, layouts[step], tuple(offsets)))
    constants = {(id(x[0]), x[1]): x for launched, _ in launches for x in launched.compiled[2]}
    kernels = {id(launched.kernel): launched.kernel for launched, _ in launches}
    for number, kernel in kernels.items():
        for name in ("debug", "pre_run_hooks"):
            constants[number, name] = vars(kernel), name, getattr(kernel, name)
    return LaunchPlan(
        tuple(within),
        tuple(steps),
        tuple((n, layouts[n]) for n in outputs if n not in last_reads),
        tuple(outputs),
        itemgetter(0) if isinstance(result, Tensor) else type(result),
        _empty_on(device),
        tuple(constants.values()),
        tuple(kernel.pre_run_hooks for kernel in kernels.values()),
        frozenset(map(type, kernels.values())) - {JITFunction},  # of which every call asks
    )


def _step(
    makes: tuple[tuple[int, Layout, tuple[int, ...]], ...],
    launched: door.Launched,
    places: Sequence[Place | None],
    order: list[Place | None],
    frees: tuple[int, ...],
) -> PlannedLaunch:
    """``order``: the places of addresses."""
    run, between, *_ = launched.compiled
    head, maps = launched.head, []
    described = [i for i, x in enumerate(head) if x is not None]
    of_maps = run.places if isinstance(run, door.KeptMaps) else ()
    if [i for i, _ in of_maps] != described[::-1]:
        raise Refused("a descriptor is taken apart")
    if isinstance(run, door.KeptMaps):
        maps = [(i, TensorMaps(run.make, meta, head[i])) for i, meta in of_maps]
        run = run.raw
    take = door.picker([order.index(place) for place in places])
    return PlannedLaunch(
        makes, run, launched.grid, between, take, tuple(maps), launched.fixed, frees
    )


def _outputs(recorder: CallRecorder, result: Any) -> tuple[dict[int, Layout], list[int]]:
    """(layout of all memory by number, numbers of ``result``'s): each is all of some memory, which
    is made as the output has it.
    """
    layouts = dict(enumerate(recorder.made, recorder.num_inputs))
    results = (result,) if isinstance(result, Tensor) else result
    if not isinstance(results, tuple | list) or any(not isinstance(x, Tensor) for x in results):
        raise Refused("the result is no tensor, nor a sequence of tensors")
    outputs: list[int] = []
    for x in results:
        (number, at), layout = recorder.place_of(x), layout_of(x)
        ends = sum((n - 1) * stride for n, stride in zip(*layout[:2], strict=True)) + 1
        bytes_ = ends * x.element_size() if x.numel() else 0
        if number not in layouts or at or bytes_ != x.untyped_storage().nbytes():
            raise Refused("an output is not memory of its own")
        if number in outputs:
            raise Refused("two outputs share memory")
        layouts[number] = layout
        outputs.append(number)
    return layouts, outputs


def _empty_on(device: torch.device) -> Callable[..., Tensor]:
    """(size, strides, dtype) -> memory, without the dispatcher where PyTorch has what code of
    torch.compile calls: a third of the time. On the current device, which is ``device``.
    """
    guards = getattr(torch._C._dynamo, "guards", None)
    made: Callable[..., Tensor] | None = getattr(guards, f"_empty_strided_{device.type}", None)
    if made is not None:
        return made
    return lambda size, strides, dtype: torch.empty_strided(
        size, strides, dtype=dtype, device=device
    )
