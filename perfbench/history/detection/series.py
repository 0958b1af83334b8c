"""The changes of a series: segments that may not be compared, and the shifts within each."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from perfbench.history.detection.noise import Floats
from perfbench.history.detection.shifts import NEIGHBOURS, STRICTNESS, Shift, find_shifts
from perfbench.history.nouns import Better, ChangeKind, ChangePoint, Metric, Series, SeriesPoint

DAY_S = 86_400
MONDAY = datetime(1970, 1, 5, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class SegmentStart:
    """A point that may not be compared with the one before it: ``changed`` maps each key of the
    segment that differs to its old and its new value (null: it was not there).
    """

    before_run_id: str
    run_id: str
    measured_utc: datetime
    changed: Mapping[str, tuple[str | None, str | None]]


@dataclass(frozen=True, slots=True)
class FoundChange:
    """A change point and where it may lie: ``first`` and ``last`` are the earliest and the latest
    time that it may turn out to have, as more points come.
    """

    change: ChangePoint
    first: datetime
    last: datetime


def find_changes(
    series: Series,
    *,
    cuts: Collection[str] = (),
    strictness: float = STRICTNESS,
) -> list[FoundChange]:
    """Steps and drifts of every segment, oldest first. Points without a value change nothing.

    ``cuts``: runs from which on nothing before is compared, as at a new segment.
    """
    points = series.without_gaps().points
    found = []
    for part in _parts(points, frozenset(cuts)):
        values, is_log = _numbers(part)
        days = np.array([(one.measured_utc - MONDAY).total_seconds() // DAY_S for one in part])
        for shift in find_shifts(values, days.astype(np.int64), strictness=strictness):
            found.append(_found(series, part, shift, is_log))
    return found


def segment_starts(points: Sequence[SeriesPoint]) -> list[SegmentStart]:
    """Where a new segment begins, oldest first; a point without a value belongs to one, too."""
    return [
        SegmentStart(old.run_id, new.run_id, new.measured_utc, _changed(old.segment, new.segment))
        for old, new in pairwise(points)
        if old.segment != new.segment
    ]


def _changed(
    old: Mapping[str, str], new: Mapping[str, str]
) -> Mapping[str, tuple[str | None, str | None]]:
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return MappingProxyType({name: (old.get(name), new.get(name)) for name in names})


def _parts(points: Sequence[SeriesPoint], cuts: frozenset[str]) -> Iterator[list[SeriesPoint]]:
    part: list[SeriesPoint] = []
    for point in points:
        if part and (point.segment != part[-1].segment or point.run_id in cuts):
            yield part
            part = []
        part.append(point)
    if part:
        yield part


def _numbers(points: Sequence[SeriesPoint]) -> tuple[Floats, bool]:
    """(values [n] on a scale where noise adds, whether that is ln): speeds, times and sizes are
    compared by their ratio; a series that has a value of 0 or less, by difference.
    """
    values = np.array([point.value for point in points], dtype=np.float64)
    if len(values) and float(values.min()) > 0:
        return np.log(values), True
    return values, False


def _found(series: Series, part: Sequence[SeriesPoint], shift: Shift, is_log: bool) -> FoundChange:
    before, point = part[shift.before], part[shift.place]
    size, low, high = (
        _pct(change, shift.old_level, is_log) for change in (shift.size, shift.low, shift.high)
    )
    change = ChangePoint(
        series.key,
        shift.kind,
        before.run_id,
        point.run_id,
        before.commit,
        point.commit,
        point.measured_utc,
        size,
        low,
        high,
        _is_worse(series.metric, size),
        p_of(shift.z),
    )
    if shift.kind is ChangeKind.DRIFT:
        first, last = shift.before - NEIGHBOURS, shift.place + NEIGHBOURS
    else:
        first, last = shift.place - shift.slack, shift.place + shift.slack
    return FoundChange(
        change,
        part[max(first, 0)].measured_utc,
        part[min(last, len(part) - 1)].measured_utc,
    )


def _pct(change: float, old_level: float, is_log: bool) -> float:
    """Of the old level; of a level of 0, in units of the metric times 100."""
    if is_log:
        return 100 * math.expm1(change)
    return 100 * change / (abs(old_level) or 1.0)


def _is_worse(metric: Metric, size: float) -> bool | None:
    if metric.better is Better.NEITHER:
        return None
    return (size < 0) is (metric.better is Better.HIGHER)


def p_of(z: float) -> float:
    """Two-sided, of one place looked at once: the search over places is in the bound on z."""
    from scipy.special import ndtr

    return float(2 * ndtr(-abs(z)))
