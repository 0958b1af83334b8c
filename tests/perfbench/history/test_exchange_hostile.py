"""Files that are damaged, doubled, empty or meant to harm: a run without invention, or one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perfbench.errors import Exit, PerfbenchError
from perfbench.history.exchange import READERS, ImportFormat, SourceFile, Stated, detect
from perfbench.history.nouns import HistoryCell, HistoryRun
from perfbench.history.store import History
from tests.perfbench.history.test_exchange_readers import WRITTEN, sources

PYTEST = ImportFormat.PYTEST_BENCHMARK
NOTHING = Stated()
UNITS = ("a b", "a_b", "a__b", "a-b", "A b", "", "_", "per/s", "per_per_s")
NAMES = (
    "a/b",
    "a, b",
    'say "hi"',
    "it's",
    "Ünïcödé 🚀",
    "<script>alert(1)</script>",
    "=cmd|' /C calc'!A0",
    "x" * 10_000,
    "two\nlines",
    "nul\x00",
    "\x1b[31mred",
    "\ud800",
    "\u202egnp.exe",
    "..",
    "%s {0}",
)


def pytest_file(benchmarks: list[dict[str, Any]], **more: Any) -> bytes:
    whole = {
        "machine_info": {"node": "m"},
        "commit_info": {"id": "c0ffee", "project": "p"},
        "datetime": "2026-01-01T00:00:00+00:00",
        "benchmarks": benchmarks,
        **more,
    }
    return json.dumps(whole).encode()


def bench(name: str, median: float | None, **stats: Any) -> dict[str, Any]:
    return {"fullname": name, "params": None, "stats": {"median": median, "rounds": 5, **stats}}


def read(data: bytes, kind: ImportFormat = PYTEST, stated: Stated = NOTHING) -> HistoryRun:
    (run,) = READERS[kind]([SourceFile("f.json", data, WRITTEN)], stated).runs
    return run


def refusal(data: bytes, kind: ImportFormat = PYTEST, stated: Stated = NOTHING) -> str:
    with pytest.raises(PerfbenchError) as caught:
        READERS[kind]([SourceFile("f.json", data, WRITTEN)], stated)
    message = str(caught.value)
    assert caught.value.exit_code is Exit.USAGE
    assert message.startswith("f.json") and "Next: " in message and "\n" not in message
    assert len(message) < 1500
    return message


def only(run: HistoryRun) -> HistoryCell:
    (cell,) = run.cells
    return cell


@pytest.mark.parametrize("name", NAMES)
def test_names_stay_apart_and_whole(name: str) -> None:
    """Every name is a cell; what no database or terminal takes is an escape."""
    run = read(pytest_file([bench(name, 1.0), bench(name + "'", 2.0)]))
    values = {cell.cell_id: cell.measured["median_s"].value for cell in run.cells}
    assert sorted(values.values()) == [1.0, 2.0]
    for cell_id in values:
        cell_id.encode()
        assert "\x00" not in cell_id and "\x1b" not in cell_id
    assert max(map(len, values)) >= len(name)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (None, "null"),
        (float("nan"), "NaN"),
        (float("inf"), "infinite"),
        (-float("inf"), "infinite"),
    ],
)
def test_what_is_no_number_is_a_gap_with_its_reason(value: float | None, word: str) -> None:
    cell = only(read(pytest_file([bench("a", value)])))
    measured = cell.measured["median_s"]
    assert measured.value is None and word in measured.reason
    assert cell.verdict == "FAILED" and word in cell.reason


def test_a_number_beyond_floats_is_infinite() -> None:
    data = pytest_file([bench("a", 1.25)])
    for huge in (b"1e999", b"9" * 5000):
        measured = only(read(data.replace(b"1.25", huge))).measured["median_s"]
        assert measured.value is None and "infinite" in measured.reason


def test_zero_and_negative_numbers_stay() -> None:
    run = read(pytest_file([bench("a", 0.0), bench("b", -1.5)]))
    assert [cell.measured["median_s"].value for cell in run.cells] == [0.0, -1.5]


def test_one_null_of_several_is_a_gap() -> None:
    """The median of the others would hide that one failed."""
    run = read(pytest_file([bench("a", 1.0), bench("a", None), bench("a", 3.0)]))
    assert only(run).measured["median_s"].value is None


def test_a_repeated_name_is_the_median_without_an_interval() -> None:
    data = {"a": {"latency": {"value": 1.0, "lower_value": 0.5, "upper_value": 1.5}}}
    once = only(read(json.dumps(data).encode(), ImportFormat.BENCHER)).measured["latency"]
    assert (once.low, once.high) == (0.5, 1.5)
    many = [{"name": "a", "unit": "ms", "value": value} for value in (1, 9, 2)]
    found = only(read(json.dumps(many).encode(), ImportFormat.SMALLER)).measured["smaller_ms"]
    assert (found.value, found.low, found.high, found.count) == (2.0, None, None, 3)


def test_numbers_at_the_bound_have_no_median_and_counts_fit_a_column() -> None:
    run = read(pytest_file([bench("a", 1.7e308), bench("a", 1.6e308), bench("b", 1.0)]))
    assert "beyond" in run.cells[0].measured["median_s"].reason
    many = pytest_file([bench("a", 1.0, rounds=10**12)])
    assert only(read(many)).measured["median_s"].count == 2**31 - 1


def test_another_unit_is_another_metric() -> None:
    """So that a step of a thousand is not seen where only the unit changed."""
    both = [{"name": "a", "unit": unit, "value": 1} for unit in ("ms", "us", "µs", "MB/s", "mb/s")]
    found = only(read(json.dumps(both).encode(), ImportFormat.SMALLER)).measured
    assert len(found) == 4 and found["smaller_us"].count == 2


def test_units_that_look_alike_are_not_one() -> None:
    rows = [{"name": "x", "unit": one, "value": 1} for one in UNITS]
    run = read(json.dumps(rows).encode(), ImportFormat.SMALLER)
    assert {one.unit for one in run.metrics.values()} == set(UNITS)


def test_google_units_are_one_unit() -> None:
    rows = [
        {"name": name, "real_time": value, "cpu_time": value, "time_unit": unit}
        for name, value, unit in (("a", 1500.0, "ns"), ("b", 1.5, "us"), ("c", 0.0015, "ms"))
    ]
    data = json.dumps({"context": {"date": "2015/03/17-18:40:25"}, "benchmarks": rows}).encode()
    run = read(data, ImportFormat.GOOGLE_BENCHMARK)
    values = [cell.measured["real_time_ns"].value for cell in run.cells]
    assert values == pytest.approx([1500.0] * 3)
    wrong = data.replace(b'"us"', b'"parsec"')
    assert "benchmarks[1].time_unit" in refusal(wrong, ImportFormat.GOOGLE_BENCHMARK)


def test_google_rows_that_are_left_out_are_counted() -> None:
    rows = [
        {"name": "a", "real_time": 1.0, "cpu_time": 1.0, "time_unit": "ns"},
        {"name": "a_BigO", "run_name": "a", "run_type": "aggregate", "aggregate_name": "BigO"},
    ]
    data = json.dumps({"context": {}, "benchmarks": rows}).encode()
    found = READERS[ImportFormat.GOOGLE_BENCHMARK]([SourceFile("f", data, WRITTEN)], Stated())
    assert len(found.notes) == 1 and "a_BigO" in found.notes[0]


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"", "f.json:1:1: not JSON"),
        (b'{"a": 1,\n "b": }', "f.json:2:7: not JSON"),
        (b"\xff\xfe{", "not UTF-8"),
        (b"[" * 100_000, "f.json:1: not JSON that is read (nested too deep)"),
        (b"[]", "f.json: got []"),
        (b'{"benchmarks": [], "benchmarks": [1]}', "f.json: got the key 'benchmarks' twice"),
        (
            pytest_file([bench("a", 1)]).replace(b'"rounds"', b'"median"'),
            "benchmarks[0].stats: got",
        ),
        (pytest_file([]), "a run without any benchmark"),
        (pytest_file([bench("", 1.0)]), "an empty name"),
        (pytest_file([{"name": "a"}]), "benchmarks[0].fullname"),
        (pytest_file([bench("a", 1.0, rounds=-1)]), "benchmarks[0].stats.rounds"),
        (pytest_file([{**bench("a", 1.0), "stats": {"median": "1", "rounds": 1}}]), "stats.median"),
        (
            pytest_file([{**bench("a", 1.0), "stats": {"median": True, "rounds": 1}}]),
            "stats.median",
        ),
        (pytest_file([bench("a", 1.0)], datetime="yesterday"), "datetime: got 'yesterday'"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_its_place(data: bytes, place: str) -> None:
    assert place in refusal(data)


@pytest.mark.parametrize("date", [1e300, float("nan"), float("inf"), -1e15, 10**18])
def test_a_date_that_none_is(date: float) -> None:
    entry = {
        "commit": {"id": "c"},
        "date": date,
        "tool": "go",
        "benches": [{"name": "a", "unit": "ns", "value": 1}],
    }
    data = json.dumps({"entries": {"s": [entry]}, "lastUpdate": 1}).encode()
    assert "entries.s[0].date" in refusal(data, ImportFormat.GITHUB_ACTION)


@pytest.mark.parametrize("name", NAMES)
def test_a_history_takes_every_name_wherever_it_stands(name: str, tmp_path: Path) -> None:
    """As suite, machine, unit, measure, counter and parameter."""
    unit = json.dumps([{"name": name, "unit": name, "value": 1, "extra": name}]).encode()
    counter = name.replace("\ud800", "x")  # pydantic takes no lone surrogate for a key
    google = {"name": name, "run_name": name, "real_time": 1, "cpu_time": 1, counter: 1.5}
    entry = {**bench(name, 1.0), "params": {name: name}}
    found = [
        read(unit, ImportFormat.BIGGER, Stated(suite=name, card=name)),
        read(json.dumps({name: {name: {"value": 1}}}).encode(), ImportFormat.BENCHER),
        read(
            json.dumps({"context": {"host_name": name}, "benchmarks": [google]}).encode(),
            ImportFormat.GOOGLE_BENCHMARK,
        ),
        read(pytest_file([entry], machine_info={"node": name, "machine": name})),
    ]
    with History.open(tmp_path / "h.sqlite", create=True) as history:
        for run in found:
            assert history.add(run) == "new"
            assert history.run(run.info.run_id) == run


def test_a_byte_order_mark_is_no_part_of_the_file() -> None:
    data = pytest_file([bench("a", 1.0)])
    assert only(read(b"\xef\xbb\xbf" + data)).measured["median_s"].value == 1.0


def test_asv_results_that_do_not_fit_their_parameters() -> None:
    (one,) = [file for file in sources("asv-1/**/*.json") if "0a0a" in file.name]
    data = one.data.replace(b"[1.5, NaN]", b"[1.5]")
    assert "results.b.time_range: got 1 values, wanted 2" in refusal(data, ImportFormat.ASV)
    many = one.data.replace(b'[["10", "100"]]', json.dumps([["1"] * 1000] * 3).encode())
    assert "1000000000 combinations" in refusal(many, ImportFormat.ASV)


def test_a_commit_that_contradicts_the_file_is_refused() -> None:
    data = pytest_file([bench("a", 1.0)])
    assert "names commit c0ffee, got --commit dead" in refusal(data, stated=Stated(commit="dead"))
    assert read(data, stated=Stated(commit="c0ffee00")).info.commit == "c0ffee"


def test_a_format_without_a_date_wants_one() -> None:
    found = [SourceFile("f.json", sources("bencher.json")[0].data)]
    with pytest.raises(PerfbenchError, match="no date. Next: name one with --date"):
        READERS[ImportFormat.BENCHER](found, Stated())


def test_a_tool_whose_direction_is_unknown_is_named() -> None:
    data = sources("data.js")[0].data.replace(b'"go"', b'"abacus"')
    found = READERS[ImportFormat.GITHUB_ACTION]([SourceFile("d", data, WRITTEN)], Stated())
    (metric,) = found.runs[2].metrics.values()
    assert metric.better == "neither" and any("'abacus'" in note for note in found.notes)


def test_a_script_that_assigns_something_else_is_not_run() -> None:
    data = b"window.BENCHMARK_DATA = alert(1)"
    assert "not JSON" in refusal(data, ImportFormat.GITHUB_ACTION)


def test_files_of_two_formats_are_refused() -> None:
    with pytest.raises(PerfbenchError, match="one format at a time"):
        detect(sources("google.json", "data.js"))


@pytest.mark.parametrize("data", [b"{}", b"null", b"3", b'{"a": 1}', b'{"a": {}}', b"[[]]"])
def test_json_of_no_format_is_not_detected(data: bytes) -> None:
    with pytest.raises(PerfbenchError, match="Next: name FORMAT"):
        detect([SourceFile("f.json", data)])
