"""A call that is repeated by a plan makes the launches that the operator's body would make, on the
call's own tensors and its own memory.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.ops.kernels import launch_plan, plans, shares
from nsa.ops.kernels.launch import launch
from nsa.ops.kernels.launch_plan import LaunchPlan
from nsa.ops.kernels.plans import Plans
from tests.cases import randn
from tests.nsa.planned_calls import (
    Body,
    Computing,
    add,
    by_body,
    by_plan,
    computing_gpu,
    copied,
    fetch,
    flat,
    inputs,
    planned,
    same,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Computing]:
    yield from computing_gpu(monkeypatch)


def test_a_like_call_repeats_the_launches_on_its_own_tensors(gpu: Computing) -> None:
    one, body = planned()
    ran = body.calls
    assert [type(plan) for plan in one.plans.values()] == [LaunchPlan] and ran in (2, 3)
    for seed in range(1, 5):
        given = inputs(seed)
        got = by_plan(one, given)
        launched = gpu.records[-4:]
        assert body.calls == ran
        want = by_body(body, given)
        assert same(got, want)
        ran = body.calls
        assert [made for made, _ in launched] == [made for made, _ in gpu.records[-4:]]
    assert len({id(made) for made, _ in gpu.records}) == 4


def test_interleaved_calls_do_not_mix(gpu: Computing) -> None:
    one, body = planned()
    big = inputs(7, rows=128)
    for _ in range(3):
        by_plan(one, big)
    assert len(one.plans) == 2
    wanted = {seed: by_body(body, inputs(seed, 64 + 64 * (seed % 2))) for seed in range(6)}
    ran = body.calls
    kept = {seed: by_plan(one, inputs(seed, 64 + 64 * (seed % 2))) for seed in range(6)}
    assert body.calls == ran and all(same(kept[seed], wanted[seed]) for seed in range(6))

    def ask(seed: int) -> bool:
        rows = 64 + 64 * (seed % 2)
        return all(same(by_plan(one, inputs(seed, rows)), wanted[seed]) for _ in range(20))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(ask, range(6)))
    assert body.calls == ran


def other_shape(given: list[Any]) -> None:
    given[0] = randn(66, 16, seed=1)


def other_strides(given: list[Any]) -> None:
    given[0] = randn(64, 32, seed=1)[:, :16]


def other_dtype(given: list[Any]) -> None:
    given[0] = given[0].half()


def other_alignment(given: list[Any]) -> None:
    wide = randn(64 * 48 + 1, seed=1)[1:].view(64, 48)
    given[1] = [wide[:, :16], wide[:, 16:32], wide[:, 32:]]


def other_number(given: list[Any]) -> None:
    given[3] = 6


def a_number_of_another_type(given: list[Any]) -> None:
    given[3] = True


def other_zero(given: list[Any]) -> None:
    given[4] = -0.0


def other_length(given: list[Any]) -> None:
    given[1] = given[1][1:]


def a_tensor_where_none_was(given: list[Any]) -> None:
    given[2] = randn(64, 16, seed=1)


def one_tensor_twice(given: list[Any]) -> None:
    given[1] = [given[1][0], given[1][1], given[1][1]]


@pytest.mark.parametrize(
    "change",
    [
        other_shape,
        other_strides,
        other_dtype,
        other_alignment,
        other_number,
        a_number_of_another_type,
        other_zero,
        other_length,
        a_tensor_where_none_was,
        one_tensor_twice,
    ],
)
def test_each_part_of_the_key_makes_another_plan(
    change: Callable[[list[Any]], None], gpu: Computing
) -> None:
    first = inputs()
    if change in (a_number_of_another_type, other_zero):
        first[3:] = [1, 0.0]
    one, body = planned(first)
    changed = copied(first)
    change(changed)
    for n in range(4):
        ran = body.calls
        got = by_plan(one, changed)
        by_it = body.calls == ran
        assert by_it == (n > 1 and len(one.plans) == 2), (change, n)
        assert not by_it or same(got, by_body(body, changed))
    assert by_it
    assert len(one.plans) == 2 and all(type(plan) is LaunchPlan for plan in one.plans.values())
    ran = body.calls
    got = by_plan(one, first)
    assert body.calls == ran and same(got, by_body(body, first))


def test_which_of_two_tensors_there_is(gpu: Computing) -> None:
    kernel, x, y = JITFunction(add), *(randn(64, 16, seed=seed) for seed in (1, 2))

    def body(x: Tensor, a: Tensor | None, b: Tensor | None, n: int) -> Tensor:
        out = torch.empty_like(x)
        launch(kernel, (1,), x, a, out, b, n, 0.5, 64)
        return out

    one = Plans(body)
    for given in ([x, y, None, 3], [x, None, y, 3]):
        for _ in range(plans.MOST_TRIES):
            got = by_plan(one, given)
        assert same(got, by_body(body, given))
    assert [type(plan) for plan in one.plans.values()] == [LaunchPlan] * 2


def test_a_share_is_another_call(gpu: Computing) -> None:
    one, body = planned()
    for _ in range(4):
        ran = body.calls
        with shares.one_of(3):
            got = by_plan(one, inputs(1))
            by_it = body.calls == ran
            want = by_body(body, inputs(1))
    assert by_it and same(got, want) and len(one.plans) == 2
    assert not same(got, by_body(body, inputs(1)))


def test_the_stream_is_that_of_each_call(gpu: Computing) -> None:
    one, _ = planned()
    for stream in (7, 8, 9, 7):
        gpu.stream = stream
        gpu.records.clear()
        one.call(inputs())
        assert [given[3] for _, given in gpu.records] == [stream] * 4


def test_another_device_runs_the_body(gpu: Computing, monkeypatch: pytest.MonkeyPatch) -> None:
    one, body = planned()
    ran = body.calls
    devices = iter([-1, -1, 1, *[-1] * 99])
    monkeypatch.setattr(plans, "_get_device", lambda _: next(devices))
    one.call(inputs())
    assert body.calls == ran + 1


def test_outputs_are_new_and_no_tensor_is_held(gpu: Computing) -> None:
    one, _ = planned()
    given = inputs()
    dead = [weakref.ref(x) for x in flat(given)]
    first, second = one.call(given), one.call(given)
    assert not {x.data_ptr() for x in first} & {x.data_ptr() for x in second}
    dead += [weakref.ref(x) for x in (*first, *second)]
    del given, first, second
    gc.collect()
    assert all(x() is None for x in dead)
    held = [x for x in gc.get_objects() if isinstance(x, Tensor)]
    reached = {id(y) for x in one.plans.values() for y in reachable(x)}
    assert not any(id(x) in reached for x in held)


def reachable(x: object) -> list[object]:
    """What a plan refers to, but for modules, classes and what a kernel itself has."""
    seen: dict[int, object] = {}
    todo = [x]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | JITFunction):
            continue
        if callable(one) and not isinstance(one, launch_plan.TensorMaps):
            continue
        if isinstance(one, dict) and "__builtins__" in one:
            continue
        seen[id(one)] = one
        todo += gc.get_referents(one)
    return list(seen.values())


def test_a_workspace_is_freed_where_the_body_frees_it_or_before(
    gpu: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three workspaces that follow each other, one is there at a time."""
    kernel, fetching, made, most = JITFunction(add), JITFunction(fetch), list[Any](), [0]

    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for _ in range(3):
            room = x.new_empty(x.shape)
            launch(kernel, (1,), x, x, room, out, 3, 0.5, 64)
            described = TensorDescriptor(room, [*room.shape], [*room.stride()], [16, 16])
            launch(fetching, (1,), described, out, 3, 16)
            gone = weakref.ref(room)
            del room, described
            gpu.records.clear()
            assert gone() is None, "recorded or not"
        return out

    def empty(size: Any, strides: Any, dtype: Any) -> Tensor:
        x = torch.empty_strided(size, strides, dtype=dtype)
        made.append(weakref.ref(x))
        most[0] = max(most[0], sum(one() is not None for one in made))
        return x

    monkeypatch.setattr(launch_plan, "_empty_on", lambda device: empty)
    one = Plans(body)
    for _ in range(4):
        one.call([inputs()[0]])
    assert len(made) == 2 * 4 and most[0] == 2


def test_plans_and_what_was_seen_once_are_bounded(gpu: Computing) -> None:
    one, given = Plans(Body()), inputs()
    for n in range(plans.MOST_PLANS + 9):
        given[3] = 16 * n
        for _ in range(3):
            one.call(given)
    assert len(one.plans) == plans.MOST_PLANS and all(
        type(x) is LaunchPlan for x in one.plans.values()
    )
    for n in range(plans.MOST_SEEN + 9):
        given[3] = -16 * n - 16
        one.call(given)
        assert len(one.seen) <= plans.MOST_SEEN
    assert len(one.plans) == plans.MOST_PLANS
