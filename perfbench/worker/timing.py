"""The timed part of a replicate: warm up until the step is level, then take samples while NVML and
the counters watch.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from nsa import engagement
from perfbench.records import Job, MeasureOptions, Telemetry
from perfbench.worker.clock import CheckedClock, Clock
from perfbench.worker.telemetry import Sampler

WARMUP_SAMPLE_S = 0.02
STEADY_SLOPE_PER_S = 0.001
MIN_POINTS = 4  # fewer show no slope
MIN_SAMPLES = 3
MAX_SAMPLES = 1000
# NVML's energy counter moves every 20 to 100 ms by card, so that a window of 2 s is known to 5 %.
MIN_ENERGY_WINDOW_S = 2.0
NUM_FLUSHES = 10  # timed alone
# Of a trace, after the first, which compiles and tunes; the optimizer's state is there from the
# second on.
TRACE_WARM_STEPS = 2
Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Warmth:
    """``step_s`` seconds a step at the end of the warm-up; ``steady`` None where too few samples
    show whether it is level.
    """

    step_s: float
    steady: bool | None
    num_samples: int


def warm_up(
    step: Step, clock: Clock, options: MeasureOptions, between: Step | None = None
) -> Warmth:
    """Run for ``options.shortest_warmup_s`` and on until the last half of the samples is level, or
    ``longest_warmup_s`` is reached.
    """
    begin, first_s = clock.now(), clock.time_steps(step, 1, between)
    steps = max(1, int(WARMUP_SAMPLE_S / max(first_s, 1e-9)))
    times_s = [clock.time_steps(step, steps, between)]
    steady = False
    while (elapsed := clock.now() - begin) < options.longest_warmup_s:
        if elapsed >= options.shortest_warmup_s and (steady := is_level(_last_half(times_s))):
            break
        times_s.append(clock.time_steps(step, steps, between))
    judged = steady if len(_last_half(times_s)) >= MIN_POINTS else None
    return Warmth(statistics.median(_last_half(times_s)) / steps, judged, len(times_s))


def _last_half(times_s: list[float]) -> list[float]:
    return times_s[len(times_s) // 2 :]


def is_level(times_s: list[float]) -> bool:
    """|slope| below the larger of 0.1 % of the mean a second and two standard errors.

    ``times_s`` are consecutive samples of the same number of steps, so their running sum is the
    time at which each ended; the slope is that of a least-squares line over it.
    """
    n = len(times_s)
    if n < MIN_POINTS:
        return False
    at = list(itertools.accumulate(times_s))
    mean_at, mean = statistics.fmean(at), statistics.fmean(times_s)
    spread = sum((a - mean_at) ** 2 for a in at)
    slope = sum((a - mean_at) * (t - mean) for a, t in zip(at, times_s, strict=True)) / spread
    residual = sum(
        (t - mean - slope * (a - mean_at)) ** 2 for a, t in zip(at, times_s, strict=True)
    )
    standard_error = math.sqrt(residual / (n - 2) / spread)
    return bool(abs(slope) < max(STEADY_SLOPE_PER_S * mean, 2 * standard_error))


@dataclass(frozen=True, slots=True)
class Timed:
    """What the timed window showed.

    ``flushed``: the L2 was emptied before each step, outside of the samples. ``raw_s``: how long
    all of it took by the raw clock, ``between_s`` of which were the flushes and ``aside_s`` lay
    outside of the samples; ``cpu_s``: CPU time of this process meanwhile.
    """

    samples_s: list[float]
    steps_per_sample: int
    engaged: dict[str, int]
    telemetry: Telemetry
    flushed: bool = False
    raw_s: float = 0.0
    between_s: float = 0.0
    aside_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def num_steps(self) -> int:
        return self.steps_per_sample * len(self.samples_s)

    @property
    def step_s(self) -> float:
        return statistics.median(self.samples_s) / self.steps_per_sample

    def facts(self, tokens_per_step: int) -> dict[str, Any]:
        """The row's fields; ``absent`` says why one is null."""
        cycles, no_cycles = self.cycles_per_step()
        energy_j, no_energy = self.energy_j_per_token(tokens_per_step)
        return {
            "samples_s": self.samples_s,
            "steps_per_sample": self.steps_per_sample,
            "tokens_per_step": tokens_per_step,
            "tok_per_s": tokens_per_step / self.step_s,
            "engaged": self.engaged,
            "telemetry": self.telemetry,
            "cycles_per_step": cycles,
            "energy_j_per_token": energy_j,
            "absent": {
                name: why
                for name, why in (("cycles_per_step", no_cycles), ("energy_j_per_token", no_energy))
                if why
            },
        }

    def cycles_per_step(self) -> tuple[float | None, str]:
        """Seconds a step times the mean SM clock of the window, or (None, reason)."""
        clock_mhz = self.telemetry.sm_clock_mhz
        if not clock_mhz:
            return None, self.telemetry.absent.get(
                "sm_clock_mhz", f"the SM clock of the window is {clock_mhz} MHz"
            )
        return self.step_s * clock_mhz * 1e6, ""

    def energy_j_per_token(self, tokens_per_step: int) -> tuple[float | None, str]:
        """The window's energy over its tokens, or (None, reason)."""
        energy_j, window_s = self.telemetry.energy_j, self.telemetry.window_s
        if energy_j is None:
            return None, self.telemetry.absent.get("energy_j", "NVML gave no energy")
        if window_s < MIN_ENERGY_WINDOW_S:
            return (
                None,
                f"the timed window is shorter than {MIN_ENERGY_WINDOW_S:g} s; raise measure.max_s",
            )
        if energy_j <= 0:
            return None, f"NVML's energy counter moved by {energy_j:g} J in {window_s:.2f} s"
        if self.flushed:
            return None, "the window's energy holds that of the L2 flushes between the steps"
        return energy_j / (tokens_per_step * self.num_steps), ""


