"""What `perfbench detect` found in a history, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfbench.errors import Exit, PerfbenchError
from perfbench.text import NULL, shorten

if TYPE_CHECKING:
    from perfbench.history import ChangePoint, History, Series, SeriesKey
    from perfbench.history.detection import JudgedChange, SegmentStart, SeriesChanges

COMMIT_CHARS = 10
SUBJECTS = 3  # of the commits between


@dataclass(frozen=True, slots=True)
class Looked:
    """What was asked for; null is everything, and so are no ``cells``.

    ``every``: changes that are no news, too.
    """

    suite: str | None = None
    card: str | None = None
    cells: tuple[str, ...] = ()
    metric: str | None = None
    since: datetime | None = None
    every: bool = False


@dataclass(frozen=True, slots=True)
class PrintedChange:
    """A change and what its text needs: the metric's title is its name here."""

    judged: JudgedChange
    commits: tuple[int, tuple[str, ...]] | None  # between the runs: how many, some subjects
    reproduce: str = ""  # the command that measures the cell again

    @property
    def change(self) -> ChangePoint:
        return self.judged.change

    def next_step(self) -> str:
        from perfbench.history import next_step

        return next_step(self.change, self.reproduce, is_dirty=bool(self.judged.dirty))

    def text(self) -> str:
        one = self.change
        size = f"{one.size_pct:+.1f} % ({one.low_pct:+.1f} to {one.high_pct:+.1f})"
        if self.is_from_zero:
            size = self._levels_text()
        better = {True: "worse", False: "better", None: "changed"}[one.is_worse]
        where = f"{one.key.metric} of {one.key.cell_id} ({one.key.suite}, {one.key.card})"
        if one.kind == "drift":
            place = f"drifts from run {one.before_run_id} to {one.run_id}"
        else:
            place = f"at run {one.run_id}, after {one.before_run_id}"
        lines = [f"{size} {where}: {better}, {place}", f"    {self._commits_text()}"]
        if self.judged.dirty:
            runs = " and ".join(self.judged.dirty)
            lines.append(f"    uncommitted changes may be the cause: the tree of {runs} was dirty")
        if self.judged.news != "new":
            lines[0] = f"[{self.judged.news}] {lines[0]}"
        lines += [f"    note: {note}" for note in self.judged.notes]
        return "\n".join([*lines, f"    next: {self.next_step()}"])

    @property
    def is_from_zero(self) -> bool:
        """No percentage of 0 exists: the levels are printed instead."""
        return self.judged.levels[0] == 0

    def _levels_text(self) -> str:
        return " -> ".join(f"{level:.6g}" for level in self.judged.levels)

    def _commits_text(self) -> str:
        old, new = self.change.before_commit, self.change.commit
        if old is None or new is None:
            return "no commit is known of one of the runs"
        if old == new:
            return f"both of commit {old[:COMMIT_CHARS]}: no commit lies between"
        span = f"commits {old[:COMMIT_CHARS]}..{new[:COMMIT_CHARS]}"
        if self.commits is None:
            return f"{span} (git does not know them here)"
        count, subjects = self.commits
        shown = "; ".join(shorten(one, 70) for one in subjects)
        more = "; ..." if count > len(subjects) else ""
        return f"{span} ({count} between: {shown}{more})"

    def to_json(self) -> dict[str, Any]:
        one = self.change
        sizes: dict[str, Any] = {
            name: None if self.is_from_zero else getattr(one, name)
            for name in ("size_pct", "low_pct", "high_pct")
        }
        no_size = f"no percentage of 0 exists: {self._levels_text()}" if self.is_from_zero else ""
        return {
            "news": self.judged.news.value,
            "kind": one.kind.value,
            "suite": one.key.suite,
            "card": one.key.card,
            "cell_id": one.key.cell_id,
            "metric": one.key.metric,
            **sizes,
            "reason": no_size,
            "old_level": self.judged.levels[0],
            "new_level": self.judged.levels[1],
            "is_worse": one.is_worse,
            "p": one.p,
            "before_run_id": one.before_run_id,
            "run_id": one.run_id,
            "before_commit": one.before_commit,
            "commit": one.commit,
            "measured_utc": one.measured_utc.isoformat(),
            "commits_between": None if self.commits is None else self.commits[0],
            "subjects": [] if self.commits is None else list(self.commits[1]),
            "dirty_runs": list(self.judged.dirty),
            "notes": list(self.judged.notes),
            "next": self.next_step(),
        }


