"""Clocks: the seam between a measurement and time.

CUDA work is timed by events on its own stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol


class Clock(Protocol):
    @property
    def is_of_host(self) -> bool:
        """Whether the host's clock is read right before the first call and right after the last:
        then many calls may be given as one.
        """
        ...

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def time_steps(
        self, step: Callable[[], None], steps: int, between: Callable[[], None] | None = None
    ) -> float:
        """Seconds that ``steps`` calls of ``step`` take, their device work included.

        ``between`` runs before each step and is not in those seconds.
        """
        ...


class PerfCounterClock:
    """For a CPU, where a call returns when its work is done."""

    is_of_host = True

    def now(self) -> float:
        return time.perf_counter()

    def time_steps(
        self, step: Callable[[], None], steps: int, between: Callable[[], None] | None = None
    ) -> float:
        check_steps(steps)
        if between is not None:
            return sum(self._one(step, between) for _ in range(steps))
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        return time.perf_counter() - begin

    def _one(self, step: Callable[[], None], between: Callable[[], None]) -> float:
        between()
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin


class CudaEventClock:
    """Events on the current stream, around all steps or around each, read only after the last has
    completed.
    """

    is_of_host = False

    def now(self) -> float:
        return time.perf_counter()

    def time_steps(
        self, step: Callable[[], None], steps: int, between: Callable[[], None] | None = None
    ) -> float:
        import torch

        check_steps(steps)
        event: Callable[..., Any] = torch.cuda.Event  # torch leaves it untyped
        per_pair, pairs = (steps, 1) if between is None else (1, steps)
        events = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(pairs)]
        torch.cuda.synchronize()  # work queued before belongs to nobody's sample
        for begin, end in events:
            if between is not None:
                between()  # on the same stream, so the first event waits for its end
            begin.record()
            for _ in range(per_pair):
                step()
            end.record()
        # An event read before it completed gives an error, or an old time.
        events[-1][1].synchronize()
        return sum(float(begin.elapsed_time(end)) for begin, end in events) / 1e3


def raw_seconds() -> float:
    """The kernel's raw clock: another than any Clock reads, and no time server slews it."""
    raw = getattr(time, "CLOCK_MONOTONIC_RAW", None)  # not on every system
    return time.monotonic() if raw is None else time.clock_gettime(raw)


class CheckedClock:
    """``clock``, each of whose intervals is timed by the raw clock as well: ``clock_s`` and
    ``raw_s`` add up what either saw, what runs between steps included in the latter alone.

    ``aside_s`` of ``raw_s`` passed before a sample's first step or after its last: a busy machine
    may stop the process between the readings of two clocks. Known of a clock of the host alone.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.clock_s = self.raw_s = self.aside_s = 0.0

    @property
    def is_of_host(self) -> bool:
        return self._clock.is_of_host

    def now(self) -> float:
        return self._clock.now()

    def time_steps(
        self, step: Callable[[], None], steps: int, between: Callable[[], None] | None = None
    ) -> float:
        check_steps(steps)
        within_s: float | None = None

        def all_steps() -> None:
            nonlocal within_s
            first = raw_seconds()
            for _ in range(steps):
                step()
            within_s = raw_seconds() - first

        begin = raw_seconds()
        if between is None and self._clock.is_of_host:
            seconds = self._clock.time_steps(all_steps, 1)
        else:
            seconds = self._clock.time_steps(step, steps, between)
        raw_s = raw_seconds() - begin
        self.raw_s += raw_s
        self.aside_s += 0.0 if within_s is None else raw_s - within_s
        self.clock_s += seconds
        return seconds


def check_steps(steps: int) -> None:
    """ValueError where nothing would be timed."""
    if steps < 1:
        raise ValueError(f"steps={steps} times nothing; give at least 1")


def clock_for(device: str) -> Clock:
    """The true clock of ``device`` ('cpu' or 'cuda...')."""
    return CudaEventClock() if device.startswith("cuda") else PerfCounterClock()
