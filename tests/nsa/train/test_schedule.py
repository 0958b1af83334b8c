"""Learning rates at points that are known without the formula, and their shape between."""

from __future__ import annotations

import itertools

import pytest

from nsa.train.config import SCHEDULES, LoopConfig
from nsa.train.schedule import learning_rate


def of(schedule: str, **values: float) -> LoopConfig:
    given = {
        "steps": 100,
        "warmup_steps": 9,
        "lr": 1.0,
        "min_lr_ratio": 0.1,
        "decay_steps": 20,
        **values,
    }
    return LoopConfig(schedule=schedule, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_and_never_zero(schedule: str) -> None:
    rates = [learning_rate(step, of(schedule)) for step in range(10)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])


# cos 60 degrees is 1/2, cos 90 is 0, cos 120 is -1/2
@pytest.mark.parametrize(
    "step, rate", [(0, 1.0), (40, 0.775), (60, 0.55), (80, 0.325), (120, 0.1), (500, 0.1)]
)
def test_cosine(step: int, rate: float) -> None:
    assert learning_rate(step, of("cosine", steps=120, warmup_steps=0)) == pytest.approx(rate)


def test_cosine_begins_after_the_warm_up() -> None:
    config = of("cosine", steps=129, lr=2.0)  # 9 of warm-up, 120 of cosine
    assert learning_rate(9, config) == 2.0
    assert learning_rate(69, config) == pytest.approx(1.1)


@pytest.mark.parametrize(
    "step, rate", [(10, 1.0), (50, 1.0), (80, 1.0), (85, 0.775), (90, 0.55), (100, 0.1), (101, 0.1)]
)
def test_wsd_is_constant_then_linear(step: int, rate: float) -> None:
    assert learning_rate(step, of("wsd")) == pytest.approx(rate)


def test_constant() -> None:
    assert {learning_rate(step, of("constant")) for step in (9, 10, 99, 10_000)} == {1.0}


@pytest.mark.parametrize("warmup", [0, 1, 9, 95, 100, 300])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rises_then_falls_without_a_jump(schedule: str, warmup: int) -> None:
    config = of(schedule, warmup_steps=warmup)
    rates = [learning_rate(step, config) for step in range(120)]
    top = rates.index(max(rates))
    pairs = list(itertools.pairwise(rates))
    assert all(a <= b for a, b in pairs[:top]) and all(a >= b for a, b in pairs[top:])
    # the steepest slope: of a warm-up's 1 / (warmup + 1), a decay over at least 1 step, a cosine
    slope = max(1 / (warmup + 1), 0.9 / 20, 0.9 * 1.571 / max(1, 100 - warmup))
    assert all(abs(a - b) <= slope + 1e-12 for a, b in pairs)
    assert all(0 < rate <= 1 for rate in rates)


def test_a_step_before_the_first_is_refused() -> None:
    with pytest.raises(ValueError, match="step=-1"):
        learning_rate(-1, of("cosine"))
