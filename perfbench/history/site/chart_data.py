"""What a chart shows of a series: its points, change points, levels, segments and baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import Any

from perfbench.history.nouns import (
    ChangeKind,
    ChangePoint,
    Series,
    SeriesPoint,
    Triage,
    TriageKind,
)
from perfbench.history.segments import segment_differences
from perfbench.history.site.decided import decided_text, remark
from perfbench.history.site.units import short_commit

DIGITS = 6  # significant, of a value in a page's data
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The runs that a page's series share, oldest first.

    ``places``: run id -> index. ``orders``: of each run its place by the age of its commit; runs of
    one commit follow one another. ``commits``: the short commit at each of those places.
    """

    points: tuple[SeriesPoint, ...]
    places: Mapping[str, int]
    orders: tuple[int, ...]
    commits: tuple[str, ...]


def timeline(
    every: Iterable[Series], commit_times: Mapping[str, datetime] | None = None
) -> Timeline:
    """The runs of all ``every``; ``commit_times`` orders commits, by first measurement without."""
    found = {point.run_id: point for series in every for point in series.points}
    points = tuple(sorted(found.values(), key=lambda one: (one.measured_utc, one.run_id)))
    first: dict[str, datetime] = {}
    for point in points:
        first.setdefault(point.commit or point.run_id, point.measured_utc)
    first |= {name: when for name, when in (commit_times or {}).items() if name in first}

    def age(index: int) -> tuple[datetime, str, int]:
        name = points[index].commit or points[index].run_id
        return first[name], name, index

    by_commit = sorted(range(len(points)), key=age)
    orders = {index: place for place, index in enumerate(by_commit)}
    commits = tuple(short_commit(points[index].commit) for index in by_commit)
    places = {point.run_id: index for index, point in enumerate(points)}
    return Timeline(points, places, tuple(orders[i] for i in range(len(points))), commits)


def milliseconds(when: datetime) -> int:
    """Since 1970, UTC; a time without a zone is UTC."""
    aware = when if when.tzinfo else when.replace(tzinfo=UTC)
    return round(aware.timestamp() * 1000)


def rounded(value: float | None) -> float | None:
    """``value`` with `DIGITS` significant digits; null for infinity and NaN, which JSON lacks."""
    if value is None or value != value or value in (float("inf"), float("-inf")):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short


def runs_columns(line: Timeline) -> dict[str, Any]:
    """Of each run: when it was measured, its place by commit, whether a segment begins."""
    segments = [point.segment for point in line.points]
    begins = [int(bool(segment_differences(old, new))) for old, new in pairwise(segments)]
    return {
        "time": [milliseconds(point.measured_utc) for point in line.points],
        "order": list(line.orders),
        "fresh": [0, *begins] if segments else [],
        "commits": list(line.commits),
    }


def series_columns(series: Series, line: Timeline) -> dict[str, Any]:
    """The values of a series by column. ``at``: the index of each point's run; without it there is
    one for every run. ``why``: index -> why there is no value.
    """
    points = series.points
    at = [line.places[point.run_id] for point in points]
    columns: dict[str, Any] = {
        "value": [rounded(point.value) for point in points],
        "low": [rounded(point.low) for point in points],
        "high": [rounded(point.high) for point in points],
        "count": [point.count for point in points],
        "why": {str(i): p.reason for i, p in zip(at, points, strict=True) if p.value is None},
    }
    for name in ("low", "high"):
        if not any(one is not None for one in columns[name]):
            columns[name] = []
    if len(at) < len(line.points):
        columns["at"] = at
    return columns


def segment_changes(line: Timeline) -> list[Row]:
    """Where what was measured with changed, and what: driver, torch, card, method."""
    found = []
    for index, (old, new) in enumerate(pairwise(point.segment for point in line.points), 1):
        if differences := segment_differences(old, new):
            changed = [
                f"{name} {before or 'none'} → {after or 'none'}"
                for name, (before, after) in differences.items()
            ]
            found.append({"i": index, "text": ", ".join(changed), "short": ", ".join(differences)})
    return found


def change_marks(
    changes: Sequence[ChangePoint],
    line: Timeline,
    decided: Mapping[ChangePoint, Triage] = MappingProxyType({}),
) -> list[Row]:
    """Change points whose runs are shown: ``i`` is the first run of the new level, ``from`` the
    last of the old one. ``worse`` is null of one that was decided; ``decided`` is the decision.
    """
    return [
        {
            "i": line.places[one.run_id],
            "from": line.places[one.before_run_id],
            "kind": one.kind.value,
            "pct": rounded(one.size_pct),
            "low": rounded(one.low_pct),
            "high": rounded(one.high_pct),
            "worse": None if one in decided else one.is_worse,
            "decided": decided_text(decided[one]) if one in decided else "",
        }
        for one in changes
        if one.run_id in line.places and one.before_run_id in line.places
    ]


def accepted_rows(decisions: Sequence[Triage], line: Timeline) -> list[Row]:
    """Triage on runs that are shown, with who decided it and why."""
    return [
        {
            "i": line.places[one.run_id],
            "kind": one.kind.value,
            "text": remark(one),
        }
        for one in decisions
        if one.run_id in line.places
    ]


def levels(
    series: Series,
    line: Timeline,
    changes: Sequence[ChangePoint],
    decisions: Sequence[Triage] = (),
) -> list[Row]:
    """The median between two boundaries: a step, a new segment, an accepted level. While a series
    drifts it has no level.
    """
    points = series.points
    starts, drifting = {0}, set[int]()
    index_of = {point.run_id: index for index, point in enumerate(points)}
    accepted = {one.run_id for one in decisions if one.kind == TriageKind.ACCEPTED}
    for one in changes:
        begin, end = index_of.get(one.before_run_id), index_of.get(one.run_id)
        if begin is None or end is None:
            continue
        if one.kind == ChangeKind.DRIFT:
            starts |= {begin, end + 1}
            drifting.add(begin)
        else:
            starts.add(end)
    for index, (old, new) in enumerate(pairwise(points), 1):
        if segment_differences(old.segment, new.segment) or new.run_id in accepted:
            starts.add(index)
    ordered = [*sorted(start for start in starts if start < len(points)), len(points)]
    found = []
    for start, stop in pairwise(ordered):
        values = [one.value for one in points[start:stop] if one.value is not None]
        if values and start not in drifting:
            ends = line.places[points[start].run_id], line.places[points[stop - 1].run_id]
            found.append({"i": ends[0], "to": ends[1], "level": rounded(median(values))})
    return found
