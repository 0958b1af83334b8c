"""A clock that is wrong is found by the clocks that it does not know: the ceiling, which it times
as well, cannot find it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from perfbench.records import OtherClocks, Replicate
from perfbench.worker import measure
from perfbench.worker.clock import CheckedClock, Clock, PerfCounterClock
from perfbench.worker.timing import time_samples
from tests.perfbench import builders
from tests.perfbench.fakes import FakeClock, FakeSampler, WrongClock
from tests.perfbench.jobs import cell_of, job
from tests.perfbench.measure_cases import PROOF, TELEMETRY, clock_faults


def measured(clock: Clock) -> Replicate:
    asked = job("v2", "forward", proof=PROOF, measure={"min_sample_ms": 5, "samples": 4})
    return measure.measure(asked, clock, FakeSampler(TELEMETRY))


def faults_of(row: Replicate, gpu: bool = False) -> list[str]:
    return clock_faults(builders.planned_cell(cell_of("v2", "forward")), row, gpu=gpu)


@pytest.mark.parametrize("factor", [100.0, 1.2, 0.5])
def test_a_wrong_clock_is_impossible(factor: float) -> None:
    row = measured(WrongClock(PerfCounterClock(), factor))
    assert row.other_clocks is not None
    [reason] = faults_of(row)
    assert "the clock is wrong" in reason and "the kernel's raw clock" in reason


def test_a_true_clock_passes() -> None:
    row = measured(PerfCounterClock())
    assert row.other_clocks is not None and faults_of(row) == []
    clocks = row.other_clocks
    assert clocks.threads == 1 and clocks.cpu_s <= 1.5 * clocks.raw_s
    assert clocks.gemm_raw_s and clocks.between_s == 0


class BusyMachine:
    """``clock`` on a machine that stops the process between the readings of two clocks."""

    is_of_host = True

    def __init__(self, clock: Clock, pause_s: float) -> None:
        self._clock, self._pause_s = clock, pause_s

    def now(self) -> float:
        return self._clock.now()

    def time_steps(
        self, step: Callable[[], None], steps: int, between: Callable[[], None] | None = None
    ) -> float:
        time.sleep(self._pause_s)
        found = self._clock.time_steps(step, steps, between)
        time.sleep(self._pause_s)
        return found


def test_a_process_that_is_stopped_between_two_readings_has_a_true_clock() -> None:
    row = measured(BusyMachine(PerfCounterClock(), 0.005))
    clocks = row.other_clocks
    assert clocks is not None
    assert clocks.raw_s > 1.1 * sum(row.samples_s), "the pauses are in the raw clock's seconds"
    assert clocks.gemm_aside_s > 0
    assert faults_of(row) == []


@pytest.mark.parametrize("factor", [1.1, 0.5])
def test_a_wrong_clock_is_impossible_on_a_busy_machine(factor: float) -> None:
    """What passed outside of the steps excuses no more than itself."""
    row = measured(BusyMachine(WrongClock(PerfCounterClock(), factor), 0.001))
    [reason] = faults_of(row)
    assert "the clock is wrong" in reason and "the kernel's raw clock" in reason


def test_what_passed_outside_of_the_steps_is_no_wrong_clock() -> None:
    assert faults_of(row_of([0.9] * 4, aside_s=0.3, cpu_s=3.6)) == []
    [reason] = faults_of(row_of([0.9] * 4, aside_s=0.2, cpu_s=3.6))
    assert "at most 0.2 s of it outside of the steps" in reason
    stopped = {"raw_s": 5.0, "aside_s": 2.0, "parent_s": 5.01, "cpu_s": 3.0}
    assert faults_of(row_of([1.0] * 3, **stopped)) == []
    [reason] = faults_of(row_of([1.0] * 3, **stopped | {"parent_s": 9.0}))
    assert "the parent's clock" in reason
    gemm = {"gemm_s": 0.5, "gemm_raw_s": 1.0}
    assert faults_of(row_of([1.0] * 4, **gemm, gemm_aside_s=0.5)) == []
    assert faults_of(row_of([1.0] * 4, **gemm, gemm_aside_s=0.3)) != []


def row_of(samples_s: list[float], gpu: bool = False, **clocks: Any) -> Replicate:
    known: dict[str, Any] = {"raw_s": 4.0, "cpu_s": 3.9, "threads": None if gpu else 1}
    cell = builders.planned_cell(cell_of("v2", "forward"))
    return builders.replicate(
        cell, gpu=gpu, samples_s=samples_s, other_clocks=OtherClocks(**{**known, **clocks})
    )


@pytest.mark.parametrize(
    ("samples_s", "clocks", "words"),
    [
        ([1.0] * 4, {}, ""),
        ([0.96] * 4, {}, "add up to 3.84 s, and the kernel's raw clock saw 4 s pass"),
        ([1.04] * 4, {"cpu_s": 4.1}, "add up to 4.16 s"),
        # Both clocks are fast: the CPU cannot have computed longer than it had.
        ([1.0] * 4, {"cpu_s": 5.0}, "1 threads cannot have used the 5 s of CPU time"),
        ([1.0] * 4, {"cpu_s": 7.0, "threads": 2}, ""),
        ([1.0] * 4, {"gemm_s": 0.5, "gemm_raw_s": 1.0}, "the GEMM's repeats add up to 0.5 s"),
        ([1.0] * 4, {"gemm_s": 1.0, "gemm_raw_s": 1.0}, ""),
    ],
)
def test_each_clock_has_a_say(samples_s: list[float], clocks: dict[str, Any], words: str) -> None:
    found = faults_of(row_of(samples_s, **clocks))
    assert (words == "" and found == []) or (len(found) == 1 and words in found[0])


def test_flushes_may_be_in_the_raw_clock_alone_and_no_more() -> None:
    flushed = {"gpu": True, "between_s": 0.5}
    assert faults_of(row_of([0.8] * 4, **flushed), gpu=True) == []
    [reason] = faults_of(row_of([0.6] * 4, **flushed), gpu=True)
    assert "at most 1 s of it outside of the steps" in reason
    assert faults_of(row_of([1.1] * 4, **flushed), gpu=True), "never more than passed"


def test_the_window_s_flushes_are_timed_alone() -> None:
    flushes: list[int] = []
    options = job(measure={"samples": 3, "min_sample_ms": 1}).measure
    timed = time_samples(
        lambda: None, 0.01, options, FakeClock(), FakeSampler(TELEMETRY), lambda: flushes.append(1)
    )
    assert timed.between_s > 0 and len(flushes) > timed.num_steps


def test_an_older_row_has_no_other_clock() -> None:
    cell = builders.planned_cell(cell_of("v2", "forward"))
    assert faults_of(builders.replicate(cell, gpu=False)) == []


def test_a_checked_clock_adds_up_both() -> None:
    checked = CheckedClock(FakeClock(0.5))
    assert checked.time_steps(lambda: None, 4) == 2.0 and checked.clock_s == 2.0
    assert 0 < checked.raw_s < checked.clock_s and checked.now() == 2.0
