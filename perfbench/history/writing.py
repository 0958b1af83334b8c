"""Puts a run into the tables, in the place of what was there of it; takes runs away."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Table, delete, exists, insert, select, update

from perfbench.errors import Exit, FewerRows, PerfbenchError
from perfbench.history import tables
from perfbench.history.nouns import METRICS, HistoryCell, HistoryRun, Metric, RunInfo
from perfbench.history.tables import chunks, digest

OF_INFO = (  # columns of `runs` that are fields of RunInfo
    *("run_id", "content_sha256", "origin", "suite", "card", "measured_utc", "commit_utc"),
    *("branch", "is_dirty", "command", "headline", "exit_code", "folder"),
)

NO_ROW = "MISSING"  # the verdict of a cell without any row: of one that crashed it is FAILED


class Added(StrEnum):
    """What `History.add` did."""

    NEW = "new"
    SAME = "same"  # these bytes are there: nothing was done
    REPLACED = "replaced"  # the run is there with other content, which is gone


def check(run: HistoryRun) -> None:
    """PerfbenchError: what no history holds, with the run, the cell and the metric."""
    info = run.info
    times = {"measured_utc": info.measured_utc, "commit_utc": info.commit_utc}
    for name, time in times.items():
        if time is not None and time.utcoffset() is None:
            raise _refused(info, f"{name} {time} has no time zone, wanted UTC")
    if not info.run_id:
        raise _refused(info, "the run_id is empty")
    seen: set[str] = set()
    for cell in run.cells:
        if cell.cell_id in seen:
            raise _refused(info, f"cell {cell.cell_id!r} comes twice, wanted each cell once")
        seen.add(cell.cell_id)
        for metric, measured in cell.measured.items():
            place = f"cell {cell.cell_id!r}, metric {metric!r}"
            if metric not in METRICS and metric not in run.metrics:
                raise _refused(info, f"{place}: nothing describes this metric, wanted a Metric")
            for field in ("value", "low", "high"):
                number = getattr(measured, field)
                if number is not None and not math.isfinite(number):
                    raise _refused(info, f"{place}: {field} is {number}, wanted a number or null")
            if measured.value is None and not measured.reason:
                raise _refused(info, f"{place}: the value is null without a reason")


def check_nothing_lost(stored: Iterable[HistoryCell], run: HistoryRun) -> None:
    """FewerRows where ``run`` was measured less often than what is stored of it. A cell whose
    numbers a verdict withholds has lost none.
    """
    now = {cell.cell_id: cell for cell in run.cells}
    lost = []
    for before in stored:
        had, cell = _processes(before), now.get(before.cell_id)
        has = 0 if cell is None else _processes(cell)
        no_row = cell is None or cell.verdict == NO_ROW
        if has < had and (has or no_row):
            lost.append(f"{before.cell_id} has {has} of {had} processes")
    if lost:
        more = f" (and {len(lost) - 1} more cells)" if len(lost) > 1 else ""
        raise FewerRows(
            Exit.USAGE,
            f"run {run.info.run_id!r}: this copy has fewer rows than the one in the history:"
            f" {lost[0]}{more}. Next: add the whole run, or --force to keep this copy instead",
        )


def _processes(cell: HistoryCell) -> int:
    return max((one.count for one in cell.measured.values()), default=0)


def _refused(info: RunInfo, problem: str) -> PerfbenchError:
    return PerfbenchError(
        Exit.USAGE, f"run {info.run_id!r}: {problem}. Next: correct it where the run is made"
    )


def add(connection: Connection, run: HistoryRun) -> Added:
    """Stores a run that `check` accepts."""
    runs, info, key = tables.runs, run.info, digest(run.info.run_id)
    there = connection.execute(
        select(runs.c.id, runs.c.content_sha256).where(runs.c.digest == key)
    ).one_or_none()
    if there is not None and there.content_sha256 == info.content_sha256:
        return Added.SAME
    row = _row(connection, info)
    if there is None:
        made = connection.execute(insert(runs).values(digest=key, **row))
        (number,) = made.inserted_primary_key or (0,)
    else:
        number = there.id  # kept, and so are the changes and decisions that name the run
        connection.execute(update(runs).where(runs.c.id == number).values(row))
        for table in (tables.points, tables.outcomes, tables.reports):
            connection.execute(delete(table).where(table.c.run == number))
    if info.report:
        connection.execute(insert(tables.reports).values(run=number, body=info.report))
    _add_cells(connection, run, number)
    if there is None:
        return Added.NEW
    forget_unused(connection)
    return Added.REPLACED


def _row(connection: Connection, info: RunInfo) -> dict[str, object]:
    segment = digest(dict(info.segment))
    segments = _numbers(connection, tables.segments, {segment: {"mapping": info.segment}})
    return {name: getattr(info, name) for name in OF_INFO} | {
        "commit_sha": info.commit,
        "segment": segments[segment],
        "injections": list(info.injections),
    }


def _add_cells(connection: Connection, run: HistoryRun, number: int) -> None:
    info = run.info
    by_id = {cell.cell_id: digest(info.suite, info.card, cell.cell_id) for cell in run.cells}
    names = {
        by_id[cell.cell_id]: {"suite": info.suite, "card": info.card, "cell_id": cell.cell_id}
        for cell in run.cells
    }
    cells = _numbers(connection, tables.cells, names)
    definitions = _numbers(
        connection,
        tables.definitions,
        {
            _definition(cell): {
                "axes": cell.axes,
                "reproduce": cell.reproduce,
                "config_sha256": cell.config_sha256,
            }
            for cell in run.cells
        },
    )
    words = {word for cell in run.cells for word in (cell.verdict, cell.reason) if word is not None}
    words |= {one.reason for cell in run.cells for one in cell.measured.values() if one.reason}
    texts = _numbers(connection, tables.texts, {digest(word): {"body": word} for word in words})
    metrics = _metrics(connection, run)
    numbers = {cell.cell_id: cells[by_id[cell.cell_id]] for cell in run.cells}
    pairs = [(numbers[cell.cell_id], metrics[one]) for cell in run.cells for one in cell.measured]
    series = _series(connection, pairs)
    outcomes = [
        {
            "cell": numbers[cell.cell_id],
            "run": number,
            "place": place,
            "verdict": None if cell.verdict is None else texts[digest(cell.verdict)],
            "reason": texts[digest(cell.reason)],
            "definition": definitions[_definition(cell)],
        }
        for place, cell in enumerate(run.cells)
    ]
    points = [
        {
            "series": series[numbers[cell.cell_id], metrics[metric]],
            "measured_utc": info.measured_utc,
            "run": number,
            "value": one.value,
            "low": one.low,
            "high": one.high,
            "count": one.count,
            "reason": texts[digest(one.reason)] if one.reason else None,
        }
        for cell in run.cells
        for metric, one in cell.measured.items()
    ]
    for table, rows in ((tables.outcomes, outcomes), (tables.points, points)):
        if rows:
            connection.execute(insert(table), rows)


def _definition(cell: HistoryCell) -> str:
    return digest(dict(cell.axes), cell.reproduce, cell.config_sha256)


def _metrics(connection: Connection, run: HistoryRun) -> dict[str, int]:
    """Name -> number, of every metric of the run; a title of now replaces an older one.

    PerfbenchError: the history, or METRICS, has the name with another unit.
    """
    used = {metric for cell in run.cells for metric in cell.measured}
    wanted = {name: METRICS.get(name) or run.metrics[name] for name in sorted(used)}
    table = tables.metrics
    known = {row.name: row for row in connection.execute(select(table))}
    for name, metric in wanted.items():
        given = run.metrics.get(name, metric)
        unit = known[name].unit if name in known else metric.unit
        if given.unit != unit or given.name != name:
            problem = f"metric {name!r} is {given.name!r} in {given.unit!r}, wanted it in {unit!r}"
            raise _refused(run.info, problem)
        row = {"title": metric.title, "better": metric.better.value}
        if name in known and (known[name].title, known[name].better) != tuple(row.values()):
            connection.execute(update(table).where(table.c.id == known[name].id).values(row))
    rows = {digest(name): _metric_row(metric) for name, metric in wanted.items()}
    numbers = _numbers(connection, table, rows)
    return {name: numbers[digest(name)] for name in wanted}


def _metric_row(metric: Metric) -> dict[str, object]:
    better = metric.better.value
    return {"name": metric.name, "title": metric.title, "unit": metric.unit, "better": better}


def _numbers(
    connection: Connection, table: Table, rows: Mapping[str, Mapping[str, Any]]
) -> dict[str, int]:
    """Digest -> number in a table of distinct things, where those that are missing are added."""

    def found(digests: Iterable[str]) -> Iterator[tuple[str, int]]:
        for some in chunks(digests):
            query = select(table.c.digest, table.c.id).where(table.c.digest.in_(some))
            yield from ((row.digest, row.id) for row in connection.execute(query))

    numbers = dict(found(rows))
    missing = [{"digest": key, **row} for key, row in rows.items() if key not in numbers]
    if missing:
        connection.execute(insert(table), missing)
        numbers |= found(row["digest"] for row in missing)
    return numbers


def _series(connection: Connection, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """(cell, metric) -> series, those that are missing added."""
    table = tables.series

    def found(cells: Iterable[int]) -> Iterator[tuple[tuple[int, int], int]]:
        for some in chunks(cells):
            query = select(table).where(table.c.cell.in_(some))
            yield from (((row.cell, row.metric), row.id) for row in connection.execute(query))

    numbers = dict(found(dict.fromkeys(cell for cell, _ in pairs)))
    missing = [pair for pair in pairs if pair not in numbers]
    if missing:
        rows = [{"cell": cell, "metric": metric} for cell, metric in missing]
        connection.execute(insert(table), rows)
        numbers |= found(dict.fromkeys(cell for cell, _ in missing))
    return numbers


def delete_runs(connection: Connection, run_ids: Iterable[str]) -> int:
    """How many of them were there; with their points, reports, changes and decisions."""
    runs = tables.runs
    digests = {digest(run_id) for run_id in run_ids}
    gone = 0
    for some in chunks(digests):
        gone += connection.execute(delete(runs).where(runs.c.digest.in_(some))).rowcount
    if gone:
        forget_unused(connection)
    return gone


def forget_unused(connection: Connection) -> None:
    """Deletes series without a point or a change, and cells without a run."""
    series, cells = tables.series, tables.cells
    used = exists().where(tables.points.c.series == series.c.id)
    changed = exists().where(tables.changes.c.series == series.c.id)
    connection.execute(delete(series).where(~used, ~changed))
    ran = exists().where(tables.outcomes.c.cell == cells.c.id)
    has_series = exists().where(series.c.cell == cells.c.id)
    connection.execute(delete(cells).where(~ran, ~has_series))
