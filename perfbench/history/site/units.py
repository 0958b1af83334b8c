"""Values with their unit, as a page shows them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from perfbench.history.next_command import COMMIT_CHARS
from perfbench.history.nouns import Metric, Series
from perfbench.text import NULL, number

GIB = 2**30


def shown(value: float | None, unit: str) -> str:
    """Four significant digits."""
    return NULL if value is None else f"{number(value, 4)} {unit}".rstrip()


def in_shown_unit(metric: Metric) -> tuple[Metric, float]:
    """The metric as pages show it, and what its values are divided by: GiB for bytes."""
    if metric.unit == "bytes":
        return replace(metric, unit="GiB"), GIB
    return metric, 1.0


def series_in_shown_unit(series: Series) -> Series:
    metric, scale = in_shown_unit(series.metric)
    if scale == 1:
        return series
    points = tuple(
        replace(
            one,
            value=divided(one.value, scale),
            low=divided(one.low, scale),
            high=divided(one.high, scale),
        )
        for one in series.points
    )
    return replace(series, metric=metric, points=points)


def divided(value: float | None, scale: float) -> float | None:
    return None if value is None else value / scale


def minute(when: datetime) -> str:
    """'2026-11-29 02:17', in UTC."""
    return f"{_utc(when):%Y-%m-%d %H:%M}"


def iso(when: datetime) -> str:
    return f"{_utc(when):%Y-%m-%dT%H:%M:%SZ}"


def _utc(when: datetime) -> datetime:
    return when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)


def short_commit(commit: str | None) -> str:
    return commit[:COMMIT_CHARS] if commit else "?"