def time_samples(
    step: Step,
    step_s: float,
    options: MeasureOptions,
    clock: Clock,
    sampler: Sampler,
    between: Step | None = None,
    timing: AbstractContextManager[None] | None = None,
) -> Timed:
    """Samples of at least min_sample_ms, for max_s or a fixed number, while NVML, the counters and
    ``timing`` (`Turn.timing`) watch.
    """
    steps = max(1, -(-int(options.min_sample_ms * 1e6) // max(1, int(step_s * 1e9))))
    samples: list[float] = []
    checked = CheckedClock(clock)
    with sampler.window() as window, engagement.collect() as engaged, timing or nullcontext():
        begin, begin_cpu_s = clock.now(), time.process_time()
        while len(samples) < (options.samples or MAX_SAMPLES):
            if (
                options.samples is None
                and len(samples) >= MIN_SAMPLES
                and clock.now() - begin >= options.max_s
            ):
                break
            samples.append(checked.time_steps(step, steps, between))
        cpu_s = time.process_time() - begin_cpu_s
    return Timed(
        samples,
        steps,
        engaged.counts,
        window.result,
        flushed=between is not None,
        raw_s=checked.raw_s,
        between_s=_seconds_of(between, clock) * steps * len(samples),
        aside_s=checked.aside_s,
        cpu_s=cpu_s,
    )


def _seconds_of(between: Step | None, clock: Clock) -> float:
    """Of one flush alone, by the raw clock; 0 where there is none."""
    if between is None:
        return 0.0
    alone = CheckedClock(clock)
    alone.time_steps(between, NUM_FLUSHES)
    return alone.raw_s / NUM_FLUSHES


def absent_of(job: Job, warmth: Warmth) -> dict[str, str]:
    """Why a value of a row that has a speed is null, besides those that the timed window knows."""
    absent = {}
    if warmth.steady is None:
        absent["steady"] = (
            f"{warmth.num_samples} samples fitted into the warm-up, and fewer than"
            f" {2 * MIN_POINTS - 1} show no slope"
        )
    if not job.profile:
        absent |= dict.fromkeys(
            ("profile", "host_bound", "host_time_s"),
            "replicate 0 is profiled (measure.profile: first)",
        )
    if job.device == "cpu":
        absent |= dict.fromkeys(
            ("host_bound", "peak_memory_bytes", "device_uuid_sha256"),
            "no GPU: measured on the CPU",
        )
    return absent
