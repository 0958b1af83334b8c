"""`History`: runs in, series out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Self

from perfbench.errors import Exit, PerfbenchError
from perfbench.history.database import Database  # the first: it names a package that is missing

# isort: split
from perfbench.history import changes, reading, tables, writing
from perfbench.history.nouns import (
    ChangePoint,
    HistoryCell,
    HistoryRun,
    Metric,
    RunInfo,
    Series,
    SeriesKey,
    Triage,
)
from perfbench.history.writing import Added

TOGETHER = 100  # series of one transaction


class History:
    """The judged runs of months, in SQLite or PostgreSQL.

    Every method is a transaction of its own (`every_series` one for each 100 series); what other
    processes add meanwhile is there at the next one. PerfbenchError: the database is damaged, may
    not be written, does not answer, or another process writes for more than a minute.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, url: str | Path, *, create: bool = False) -> Self:
        """``url``: a path, 'sqlite:///PATH' or 'postgresql://USER@HOST/NAME'.

        PerfbenchError: there is none and ``create`` is false; it is no history; it is of another
        revision; it cannot be reached.
        """
        return cls(Database.open(url, create=create))

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def revision(self) -> str:
        return self._database.revision

    def add(self, run: HistoryRun, *, may_shrink: bool = True) -> Added:
        """Stores a run, all of it or nothing; another content of the same run_id is replaced.
        ``may_shrink`` false: unless it lacks measurements that are stored, as a copy does that was
        cut off.

        PerfbenchError: a number that is not finite, a null without a reason, a time without a zone,
        a cell twice, a metric that nothing describes, text with NUL; a copy that lacks some.
        """
        writing.check(run)
        with self._database.write() as connection:
            if not may_shrink:
                writing.check_nothing_lost(reading.stored_cells(connection, run.info.run_id), run)
            return writing.add(connection, run)

    def delete_runs(self, run_ids: Sequence[str]) -> int:
        """How many of them there were; their changes and decisions go, too."""
        with self._database.write() as connection:
            return writing.delete_runs(connection, run_ids)

    def runs(
        self,
        *,
        suite: str | None = None,
        card: str | None = None,
        origin: str | None = None,
        since: datetime | None = None,
        commit: str | None = None,
        demonstrations: bool = False,
    ) -> list[RunInfo]:
        """Newest first, without their reports. ``commit``: how it begins."""
        conditions = reading.run_conditions(
            since=since, commit=commit, demonstrations=demonstrations
        )
        wanted = {"suite": suite, "card": card, "origin": origin}
        conditions += [tables.runs.c[n] == v for n, v in wanted.items() if v is not None]
        with self._database.read() as connection:
            return [info for _, info in reading.run_infos(connection, conditions)]

    def run(self, run_id: str) -> HistoryRun:
        """The run of this name, of the one name that begins so, or 'latest', the newest that is no
        demonstration.

        PerfbenchError: there is none, or there are several.
        """
        with self._database.read() as connection:
            if run_id == "latest":
                found = reading.run_infos(connection, reading.run_conditions())[:1]
            else:
                found = reading.named(connection, run_id)
            if len(found) != 1:
                raise self._not_one(run_id, [info.run_id for _, info in found])
            ((number, info),) = found
            return reading.whole_run(connection, number, info)

    def _not_one(self, run_id: str, found: list[str]) -> PerfbenchError:
        if found:
            some = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
            problem = f"{run_id!r} begins the names of {len(found)} runs ({some})"
            return PerfbenchError(Exit.USAGE, f"{problem}. Next: give more of the name")
        problem = "has no run" if run_id == "latest" else f"has no run {run_id!r}"
        after = "perfbench history add RUN" if run_id == "latest" else "give 'latest', or its name"
        return PerfbenchError(Exit.USAGE, f"{self._database.name} {problem}. Next: {after}")

    def cells(
        self, *, since: datetime | None = None, commit: str | None = None
    ) -> list[tuple[RunInfo, HistoryCell]]:
        """Every cell of the runs since then, or of the commit that begins so; newest run first."""
        conditions = reading.run_conditions(since=since, commit=commit)
        with self._database.read() as connection:
            return [
                (info, cell)
                for number, info in reading.run_infos(connection, conditions)
                for cell in reading.cells_of(connection, number)
            ]

    def commands(self, run_ids: Iterable[str]) -> dict[tuple[str, str], str]:
        """(run, cell) -> the command that measures the cell again, of every cell of these runs."""
        with self._database.read() as connection:
            return reading.commands(connection, run_ids)

    def metric(self, name: str) -> Metric:
        """PerfbenchError: no run has it."""
        with self._database.read() as connection:
            found = reading.metrics(connection)
        if name not in found:
            known = ", ".join(sorted(found))
            raise PerfbenchError(Exit.USAGE, f"no metric {name!r}. Next: give one of {known}")
        return found[name]

    def metric_names(
        self,
        *,
        suite: str | None = None,
        card: str | None = None,
        since: datetime | None = None,
        commit: str | None = None,
        demonstrations: bool = False,
    ) -> list[str]:
        """Of the runs that `runs` would give, those of which they have a point, sorted."""
        conditions = reading.run_conditions(
            since=since, commit=commit, demonstrations=demonstrations
        )
        wanted = {"suite": suite, "card": card}
        conditions += [tables.runs.c[n] == v for n, v in wanted.items() if v is not None]
        with self._database.read() as connection:
            return reading.metric_names(connection, conditions)

    def keys(
        self,
        *,
        suite: str | None = None,
        card: str | None = None,
        cell_id: str | None = None,
        metric: str | None = None,
        demonstrations: bool = False,
    ) -> list[SeriesKey]:
        """Of the series that have a point, sorted."""
        wanted = {"suite": suite, "card": card, "cell_id": cell_id, "metric": metric}
        with self._database.read() as connection:
            found = reading.keys(connection, wanted, demonstrations=demonstrations)
        return [key for key, _, _ in found]

    def series(
        self, key: SeriesKey, *, since: datetime | None = None, demonstrations: bool = False
    ) -> Series:
        """PerfbenchError: no run has this cell and metric."""
        conditions = reading.run_conditions(since=since, demonstrations=demonstrations)
        with self._database.read() as connection:
            found = reading.series_of(connection, key)
            if found is None:
                problem = f"{self._database.name} has no {key.metric} of cell {key.cell_id!r}"
                problem += f" (suite {key.suite!r}, card {key.card!r})"
                after = "give a suite, card, cell and metric that it has"
                raise PerfbenchError(Exit.USAGE, f"{problem}. Next: {after}")
            return reading.SeriesReader(connection, conditions, since).read(key, *found)

    def every_series(
        self,
        *,
        suite: str | None = None,
        card: str | None = None,
        cell_id: str | None = None,
        metric: str | None = None,
        since: datetime | None = None,
        demonstrations: bool = False,
    ) -> Iterator[Series]:
        """Those that have a point, sorted by key, as they are asked for."""
        wanted = {"suite": suite, "card": card, "cell_id": cell_id, "metric": metric}
        conditions = reading.run_conditions(since=since, demonstrations=demonstrations)
        with self._database.read() as connection:
            keys = reading.keys(connection, wanted, demonstrations=demonstrations)
        for start in range(0, len(keys), TOGETHER):
            # Read before they are given away: a reader that stops to think keeps SQLite's writers
            # waiting.
            with self._database.read() as connection:
                reader = reading.SeriesReader(connection, conditions, since)
                some = [reader.read(*one) for one in keys[start : start + TOGETHER]]
            yield from (one for one in some if one.points)

    def change_points(
        self,
        *,
        suite: str | None = None,
        card: str | None = None,
        cell_id: str | None = None,
        metric: str | None = None,
    ) -> list[ChangePoint]:
        """What was reported, newest first."""
        wanted = {"suite": suite, "card": card, "cell_id": cell_id, "metric": metric}
        with self._database.read() as connection:
            return changes.reported(connection, wanted)

    def report_changes(self, found: Iterable[ChangePoint]) -> list[ChangePoint]:
        """Stores those that were not reported before, and returns them: of two processes that find
        the same, one gets it.

        Reported before: a change of the same series, kind and direction, at most 3 points away; of
        a drift, which goes on, any part. One that has outgrown it counts as new and replaces it.

        PerfbenchError: a series or a run that is not there, a number that is not finite.
        """
        with self._database.write() as connection:
            return changes.report(connection, found)

    def triage(self, *decisions: Triage) -> None:
        """All of them or none. PerfbenchError: a run is not there, or a time has no zone."""
        with self._database.write() as connection:
            for decision in decisions:
                changes.decide(connection, decision)

    def undo(self, *decisions: Triage) -> int:
        """Takes decisions back, as `decisions` gave them; how many there were."""
        with self._database.write() as connection:
            return sum(changes.undo(connection, decision) for decision in decisions)

    def decisions(self) -> list[Triage]:
        """Newest first."""
        with self._database.read() as connection:
            return changes.decided(connection)
