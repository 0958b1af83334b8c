"""What wants to see a call or its launches gets the operator's body, and what a plan was decided on
forgets it when it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime.jit import JITFunction

from nsa import settings
from nsa.ops.kernels import common, plans
from nsa.ops.kernels import launch as door
from nsa.ops.kernels.plans import Plans
from tests.nsa.planned_calls import (
    Body,
    Computing,
    Zeroed,
    computing_gpu,
    inputs,
    planned,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Computing]:
    yield from computing_gpu(monkeypatch)


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
