"""Clocks: the seam between a measurement and time. CUDA work is timed by events on its own stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def time_steps(self, step: Callable[[], None], steps: int) -> float:
        """Seconds that ``steps`` calls of ``step`` take, their device work included."""
        ...


class PerfCounterClock:
    """For a CPU, where a call returns when its work is done."""

    def now(self) -> float:
        return time.perf_counter()

    def time_steps(self, step: Callable[[], None], steps: int) -> float:
        _check(steps)
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        return time.perf_counter() - begin


class CudaEventClock:
    """One pair of events around all steps on the current stream, read only after the second has completed."""

    def now(self) -> float:
        return time.perf_counter()

    def time_steps(self, step: Callable[[], None], steps: int) -> float:
        import torch

        _check(steps)
        event: Callable[..., Any] = torch.cuda.Event  # torch leaves it untyped
        begin, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()  # work queued before belongs to nobody's sample
        begin.record()
        for _ in range(steps):
            step()
        end.record()
        end.synchronize()  # an event read before it completed gives an error, or an old time
        return float(begin.elapsed_time(end)) / 1e3


class FakeClock:
    """Time that passes only when a step runs: ``step_s`` seconds each, or one value of the iterator each."""

    def __init__(self, step_s: float | Iterator[float] = 0.01) -> None:
        self._step_s = step_s
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def time_steps(self, step: Callable[[], None], steps: int) -> float:
        _check(steps)
        begin = self._now
        for _ in range(steps):
            step()
            self._now += self._step_s if isinstance(self._step_s, float | int) else next(self._step_s)
        return self._now - begin


def _check(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps={steps} times nothing; give at least 1")


def clock_for(device: str) -> Clock:
    """The true clock of ``device`` ('cpu' or 'cuda...')."""
    return CudaEventClock() if device.startswith("cuda") else PerfCounterClock()
