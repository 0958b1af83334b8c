"""Changes that were reported, once each, and decisions."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta

import pytest

from perfbench.errors import PerfbenchError
from perfbench.history import writing
from perfbench.history.nouns import ChangeKind, ChangePoint, Triage, TriageKind
from perfbench.history.store import History
from tests.perfbench.history.made_runs import FIRST, key, made_cell, made_run


@pytest.fixture
def filled(history: History) -> History:
    """Forty runs of two cells, the odd ones of the second cell alone."""
    with history._database.write() as connection:  # one, since a disk takes its time for each
        for day in range(40):
            cells = [made_cell("c1")] if day % 2 else [made_cell("c0"), made_cell("c1")]
            writing.add(connection, made_run(day, *cells))
    return history


def step(day: int, cell_id: str = "c1", size_pct: float = -5.0) -> ChangePoint:
    before, after = made_run(day - 1).info, made_run(day).info
    return ChangePoint(
        key=key(cell_id),
        kind=ChangeKind.STEP,
        before_run_id=before.run_id,
        run_id=after.run_id,
        before_commit=before.commit,
        commit=after.commit,
        measured_utc=after.measured_utc,
        size_pct=size_pct,
        low_pct=size_pct - 1,
        high_pct=size_pct + 1,
        is_worse=size_pct < 0,
        p=0.001,
    )


def drift(begin: int, end: int, size_pct: float = -5.0) -> ChangePoint:
    before = made_run(begin).info
    return replace(
        step(end, size_pct=size_pct),
        kind=ChangeKind.DRIFT,
        before_run_id=before.run_id,
        before_commit=before.commit,
        is_worse=None,
        p=None,
    )


def test_changes_are_reported_once(filled: History) -> None:
    first = [step(10), step(20, size_pct=7.0), step(10, "c0"), drift(5, 30)]
    assert filled.report_changes(first) == [first[0], first[1], first[3], first[2]]
    assert filled.report_changes(first) == []
    assert filled.change_points() == [first[3], first[1], first[2], first[0]]
    assert filled.change_points(cell_id="c0") == [first[2]]
    assert filled.change_points(metric="step_ms") == filled.change_points(card="cpu") == []


def test_near_is_three_points(filled: History) -> None:
    """Of the series: 'c0' has a point in every second run."""
    assert len(filled.report_changes([step(20), step(20, "c0")])) == 2
    assert filled.report_changes([step(17), step(23), step(14, "c0"), step(26, "c0")]) == []
    far = [step(16), step(24), step(12, "c0"), step(28, "c0")]
    assert filled.report_changes(far) == far


def test_a_way_back_is_news(filled: History) -> None:
    assert len(filled.report_changes([step(20)])) == 1
    back = step(21, size_pct=5.0)
    assert filled.report_changes([back, drift(15, 20)]) == [back, drift(15, 20)]


def test_a_drift_that_goes_on_is_no_news(filled: History) -> None:
    assert filled.report_changes([drift(5, 15)]) == [drift(5, 15)]
    assert filled.report_changes([drift(5, 35), drift(18, 39), drift(0, 2)]) == []
    assert filled.report_changes([drift(19, 39)]) == [drift(19, 39)]


def test_a_drift_that_has_grown_by_half_is_news_and_replaces_what_was_reported(
    filled: History,
) -> None:
    """Beyond the interval, too: -5 (-6 to -4). Half is of the logarithm: no fall is over 100 %."""
    assert filled.report_changes([drift(5, 15)]) == [drift(5, 15)]
    assert filled.report_changes([drift(5, 20, -7.2)]) == []
    grown = drift(5, 25, -7.8)
    assert filled.report_changes([grown]) == [grown]
    assert filled.change_points() == [grown]
    assert filled.report_changes([grown, drift(5, 30, -11.0)]) == []
    far = [drift(5, 30, -70.0), drift(5, 39, -85.0)]
    assert filled.report_changes(far) == far
    assert filled.change_points() == [far[1]]


def test_a_replaced_run_keeps_its_changes_and_a_deleted_one_takes_them(filled: History) -> None:
    note = Triage(TriageKind.NOTE, "run-010", "driver", "me", FIRST)
    filled.report_changes([step(10), step(20)])
    filled.triage(note)
    filled.add(made_run(10, made_cell("other"), content_sha256="d" * 64))
    assert filled.change_points() == [step(20), step(10)]
    assert filled.decisions() == [note]
    assert filled.report_changes([step(10)]) == []
    filled.delete_runs(["run-010"])
    assert filled.change_points() == [step(20)]
    assert filled.decisions() == []


def test_a_series_without_points_keeps_its_changes(history: History) -> None:
    """Its only run is replaced by one without the cell, and then has it again."""
    history.add(made_run(1))
    history.report_changes([step(1, "c0")])
    history.add(made_run(1, made_cell("other"), content_sha256="d" * 64))
    assert history.keys() == [key("other")]
    assert list(history.every_series(cell_id="c0")) == []
    assert history.series(key("c0")).points == ()
    history.add(made_run(1, content_sha256="e" * 64))
    assert history.report_changes([step(1, "c0")]) == []


def test_decisions_newest_first(filled: History) -> None:
    made = [
        Triage(TriageKind.NOISE, "run-003", "a, 'b'", "", FIRST, cell_id="c0", metric="tok_per_s"),
        Triage(TriageKind.ACCEPTED, "run-001", "", "me", FIRST + timedelta(1), "nightly", "h200"),
    ]
    for one in made:
        filled.triage(one)
    assert filled.decisions() == made[::-1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (step(10, "nobody"), "no series of 'tok_per_s' of cell 'nobody'"),
        (replace(step(10), run_id="run-999"), "no run 'run-999'"),
        (replace(step(10), high_pct=math.nan), "wanted numbers"),
        (replace(step(10), measured_utc=FIRST.replace(tzinfo=None)), "has no time zone"),
    ],
)
def test_changes_that_no_history_holds(filled: History, change: ChangePoint, words: str) -> None:
    with pytest.raises(PerfbenchError, match=words):
        filled.report_changes([step(20), change])
    assert filled.change_points() == []


def test_decisions_that_no_history_holds(filled: History) -> None:
    decision = Triage(TriageKind.NOTE, "run-0", "", "", FIRST)
    with pytest.raises(PerfbenchError, match="there is no run 'run-0'"):
        filled.triage(decision)
    naive = replace(decision, run_id="run-001", created_utc=FIRST.replace(tzinfo=None))
    with pytest.raises(PerfbenchError, match="has no time zone"):
        filled.triage(naive)
    with pytest.raises(PerfbenchError, match="has no time zone"):  # the first is not kept either
        filled.triage(replace(decision, run_id="run-001"), naive)
    assert filled.decisions() == []
