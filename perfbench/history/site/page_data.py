"""What each page shows, from a history's nouns; pure, so that the same history is the same site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from perfbench.history.interval import half_width_pct
from perfbench.history.nouns import (
    METRICS,
    Better,
    ChangePoint,
    HistoryCell,
    HistoryRun,
    RunInfo,
    Series,
    Triage,
    TriageKind,
)
from perfbench.history.site import chart_data, names
from perfbench.history.site.cells_of_suite import Axes, dense_twins, peers_of, short_names
from perfbench.history.site.decided import decision_on, decisions_on
from perfbench.history.site.sparkline import Sparkline, sparkline
from perfbench.history.site.units import divided, minute, short_commit, shown
from perfbench.history.site.verdict_marks import Light, letter_of, light_of

RUN_METRICS = ("tok_per_s", "device_ms", "launches", "peak_memory_bytes")  # to compare runs by
MEASURED = "MEASURED"  # in the place of a verdict where nothing was compared
MAX_PEERS = 8  # whose values a cell's page holds
LIGHTS = (Light.RED, Light.BLIND, Light.GREEN, Light.NONE)  # worst first


@dataclass(frozen=True, slots=True)
class Mark:
    """A verdict as a shape with a letter."""

    verdict: str
    light: str
    letter: str


def mark_of(verdict: str | None) -> Mark:
    return Mark(verdict or MEASURED, light_of(verdict).value, letter_of(verdict))


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run in a list. ``counts``: cells by light, worst first."""

    info: RunInfo
    page: str
    when: str
    commit: str
    milliseconds: int
    counts: tuple[tuple[str, int], ...]
    num_cells: int


def run_summary(run: HistoryRun) -> RunSummary:
    counted = Counter(light_of(cell.verdict) for cell in run.cells)
    counts = tuple((light.value, counted[light]) for light in LIGHTS)
    info = run.info
    page, when = names.run_page(info.run_id), minute(info.measured_utc)
    time = chart_data.milliseconds(info.measured_utc)
    return RunSummary(info, page, when, short_commit(info.commit), time, counts, len(run.cells))


def run_columns(
    run: HistoryRun, index_of: Mapping[tuple[str, str, str], int], metrics: Mapping[str, float]
) -> dict[str, Any]:
    """The cells of a run for its own page and for comparing: index, verdict, reason, and [value,
    low, high] of each of ``metrics``, name -> what its values are divided by.
    """
    info = run.info
    cells = []
    for cell in run.cells:
        values = []
        for name, scale in metrics.items():
            one = cell.measured.get(name)
            found = (one.value, one.low, one.high) if one is not None else (None, None, None)
            values.append([chart_data.rounded(divided(value, scale)) for value in found])
        place = index_of[info.suite, info.card, cell.cell_id]
        cells.append([place, cell.verdict, cell.reason, *values])
    return {"metrics": list(metrics), "segment": dict(info.segment), "cells": cells}


def run_metrics(found: Iterable[str]) -> tuple[str, ...]:
    """What runs are compared by: `RUN_METRICS`, and in other tools' runs whatever they have."""
    every = set(found)
    known = tuple(name for name in RUN_METRICS if name in every)
    return known or tuple(sorted(every))[: len(RUN_METRICS)]


def main_metric(found: Iterable[str]) -> str:
    """The metric that stands for a cell: its speed, or the first that it has."""
    return (*run_metrics(found), RUN_METRICS[0])[0]


@dataclass(frozen=True, slots=True)
class CellRow:
    """A cell in a list: its newest value and verdict, and its sparkline.

    ``pct``: half of the newest interval in percent. ``terms``: what the filter box matches.
    ``is_stale``: the newest run of the suite lacks it.
    """

    page: str
    cell_id: str
    name: str
    mark: Mark
    reason: str
    value: str
    pct: float | None
    line: Sparkline
    terms: str
    is_stale: bool
    when: str


