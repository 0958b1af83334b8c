"""Change points that were reported, each once, and what somebody decided about them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

from sqlalchemy import Connection, delete, insert, select, update

from perfbench.errors import Exit, PerfbenchError
from perfbench.history import reading, tables
from perfbench.history.nouns import ChangeKind, ChangePoint, SeriesKey, Triage, TriageKind
from perfbench.history.tables import digest

NEAR = 3  # points between two reports of one change
CHANGES, RUNS = tables.changes, tables.runs
OF_CHANGE = (  # columns that are fields of ChangePoint
    *("before_run_id", "before_commit", "measured_utc"),
    *("size_pct", "low_pct", "high_pct", "is_worse", "p"),
)
OF_DECISION = ("note", "author", "created_utc", "suite", "card", "cell_id", "metric")


def reported(connection: Connection, wanted: Mapping[str, str | None]) -> list[ChangePoint]:
    """Newest first. ``wanted``: of suite, card, cell_id and metric; null allows every value."""
    return [change for _, change in _stored(connection, wanted)]


def _stored(
    connection: Connection, wanted: Mapping[str, str | None]
) -> list[tuple[int, ChangePoint]]:
    """Each with its number."""
    query = reading.only(
        select(CHANGES, RUNS.c.run_id, *reading.OF_KEY)
        .join(RUNS, RUNS.c.id == CHANGES.c.run)
        .join(tables.series, tables.series.c.id == CHANGES.c.series)
        .join(tables.cells, tables.cells.c.id == tables.series.c.cell)
        .join(tables.metrics, tables.metrics.c.id == tables.series.c.metric),
        wanted,
    ).order_by(CHANGES.c.measured_utc.desc(), CHANGES.c.id.desc())
    return [
        (
            row.id,
            ChangePoint(
                key=SeriesKey(row.suite, row.card, row.cell_id, row.name),
                kind=ChangeKind(row.kind),
                run_id=row.run_id,
                commit=row.commit_sha,
                **{name: row._mapping[name] for name in OF_CHANGE},
            ),
        )
        for row in connection.execute(query)
    ]


def report(connection: Connection, found: Iterable[ChangePoint]) -> list[ChangePoint]:
    """Stores those that were not reported before or have outgrown what was, and returns them. What
    has grown takes the place of what was reported.

    Reported before: a change of the same series, kind and direction, at most 3 points away; of a
    drift, which goes on, any part.

    PerfbenchError: a series or a run that is not there, a number that is not finite.
    """
    by_key: dict[SeriesKey, list[ChangePoint]] = defaultdict(list)
    for change in found:
        _check(change)
        by_key[change.key].append(change)
    new = []
    for key, some in by_key.items():
        there = reading.series_of(connection, key)
        if there is None:
            raise _absent(f"series of {key.metric!r} of cell {key.cell_id!r}")
        wanted = {n: getattr(key, n) for n in ("suite", "card", "cell_id", "metric")}
        known = dict(_stored(connection, wanted))
        times = _times(connection, there[0])
        runs = _runs(connection, {one.run_id for one in some})
        started = _runs(connection, {one.before_run_id for one in [*some, *known.values()]})
        for change in some:
            place = _place(change, times, started)
            same = [
                number
                for number, one in known.items()
                if _is_same(change, place, one, _place(one, times, started))
            ]
            if not all(change.has_outgrown(known[number]) for number in same):
                continue
            if change.run_id not in runs:
                raise _absent(f"run {change.run_id!r}")
            row = {name: getattr(change, name) for name in OF_CHANGE}
            row |= {"kind": change.kind.value, "commit_sha": change.commit, "series": there[0]}
            row["run"] = runs[change.run_id][0]
            if same:
                number = same[0]
                connection.execute(update(CHANGES).where(CHANGES.c.id == number).values(row))
            else:
                made = insert(CHANGES).values(row).returning(CHANGES.c.id)
                number = connection.execute(made).scalar_one()
            known[number] = change
            new.append(change)
    return new


def _check(change: ChangePoint) -> None:
    tables.aware(change.measured_utc)
    numbers = (change.size_pct, change.low_pct, change.high_pct, change.p)
    if not all(one is None or math.isfinite(one) for one in numbers):
        place = f"the change of {change.key.metric!r} of cell {change.key.cell_id!r}"
        raise PerfbenchError(
            Exit.USAGE,
            f"{place} at run {change.run_id!r} has {numbers}, wanted numbers. Next: correct it"
            " where it is found",
        )


def _absent(what: str) -> PerfbenchError:
    return PerfbenchError(
        Exit.USAGE, f"there is no {what}, wanted one that was added. Next: add its run"
    )


Runs = Mapping[str, tuple[int, datetime]]  # name -> (number, time)


def _runs(connection: Connection, names: Iterable[str]) -> Runs:
    def rows() -> Iterator[tuple[str, tuple[int, datetime]]]:
        for some in tables.chunks(digest(name) for name in names):
            query = select(RUNS.c.run_id, RUNS.c.id, RUNS.c.measured_utc)
            for row in connection.execute(query.where(RUNS.c.digest.in_(some))):
                yield row.run_id, (row.id, row.measured_utc)

    return dict(rows())


def _times(connection: Connection, series: int) -> list[datetime]:
    points = tables.points
    query = select(points.c.measured_utc).where(points.c.series == series, reading.SHOWN)
    return list(
        connection.execute(query.join(RUNS).order_by(points.c.measured_utc, points.c.run)).scalars()
    )


def _place(change: ChangePoint, times: list[datetime], started: Runs) -> tuple[int, int]:
    """First and last point: of a step one, of a drift the two that it lies between."""
    end = bisect_left(times, change.measured_utc)
    if change.kind is ChangeKind.STEP or change.before_run_id not in started:
        return end, end
    return bisect_left(times, started[change.before_run_id][1]), end


def _is_same(
    one: ChangePoint, place: tuple[int, int], other: ChangePoint, other_place: tuple[int, int]
) -> bool:
    alike = one.kind is other.kind and (one.size_pct < 0) == (other.size_pct < 0)
    return alike and place[0] - NEAR <= other_place[1] and other_place[0] - NEAR <= place[1]


def decide(connection: Connection, decision: Triage) -> None:
    """PerfbenchError: the run is not there, or the time has no zone."""
    runs = _runs(connection, [decision.run_id])
    if not runs:
        raise _absent(f"run {decision.run_id!r}")
    row = {name: getattr(decision, name) for name in OF_DECISION}
    run, _ = runs[decision.run_id]
    connection.execute(insert(tables.decisions).values(kind=decision.kind.value, run=run, **row))


def undo(connection: Connection, decision: Triage) -> int:
    """Forgets the decision, however often it was made; how many rows there were."""
    runs = _runs(connection, [decision.run_id])
    if not runs:
        return 0
    table = tables.decisions
    same = [table.c.run == runs[decision.run_id][0], table.c.kind == decision.kind.value]
    same += [table.c[name].is_not_distinct_from(getattr(decision, name)) for name in OF_DECISION]
    return int(connection.execute(delete(table).where(*same)).rowcount)


def decided(connection: Connection) -> list[Triage]:
    """Newest first."""
    table = tables.decisions
    query = select(table, RUNS.c.run_id).join(RUNS)
    newest = query.order_by(table.c.created_utc.desc(), table.c.id.desc())
    return [
        Triage(
            kind=TriageKind(row.kind),
            run_id=row.run_id,
            **{name: row._mapping[name] for name in OF_DECISION},
        )
        for row in connection.execute(newest)
    ]
