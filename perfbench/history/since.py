"""Each point of a series next to the one before it: the rows of "what changed since".

Pure: reads no clock and no database.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from perfbench.gate import severity
from perfbench.history.nouns import Metric, Series, SeriesKey, SeriesPoint
from perfbench.history.segments import Segment, segment_differences, segment_so_far
from perfbench.records import Verdict


@dataclass(frozen=True, slots=True)
class ChangeRow:
    """A point, and how it differs from the point with a value before it.

    ``change_pct``: of the value; null without one, and where the two may not be compared.
    ``began``: what is not as it was there ('torch: 2.11.0 -> 2.12.0'), so that a new level begins.
    """

    key: SeriesKey
    metric: Metric
    point: SeriesPoint
    change_pct: float | None
    began: str = ""

    @property
    def remark(self) -> str:
        """Why there is no value, or why there is no change."""
        if self.point.value is None:
            return self.point.reason
        return self.began


def change_rows(series: Series) -> list[ChangeRow]:
    """A row for each point, newest first."""
    found, before = list[ChangeRow](), None
    segment: Segment = {}
    for point in series.points:
        change, began = _against(before, segment, point)
        found.append(ChangeRow(series.key, series.metric, point, change, began))
        if point.value is not None:
            known = {} if began else segment
            before, segment = point, segment_so_far(known, point.segment)
    return found[::-1]


def newest_first(rows: Iterable[ChangeRow]) -> list[ChangeRow]:
    """By time; of one run the worst verdict and the largest change first."""
    return sorted(rows, key=_order)


def _against(
    before: SeriesPoint | None, segment: Segment, point: SeriesPoint
) -> tuple[float | None, str]:
    """``segment``: of ``before``."""
    if before is None or before.value is None:
        return None, ""
    if changed := segment_differences(segment, point.segment):
        return None, "; ".join(f"{key}: {old} -> {new}" for key, (old, new) in changed.items())
    if point.value is None or before.value == 0:
        return None, ""
    return round(100 * (point.value / before.value - 1), 9) + 0.0, ""


def _order(row: ChangeRow) -> tuple[float, str, tuple[int, int], float, SeriesKey]:
    point = row.point
    try:
        rank = severity(Verdict(point.verdict or ""))
    except ValueError:  # another tool's, or nothing was compared
        rank = (len(Verdict), 0)
    since: datetime = point.measured_utc
    return -since.timestamp(), point.run_id, rank, -abs(row.change_pct or 0.0), row.key