def cell_row(name: str, cell: HistoryCell, series: Series, known: Levels, newest: str) -> CellRow:
    """``series``: of the metric that stands for the cell; ``newest``: the suite's newest run."""
    key, points = series.key, series.points
    last = points[-1]
    index_of = {point.run_id: index for index, point in enumerate(points)}
    changes = [one for one in known.changes if one.key == key and one.run_id in index_of]
    undecided = [c for c in changes if decision_on(c, series, known.decisions) is None]
    places = [index_of[one.run_id] for one in undecided]
    mark = mark_of(cell.verdict)
    page = names.cell_page(key.suite, key.card, key.cell_id)
    return CellRow(
        page,
        key.cell_id,
        name,
        mark,
        cell.reason,
        shown(last.value, series.metric.unit),
        half_width_pct(last.value, last.low, last.high),
        sparkline([point.value for point in points], places),
        terms(key.suite, key.card, cell.axes, mark),
        last.run_id != newest,
        minute(last.measured_utc),
    )


def terms(suite: str, card: str, axes: Axes, mark: Mark) -> str:
    """Lower-case 'axis=value' lines, one for each thing that the filter box knows exactly."""
    known = {**axes, "suite": suite, "card": card, "verdict": mark.verdict, "is": mark.light}
    lines = (" ".join(f"{name}={value}".lower().split()) for name, value in known.items())
    return "\n".join(["", *lines, ""])


@dataclass(frozen=True, slots=True)
class Levels:
    """What the site knows of all cells of a suite: change points, decisions, baselines by cell and
    metric, when commits were made.
    """

    changes: Sequence[ChangePoint]
    decisions: Sequence[Triage]
    baselines: Mapping[tuple[str, str], float]
    commit_times: Mapping[str, datetime]


def cell_columns(
    every: Sequence[Series],
    main: Mapping[str, Series],
    known: Levels,
) -> dict[str, Any]:
    """The data of a cell's page. ``every``: its series. ``main``: cell id -> the series of the
    metric that stands for it, of the cell and of those that compute the same.
    """
    line = chart_data.timeline(every, known.commit_times)
    key = every[0].key
    axes = {cell_id: series.axes for cell_id, series in main.items()}
    verdicts = sorted({point.verdict or MEASURED for point in line.points})
    reasons = sorted({point.reason for point in line.points})
    runs = {
        **chart_data.runs_columns(line),
        "page": [names.run_page(point.run_id) for point in line.points],
        "id": [point.run_id for point in line.points],
        "commit": [point.commit for point in line.points],
        "verdicts": verdicts,
        "verdict": [verdicts.index(point.verdict or MEASURED) for point in line.points],
        "reasons": reasons,
        "reason": [reasons.index(point.reason) for point in line.points],
        "segments": chart_data.segment_changes(line),
    }
    charts = [_chart(series, line, known) for series in _in_order(every)]
    mine = next((s for s in every if s.key.metric == main[key.cell_id].key.metric), None)
    twins = [main[one] for one in dense_twins(key.cell_id, axes)]
    ratio = None if mine is None or not twins else _ratio_chart(mine, twins, line)
    if ratio is not None:
        charts.insert(1, ratio)
    others = peers_of(key.cell_id, axes)[:MAX_PEERS]
    route = short_names({one: axes[one] for one in (key.cell_id, *others)})
    peers = [{"name": route[one], "value": _aligned(main[one], line)} for one in others]
    return {"runs": runs, "metrics": charts, "peers": peers}


def _in_order(every: Sequence[Series]) -> list[Series]:
    return sorted(every, key=lambda one: metric_order(one.key.metric))


def metric_order(name: str) -> tuple[int, str]:
    """That of METRICS; another tool's come after them, by name."""
    return ([*METRICS].index(name) if name in METRICS else len(METRICS), name)


