"""A call that is repeated by a plan makes the launches that the operator's body would make, on the
call's own tensors; what a plan does not know to be right runs the body.

No GPU is needed: `tests.nsa.absent_gpu`. There a launch computes something that depends on all of
it (`Computing`), so that a wrong address, number or order shows in the outputs.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import pkgutil
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from types import ModuleType
from typing import Any
from zlib import crc32

import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import nsa.ops
from nsa import settings
from nsa.ops import operator
from nsa.ops.interval import roles
from nsa.ops.kernels import call_recorder, common, launch_plan, plans, shares, tiles
from nsa.ops.kernels import launch as door
from nsa.ops.kernels.launch import LaunchedKernel, launch
from nsa.ops.kernels.launch_plan import LaunchPlan
from nsa.ops.kernels.plans import Plans
from nsa.ops.scores import kernels as scores
from tests.cases import randn
from tests.nsa import absent_gpu
from tests.nsa.absent_gpu import Gpu

SCALE = tl.constexpr(8)


class Computing(Gpu):
    """A launch mixes what it is given, and the first 8 bytes at each address, and stores there what
    that gives.
    """

    def compiled(self, function: Any, signature: dict[str, str]) -> Any:
        made = super().compiled(function, signature)
        launcher, kinds = made._run, [str(kind) for kind in signature.values()]

        def compute(*given: Any) -> None:
            before, values = given[:-1], given[-1]
            if not door.AS_ONE:
                first = nvidia._BASE_ARGS_FORMAT_LEN
                before, values = given[:first], given[first:]
            self.records.append((made, given))
            mix(function.__name__, before[:3], kinds, list(values))

        meta = [{**absent_gpu.MAPS} for kind in kinds if kind.startswith("tensordesc")]
        launcher.launch = nvidia.wrap_handle_tensordesc(compute, signature, meta)
        return made


def mix(name: str, grid: tuple[int, ...], kinds: list[str], values: list[Any]) -> None:
    addresses: list[int] = []
    numbers: list[Any] = [name, grid]
    for kind in kinds:
        value = values.pop(0)
        if kind.startswith("tensordesc"):  # a map, then sizes and strides
            sizes = 2 * (kind[kind.index("[") : kind.index("]")].count(",") + 1)
            numbers += [value[2:], [values.pop(0) for _ in range(sizes)]]
            addresses.append(value[1])
        elif kind.startswith("*"):
            addresses.append(value.data_ptr() if isinstance(value, Tensor) else value)
        else:
            numbers.append(value)
    assert not values
    held = [ctypes.c_int64.from_address(address) for address in addresses if address]
    result = crc32(repr((numbers, [x.value for x in held])).encode())
    for i, x in enumerate(held):
        x.value = crc32(b"%d" % i, result)


class Zeroed(TorchFunctionMode):
    """Memory is zero when it is made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in call_recorder.MAKES else made


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Computing]:
    made = Computing()
    absent_gpu.installed(monkeypatch, made)
    monkeypatch.setattr(
        launch_plan,
        "_empty_on",
        lambda device: (
            lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype).zero_()
        ),
    )
    yield made
    plans.forget()


def add(X, Y, OUT, START, n, scale, BLOCK: tl.constexpr):
    tl.store(OUT + tl.arange(0, BLOCK), tl.load(X) + tl.load(Y) + n + scale + SCALE)


def fetch(X, OUT, n, BLOCK: tl.constexpr):
    tl.store(OUT + tl.arange(0, BLOCK), X.load([0, 0]))


