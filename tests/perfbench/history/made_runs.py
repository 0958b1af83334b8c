"""Runs for a history, small and of known numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from perfbench.history.nouns import HistoryCell, HistoryRun, MeasuredValue, RunInfo, SeriesKey

FIRST = datetime(2026, 3, 1, 2, 17, 0, 123457, tzinfo=UTC)
SEGMENT = {"torch": "2.13.0", "driver": "580.65"}
MEASURED = {"tok_per_s": MeasuredValue(100.5, 99.25, 101.75, 5)}


def key(cell_id: str = "c0", metric: str = "tok_per_s") -> SeriesKey:
    return SeriesKey("nightly", "h200", cell_id, metric)


def made_cell(
    cell_id: str = "c0", measured: Mapping[str, MeasuredValue] = MEASURED, **fields: object
) -> HistoryCell:
    cell = HistoryCell(
        cell_id=cell_id,
        axes={"path": "triton", "seq": 512},
        verdict="PASS",
        reason="within 1.2 %",
        reproduce=f"perfbench run nightly.yaml --only {cell_id}",
        measured=measured,
        config_sha256="c" * 64,
    )
    return replace(cell, **fields)


def made_run(day: int = 0, *cells: HistoryCell, metrics=(), **fields: object) -> HistoryRun:
    """The run of one day; one cell where none is given."""
    info = RunInfo(
        run_id=f"run-{day:03d}",
        content_sha256=f"{day:064x}",
        origin="perfbench",
        suite="nightly",
        card="h200",
        measured_utc=FIRST + timedelta(days=day),
        commit=f"{day:04x}" * 10,
        segment=SEGMENT,
        commit_utc=FIRST + timedelta(days=day, hours=-2),
        branch="main",
        is_dirty=False,
        command="perfbench check nightly.yaml",
        headline="1 PASS",
        exit_code=0,
        folder=f"reports/runs/{day}",
        report=f"# Report {day}",
    )
    made = cells or (made_cell(),)
    return HistoryRun(replace(info, **fields), made, {one.name: one for one in metrics})