def _chart(series: Series, line: chart_data.Timeline, known: Levels) -> dict[str, Any]:
    key = series.key
    changes = [change for change in known.changes if change.key == key]
    decisions = [one for one in known.decisions if one.matches(key)]
    decided = decisions_on(changes, series, decisions)
    real = [one for one in changes if one not in decided or decided[one].kind != TriageKind.NOISE]
    return {
        "name": key.metric,
        "title": series.metric.title,
        "unit": series.metric.unit,
        "better": series.metric.better.value,
        **chart_data.series_columns(series, line),
        "changes": chart_data.change_marks(changes, line, decided),
        "levels": chart_data.levels(series, line, real, decisions),
        "accepted": chart_data.accepted_rows(decisions, line),
        "baseline": chart_data.rounded(known.baselines.get((key.cell_id, key.metric))),
    }


def _best_of(twins: Sequence[Series]) -> dict[str, float]:
    """The best value of the twins in each run that measured one, by the run's id."""
    found: dict[str, float] = {}
    for twin in twins:
        better = min if twin.metric.better is Better.LOWER else max
        for point in twin.points:
            if point.value:
                found[point.run_id] = better(point.value, found.get(point.run_id, point.value))
    return found


def _ratio_chart(
    mine: Series, twins: Sequence[Series], line: chart_data.Timeline
) -> dict[str, Any] | None:
    """This cell against the best of its dense twins, where one run measured both."""
    theirs = _best_of(twins)
    values: list[float | None] = [None] * len(line.points)
    for point in mine.points:
        other = theirs.get(point.run_id)
        if point.value is not None and other:
            values[line.places[point.run_id]] = chart_data.rounded(point.value / other)
    at = [index for index, value in enumerate(values) if value is not None]
    if not at:
        return None
    return {
        "name": "x_dense",
        "title": f"{mine.metric.title}, × dense",
        "unit": "",
        "better": mine.metric.better.value,
        "value": [values[index] for index in at],
        "low": [],
        "high": [],
        "count": [],
        "why": {},
        "at": at,
        "changes": [],
        "levels": [],
        "accepted": [],
        "baseline": None,
    }


def _aligned(series: Series, line: chart_data.Timeline) -> list[float | None]:
    """A peer's values at the runs of this page."""
    found: list[float | None] = [None] * len(line.points)
    for point in series.points:
        if point.run_id in line.places:
            found[line.places[point.run_id]] = chart_data.rounded(point.value)
    return found


@dataclass(frozen=True, slots=True)
class PeerRow:
    """A way to compute the same, next to the cell: its newest value, and how much faster it is.

    ``ratio``: the peer's value over this cell's in the newest run of this cell; ``remark``: why
    there is none.
    """

    page: str
    name: str
    value: str
    ratio: float | None
    remark: str
    line: Sparkline
    is_dense: bool


def peer_rows(cell_id: str, main: Mapping[str, Series]) -> list[PeerRow]:
    """Named by the axes in which they differ from the cell."""
    axes = {one: series.axes for one, series in main.items()}
    mine = main[cell_id].points[-1]
    twins = dense_twins(cell_id, axes)
    best = _best_of([main[one] for one in twins]).get(mine.run_id)
    others = peers_of(cell_id, axes)[:MAX_PEERS]
    route = short_names({one: axes[one] for one in (cell_id, *others)})
    rows = []
    for other in others:
        series = main[other]
        newest = series.points[-1]
        theirs = next((one for one in series.points if one.run_id == mine.run_id), None)
        ratio, remark = None, ""
        if not mine.value:
            remark = f"this cell: {mine.verdict or MEASURED}, no value"
        elif theirs is None:
            remark = f"measured {minute(newest.measured_utc)}, not in this cell's newest run"
        elif theirs.value is None:
            remark = f"{theirs.verdict or MEASURED}: {theirs.reason or 'no value'}"
        else:
            ratio = theirs.value / mine.value
        rows.append(
            PeerRow(
                names.cell_page(series.key.suite, series.key.card, other),
                route[other],
                shown(newest.value, series.metric.unit),
                ratio,
                remark,
                sparkline([point.value for point in series.points]),
                other in twins and (len(twins) == 1 or (theirs and theirs.value) == best),
            )
        )
    return rows
