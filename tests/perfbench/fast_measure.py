"""The real measuring function in a process all of whose own clocks are fast: they say a hundredth
of the seconds that pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from perfbench.records import Job, Replicate
from perfbench.worker import measure as real
from perfbench.worker import sentinels, timing
from perfbench.worker.clock import Clock
from perfbench.worker.telemetry import Sampler
from perfbench.worker.turn import Turn

FACTOR = 100
CLOCKS = ("perf_counter", "process_time", "clock_gettime")
# In seconds of these clocks, so that a test does not wait for a hundred times as many.
SHORT = {timing: {"WARMUP_SAMPLE_S": 2e-4}, sentinels: {"WARMUP_S": 1e-3, "WINDOW_S": 1e-3}}


def slowed(clock: Callable[..., float]) -> Callable[..., float]:
    return lambda *which: clock(*which) / FACTOR


def measure(job: Job, clock: Clock, sampler: Sampler, turn: Turn) -> Replicate:
    for name in CLOCKS:
        setattr(time, name, slowed(getattr(time, name)))
    sentinels.SAMPLE_S = 6e-3
    for module, values in SHORT.items():
        for name, value in values.items():
            setattr(module, name, value)
    return real.measure(job, clock, sampler, turn)


def without_words(job: Job, clock: Clock, sampler: Sampler, turn: Turn) -> Replicate:
    """The real function, which never says when it times."""

    class Silent:
        def __call__(self) -> None:
            turn()

        def timing(self) -> Any:
            return real.Alone().timing()

    return real.measure(job, clock, sampler, Silent())
