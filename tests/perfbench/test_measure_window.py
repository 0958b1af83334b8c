"""How long a replicate warms up, how many samples it takes and how long each lasts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from perfbench.records.rows import Status
from perfbench.worker.timing import is_level
from tests.perfbench.fakes import FakeClock
from tests.perfbench.jobs import job
from tests.perfbench.measure_cases import PROOF, STEP_S, Watch, run, stub

pytestmark = pytest.mark.usefixtures("one_thread", "light")


@pytest.mark.parametrize("samples", [1, 2, 7])
def test_a_fixed_number_of_samples(monkeypatch: pytest.MonkeyPatch, samples: int) -> None:
    stub(monkeypatch)
    row = run(job(proof=PROOF, measure={"samples": samples, "max_s": 0.001}))
    assert len(row.samples_s) == samples, "max_s does not cut a fixed number short"


@pytest.mark.parametrize(
    ("min_sample_ms", "steps"), [(0.001, 1), (7.8, 1), (8, 2), (50, 7), (1000, 128)]
)
def test_samples_last_at_least_min_sample_ms(
    monkeypatch: pytest.MonkeyPatch, min_sample_ms: float, steps: int
) -> None:
    counted = stub(monkeypatch)
    clock = FakeClock(STEP_S)
    watch = Watch(clock, counted)
    row = run(
        job(proof=PROOF, measure={"samples": 3, "min_sample_ms": min_sample_ms}), clock, watch
    )
    assert row.steps_per_sample == steps and row.samples_s == [steps * STEP_S] * 3
    assert min(row.samples_s) * 1e3 >= min_sample_ms
    assert counted.steps - watch.steps_before == 3 * steps and row.tok_per_s == 64 / STEP_S


@pytest.mark.parametrize(("max_s", "count"), [(1.0, 16), (0.5, 8), (0.01, 3)])
def test_max_s_ends_the_window(monkeypatch: pytest.MonkeyPatch, max_s: float, count: int) -> None:
    """Full samples until the time is up, and never fewer than three."""
    stub(monkeypatch)
    clock = FakeClock(STEP_S)
    watch = Watch(clock)
    row = run(
        job(
            proof=PROOF,
            measure={"samples": None, "max_s": max_s, "min_sample_ms": 8 * STEP_S * 1e3},
        ),
        clock,
        watch,
    )
    assert row.steps_per_sample == 8 and len(row.samples_s) == count
    assert watch.closed_s - watch.opened_s == sum(row.samples_s)


def warm_up_s(
    monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float] | float, warmup_s: float
) -> float:
    stub(monkeypatch)
    clock = FakeClock(seconds)
    watch = Watch(clock)
    row = run(job(proof=PROOF, measure={"warmup_s": warmup_s}), clock, watch)
    assert row.status is Status.OK and row.samples_s
    return watch.opened_s


def test_a_level_series_is_warm_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted_s in (0.5, 2.0):
        assert wanted_s <= warm_up_s(monkeypatch, STEP_S, wanted_s) < wanted_s + 0.1
    rng = random.Random(4)
    noisy = (STEP_S * (1 + 0.05 * rng.gauss(0, 1)) for _ in itertools.count())
    wanted_s = 0.5
    assert wanted_s <= warm_up_s(monkeypatch, noisy, wanted_s) < 2 * wanted_s


def test_warm_up_goes_on_while_it_gets_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    settling = (STEP_S * (1 + 2 * 0.97**i) for i in itertools.count())
    wanted_s = 0.5
    cap_s = 4 * wanted_s
    assert 2 * wanted_s < warm_up_s(monkeypatch, settling, wanted_s) < cap_s + 0.1


@pytest.mark.parametrize(("warmup_s", "cap_s"), [(0.25, 1.0), (1.0, 4.0), (2.0, 5.0), (3.0, 5.0)])
def test_warm_up_is_capped(monkeypatch: pytest.MonkeyPatch, warmup_s: float, cap_s: float) -> None:
    rising = (STEP_S * (1 + 0.01 * i) for i in itertools.count())
    assert cap_s <= warm_up_s(monkeypatch, rising, warmup_s) < cap_s + 0.3


def test_no_warm_up_still_sizes_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warm_up_s(monkeypatch, STEP_S, 0.0) < 13 * STEP_S


def test_the_warmed_up_speed_sizes_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cold first steps, many times slower, must not make samples many times too short."""
    stub(monkeypatch)
    seconds = itertools.chain([32 * STEP_S, 16 * STEP_S, 8 * STEP_S], itertools.repeat(STEP_S))
    row = run(
        job(proof=PROOF, measure={"min_sample_ms": 8 * STEP_S * 1e3, "warmup_s": 1.0}),
        FakeClock(seconds),
    )
    assert row.steps_per_sample == 8


def test_is_level_on_series() -> None:
    level = [0.02] * 50
    assert is_level(level)
    assert not is_level(level[:3]), "three points show no slope"
    for drift in (0.01, -0.01, 0.5):  # a second, relative
        assert not is_level([0.02 * (1 + drift * 0.02 * i) for i in range(50)])
    assert is_level([0.02 * (1 + 0.0005 * 0.02 * i) for i in range(50)]), (
        "half of what counts as a slope"
    )


def test_is_level_amid_noise() -> None:
    def series(seed: int, drift: float, noise: float = 0.02) -> list[float]:
        rng = random.Random(seed)
        return [0.02 * (1 + drift * 0.02 * i + noise * rng.gauss(0, 1)) for i in range(100)]

    assert sum(is_level(series(seed, 0.0)) for seed in range(100)) >= 85, (
        "two standard errors: 95 of 100"
    )
    for drift in (0.02, -0.02, 0.2):  # the smaller ones are six standard errors
        assert sum(is_level(series(seed, drift)) for seed in range(100)) <= 1
