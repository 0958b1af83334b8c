"""The changes of a series: segments that may not be compared, and the shifts within each."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from perfbench.history.detection.noise import Floats
from perfbench.history.detection.shifts import NEIGHBOURS, STRICTNESS, Shift, find_shifts
from perfbench.history.nouns import Better, ChangeKind, ChangePoint, Metric, Series, SeriesPoint
from perfbench.history.segments import (
    Differences,
    Segment,
    segment_differences,
    segment_so_far,
)

DAY_S = 86_400
ROUNDING = 1e-9  # of a change: a level of so little is 0
LARGEST = 1e100  # beyond it, and of positive values below its inverse, nothing is compared
MONDAY = datetime(1970, 1, 5, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class SegmentStart:
    """A point that may not be compared with the one before it: ``changed`` maps each key of the
    segment that differs to its old and its new value (null: it was not there).
    """

    before_run_id: str
    run_id: str
    measured_utc: datetime
    changed: Differences


@dataclass(frozen=True, slots=True)
class FoundChange:
    """A change point and where it may lie: ``first`` and ``last`` are the earliest and the latest
    time that it may turn out to have, as more points come.

    ``old_level`` and ``new_level``: in the metric's unit; of a drift, where it begins and ends.
    """

    change: ChangePoint
    first: datetime
    last: datetime
    old_level: float
    new_level: float


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


def why_not_judged(series: Series) -> str:
    """Why its values cannot be compared, whose squares would overflow; '' where they can."""
    values = [one.value for one in series.points if one.value is not None]
    if not values:
        return ""
    low, high = min(values), max(values)
    if max(high, -low) > LARGEST:
        far = high if high > -low else low
        return f"a value of {far:.3g} is too large to be compared"
    if 0 < low < 1 / LARGEST:
        return f"a value of {low:.3g} is too small to be compared"
    return ""


def segment_starts(points: Sequence[SeriesPoint]) -> list[SegmentStart]:
    """Where a new segment begins, oldest first; a point without a value belongs to one, too."""
    found = []
    before: SeriesPoint | None = None
    segment: Segment = {}
    for point in points:
        changed = {} if before is None else segment_differences(segment, point.segment)
        if before is not None and changed:
            found.append(SegmentStart(before.run_id, point.run_id, point.measured_utc, changed))
        segment = segment_so_far({} if changed else segment, point.segment)
        before = point
    return found


def _parts(points: Sequence[SeriesPoint], cuts: frozenset[str]) -> Iterator[list[SeriesPoint]]:
    part: list[SeriesPoint] = []
    segment: Segment = {}
    for point in points:
        if part and (segment_differences(segment, point.segment) or point.run_id in cuts):
            yield part
            part = []
        segment = segment_so_far(segment if part else {}, point.segment)
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
    old_level, new_level = shift.old_level, shift.old_level + shift.size
    if abs(old_level) <= ROUNDING * abs(shift.size):
        old_level = 0.0
    size, low, high = (
        _pct(change, old_level, is_log) for change in (shift.size, shift.low, shift.high)
    )
    if is_log:
        old_level, new_level = math.exp(shift.old_level), math.exp(new_level)
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
        old_level,
        new_level,
    )


def _pct(change: float, old_level: float, is_log: bool) -> float:
    """Of the old level. Of a level of 0 no percentage exists: a finite number that orders changes
    and has their sign, 100 times the difference, which is never printed.
    """
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