@dataclass(frozen=True, slots=True)
class SegmentFinding:
    """A new segment of ``series`` series of a suite on a card."""

    suite: str
    card: str
    start: SegmentStart
    series: int

    def text(self) -> str:
        changed = ", ".join(
            f"{name} {old or NULL} -> {new or NULL}"
            for name, (old, new) in self.start.changed.items()
        )
        return (
            f"new segment at run {self.start.run_id} ({self.suite}, {self.card}): {changed};"
            f" {self.series} series, of which nothing is compared across it"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "card": self.card,
            "before_run_id": self.start.before_run_id,
            "run_id": self.start.run_id,
            "measured_utc": self.start.measured_utc.isoformat(),
            "changed": {
                name: {"from": old, "to": new} for name, (old, new) in self.start.changed.items()
            },
            "series": self.series,
        }


@dataclass(frozen=True, slots=True)
class Findings:
    """Changes, what is new first and then by size; segments, newest first.

    ``skipped``: series that could not be judged, and why.
    """

    changes: Sequence[PrintedChange]
    segments: Sequence[SegmentFinding]
    series: int
    points: int
    skipped: Sequence[tuple[SeriesKey, str]] = ()

    @property
    def new(self) -> list[ChangePoint]:
        return [one.change for one in self.changes if one.judged.news == "new"]

    @property
    def is_worse(self) -> bool:
        """Whether something new is."""
        return any(one.is_worse for one in self.new)

    def summary(self) -> str:
        new = self.new
        worse, better = (sum(one.is_worse is w for one in new) for w in (True, False))
        return (
            f"{len(new)} new change{'' if len(new) == 1 else 's'} ({worse} worse, {better} better)"
            f" in {self.series} series of {self.points} points"
        )

    def text(self) -> str:
        lines = [one.text() for one in self.changes] + [one.text() for one in self.segments]
        lines += [
            f"skipped: {key.metric} of {key.cell_id} ({key.suite}, {key.card}): {why}"
            for key, why in self.skipped
        ]
        return "\n".join(lines or ["nothing new"])

    def to_json(self) -> dict[str, Any]:
        return {
            "changes": [one.to_json() for one in self.changes],
            "segments": [one.to_json() for one in self.segments],
            "skipped": [
                {
                    "suite": key.suite,
                    "card": key.card,
                    "cell_id": key.cell_id,
                    "metric": key.metric,
                    "reason": why,
                }
                for key, why in self.skipped
            ],
            "series": self.series,
            "points": self.points,
        }


def look(history: History, looked: Looked, *, remember: bool) -> Findings:
    """The changes of every series that was asked for; what is new is stored as reported.

    USAGE where the history has no such series.
    """
    from perfbench.history.detection import News, Remembered, judge_series

    infos = history.runs(demonstrations=True)
    times = {info.run_id: info.measured_utc for info in infos}
    memory = Remembered.of(history.change_points(), history.decisions(), times)
    only = {"suite": looked.suite, "card": looked.card, "metric": looked.metric}
    judged = [
        judge_series(series, memory)
        for cell_id in _cell_ids(history, looked)
        for series in history.every_series(
            suite=looked.suite, card=looked.card, metric=looked.metric, cell_id=cell_id
        )
    ]
    if not judged:
        asked = ", ".join(f"{name} {value!r}" for name, value in only.items() if value)
        raise PerfbenchError(
            Exit.USAGE,
            f"the history has no series{f' of {asked}' if asked else ''}. Next: perfbench history"
            " add RUN, or ask for less",
        )
    changes = [
        one
        for series in judged
        for one in series.changes
        if looked.since is None or one.change.measured_utc >= looked.since
    ]
    if remember:
        stored = history.report_changes(one.change for one in changes if one.news is News.NEW)
        first = {(one.key, one.run_id) for one in stored}
        changes = [
            replace(one, news=News.REPORTED)  # by another process, meanwhile
            if one.news is News.NEW and (one.change.key, one.change.run_id) not in first
            else one
            for one in changes
        ]
    shown = [one for one in changes if looked.every or one.news is News.NEW]
    shown.sort(key=lambda one: (one.news is not News.NEW, -abs(one.change.size_pct)))
    return Findings(
        with_commits(shown, Path.cwd(), history.commands({one.change.run_id for one in shown})),
        _segments(judged, looked),
        len(judged),
        sum(len(one.series.points) for one in judged),
        [(one.series.key, one.skipped) for one in judged if one.skipped],
    )


