"""Each tool's own file becomes the runs, cells and numbers that the tool itself shows."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from perfbench.history.exchange import READERS, ImportFormat, SourceFile, Stated, detect
from perfbench.history.nouns import Better, HistoryCell, HistoryRun

DATA = Path(__file__).parents[2] / "data" / "exchange"
NOTHING = Stated()
WRITTEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def sources(*names: str) -> list[SourceFile]:
    """Files of the fixtures by name or pattern."""
    paths = [path for name in names for path in sorted(DATA.glob(name))]
    return [
        SourceFile(path.relative_to(DATA).as_posix(), path.read_bytes(), WRITTEN) for path in paths
    ]


def runs_of(*names: str, kind: ImportFormat, stated: Stated = NOTHING) -> tuple[HistoryRun, ...]:
    found = sources(*names)
    assert detect(found) == kind
    return READERS[kind](found, stated).runs


def cell_of(run: HistoryRun, cell_id: str) -> HistoryCell:
    (found,) = (cell for cell in run.cells if cell.cell_id == cell_id)
    return found


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (ImportFormat.PYTEST_BENCHMARK, ["pytest-benchmark.json"]),
        (ImportFormat.ASV, ["asv/**/*.json"]),
        (ImportFormat.GOOGLE_BENCHMARK, ["google.json"]),
        (ImportFormat.CRITERION, ["criterion/**/new/*.json"]),
        (ImportFormat.BENCHER, ["bencher.json"]),
        (ImportFormat.BIGGER, ["custom.json"]),
        (ImportFormat.SMALLER, ["custom.json"]),
    ],
)
def test_whatever_a_file_says_its_runs_are_of_its_tool(
    kind: ImportFormat, names: list[str]
) -> None:
    """A suite and a card that the user names change nothing about it. data.js has its own test."""
    found = READERS[kind](sources(*names), Stated(suite="perfbench", card="perfbench")).runs
    tool = "github-action-benchmark" if kind.startswith("custom") else kind.value
    assert found and {run.info.origin for run in found} == {tool}


def test_pytest_benchmark() -> None:
    (run,) = runs_of("pytest-benchmark.json", kind=ImportFormat.PYTEST_BENCHMARK)
    info = run.info
    assert (info.suite, info.card, info.branch, info.is_dirty) == ("pb", "vm", "main", False)
    assert info.commit == "60742b9f548cdbdf67190050cb4c23cc50183cea"
    assert info.measured_utc == datetime(2026, 11, 29, 18, 55, 36, 588120, UTC)
    assert info.commit_utc == datetime(2026, 11, 29, 18, 53, 50, tzinfo=UTC)
    assert info.segment["python"] == "3.11.7" and info.segment["cpu"] == "AMD EPYC"
    assert len(run.cells) == 7
    cell = cell_of(run, "test_speed.py::test_range[c, d-10]")
    assert cell.axes == {"benchmark": "test_speed.py::test_range", "how": "c, d", "n": 10}
    assert cell.measured["median_s"].value == pytest.approx(2.2483e-7, rel=1e-4)
    assert cell.measured["median_s"].count == 3
    assert run.metrics["median_s"].unit == "s" and run.metrics["median_s"].better is Better.LOWER


def test_google_benchmark() -> None:
    """Microseconds and nanoseconds are one unit; an error has its message; counters are metrics."""
    (run,) = runs_of("google.json", kind=ImportFormat.GOOGLE_BENCHMARK)
    assert (run.info.suite, run.info.card) == ("g.py", "vm")
    cell = cell_of(run, "with_args/64")
    assert cell.axes == {"benchmark": "with_args", "arg0": 64}
    assert cell.measured["real_time_ns"].value == pytest.approx(964.541, rel=1e-5)
    assert cell.measured["items_per_s"].value == pytest.approx(66282181.168477)
    assert run.metrics["items_per_s"].better is Better.HIGHER
    plain = cell_of(run, "sum_million")
    assert plain.measured["real_time_ns"].value == pytest.approx(18516.1, rel=1e-5)
    assert cell_of(run, "counters").measured["counter_foo"].value == 17407.0
    assert run.metrics["counter_foo"].better is Better.NEITHER
    failed = cell_of(run, "fails")
    assert (failed.verdict, failed.reason) == ("FAILED", 'no GPU here, "quoted"')
    assert failed.measured["real_time_ns"].value is None


def test_google_benchmark_repetitions_are_one_median() -> None:
    (run,) = runs_of("google-repetitions.json", kind=ImportFormat.GOOGLE_BENCHMARK)
    assert [cell.cell_id for cell in run.cells] == ["sum_million", "with_args/8"]
    found = cell_of(run, "sum_million").measured["real_time_ns"]
    assert (found.value, found.count) == (pytest.approx(14078.049432663691), 3)


def test_google_benchmark_aggregates_alone_give_their_median() -> None:
    (run,) = runs_of("google-aggregates.json", kind=ImportFormat.GOOGLE_BENCHMARK)
    found = cell_of(run, "with_args/8").measured["cpu_time_ns"]
    assert (found.value, found.count) == (pytest.approx(250.2612344815524), 3)


def test_asv_version_2() -> None:
    (run,) = runs_of("asv/**/*.json", kind=ImportFormat.ASV)
    info = run.info
    assert info.suite == "asv existing-py_tmp_ex_venv_bin_python3"
    assert info.card == "planted" and info.segment["cpu"] == "a CPU"
    assert info.measured_utc == info.commit_utc == datetime(2026, 11, 29, 18, 53, 48, tzinfo=UTC)
    assert len(run.cells) == 12
    cell = cell_of(run, "benchmarks.TimeSuite.time_range(10, 'c \"quoted\", ü')")
    assert cell.axes["n"] == 10 and cell.axes["how"] == "'c \"quoted\", ü'"
    assert cell.measured["time_s"].value == 2.4529999791411683e-06
    assert cell.measured["time_s"].low is None, "asv has -Infinity there"
    skipped = cell_of(run, "benchmarks.TimeSuite.time_range(100, 'a/b')")
    assert (skipped.verdict, skipped.reason) == (None, "NaN, asv's word for skipped")
    failed = cell_of(run, "benchmarks.TimeSuite.time_fails(10, 'a/b')")
    assert (failed.verdict, failed.reason) == ("FAILED", "null, asv's word for failed")
    assert cell_of(run, "benchmarks.peakmem_list").measured["peakmem_bytes"].value == 27910144
    assert cell_of(run, "benchmarks.track_answer").measured["track_tok_per_s"].value == 42
    assert run.metrics["track_tok_per_s"].better is Better.NEITHER


def test_asv_version_1() -> None:
    """Without benchmarks.json the types follow from the names."""
    (run,) = runs_of("asv-1/**/*.json", kind=ImportFormat.ASV)
    assert run.info.suite == "asv virtualenv-py3.6-numpy1.8"
    found = cell_of(run, "b.time_range(10)").measured["time_s"]
    assert (found.value, found.low, found.high, found.count) == (1.5, 1.25, 1.75, 8)
    assert cell_of(run, "b.time_range(100)").measured["time_s"].value is None
    assert cell_of(run, "b.time_range(10)").axes["param1"] == 10
    assert cell_of(run, "b.peakmem_one").measured["peakmem_bytes"].value == 1024
    assert cell_of(run, "b.time_fails").verdict == "FAILED"


def test_asv_result_of_another_version_of_its_benchmark_is_a_gap() -> None:
    benchmarks, *others = sources("asv/**/*.json")
    code = b"ec0721f8abd7"
    changed = SourceFile(benchmarks.name, benchmarks.data.replace(code, b"0" * len(code)))
    (run,) = READERS[ImportFormat.ASV]([changed, *others], Stated()).runs
    cell = cell_of(run, "benchmarks.time_plain")
    assert cell.verdict is None and "another version" in cell.reason


def test_github_action_benchmark() -> None:
    first, second, go = runs_of("data.js", kind=ImportFormat.GITHUB_ACTION)
    assert first.info.suite == "Python Benchmark" and first.info.card == "unknown"
    assert first.info.commit == "1" * 40
    assert first.info.measured_utc == datetime(2025, 1, 1, 12, tzinfo=UTC)
    assert first.info.commit_utc == datetime(2025, 1, 1, 8, tzinfo=UTC)
    found = cell_of(first, "bench.py::test_fib_10").measured["bigger_iter_per_sec"]
    assert found.value == 41513.3 and found.low is None, "a standard deviation is no interval"
    assert first.metrics["bigger_iter_per_sec"].better is Better.HIGHER
    assert second.cells[0].verdict == "FAILED" and second.cells[0].reason == "the file has null"
    fib = cell_of(go, "BenchmarkFib").measured["smaller_ns_per_op"]
    assert (fib.value, fib.count) == (11, 3)
    assert go.metrics["smaller_ns_per_op"].better is Better.LOWER


def test_a_name_that_stands_several_times_is_named() -> None:
    notes = READERS[ImportFormat.GITHUB_ACTION](sources("data.js"), Stated()).notes
    assert len(notes) == 1
    assert "'BenchmarkFib' 3 times" in notes[0] and "Go Benchmark[0]" in notes[0]


def test_github_action_custom_json() -> None:
    found = sources("custom.json")
    for kind, better in (
        (ImportFormat.BIGGER, Better.HIGHER),
        (ImportFormat.SMALLER, Better.LOWER),
    ):
        (run,) = READERS[kind](found, Stated(card="c", commit="abc")).runs
        assert {metric.better for metric in run.metrics.values()} == {better}
        assert {metric.unit for metric in run.metrics.values()} == {"points", "MB/s"}
        assert (run.info.card, run.info.commit, run.info.measured_utc) == ("c", "abc", WRITTEN)


def test_criterion_reads_the_newest_estimates() -> None:
    """The slope where there is one, as criterion itself shows it, else the mean."""
    (run,) = runs_of("criterion/**/new/*.json", kind=ImportFormat.CRITERION)
    found = cell_of(run, "sums/fast/10")
    assert found.axes == {"group": "sums", "function": "fast", "value": "10"}
    typical = found.measured["typical_ns"]
    assert (typical.value, typical.low, typical.high) == (100.5, 100.25, 100.75)
    assert cell_of(run, 'a/b, "c" é').measured["typical_ns"].value == 102.5
    assert run.info.measured_utc == WRITTEN


def test_cargo_criterion_messages() -> None:
    (run,) = runs_of("cargo-criterion.jsonl", kind=ImportFormat.CRITERION)
    typical = cell_of(run, "sums/fast/10").measured["typical_ns"]
    assert (typical.value, typical.low, typical.high, typical.count) == (100.5, 100.25, 100.75, 3)


def test_bencher() -> None:
    (run,) = runs_of("bencher.json", kind=ImportFormat.BENCHER)
    cell = cell_of(run, "adapter::magic")
    latency = cell.measured["latency"]
    assert (latency.value, latency.low, latency.high) == (88.0, 87.42, 88.88)
    assert run.metrics["latency"].better is Better.LOWER
    assert cell.measured["allocations"].value == 3
    assert run.metrics["allocations"].better is Better.NEITHER


@pytest.mark.parametrize("kind", [ImportFormat.BIGGER, ImportFormat.BENCHER])
def test_a_copy_of_a_file_without_a_date_is_the_same_run(kind: ImportFormat) -> None:
    """Whenever it was copied: its own time is no part of what it holds."""
    (one,) = sources("bencher.json" if kind is ImportFormat.BENCHER else "custom.json")
    later = SourceFile("copy", one.data, datetime(2027, 1, 1, tzinfo=UTC))
    (first,), (second,) = (READERS[kind]([file], Stated()).runs for file in (one, later))
    assert first.info.run_id == second.info.run_id
    assert first.info.content_sha256 == second.info.content_sha256


def test_a_later_result_of_an_asv_commit_is_the_same_run_with_other_content() -> None:
    before = sources("asv-1/**/*.json")
    after = [SourceFile(one.name, one.data.replace(b"1.5, NaN", b"1.5, 2.5")) for one in before]
    (one,), (other,) = (
        READERS[ImportFormat.ASV](files, Stated()).runs for files in (before, after)
    )
    assert one.info.run_id == other.info.run_id
    assert one.info.content_sha256 != other.info.content_sha256


def test_two_google_files_of_one_second_are_two_runs() -> None:
    found = sources("google.json", "google-repetitions.json")
    one, other = READERS[ImportFormat.GOOGLE_BENCHMARK](found, Stated()).runs
    assert one.info.measured_utc == other.info.measured_utc
    assert one.info.run_id != other.info.run_id
