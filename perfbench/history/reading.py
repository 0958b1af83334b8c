"""Reads runs, cells and series out of the tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Row,
    Select,
    Table,
    and_,
    exists,
    func,
    select,
)

from perfbench.history import tables
from perfbench.history.nouns import (
    METRICS,
    Better,
    HistoryCell,
    HistoryRun,
    MeasuredValue,
    Metric,
    RunInfo,
    Series,
    SeriesKey,
    SeriesPoint,
)
from perfbench.history.tables import digest

runs, cells, series, points = tables.runs, tables.cells, tables.series, tables.points
VERDICTS, REASONS = tables.texts.alias("verdicts"), tables.texts.alias("reasons")
GAPS = tables.texts.alias("gaps")  # why a value is null
OF_KEY = (cells.c.suite, cells.c.card, cells.c.cell_id, tables.metrics.c.name)
SHOWN = runs.c.injections == []


def run_infos(
    connection: Connection, conditions: list[ColumnElement[bool]]
) -> list[tuple[int, RunInfo]]:
    """(number, run without its report), newest first."""
    query = (
        select(runs, tables.segments.c.mapping)
        .join(tables.segments)
        .where(*conditions)
        .order_by(runs.c.measured_utc.desc(), runs.c.id.desc())
    )
    return [(row.id, _info(row)) for row in connection.execute(query)]


def run_conditions(
    *, since: datetime | None = None, commit: str | None = None, demonstrations: bool = False
) -> list[ColumnElement[bool]]:
    """``commit``: how it begins."""
    found: list[ColumnElement[bool]] = [] if demonstrations else [SHOWN]
    if since is not None:
        found.append(runs.c.measured_utc >= since)
    if commit is not None:
        found.append(_begins(runs.c.commit_sha, commit))
    return found


def _begins(column: ColumnElement[Any], prefix: str) -> ColumnElement[bool]:
    """LIKE would ignore case in SQLite."""
    return func.substr(column, 1, len(tables.stored(prefix)), type_=tables.AnyText) == prefix


def named(connection: Connection, run_id: str) -> list[tuple[int, RunInfo]]:
    """The run of this name; else those whose names begin so, newest first."""
    exact = run_infos(connection, [runs.c.digest == digest(run_id)])
    return exact or run_infos(connection, [_begins(runs.c.run_id, run_id)])


def _report(connection: Connection, run: int) -> str:
    body = tables.reports.c.body
    return connection.execute(select(body).where(tables.reports.c.run == run)).scalar() or ""


def _info(row: Row[Any]) -> RunInfo:
    return RunInfo(
        run_id=row.run_id,
        content_sha256=row.content_sha256,
        origin=row.origin,
        suite=row.suite,
        card=row.card,
        measured_utc=row.measured_utc,
        commit=row.commit_sha,
        segment=row.mapping,
        commit_utc=row.commit_utc,
        branch=row.branch,
        is_dirty=row.is_dirty,
        command=row.command,
        headline=row.headline,
        exit_code=row.exit_code,
        injections=tuple(row.injections),
        folder=row.folder,
    )


def stored_cells(connection: Connection, run_id: str) -> list[HistoryCell]:
    """Of the run of exactly this name; none where it is not there."""
    found = run_infos(connection, [runs.c.digest == digest(run_id)])
    return [cell for number, _ in found for cell in cells_of(connection, number)]


def cells_of(connection: Connection, run: int) -> list[HistoryCell]:
    """In the order of the run."""
    measured: dict[int, dict[str, MeasuredValue]] = defaultdict(dict)
    query = (
        select(series.c.cell, tables.metrics.c.name, points, GAPS.c.body.label("gap"))
        .join(series, series.c.id == points.c.series)
        .join(tables.metrics)
        .outerjoin(GAPS, GAPS.c.id == points.c.reason)
        .where(points.c.run == run)
        .order_by(series.c.cell, tables.metrics.c.id)
    )
    for row in connection.execute(query):
        measured[row.cell][row.name] = MeasuredValue(
            row.value, row.low, row.high, row._mapping["count"], row.gap or ""
        )
    outcomes, definitions = tables.outcomes, tables.definitions
    query = (
        select(cells.c.id, cells.c.cell_id, definitions, *_words())
        .join(outcomes, outcomes.c.cell == cells.c.id)
        .join(definitions)
        .join(REASONS, REASONS.c.id == outcomes.c.reason)
        .outerjoin(VERDICTS, VERDICTS.c.id == outcomes.c.verdict)
        .where(outcomes.c.run == run)
        .order_by(outcomes.c.place)
    )
    return [
        HistoryCell(
            cell_id=row.cell_id,
            axes=row.axes,
            verdict=row.verdict,
            reason=row.reason,
            reproduce=row.reproduce,
            measured=measured[row.id],
            config_sha256=row.config_sha256,
        )
        for row in connection.execute(query)
    ]


def commands(connection: Connection, run_ids: Iterable[str]) -> dict[tuple[str, str], str]:
    """(run, cell) -> the command that measures the cell again."""
    outcomes, definitions = tables.outcomes, tables.definitions
    found = {}
    for some in tables.chunks(digest(run_id) for run_id in run_ids):
        query = (
            select(runs.c.run_id, cells.c.cell_id, definitions.c.reproduce)
            .select_from(outcomes)
            .join(runs, runs.c.id == outcomes.c.run)
            .join(cells, cells.c.id == outcomes.c.cell)
            .join(definitions, definitions.c.id == outcomes.c.definition)
            .where(runs.c.digest.in_(some))
        )
        for row in connection.execute(query):
            found[row.run_id, row.cell_id] = row.reproduce
    return found


def whole_run(connection: Connection, number: int, info: RunInfo) -> HistoryRun:
    """With its report."""
    found = tuple(cells_of(connection, number))
    used = {metric for cell in found for metric in cell.measured} - set(METRICS)
    known = metrics(connection) if used else {}
    info = replace(info, report=_report(connection, number))
    return HistoryRun(info, found, {name: known[name] for name in sorted(used)})


def _words() -> tuple[ColumnElement[str], ColumnElement[str]]:
    return VERDICTS.c.body.label("verdict"), REASONS.c.body.label("reason")


def metrics(connection: Connection) -> dict[str, Metric]:
    """Those of METRICS, and those that runs brought."""
    rows = connection.execute(select(tables.metrics))
    brought = {row.name: Metric(row.name, row.title, row.unit, Better(row.better)) for row in rows}
    return {**brought, **METRICS}


def metric_names(connection: Connection, conditions: list[ColumnElement[bool]]) -> list[str]:
    """Of which one of these runs has a point, sorted."""
    query = (
        select(tables.metrics.c.name)
        .join(series, series.c.metric == tables.metrics.c.id)
        .join(points, points.c.series == series.c.id)
        .join(runs, runs.c.id == points.c.run)
        .where(*conditions)
        .distinct()
    )
    return sorted(connection.execute(query).scalars())


def keys(
    connection: Connection, wanted: Mapping[str, str | None], *, demonstrations: bool = False
) -> list[tuple[SeriesKey, int, int]]:
    """(key, series, cell) of the series that have a point, sorted by key.

    ``wanted``: of suite, card, cell_id and metric; null allows every value.
    """
    query = only(
        select(*OF_KEY, series.c.id, series.c.cell)
        .join(series, series.c.cell == cells.c.id)
        .join(tables.metrics, tables.metrics.c.id == series.c.metric),
        wanted,
    )
    point = points.c.series == series.c.id
    if not demonstrations:
        point = and_(point, exists().where(runs.c.id == points.c.run, SHOWN))
    return sorted(
        (SeriesKey(row.suite, row.card, row.cell_id, row.name), row.id, row.cell)
        for row in connection.execute(query.where(exists().where(point)))
    )


def only(query: Select[Any], wanted: Mapping[str, str | None]) -> Select[Any]:
    for name, value in wanted.items():
        if value is not None:
            column = tables.metrics.c.name if name == "metric" else cells.c[name]
            query = query.where(column == value)
    return query


def series_of(connection: Connection, key: SeriesKey) -> tuple[int, int] | None:
    """(series, cell), null where no run has it."""
    row = connection.execute(
        select(series.c.id, series.c.cell)
        .join(cells)
        .join(tables.metrics)
        .where(cells.c.digest == digest(key.suite, key.card, key.cell_id))
        .where(tables.metrics.c.digest == digest(key.metric))
    ).one_or_none()
    return None if row is None else (row.id, row.cell)


class _CellRun(NamedTuple):
    """What the points of a cell share in one run; numbers of `segments`, `definitions`, `texts`."""

    run_id: str
    measured_utc: datetime
    commit: str | None
    is_dirty: bool | None
    segment: int
    definition: int
    verdict: int | None
    reason: int


class SeriesReader:
    """Reads series one after the other, of the runs that ``conditions`` allow; ``since``: as they
    have it.

    What the series of a cell share is read once: 13 of them cost little more than one.
    """

    def __init__(
        self,
        connection: Connection,
        conditions: list[ColumnElement[bool]],
        since: datetime | None = None,
    ) -> None:
        self._connection, self._conditions, self._since = connection, conditions, since
        self._metrics = metrics(connection)
        rows = connection.execute(select(tables.segments.c.id, tables.segments.c.mapping))
        self._segments = {row.id: row.mapping for row in rows}
        self._with_config: dict[tuple[int, int], Mapping[str, str]] = {}
        self._of_config: dict[tuple[int, str], Mapping[str, str]] = {}
        self._texts: dict[int | None, str | None] = {None: None}
        self._configs: dict[int, str | None] = {}
        self._cell: int | None = None
        self._axes: Mapping[str, str | int] = {}
        self._runs: dict[int, _CellRun] = {}

    def read(self, key: SeriesKey, number: int, cell: int) -> Series:
        """The points, oldest first."""
        if cell != self._cell:
            self._axes, self._runs = self._axes_of(cell), self._runs_of(cell)
            self._cell = cell
        found = tuple(self._points(number))
        return Series(key, self._metrics[key.metric], self._axes, found)

    def _axes_of(self, cell: int) -> Mapping[str, str | int]:
        """Of the last run that was added with the cell; {} where it has none left."""
        outcomes, definitions = tables.outcomes, tables.definitions
        last = (
            select(definitions.c.axes)
            .join(outcomes, outcomes.c.definition == definitions.c.id)
            .where(outcomes.c.cell == cell)
            .order_by(outcomes.c.run.desc())
            .limit(1)
        )
        axes: Mapping[str, str | int] = self._connection.execute(last).scalar() or {}
        return axes

    def _runs_of(self, cell: int) -> dict[int, _CellRun]:
        outcomes = tables.outcomes
        of_run = [runs.c.run_id, runs.c.measured_utc, runs.c.commit_sha, runs.c.is_dirty]
        of_cell = [outcomes.c.definition, outcomes.c.verdict, outcomes.c.reason]
        query = (
            select(outcomes.c.run, *of_run, runs.c.segment, *of_cell)
            .join(runs, runs.c.id == outcomes.c.run)
            .where(outcomes.c.cell == cell, *self._conditions)
        )
        rows = self._connection.execute(query)
        found = {number: _CellRun(*values) for number, *values in rows}
        table, every = tables.definitions, found.values()
        self._look_up(
            self._configs, table, table.c.config_sha256, {one.definition for one in every}
        )
        words = {one.verdict for one in every} | {one.reason for one in every}
        self._look_up(self._texts, tables.texts, tables.texts.c.body, words)
        return found

    def _look_up(
        self, known: dict[Any, str | None], table: Table, column: Column[Any], wanted: set[Any]
    ) -> None:
        """Adds to ``known`` the rows of ``wanted`` that it lacks."""
        for some in tables.chunks(sorted(wanted - known.keys())):
            query = select(table.c.id, column).where(table.c.id.in_(some))
            known.update((number, value) for number, value in self._connection.execute(query))

    def _points(self, number: int) -> Iterator[SeriesPoint]:
        query = (
            select(
                *(points.c.run, points.c.value, points.c.low, points.c.high, points.c.count),
                points.c.reason,
            )
            .where(points.c.series == number)
            .order_by(points.c.measured_utc, points.c.run)
        )
        if self._since is not None:
            query = query.where(points.c.measured_utc >= self._since)
        rows = self._connection.execute(query).all()
        self._look_up(self._texts, tables.texts, tables.texts.c.body, {row[5] for row in rows})
        known, texts, segments = self._runs, self._texts, self._with_config
        for run, value, low, high, count, gap in rows:
            if (of := known.get(run)) is None:
                continue
            run_id, measured_utc, commit, is_dirty, segment, definition, verdict, reason = of
            if (mapping := segments.get((segment, definition))) is None:
                mapping = self._segment(segment, definition)
            yield SeriesPoint(
                run_id,
                measured_utc,
                commit,
                value,
                low,
                high,
                count,
                texts[verdict],
                texts[gap] or texts[reason] or "",
                mapping,
                is_dirty,
            )

    def _segment(self, number: int, definition: int) -> Mapping[str, str]:
        """The run's, and the cell's configuration: another one under the same name may not be
        compared.
        """
        config_sha256 = self._configs[definition]
        found: Mapping[str, str] = self._segments[number]
        if config_sha256 is not None:
            key = (number, config_sha256)
            found = self._of_config.setdefault(key, {**found, "config": config_sha256[:12]})
        self._with_config[number, definition] = found
        return found
