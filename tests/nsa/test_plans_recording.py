"""Which calls become plans: what reads a value, copies or computes runs in every call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from nsa.ops.kernels import launch as door
from nsa.ops.kernels import plans
from nsa.ops.kernels.launch import LaunchedKernel, launch
from nsa.ops.kernels.launch_plan import LaunchPlan
from nsa.ops.kernels.plans import Plans
from nsa.ops.scores import kernels as scores
from tests.cases import randn
from tests.nsa.planned_calls import (
    Body,
    Computing,
    add,
    by_body,
    by_plan,
    computing_gpu,
    inputs,
    planned,
    same,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Computing]:
    yield from computing_gpu(monkeypatch)


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
