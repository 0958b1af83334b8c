"""Steady state, cycles, energy: from the samples and the telemetry of one window, each null with
its reason.
"""

from __future__ import annotations

import itertools

import pytest

from perfbench.records.job import MeasureOptions
from perfbench.records.rows import Telemetry
from perfbench.worker.timing import NUM_FLUSHES, Timed, time_samples, warm_up
from tests.perfbench import builders
from tests.perfbench.fakes import FakeClock, FakeSampler

STEP_S = 1 / 1024


def nothing() -> None:
    """A step."""


def timed(telemetry: Telemetry, *, flushed: bool = False) -> Timed:
    """Median 0.06 s of 3 steps: 0.02 s a step, and 12 steps in all."""
    return Timed([0.06, 0.06, 0.05, 0.09], 3, {}, telemetry, flushed)


def test_a_level_warm_up_is_steady() -> None:
    warmth = warm_up(nothing, FakeClock(STEP_S), MeasureOptions(warmup_s=0.5))
    assert (warmth.step_s, warmth.steady) == (STEP_S, True) and warmth.num_samples > 20


def test_one_that_ran_into_its_cap_is_not() -> None:
    clock = FakeClock(STEP_S * (1 + 0.001 * i) for i in itertools.count())
    warmth = warm_up(nothing, clock, MeasureOptions(warmup_s=0.5))
    assert warmth.steady is False and 2.0 <= clock.now() < 2.2


def test_too_few_samples_show_nothing() -> None:
    warmth = warm_up(nothing, FakeClock(0.2), MeasureOptions(warmup_s=0.25))
    assert warmth.steady is None and warmth.step_s == pytest.approx(0.2)
    assert warm_up(nothing, FakeClock(STEP_S), MeasureOptions(warmup_s=0.0)).steady is None


@pytest.mark.parametrize(("drift_per_s", "steady"), [(0.0005, True), (0.003, False)])
def test_the_slope_is_relative_to_seconds_whatever_the_length_of_a_step(
    drift_per_s: float, steady: bool
) -> None:
    """0.05 % a second is level and 0.3 % is not, also where a sample holds twenty steps."""
    clock = FakeClock(STEP_S * (1 + drift_per_s * i * STEP_S) for i in itertools.count())
    warmth = warm_up(nothing, clock, MeasureOptions(warmup_s=1.0))
    assert warmth.steady is steady
    assert (clock.now() < 1.1) is steady


def test_what_runs_between_steps_is_not_in_the_samples() -> None:
    clock = FakeClock(0.01)
    options = MeasureOptions(min_sample_ms=40, samples=3)
    found = time_samples(
        nothing, 0.01, options, clock, FakeSampler(builders.telemetry()), lambda: clock.advance(1.0)
    )
    assert (
        found.samples_s == [pytest.approx(0.04)] * 3
        and found.flushed
        and clock.now() == pytest.approx(12.12 + NUM_FLUSHES * 1.01)
    )
    assert not time_samples(
        nothing, 0.01, options, clock, FakeSampler(builders.telemetry())
    ).flushed


def test_cycles_are_seconds_times_the_sm_clock() -> None:
    row = timed(builders.telemetry(sm_clock_mhz=1500.0)).facts(64)
    assert row["tok_per_s"] == pytest.approx(3200) and row["cycles_per_step"] == pytest.approx(30e6)
    assert "cycles_per_step" not in row["absent"]


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (
            {"sm_clock_mhz": None, "absent": {"sm_clock_mhz": "NVML_ERROR_NOT_SUPPORTED"}},
            "NVML_ERROR_NOT_SUPPORTED",
        ),
        ({"sm_clock_mhz": 0.0}, "0.0 MHz"),
    ],
)
def test_no_clock_no_cycles(seen: dict[str, object], why: str) -> None:
    row = timed(builders.telemetry(**seen)).facts(64)
    assert row["cycles_per_step"] is None and why in row["absent"]["cycles_per_step"]


def test_energy_per_token_needs_two_seconds() -> None:
    """600 J over 12 steps of 64 tokens."""
    row = timed(builders.telemetry(energy_j=600.0, window_s=2.0)).facts(64)
    assert row["energy_j_per_token"] == pytest.approx(0.78125) and row["absent"] == {}


@pytest.mark.parametrize(
    ("seen", "flushed", "why"),
    [
        ({"energy_j": 600.0, "window_s": 1.99}, False, "shorter than 2 s"),
        (
            {"energy_j": None, "window_s": 3.0, "absent": {"energy_j": "NVML_ERROR_NOT_SUPPORTED"}},
            False,
            "NVML_ERROR_NOT_SUPPORTED",
        ),
        ({"energy_j": None, "window_s": 3.0}, False, "NVML gave no energy"),
        ({"energy_j": 0.0, "window_s": 3.0}, False, "moved by 0 J"),
        ({"energy_j": 600.0, "window_s": 3.0}, True, "L2 flushes"),
    ],
)
def test_energy_that_is_not_known(seen: dict[str, object], flushed: bool, why: str) -> None:
    row = timed(builders.telemetry(**seen), flushed=flushed).facts(64)
    assert row["energy_j_per_token"] is None and why in row["absent"]["energy_j_per_token"]
