"""A clock and a sampler of tests: time passes only when a step runs, telemetry is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from perfbench.records import Telemetry
from perfbench.worker.clock import Clock, check_steps
from perfbench.worker.telemetry import Window


class FakeClock:
    """Time that passes only when a step runs: ``step_s`` seconds each, or one value of the iterator
    each.
    """

    is_of_host = False

    def __init__(self, step_s: float | Iterator[float] = 0.01) -> None:
        self._step_s = step_s
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def time_steps(
        self, step: Callable[[], None], steps: int, between: Callable[[], None] | None = None
    ) -> float:
        check_steps(steps)
        begin, aside = self._now, 0.0
        for _ in range(steps):
            if between is not None:
                before = self._now
                between()
                aside += self._now - before
            step()
            self._now += (
                self._step_s if isinstance(self._step_s, float | int) else next(self._step_s)
            )
        return self._now - begin - aside


class WrongClock:
    """``clock``, but its second lasts ``factor`` true ones."""

    @property
    def is_of_host(self) -> bool:
        return self._clock.is_of_host

    def __init__(self, clock: Clock, factor: float) -> None:
        self._clock, self._factor = clock, factor

    def now(self) -> float:
        return self._clock.now()

    def time_steps(
        self, step: Callable[[], None], steps: int, between: Callable[[], None] | None = None
    ) -> float:
        return self._clock.time_steps(step, steps, between) / self._factor


class FakeSampler:
    """Returns the telemetry that it was made with."""

    def __init__(self, result: Telemetry) -> None:
        self._canned = result

    @contextmanager
    def window(self) -> Iterator[Window]:
        opened = Window()
        try:
            yield opened
        finally:
            opened.close(self._canned)
