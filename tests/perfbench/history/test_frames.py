"""`perfbench.history_frame`: every value is that of its point, and every column has its type."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pandas as pd
import pytest

import perfbench
from perfbench.commands import app
from perfbench.history.nouns import METRICS, Better, MeasuredValue, Metric
from perfbench.history.store import History
from tests.perfbench.history.made_runs import FIRST, MEASURED, made_cell, made_run

DATA = Path(__file__).parents[2] / "data"
POINT = (
    *("metric", "unit", "run_id", "measured_utc", "commit", "value", "low", "high", "count"),
    *("verdict", "reason"),
)


@pytest.fixture
def small(tmp_path: Path) -> History:
    """Two runs of one cell; in the second it failed, on another torch."""
    axes = {"path": "v2", "seq_len": 128, "workload": "forward", "flavour": "new"}
    gone = {"tok_per_s": MeasuredValue(None, reason="FAILED: oom")}
    history = History.open(tmp_path / "h.sqlite", create=True)
    history.add(made_run(0, made_cell("c", axes=axes)))
    failed = made_cell("c", gone, axes=axes, verdict="FAILED", reason="oom")
    history.add(made_run(1, failed, segment={"torch": "2.14.0"}, commit=None))
    return history


def test_a_row_is_a_point(small: History) -> None:
    first, second = perfbench.history_frame(small).to_dict("records")
    one = MEASURED["tok_per_s"]
    assert (first["suite"], first["card"], first["cell_id"]) == ("nightly", "h200", "c")
    assert (first["path"], first["seq_len"], first["flavour"]) == ("v2", 128, "new")
    assert (first["metric"], first["unit"]) == ("tok_per_s", "tok/s")
    assert (first["value"], first["low"], first["high"]) == (one.value, one.low, one.high)
    assert (first["count"], first["verdict"], first["run_id"]) == (5, "PASS", "run-000")
    assert first["measured_utc"] == FIRST and first["reason"] == "within 1.2 %"
    assert first["segment_torch"] == "2.13.0" and first["segment_driver"] == "580.65"
    assert pd.isna(second["value"]) and pd.isna(second["low"]) and pd.isna(second["commit"])
    assert (second["verdict"], second["reason"]) == ("FAILED", "FAILED: oom")
    assert second["segment_torch"] == "2.14.0" and pd.isna(second["segment_driver"])
    assert pd.isna(second["batch"])  # an axis that the cell does not have


def test_columns_have_the_types_of_load(small: History) -> None:
    frame = perfbench.history_frame(small)
    runs = perfbench.load(DATA / "runs" / "cpu")
    for name in ("seq_len", "batch", "commit", "path", "run_id"):
        kinds = {type(one[name].dtype) for one in (frame, runs)}
        assert len(kinds) == 1, name
    assert str(frame.measured_utc.dtype) == "datetime64[us, UTC]"
    assert str(frame["count"].dtype) == "Int64" and str(frame.value.dtype) == "float64"
    assert str(frame.verdict.dtype) == "category" and str(frame.reason.dtype) == "string"
    assert str(frame.segment_torch.dtype) == str(frame.flavour.dtype) == "category"
    columns = list(frame.columns)
    assert columns[:3] == ["suite", "card", "cell_id"]
    assert columns[-len(POINT) - 2 :] == [*POINT, "segment_driver", "segment_torch"]


def test_an_empty_history_has_the_same_columns(tmp_path: Path, small: History) -> None:
    with History.open(tmp_path / "empty.sqlite", create=True) as empty:
        frame = perfbench.history_frame(empty)
    full = perfbench.history_frame(small)
    own = [one for one in full.columns if one not in ("flavour", "segment_driver", "segment_torch")]
    assert list(frame.columns) == own and len(frame) == 0
    assert str(frame.measured_utc.dtype) == "datetime64[us, UTC]"


def test_rows_are_chosen(small: History) -> None:
    other = {"seconds": MeasuredValue(2.0, count=1)}
    metric = Metric("seconds", "time", "s", Better.LOWER)
    small.add(made_run(2, made_cell("bench", other), metrics=[metric], suite="asv", card="mine"))
    small.add(made_run(3, made_cell("c"), injections=("slowdown=10%@c",)))
    chosen = {
        "suite": ("asv", 1),
        "card": ("h200", 2),
        "cell_id": ("bench", 1),
        "metric": ("seconds", 1),
        "since": (FIRST + timedelta(hours=1), 2),
        "demonstrations": (True, 4),
    }
    for name, (value, count) in chosen.items():
        assert len(perfbench.history_frame(small, **{name: value})) == count, name
    assert len(perfbench.history_frame(small)) == 3


def test_a_run_of_perfbench_is_as_load_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The median launches, and the geometric mean of the speeds, of a stored run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERFBENCH_HISTORY", "h.sqlite")
    folder = DATA / "runs" / "h100-gate" / "start-1"
    assert app.invoke(["history", "init"]) == 0
    assert app.invoke(["history", "add", str(folder)]) == 0
    with perfbench.open_history() as history:
        frame = perfbench.history_frame(history)
    assert set(frame.metric) == set(METRICS)
    wide = frame.pivot(index="cell_id", columns="metric", values="value")
    rows = perfbench.load(folder)
    by_cell = rows[rows.status == "ok"].groupby("cell_id", observed=True)
    for cell_id, one in by_cell:
        speed = one.tok_per_s.prod() ** (1 / len(one))
        assert wide.tok_per_s[cell_id] == pytest.approx(speed)
        assert wide.launches[cell_id] == one.launches.median()
        assert wide.peak_memory_bytes[cell_id] == one.peak_memory_bytes.median()
        assert wide.utilisation_pct[cell_id] == pytest.approx(one.utilisation_pct.median())