def with_commits(
    changes: Sequence[JudgedChange], repository: Path, commands: Mapping[tuple[str, str], str]
) -> list[PrintedChange]:
    """Each with the commits between its runs, where git in ``repository`` knows them.

    ``commands``: (run, cell) -> the command that measures the cell again.
    """
    from perfbench.machine import subjects_between

    known: dict[tuple[str, str], tuple[int, tuple[str, ...]] | None] = {}
    found = []
    for one in changes:
        old, new = one.change.before_commit, one.change.commit
        between = None
        if old is not None and new is not None and old != new:
            if (old, new) not in known:
                asked = subjects_between(repository, old, new, SUBJECTS)
                known[old, new] = asked and (asked[0], tuple(asked[1]))
            between = known[old, new]
        command = commands.get((one.change.run_id, one.change.key.cell_id), "")
        found.append(PrintedChange(one, between, command))
    return found


def _cell_ids(history: History, looked: Looked) -> list[str | None]:
    """Each once; null is every cell."""
    from perfbench.commands.history_choice import named_cell

    if not looked.cells:
        return [None]
    keys = history.keys(suite=looked.suite, card=looked.card, metric=looked.metric)
    known = {key.cell_id for key in keys}
    return list(dict.fromkeys(named_cell(cell, known) for cell in looked.cells))


def _segments(judged: Sequence[SeriesChanges], looked: Looked) -> list[SegmentFinding]:
    """Of each suite on each card, newest first: the newest, or all where all was asked for."""
    starts: dict[tuple[str, str, str], SegmentStart] = {}
    counts: Counter[tuple[str, str, str]] = Counter()
    for one in judged:
        for start in one.segments:
            place = (one.series.key.suite, one.series.key.card, start.run_id)
            starts[place] = start
            counts[place] += 1
    found = [
        SegmentFinding(suite, card, start, counts[suite, card, run_id])
        for (suite, card, run_id), start in starts.items()
        if looked.since is None or start.measured_utc >= looked.since
    ]
    found += _new_cards([one.series for one in judged], looked)
    found.sort(key=lambda one: one.start.measured_utc, reverse=True)
    if looked.every:
        return found
    newest: dict[tuple[str, str], SegmentFinding] = {}
    for segment in found:
        newest.setdefault((segment.suite, segment.card), segment)
    return list(newest.values())


def _new_cards(series: Sequence[Series], looked: Looked) -> list[SegmentFinding]:
    """A card whose first run of a suite came after another card's: its series are its own."""
    from perfbench.history.detection import SegmentStart

    first: dict[tuple[str, str], tuple[datetime, str]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for one in series:
        place = (one.key.suite, one.key.card)
        point = one.points[0]
        first[place] = min(
            first.get(place, (point.measured_utc, point.run_id)),
            (
                point.measured_utc,
                point.run_id,
            ),
        )
        counts[place] += 1
    found = []
    for (suite, card), (when, run_id) in first.items():
        before = [
            (moment, other_run, other)
            for (of, other), (moment, other_run) in first.items()
            if of == suite and moment < when
        ]
        if before and (looked.since is None or when >= looked.since):
            _, other_run, other = max(before)
            start = SegmentStart(other_run, run_id, when, {"card": (other, card)})
            found.append(SegmentFinding(suite, card, start, counts[suite, card]))
    return found
