"""Clocks: device time is read only after it is complete, and a fake passes time without waiting."""

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from perfbench.worker.clock import Clock, CudaEventClock, PerfCounterClock, clock_for
from tests.perfbench.fakes import FakeClock


def test_the_cpu_clock_counts_every_step() -> None:
    inside: list[float] = []

    def step() -> None:
        begin = time.perf_counter()
        time.sleep(0.002)
        inside.append(time.perf_counter() - begin)

    clock: Clock = PerfCounterClock()
    before = clock.now()
    steps_s = clock.time_steps(step, 3)
    whole_s = clock.now() - before
    assert len(inside) == 3 and sum(inside) <= steps_s <= whole_s


def test_the_cuda_clock_waits_before_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Any) -> float:
            log.append("read")
            return 12.0

    cuda = SimpleNamespace(Event=Event, synchronize=lambda: log.append("idle"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert CudaEventClock().time_steps(lambda: log.append("step"), 2) == 0.012
    assert log == ["idle", "record", "step", "step", "record", "wait", "read"]


def test_the_fake_clock() -> None:
    clock = FakeClock(0.5)
    assert clock.time_steps(lambda: None, 4) == 2.0 and clock.now() == 2.0
    clock.advance(1.0)
    assert clock.now() == 3.0
    varied = FakeClock(iter([0.1, 0.2, 0.3]))
    assert varied.time_steps(lambda: None, 2) == pytest.approx(0.3) and varied.time_steps(
        lambda: None, 1
    ) == pytest.approx(0.3)


@pytest.mark.parametrize("clock", [PerfCounterClock(), FakeClock()])
def test_no_steps_are_no_time(clock: Clock) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        clock.time_steps(lambda: None, 0)


def test_clock_for_each_device() -> None:
    assert isinstance(clock_for("cpu"), PerfCounterClock) and isinstance(
        clock_for("cuda"), CudaEventClock
    )


def cuda_torch(log: list[str], milliseconds: list[float]) -> SimpleNamespace:
    """A torch whose events log what happens, each pair lasting the next of ``milliseconds``."""
    numbers, left = iter(range(100)), iter(milliseconds)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.name = f"e{next(numbers)}"

        def record(self) -> None:
            log.append(self.name)

        def synchronize(self) -> None:
            log.append(f"wait {self.name}")

        def elapsed_time(self, end: Any) -> float:
            log.append(f"read {self.name} {end.name}")
            return next(left)

    return SimpleNamespace(
        cuda=SimpleNamespace(Event=Event, synchronize=lambda: log.append("idle"))
    )


def test_what_runs_between_steps_is_outside_of_every_pair_of_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    monkeypatch.setitem(sys.modules, "torch", cuda_torch(log, [3.0, 5.0]))
    assert CudaEventClock().time_steps(
        lambda: log.append("step"), 2, lambda: log.append("flush")
    ) == pytest.approx(0.008)
    one, two = ["flush", "e0", "step", "e1"], ["flush", "e2", "step", "e3"]
    assert log == [
        "idle",
        *one,
        *two,
        "wait e3",
        "read e0 e1",
        "read e2 e3",
    ], "read once, after the last has completed"


def test_what_runs_between_steps_costs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    lasts = {"flush": 20.0, "step": 1.0}
    monkeypatch.setattr(
        time, "perf_counter", lambda: sum((lasts[one] for one in calls), start=100.0)
    )
    steps_s = PerfCounterClock().time_steps(
        lambda: calls.append("step"), 3, lambda: calls.append("flush")
    )
    assert calls == ["flush", "step"] * 3 and steps_s == 3.0
    fake = FakeClock(0.5)
    assert (
        fake.time_steps(lambda: None, 4, lambda: fake.advance(10.0)) == 2.0 and fake.now() == 42.0
    )
