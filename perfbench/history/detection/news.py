"""Which changes are news: not those that were reported, accepted, or called noise.

Nothing is stored here: `History` remembers what was reported and what somebody decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from perfbench.history.detection.series import (
    FoundChange,
    SegmentStart,
    find_changes,
    segment_starts,
    why_not_judged,
)
from perfbench.history.nouns import ChangeKind, ChangePoint, Series, Triage, TriageKind


class News(StrEnum):
    """What is known about a change that was found."""

    NEW = "new"
    REPORTED = "reported"
    ACCEPTED = "accepted"
    NOISE = "noise"


@dataclass(frozen=True, slots=True)
class JudgedChange:
    """A change point, what is known about it, and what was noted about its run.

    ``levels``: old and new, in the metric's unit. ``dirty``: which of the two runs between which
    it lies were of a tree with uncommitted changes.
    """

    change: ChangePoint
    news: News
    levels: tuple[float, float]
    notes: tuple[str, ...] = ()
    dirty: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SeriesChanges:
    """All of one series, oldest first. ``skipped``: why nothing was looked for; '' where it was."""

    series: Series
    changes: tuple[JudgedChange, ...]
    segments: tuple[SegmentStart, ...]
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a history remembers: changes that were reported, decisions, and when runs were made.

    ``times``: measured_utc of the runs that decisions name, by run_id.
    """

    reported: Mapping[object, Sequence[ChangePoint]]  # by SeriesKey
    decisions: Sequence[Triage]
    times: Mapping[str, datetime]

    @classmethod
    def of(
        cls,
        reported: Iterable[ChangePoint],
        decisions: Iterable[Triage],
        times: Mapping[str, datetime],
    ) -> Remembered:
        """From what `History` gives."""
        by_key: dict[object, list[ChangePoint]] = {}
        for change in reported:
            by_key.setdefault(change.key, []).append(change)
        return cls(by_key, tuple(decisions), times)


def judge_series(series: Series, memory: Remembered) -> SeriesChanges:
    """What changed in a series, and which of it is news.

    A run that was accepted makes what changed until then the level: a step at it or before it is
    accepted, and a drift that goes on through it counts from it. Of two decisions about one change
    the last one wins.
    """
    if why := why_not_judged(series):
        return SeriesChanges(series, (), tuple(segment_starts(series.points)), why)
    decisions = [one for one in memory.decisions if one.matches(series.key)]
    accepted = sorted(_times(decisions, TriageKind.ACCEPTED, memory))
    found = find_changes(series)
    if cuts := _cuts(series, found, accepted):
        found = find_changes(series, cuts=cuts)
    reported = memory.reported.get(series.key, ())
    starts = {point.run_id: point.measured_utc for point in series.points}
    dirty = {point.run_id for point in series.points if point.is_dirty}
    judged = []
    for one in found:
        news = _decided(one, decisions, memory)
        if news is None:
            news = News.NEW
            if any(_is_same(one, known, starts) for known in reported):
                news = News.REPORTED
        notes = tuple(
            decision.note
            for decision in decisions
            if decision.note and decision.run_id in (one.change.run_id, one.change.before_run_id)
        )
        sides = (one.change.before_run_id, one.change.run_id)
        levels = (one.old_level, one.new_level)
        of_dirty = tuple(side for side in sides if side in dirty)
        judged.append(JudgedChange(one.change, news, levels, notes, of_dirty))
    return SeriesChanges(series, tuple(judged), tuple(segment_starts(series.points)))


def _decided(one: FoundChange, decisions: Sequence[Triage], memory: Remembered) -> News | None:
    """What the last decision about a change says; null where there is none."""
    for decision in sorted(decisions, key=lambda made: made.created_utc, reverse=True):
        when = memory.times.get(decision.run_id)
        if when is None:
            continue
        if decision.kind is TriageKind.ACCEPTED and one.change.measured_utc <= when:
            return News.ACCEPTED
        if decision.kind is TriageKind.NOISE and one.first <= when <= one.last:
            return News.NOISE
    return None


def _times(decisions: Sequence[Triage], kind: TriageKind, memory: Remembered) -> Iterator[datetime]:
    for decision in decisions:
        if decision.kind is kind and decision.run_id in memory.times:
            yield memory.times[decision.run_id]


def _cuts(series: Series, found: Sequence[FoundChange], accepted: Sequence[datetime]) -> list[str]:
    """The first run at or after each acceptance that a drift goes through."""
    starts = {point.run_id: point.measured_utc for point in series.points}
    cuts = []
    for when in accepted:
        for one in found:
            change = one.change
            begun = starts[change.before_run_id]
            if change.kind is ChangeKind.DRIFT and begun < when < change.measured_utc:
                cuts += [run_id for run_id, at in starts.items() if at >= when][:1]
    return cuts


def _is_same(one: FoundChange, known: ChangePoint, starts: Mapping[str, datetime]) -> bool:
    """Whether ``known`` is what was found, as it looked with fewer points, and not much smaller."""
    change = one.change
    if (change.size_pct < 0) is not (known.size_pct < 0):
        return False
    begun = known.measured_utc
    if known.kind is ChangeKind.DRIFT:
        begun = starts.get(known.before_run_id, begun)
    if not (one.first <= known.measured_utc and begun <= one.last):
        return False
    return not change.has_outgrown(known)