class Body:
    """An operator: x and others [N, 16] -> (two of its size, one of half of it); ``calls`` counts
    how often it ran.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.add, self.fetch = JITFunction(add), JITFunction(fetch)

    def __call__(
        self, x: Tensor, others: list[Tensor], start: Tensor | None, n: int, scale: float
    ) -> tuple[Tensor, ...]:
        self.calls += 1
        y, z = torch.empty_like(x), x.new_empty(x.shape, dtype=torch.float32)
        room = x.new_empty(2 * x.numel(), dtype=torch.int32)
        part = room[x.numel() :]
        launch(self.add, (x.shape[0],), x, others[0], room, start, n, scale, 64)
        launch(self.add, (1, 2), part, x[1:], y, None, shares.of_all(n), scale, 64, num_warps=2)
        last = others[-1]
        if last.data_ptr() % 16 == 0 and last.stride(-1) == 1:
            described = TensorDescriptor(last, list(last.shape), list(last.stride()), [16, 16])
            launch(self.fetch, (3,), described, part, n, 16)
        half = x.new_empty(x.shape[0] // 2, 16)
        launch(self.add, (1,), room, y, z, half, n, scale, 64)
        return y, z, half


def inputs(seed: int = 0, rows: int = 64) -> list[Any]:
    """The other tensors are parts of one."""
    x, wide = randn(rows, 16, seed=seed), randn(rows, 48, seed=seed + 1)
    return [x, [wide[:, :16], wide[:, 16:32], wide[:, 32:]], None, 5, 0.5]


def flat(given: Sequence[Any]) -> list[Tensor]:
    parts = [x if isinstance(x, list | tuple) else [x] for x in given]
    return [x for part in parts for x in part if isinstance(x, Tensor)]


def copied(x: Any) -> Any:
    """``x`` in other memory; tensors of one memory have one again."""
    kept: dict[int, Tensor] = {}

    def one(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)([one(y) for y in x])
        if not isinstance(x, Tensor):
            return x
        storage = x.untyped_storage()
        base = kept.setdefault(storage._cdata, torch.empty(0, dtype=torch.uint8))
        if not base.numel():
            base.set_(storage.clone())
        made = torch.empty(0, dtype=x.dtype)
        return made.set_(base.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    return one(x)


def by_body(run: Callable[..., Any], given: Sequence[Any]) -> list[Tensor]:
    """What ``run`` returns and leaves in ``given``, of a copy of it."""
    own = copied([*given])
    with Zeroed():
        result = run(*own)
    return [*flat([result] if isinstance(result, Tensor) else result), *flat(own)]


def by_plan(operator: Plans, given: Sequence[Any]) -> list[Tensor]:
    own = copied([*given])
    result = operator.call(own)
    return [*flat([result] if isinstance(result, Tensor) else result), *flat(own)]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8) if x.numel() else x.to(torch.uint8)


def same(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    return len(got) == len(want) and all(
        (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        and torch.equal(bits(a), bits(b))
        for a, b in zip(got, want, strict=True)
    )


def planned(given: Sequence[Any] | None = None) -> tuple[Plans, Body]:
    """An operator with a plan for calls like ``given``."""
    body = Body()
    made = Plans(body)
    for _ in range(3 if not made.plans else 1):
        made.call(copied(inputs() if given is None else [*given]))
    return made, body


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


def turned_off(monkeypatch: pytest.MonkeyPatch, body: Body) -> None:
    monkeypatch.setattr(plans, "enabled", False)


def launches_turned_off(monkeypatch: pytest.MonkeyPatch, body: Body) -> None:
    monkeypatch.setattr(door, "enabled", False)


def setting(monkeypatch: pytest.MonkeyPatch, body: Body) -> None:
    off = replace(settings.current(), launch_plans=settings.Setting(False, "environment"))
    monkeypatch.setattr(settings, "current", lambda: off)


def hooked(monkeypatch: pytest.MonkeyPatch, body: Body) -> None:
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [lambda _: None])


def hooked_after(monkeypatch: pytest.MonkeyPatch, body: Body) -> None:
    monkeypatch.setattr(knobs.runtime.launch_exit_hook, "calls", [lambda _: None])


def hooked_before_run(monkeypatch: pytest.MonkeyPatch, body: Body) -> None:
    monkeypatch.setattr(body.fetch, "pre_run_hooks", [lambda *_, **__: None])


def one_more_hook(monkeypatch: pytest.MonkeyPatch, body: Body) -> None:
    body.add.add_pre_run_hook(lambda *_, **__: None)


def debugged(monkeypatch: pytest.MonkeyPatch, body: Body) -> None:
    monkeypatch.setattr(body.add, "debug", True)


def knob_set(monkeypatch: pytest.MonkeyPatch, body: Body) -> None:
    monkeypatch.setattr(knobs.runtime, "debug", True)


def run_replaced(monkeypatch: pytest.MonkeyPatch, body: Body) -> None:
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda self, *x, **o: run(self, *x, **o))


@pytest.mark.parametrize(
    "why",
    [
        turned_off,
        launches_turned_off,
        setting,
        hooked,
        hooked_after,
        hooked_before_run,
        one_more_hook,
        debugged,
        knob_set,
        run_replaced,
    ],
)
def test_what_is_not_known_to_be_right_runs_the_body(
    why: Callable[..., None], gpu: Computing
) -> None:
    one, body = planned()
    ran = body.calls
    with pytest.MonkeyPatch.context() as changed:
        why(changed, body)
        for n in range(1, 5):
            one.call(inputs())
            assert body.calls == ran + n
    if why is not one_more_hook:
        for _ in range(4):
            one.call(inputs())
        assert body.calls <= ran + 4 + 2


def test_deterministic_algorithms_run_the_body(gpu: Computing) -> None:
    one, body = planned()
    ran = body.calls
    torch.use_deterministic_algorithms(True)
    try:
        one.call(inputs())
    finally:
        torch.use_deterministic_algorithms(False)
    one.call(inputs())
    assert body.calls == ran + 1


class Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Seeing, Zeroed])
def test_a_mode_sees_the_body(mode: Callable[[], AbstractContextManager[Any]], gpu: Any) -> None:
    one, body = planned()
    ran = body.calls
    with mode():
        one.call(inputs())
    one.call(inputs())
    assert body.calls == ran + 1


def test_a_tensor_of_another_class_runs_the_body(gpu: Computing) -> None:
    class Own(Tensor):
        pass

    one, body = planned()
    ran, given = body.calls, inputs()
    given[1][0] = given[1][0].as_subclass(Own)
    one.call(given)
    assert body.calls == ran + 1 and len(one.plans) == 1


def test_a_table_that_is_set_anew_forgets(gpu: Computing, monkeypatch: pytest.MonkeyPatch) -> None:
    one, body = planned()
    ran = body.calls
    one.call(inputs())
    assert body.calls == ran and len(one.plans) == 1
    monkeypatch.setattr(common, "COPY_MIN_ELEMENTS", common.COPY_MIN_ELEMENTS)
    assert not one.plans
    one.call(inputs())
    assert body.calls == ran + 1


def test_a_table_that_is_set_while_a_call_is_recorded(
    gpu: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned()  # modules are watched from now on
    body = Body()

    def changing(*given: Any) -> Any:
        result = body(*given)
        if body.calls == 3:  # the second that is recorded, with every kernel compiled
            monkeypatch.setattr(common, "LOG2E", common.LOG2E)
        return result

    one = Plans(changing)
    for n in range(1, 6):
        one.call(inputs())
        assert body.calls == n and len(one.plans) == (n == 5)


def test_other_settings_forget(gpu: Computing, monkeypatch: pytest.MonkeyPatch) -> None:
    one, body = planned()
    ran = body.calls
    others = replace(settings.current(), triton_roles=settings.Setting(False, "environment"))
    monkeypatch.setattr(settings, "current", lambda: others)
    one.call(inputs())
    assert body.calls == ran + 1 and not one.plans


def reads(x: Tensor) -> object:
    return x[0, 0].item()


def asks(x: Tensor) -> object:
    return bool((x[0, 0] == 0).any())


def fills(x: Tensor) -> object:
    return x.new_empty(4).zero_()


def makes_zeros(x: Tensor) -> object:
    return torch.zeros(4)


def copies(x: Tensor) -> object:
    return x[:, ::2].contiguous()


def sorts(x: Tensor) -> object:
    return torch.sort(x)


def chooses(x: Tensor) -> object:
    return x[torch.zeros(1, dtype=torch.int64)]


def goes_around_functions(x: Tensor) -> object:
    return torch.ops.aten.relu.default(x)


@pytest.mark.parametrize(
    "does", [reads, asks, fills, makes_zeros, copies, sorts, chooses, goes_around_functions]
)
def test_what_depends_on_values_is_never_repeated(
    does: Callable[[Tensor], object], gpu: Computing
) -> None:
    body = Body()
    one = Plans(lambda *x: (does(x[0]), body(*x))[1])
    for n in range(1, 6):
        one.call(inputs())
        assert body.calls == n
    assert [type(plan) for plan in one.plans.values()] == [str] and not one.seen


def test_memory_from_elsewhere_is_refused(gpu: Computing) -> None:
    kept, kernel = torch.zeros(64, 16), JITFunction(add)

    def body(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        launch(kernel, (1,), x, kept, y, None, 3, 0.5, 64)
        return y

    one = Plans(body)
    for _ in range(4):
        one.call([inputs()[0]])
    assert "neither an input" in str(*one.plans.values())


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (lambda x, y: x, "not memory of its own"),
        (lambda x, y: y[1:], "not memory of its own"),
        (lambda x, y: y[:1], "not memory of its own"),
        (lambda x, y: (y, y), "share memory"),
        (lambda x, y: None, "no tensor"),
        (lambda x, y: (y, 3), "no tensor"),
    ],
)
def test_outputs_that_are_no_memory_of_their_own_are_refused(
    result: Callable[..., Any], why: str, gpu: Computing
) -> None:
    kernel = JITFunction(add)

    def body(x: Tensor) -> Any:
        y = torch.empty_like(x)
        launch(kernel, (1,), x, x, y, None, 3, 0.5, 64)
        return result(x, y)

    one = Plans(body)
    for _ in range(4):
        one.call([inputs()[0]])
    assert why in str(*one.plans.values())


def test_a_part_that_is_all_of_its_memory_is_an_output(gpu: Computing) -> None:
    kernel = JITFunction(add)

    def body(x: Tensor) -> Tensor:
        y = x.new_empty(1, *x.shape)
        launch(kernel, (1,), x, x, y, None, 3, 0.5, 64)
        return y[0]

    one = Plans(body)
    for seed in range(5):
        given = [randn(64, 16, seed=seed)]
        got = by_plan(one, given)
        assert seed < 3 or same(got, by_body(body, given))
    assert [type(plan) for plan in one.plans.values()] == [LaunchPlan]


def test_another_function_in_the_place_of_launch_is_refused(
    gpu: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "launch", lambda *_, **__: None)
    one, body = planned()
    assert "another function" in str(*one.plans.values()) and body.calls == 3


class Importing(str):
    """The name of a module, while whose turn it is another thread imports."""

    def startswith(self, *given: Any) -> bool:
        sys.modules["tests.imported"] = ModuleType("tests.imported")
        return super().startswith(*given)


def test_another_thread_may_import_while_a_call_is_recorded(
    gpu: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, Importing("tests.importing"), ModuleType("tests.importing"))
    monkeypatch.delitem(sys.modules, "tests.imported", raising=False)
    one, body = planned()
    sys.modules.pop("tests.imported")
    assert [type(plan) for plan in one.plans.values()] == [LaunchPlan] and body.calls < 4


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


def test_a_kernel_that_is_never_known_is_given_up(
    gpu: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaunchedKernel, "remember", lambda *_: None)
    one = Plans(Body())
    for _ in range(plans.MOST_TRIES + 1):
        assert not one.plans
        one.call(inputs())
    assert "Triton's way" in str(*one.plans.values())


def test_an_error_leaves_no_recording_open(gpu: Computing) -> None:
    def body(x: Tensor) -> Tensor:
        raise ValueError("as the body raises it")

    one = Plans(body)
    for _ in range(4):
        with pytest.raises(ValueError, match="as the body raises it"):
            one.call([inputs()[0]])
    assert door.RECORDED.note is None and not one.plans
    assert not torch._C._len_torch_function_stack()


@pytest.fixture
def hopper(gpu: Computing, monkeypatch: pytest.MonkeyPatch) -> Computing:
    """Path triton takes all that an H200 has, of few tokens, on the GPU that is not here."""
    for found in pkgutil.walk_packages(nsa.ops.__path__, "nsa.ops."):
        importlib.import_module(found.name)  # before one does in the midst of a call
    for module in [*sys.modules.values()]:
        for name, value in [*vars(module).items()] if module.__name__.startswith("nsa.ops") else ():
            if isinstance(value, InterpretedFunction):  # what the session may have asked for
                monkeypatch.setattr(module, name, JITFunction(value.fn, **value.kwargs))
    for module in (tiles, roles, scores):
        monkeypatch.setattr(module, "sm_of", lambda device: (9, 0))
    monkeypatch.setattr(common, "COPY_MIN_ELEMENTS", COPY_MIN)
    return gpu


COPY_MIN = 1 << 20  # elements of q


def of_a_layer(tokens: int, batch: int = 1, documents: int = 0, start: str = "") -> list[Any]:
    """(name, inputs) of the operators of a call both ways; each saw what those before returned."""
    B, T, scale, calls = batch, tokens, 0.125, list[Any]()
    q, do = (randn(B, T, 12, 64, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    of_keys = [randn(B, T, 2, 64, seed=3 + i, dtype=torch.bfloat16) for i in range(6)]
    gates = randn(B, T, 12, 3, seed=9, dtype=torch.bfloat16).sigmoid()
    first = None
    if documents:
        first = torch.arange(T) // documents * documents
    starts = torch.zeros(B, dtype=torch.int64) if start else None

    def call(name: str, *given: Any) -> Any:
        calls.append((name, [list(x) if isinstance(x, tuple) else x for x in given]))
        with Zeroed():
            return operator.run_by_itself(name, *copied(calls[-1][1]))

    kc, vc, *others = of_keys
    full = 0 if documents or start else 1024
    k, v = call("means", kc, vc, 32, 16)
    oc, lc = call("interval", q, k, v, starts, first, 0, 32, 16, None, scale)
    blocks = call("choose", q, k, lc, starts, first, 0, T, 32, 16, 64, 16, 1, 2, scale)
    options = (starts, 0, 64, full, scale, True)
    os_, ls, lists = call("selected_triton", q, *others[:2], blocks, *options)
    ow, lw = call("interval", q, *others[2:], starts, first, 0, 1, 1, 512, scale)
    kv, saved = [k, v, *others], [oc, os_, ow, lc, ls, lw]
    sizes = [0, 32, 16, 64, 512, full, 0]
    call("joined", gates, q, kv, blocks, [*saved, lists], starts, first, sizes, scale)
    delta, lse, _ = call("gate_products", do, gates, saved)
    rest = (blocks, delta, lse, lists, starts, first, sizes, scale)
    _, dk, dv, *_ = call("joined_backward", do, q, kv, *rest)
    call("means_backward", dk, dv, T, 32, 16)
    call("selected_triton_backward", do, os_, ls, lists, q, *others[:2], blocks, *options)
    call("interval_backward", do, oc, lc, q, k, v, starts, first, 0, 32, 16, None, scale)
    call("gated_sum", gates, oc, os_, ow)
    call("gated_sum_backward", do, gates, oc, os_, ow)
    return calls


@pytest.mark.parametrize(
    "sizes",
    [
        {"tokens": 700},
        {"tokens": 2048},
        {"tokens": 2048, "batch": 3},
        {"tokens": 4096, "documents": 512},
        {"tokens": 2048, "start": "of each row"},
        {"tokens": 8192},
    ],
    ids=str,
)
def test_every_operator_of_a_layer_is_repeated(sizes: dict[str, Any], hopper: Computing) -> None:
    described = 0
    for name, given in of_a_layer(**sizes):
        run = operator._RUNS[name].__wrapped__  # type: ignore[attr-defined]
        one = Plans(run)
        for _ in range(plans.MOST_TRIES):
            one.call(copied(given))
        ((plan),) = one.plans.values()
        assert type(plan) is LaunchPlan, (name, plan)
        want = by_body(run, given)
        one.run = None  # type: ignore[assignment]
        assert same(by_plan(one, given), want), name
        described += any(step.maps for step in plan.steps)
    assert (described > 0) == (sizes["tokens"] * sizes.get("batch", 1) * 768 >= COPY_MIN)
