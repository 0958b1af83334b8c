"""The numbers that are exported and imported again are those that were there; the run is another,
which nobody takes for a measured one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as some

from perfbench.history.exchange import (
    READERS,
    ImportFormat,
    SourceFile,
    Stated,
    custom,
    data_js,
    write_bencher,
)
from perfbench.history.nouns import (
    METRICS,
    Better,
    HistoryCell,
    HistoryRun,
    MeasuredValue,
    Metric,
    RunInfo,
)
from perfbench.text import visible

EXAMPLES = 60
OTHER = Metric("counter_x", "counter x", "", Better.LOWER)
NAMES = ("tok_per_s", "step_ms", "peak_memory_bytes", "counter_x")
texts = some.text(min_size=1, max_size=30).map(visible).filter(bool)
commits = some.text("0123456789abcdef", min_size=4, max_size=64)
numbers = some.floats(allow_nan=False, allow_infinity=False)
times = some.datetimes(min_value=datetime(2000, 1, 1), max_value=datetime(2100, 1, 1)).map(
    lambda one: one.replace(tzinfo=UTC)
)


@some.composite
def values(draw: Any) -> MeasuredValue:
    low, value, high = sorted(draw(some.tuples(numbers, numbers, numbers)))
    known = draw(some.booleans())
    count = draw(some.integers(0, 1000))
    return MeasuredValue(value, low if known else None, high if known else None, count)


@some.composite
def runs(draw: Any) -> HistoryRun:
    axes = some.dictionaries(texts, some.one_of(texts, some.integers(-(2**53), 2**53)), max_size=3)
    measured = some.dictionaries(some.sampled_from(NAMES), values(), min_size=1)
    names = draw(some.lists(texts, min_size=1, max_size=4, unique=True))
    cells = tuple(
        HistoryCell(name, draw(axes), None, "", "", draw(measured)) for name in sorted(names)
    )
    info = RunInfo(
        run_id=draw(texts),
        content_sha256="",
        origin=draw(texts),
        suite=draw(texts),
        card=draw(texts),
        measured_utc=draw(times),
        commit=draw(some.none() | commits),
        segment=draw(some.dictionaries(texts, texts, max_size=3)),
        commit_utc=draw(some.none() | times),
        branch=draw(some.none() | texts),
        is_dirty=draw(some.none() | some.booleans()),
        injections=tuple(draw(some.lists(texts, max_size=2))),
    )
    used = {name for cell in cells for name in cell.measured}
    return HistoryRun(info, cells, {OTHER.name: OTHER} if OTHER.name in used else {})


def imported(text: str, kind: ImportFormat) -> tuple[HistoryRun, ...]:
    source = SourceFile("f", text.encode(), datetime(2026, 1, 1, tzinfo=UTC))
    return READERS[kind]([source], Stated()).runs


def as_imported(run: HistoryRun) -> HistoryRun:
    """Without what an import makes: its name, its digest and the file's name."""
    info = replace(
        run.info,
        run_id="",
        origin="github-action-benchmark",
        suite=f"github-action-benchmark: {run.info.suite}",
        segment={"exported_from": run.info.origin, **run.info.segment},
    )
    return replace(run, info=info)


def without_names(run: HistoryRun) -> HistoryRun:
    return replace(run, info=replace(run.info, run_id="", content_sha256="", folder=""))


@settings(max_examples=EXAMPLES, deadline=None)
@given(some.lists(runs(), min_size=1, max_size=3, unique_by=lambda run: run.info.run_id))
def test_data_js(found: list[HistoryRun]) -> None:
    back = imported(data_js(found).text, ImportFormat.GITHUB_ACTION)
    assert sorted(map(without_names, back), key=repr) == sorted(map(as_imported, found), key=repr)
    assert len({run.info.run_id for run in back}) == len(found)
    assert {run.info.run_id for run in back}.isdisjoint(run.info.run_id for run in found)


@settings(max_examples=EXAMPLES, deadline=None)
@given(runs())
def test_bencher_metric_format(run: HistoryRun) -> None:
    (back,) = imported(write_bencher(run).text, ImportFormat.BENCHER)
    found = {cell.cell_id: cell.measured for cell in back.cells}
    assert found == {
        cell.cell_id: {name: replace(one, count=1) for name, one in cell.measured.items()}
        for cell in run.cells
    }


@settings(max_examples=EXAMPLES, deadline=None)
@given(runs())
def test_custom_json(run: HistoryRun) -> None:
    """Both directions together are every number, under a name that says which."""
    found = {}
    for kind in (ImportFormat.BIGGER, ImportFormat.SMALLER):
        text = custom(kind, run).text
        for back in imported(text, kind) if json.loads(text) else ():
            for cell in back.cells:
                (value,) = cell.measured.values()
                found[cell.cell_id] = value
    known = {**METRICS, **run.metrics}
    assert found == {
        f"{cell.cell_id} [{name}]": one
        for cell in run.cells
        for name, one in cell.measured.items()
        if known[name].better is not Better.NEITHER
    }


def test_a_missing_number_is_counted_and_left_out() -> None:
    """None of the formats has a place for it; 0 would be an invention."""
    gap = HistoryCell("a", {}, "FAILED", "x", "", {"tok_per_s": MeasuredValue(None, reason="x")})
    whole = HistoryCell("b", {}, None, "", "", {"tok_per_s": MeasuredValue(1.0, count=1)})
    info = RunInfo("r", "", "o", "s", "c", datetime(2026, 1, 1, tzinfo=UTC), None, {})
    run = HistoryRun(info, (gap, whole))
    for made in (data_js([run]), write_bencher(run), custom("customBiggerIsBetter", run)):
        assert made.notes == ("1 numbers are missing and left out",)
        assert '"a"' not in made.text and '"a [' not in made.text


def test_a_metric_without_a_direction_is_named() -> None:
    measured = {"sm_clock_mhz": MeasuredValue(1.0, count=1)}
    info = RunInfo("r", "", "o", "s", "c", datetime(2026, 1, 1, tzinfo=UTC), None, {})
    run = HistoryRun(info, (HistoryCell("a", {}, None, "", "", measured),))
    assert "sm_clock_mhz" in data_js([run]).notes[0]
    assert json.loads(write_bencher(run).text)["a"]["sm_clock_mhz"] == {"value": 1.0}
