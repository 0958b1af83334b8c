"""`History`: what goes in comes out, in the order that was asked for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfbench.errors import Exit, PerfbenchError
from perfbench.history.nouns import (
    METRICS,
    Better,
    HistoryCell,
    HistoryRun,
    MeasuredValue,
    Metric,
    SeriesPoint,
)
from perfbench.history.store import Added, History
from tests.perfbench.history.made_runs import FIRST, MEASURED, SEGMENT, key, made_cell, made_run

DEAD = MeasuredValue(None, reason="the process left with 137")


def test_a_run_comes_back_as_it_was_added(history: History) -> None:
    foreign = Metric("mean_us", "mean", "us", Better.LOWER)
    run = made_run(
        3,
        made_cell("b", {"tok_per_s": MeasuredValue(1e-300, None, 1.5e300, 7), "mean_us": DEAD}),
        made_cell("a", {}, verdict=None, reason="", reproduce="", config_sha256=None, axes={}),
        made_cell("c", {"launches": MeasuredValue(0.0, 0.0, 0.0, 1)}, verdict="WRONG_PATH"),
        metrics=[foreign],
        is_dirty=None,
        exit_code=4,
        injections=("delay=2",),
        commit=None,
        commit_utc=None,
        branch=None,
    )
    assert history.add(run) is Added.NEW
    assert history.run("run-003") == run
    assert history.metric("mean_us") == foreign
    assert history.metric("step_ms") == METRICS["step_ms"]
    json.dumps([dict(cell.axes) for cell in history.run("run-003").cells])


def test_a_series_is_oldest_first_whatever_came_first(history: History) -> None:
    for day in (5, 1, 3):
        measured = {"tok_per_s": MeasuredValue(100.0 + day, 99.0, 101.0, day)}
        history.add(made_run(day, made_cell(measured=measured)))
    history.add(made_run(2, made_cell(measured={"tok_per_s": DEAD}, verdict="FAILED")))
    series = history.series(key())
    assert [point.value for point in series.points] == [101.0, None, 103.0, 105.0]
    assert (series.key, series.metric) == (key(), METRICS["tok_per_s"])
    assert series.axes == {"path": "triton", "seq": 512}
    gap = replace(made_run(2).info)
    assert series.points[1] == SeriesPoint(
        *(gap.run_id, gap.measured_utc, gap.commit),
        *(None, None, None, 0),
        *("FAILED", DEAD.reason, {**SEGMENT, "config": "c" * 12}, False),
    )
    assert series.points[0].reason == "within 1.2 %"
    assert [
        one.run_id for one in history.series(key(), since=FIRST + timedelta(days=3)).points
    ] == [
        "run-003",
        "run-005",
    ]


def test_a_run_is_added_once(history: History) -> None:
    assert [history.add(made_run(1)) for _ in range(3)] == [Added.NEW, Added.SAME, Added.SAME]
    assert len(history.runs()) == len(history.series(key()).points) == 1


def test_a_resumed_run_replaces_its_cells(history: History) -> None:
    """It has more cells, another time and none of the metrics that it had."""
    history.add(made_run(0))
    history.add(made_run(1, made_cell("c0", {"step_ms": MeasuredValue(3.0, None, None, 1)})))
    later = made_run(
        1,
        made_cell("c1"),
        made_cell("c2"),
        content_sha256="d" * 64,
        measured_utc=FIRST - timedelta(days=1),
        report="",
    )
    assert history.add(later) is Added.REPLACED
    assert history.run("run-001") == later
    assert history.keys() == [key("c0"), key("c1"), key("c2")]
    assert [info.run_id for info in history.runs()] == ["run-000", "run-001"]
    assert history.add(later) is Added.SAME


def test_a_copy_that_lacks_what_is_stored_is_refused_where_it_may_not_shrink(
    history: History,
) -> None:
    whole = made_run(1, made_cell("c0"), made_cell("c1"))
    (name,) = whole.cells[0].measured
    history.add(whole)

    def copy(*cells: HistoryCell, content: str = "d") -> Added:
        made = made_run(1, *cells, content_sha256=content * 64)
        return history.add(made, may_shrink=False)

    short = {name: replace(whole.cells[0].measured[name], count=1)}
    dead = {name: DEAD}
    for lacking in (
        (made_cell("c0"),),
        (made_cell("c0"), made_cell("c1", short)),
        (made_cell("c0"), made_cell("c1", dead, verdict="MISSING")),
    ):
        with pytest.raises(PerfbenchError, match="c1 has . of 5 processes. Next: add the whole"):
            copy(*lacking)
        assert history.run("run-001") == whole
    # judged otherwise, or resumed and a later process crashed: nothing is lost
    for verdict in ("IMPOSSIBLE", "FAILED"):
        withheld = (made_cell("c0"), made_cell("c1", dead, verdict=verdict))
        assert copy(*withheld) is Added.REPLACED
        assert copy(made_cell("c0"), made_cell("c1"), content="e") is Added.REPLACED


def test_runs_are_newest_first_and_filtered(history: History) -> None:
    history.add(made_run(0))
    history.add(made_run(2, commit="ABCD", suite="decode"))
    history.add(made_run(1, card="cpu", origin="asv", commit=None))
    history.add(made_run(3, injections=("delay=2",)))

    def found(**wanted: object) -> list[str]:
        return [info.run_id for info in history.runs(**wanted)]

    assert found() == ["run-002", "run-001", "run-000"]
    assert found(demonstrations=True) == ["run-003", "run-002", "run-001", "run-000"]
    assert found(suite="decode") == found(commit="ABC") == ["run-002"]
    assert found(commit="abc") == found(commit="%") == found(suite="decod_") == []
    assert found(card="cpu") == found(origin="asv") == ["run-001"]
    assert found(since=FIRST + timedelta(days=1)) == ["run-002", "run-001"]
    assert found(since=FIRST + timedelta(days=1, microseconds=1)) == ["run-002"]
    assert history.runs(suite="decode")[0] == replace(
        made_run(2, commit="ABCD", suite="decode").info, report=""
    )


def test_a_run_by_a_part_of_its_name(history: History) -> None:
    with pytest.raises(PerfbenchError, match="has no run. Next: perfbench history add"):
        history.run("latest")
    for day in (1, 10, 11):
        history.add(made_run(day))
    history.add(made_run(20, injections=("delay=2",)))
    history.add(made_run(2, run_id="run-01"))
    assert history.run("latest").info.run_id == "run-011"
    assert history.run("run-00").info.run_id == "run-001"
    assert history.run("run-01").info.measured_utc == made_run(2).info.measured_utc  # exact
    with pytest.raises(PerfbenchError, match=r"'run-' begins the names of 5 runs \(run-020, run-0"):
        history.run("run-")
    with pytest.raises(PerfbenchError, match="has no run 'RUN-001'"):
        history.run("RUN-001")
    with pytest.raises(PerfbenchError, match="has no run '%'"):
        history.run("%")


def test_demonstrations_are_shown_when_asked_for(history: History) -> None:
    history.add(made_run(0))
    history.add(made_run(1, made_cell("c0"), made_cell("slow"), injections=("delay=2",)))
    assert history.keys() == [key("c0")]
    assert history.keys(demonstrations=True) == [key("c0"), key("slow")]
    assert len(history.series(key()).points) == 1
    assert history.series(key("slow")).points == ()
    assert len(history.series(key(), demonstrations=True).points) == 2
    assert [one.key for one in history.every_series()] == [key("c0")]
    assert len(list(history.every_series(demonstrations=True))) == 2
    assert {info.run_id for info, _ in history.cells()} == {"run-000"}


def test_every_series_is_what_series_gives(history: History, monkeypatch) -> None:
    monkeypatch.setattr("perfbench.history.store.TOGETHER", 2)  # several transactions
    names = ["Z", "a", "é", "\U0001f600", "A/b, 'c'"]
    for day in range(3):
        both = {"tok_per_s": MEASURED["tok_per_s"], "step_ms": MeasuredValue(2.0 + day)}
        history.add(made_run(day, *(made_cell(name, both) for name in names)))
    keys = history.keys()
    assert keys == sorted(key(name, m) for name in names for m in ("tok_per_s", "step_ms"))
    assert list(history.every_series()) == [history.series(one) for one in keys]
    since = FIRST + timedelta(days=2)
    some = list(history.every_series(cell_id="é", metric="step_ms", since=since))
    assert some == [history.series(key("é", "step_ms"), since=since)]
    assert history.keys(suite="x") == history.keys(card="x") == []
    assert history.keys(cell_id="a", metric="step_ms") == [key("a", "step_ms")]
    assert list(history.every_series(since=FIRST + timedelta(days=9))) == []


def test_cells_newest_run_first(history: History) -> None:
    for day in range(3):
        history.add(made_run(day, made_cell("b"), made_cell("a")))
    found = history.cells(since=FIRST + timedelta(days=1))
    assert [(info.run_id, cell.cell_id) for info, cell in found] == [
        ("run-002", "b"),
        ("run-002", "a"),
        ("run-001", "b"),
        ("run-001", "a"),
    ]
    assert [info.run_id for info, _ in history.cells(commit="0001")] == ["run-001"] * 2
    assert found[0][1] == made_cell("b")


def test_times_of_any_zone_are_utc_afterwards(history: History) -> None:
    zone = timezone(timedelta(hours=5, minutes=45))
    early = datetime(1931, 5, 4, 3, 2, 1, 999999, tzinfo=zone)
    history.add(made_run(0, measured_utc=early, commit_utc=datetime.max.replace(tzinfo=UTC)))
    info = history.run("latest").info
    assert (info.measured_utc, info.commit_utc) == (early, datetime.max.replace(tzinfo=UTC))
    assert info.measured_utc.tzinfo is UTC
    assert history.series(key()).points[0].measured_utc == early


def test_another_configuration_of_a_cell_is_another_segment(history: History) -> None:
    """Under one name the gate compares no two; a series must not either."""
    one = made_run(0)
    (cell,) = one.cells[:1]
    for day, config in enumerate(("a" * 64, "a" * 64, "b" * 64, None)):
        made = made_run(day, replace(cell, config_sha256=config))
        history.add(made)
    name = next(iter(cell.measured))
    (found,) = history.every_series(cell_id=cell.cell_id, metric=name)
    configs = [point.segment.get("config") for point in found.points]
    assert configs == ["a" * 12, "a" * 12, "b" * 12, None]


def test_equal_segments_are_stored_once(history: History) -> None:
    history.add(made_run(0, segment={"a": "1", "b": "2"}))
    history.add(made_run(1, segment={"b": "2", "a": "1"}))
    history.add(made_run(2, segment={"a": "1", "b": "3"}))
    first, second, third = history.series(key()).points
    assert first.segment is second.segment and first.segment != third.segment


NAMES = [
    "a/b, \"c\" 'd' `e` \\ %s :x {y} ; DROP TABLE runs --",
    "' OR '1'='1",
    "<script>alert(1)</script>",
    " leading, trailing \n\t ",
    "\ud800 alone, \udcff\udc00 and \U0001f600",
    "\ufffed800 \ufffe\ufffe",
    "x" * 10_000,
    "ä" * 10_000,
    "e\u0301 and \u00e9",
    "",
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:12]))
def test_any_text_is_a_name(history: History, name: str) -> None:
    metric = Metric(name, name, name, Better.NEITHER)
    run = made_run(
        0,
        made_cell(name, {name: DEAD}, axes={name: name}, reason=name, reproduce=name, verdict=name),
        metrics=[metric],
        **dict.fromkeys(
            ("suite", "card", "origin", "branch", "commit", "headline", "report"), name
        ),
        segment={name: name},
        injections=(),
    )
    history.add(run)
    history.add(made_run(1))
    assert history.run("run-000") == run
    one = history.keys(cell_id=name, suite=name, card=name, metric=name)
    assert [(k.suite, k.card, k.cell_id, k.metric) for k in one] == [(name,) * 4]
    assert history.series(one[0]).metric == metric
    assert history.runs(suite=name)[0].commit == name
    assert history.runs(commit=name[:7], origin=name)[0].branch == name


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=()), max_size=12)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TEXT, min_size=1, max_size=4, unique=True), st.floats(allow_nan=False), TEXT)
def test_names_and_numbers_are_exact(
    history: History, names: list[str], number: float, run_id: str
) -> None:
    value = MeasuredValue(0.0 if math.isinf(number) else number)
    history.delete_runs([info.run_id for info in history.runs()])
    cells = (made_cell(name, {"tok_per_s": value}) for name in names)
    run = made_run(0, *cells, run_id=f"r{run_id}")
    history.add(run)
    assert history.run(run.info.run_id) == run
    found = [one.cell_id for one in history.keys(metric="tok_per_s")]
    assert found == sorted(names)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (made_run(0, made_cell(measured={"step_ms": MeasuredValue(math.nan)})), "value is nan"),
        (made_run(0, made_cell(measured={"step_ms": MeasuredValue(1, math.inf)})), "low is inf"),
        (made_run(0, made_cell(measured={"step_ms": MeasuredValue(None)})), "without a reason"),
        (made_run(0, made_cell(measured={"nobody": MeasuredValue(1)})), "describes this metric"),
        (made_run(0, made_cell("c\0d")), r"'c\\x00d' holds a NUL character"),
        (made_run(0, report="\0"), "holds a NUL character"),
        (made_run(0, made_cell(), made_cell()), "cell 'c0' comes twice"),
        (made_run(0, measured_utc=FIRST.replace(tzinfo=None)), "has no time zone"),
        (made_run(0, run_id=""), "the run_id is empty"),
        (
            made_run(0, metrics=[Metric("tok_per_s", "t", "ms", Better.LOWER)]),
            "metric 'tok_per_s' is 'tok_per_s' in 'ms', wanted it in 'tok/s'",
        ),
    ],
)
def test_what_no_history_holds(history: History, run: HistoryRun, words: str) -> None:
    """Refused in one line, and nothing of the run is stored."""
    with pytest.raises(PerfbenchError, match=words) as refused:
        history.add(run)
    assert refused.value.exit_code is Exit.USAGE
    assert "\n" not in str(refused.value) and "Next: " in str(refused.value)
    assert history.runs() == [] and history.keys(demonstrations=True) == []


def test_a_number_is_refused_with_its_cell_and_metric(history: History) -> None:
    run = made_run(0, made_cell("a/b"), made_cell("c", {"step_ms": MeasuredValue(1, 1, math.nan)}))
    with pytest.raises(PerfbenchError, match="cell 'c', metric 'step_ms': high is nan"):
        history.add(run)


def test_a_metric_keeps_its_unit_and_takes_a_new_title(history: History) -> None:
    def run(day: int, title: str, unit: str) -> HistoryRun:
        cell = made_cell(measured={"mean": MeasuredValue(1.0)})
        return made_run(day, cell, metrics=[Metric("mean", title, unit, Better.LOWER)])

    history.add(run(0, "old", "us"))
    history.add(run(1, "new", "us"))
    assert history.metric("mean").title == "new"
    with pytest.raises(PerfbenchError, match="metric 'mean' is 'mean' in 'ms', wanted it in 'us'"):
        history.add(run(2, "new", "ms"))
    with pytest.raises(PerfbenchError, match="no metric 'median'. Next: give one of .*mean"):
        history.metric("median")


def test_a_series_that_nobody_added(history: History) -> None:
    with pytest.raises(PerfbenchError, match="has no tok_per_s of cell 'c0'"):
        history.series(key())


def test_deleted_runs_take_their_cells_along(history: History) -> None:
    for day in range(3):
        history.add(made_run(day, made_cell("c0"), made_cell(f"only-{day}")))
    assert history.delete_runs(["run-001", "run-002", "run-002", "nobody", "run-0"]) == 2
    assert history.keys() == [key("c0"), key("only-0")]
    assert [info.run_id for info in history.runs()] == ["run-000"]
    assert history.run("run-000") == made_run(0, made_cell("c0"), made_cell("only-0"))
    assert history.delete_runs([]) == 0
    assert history.add(made_run(1)) is Added.NEW
    many = [f"run-{day:03d}" for day in range(2000)]
    assert history.delete_runs(many) == 2


def test_a_large_run(history: History) -> None:
    """More cells than one statement has parameters."""
    run = made_run(0, *(made_cell(f"c{i}", reason=f"{i}") for i in range(1200)))
    assert history.add(run) is Added.NEW
    assert history.run("latest") == run
    other = replace(run, info=replace(run.info, run_id="other"))
    assert history.add(other) is Added.NEW
    assert len(history.keys()) == 1200
