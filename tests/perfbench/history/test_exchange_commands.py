"""`perfbench import` and `perfbench export`: what they print, store and refuse."""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from perfbench.commands.app import invoke
from perfbench.history.store import History
from tests.perfbench.history.test_exchange_readers import DATA

START = datetime(2026, 1, 1, tzinfo=UTC)
HOST = "runner"
PYTEST = str(DATA / "pytest-benchmark.json")


@pytest.fixture
def url(tmp_path: Path) -> str:
    path = str(tmp_path / "history.sqlite")
    History.open(path, create=True).close()
    return path


def daily(folder: Path, number: int, seconds: float) -> Path:
    """What pytest-benchmark would write on day ``number``."""
    path = folder / f"{number:04}_run.json"
    commit = {"id": f"{number:040x}", "project": "planted", "branch": "main", "dirty": False}
    names = ("bench.py::test_a", "bench.py::test_b[a/b]")
    one = [
        {"fullname": name, "params": None, "stats": {"median": seconds, "rounds": 5}}
        for name in names
    ]
    whole = {
        "machine_info": {"node": HOST},
        "commit_info": commit,
        "datetime": (START + timedelta(days=number)).isoformat(),
        "benchmarks": one,
    }
    path.write_text(json.dumps(whole))
    return path


def done(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of one command line."""
    capsys.readouterr()
    assert invoke(words) == code
    found = capsys.readouterr()
    return found.out, found.err


def test_sixty_days_are_series_in_order(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    for number in range(60):
        daily(folder, number, 1.0 if number < 30 else 1.1)
    out, err = done(capsys, "import", "auto", str(folder), "--history", url)
    assert len(out.splitlines()) == 60 and all(line.startswith("new ") for line in out.splitlines())
    assert "60 runs: 60 new" in err
    with History.open(url) as history:
        every = list(history.every_series())
    assert [one.key.cell_id for one in every] == ["bench.py::test_a", "bench.py::test_b[a/b]"]
    assert {(one.key.suite, one.key.card, one.key.metric) for one in every} == {
        ("planted", HOST, "median_s")
    }
    for series in every:
        assert [point.value for point in series.points] == [1.0] * 30 + [1.1] * 30
        assert [int(point.commit or "", 16) for point in series.points] == list(range(60))
        assert len({tuple(point.segment.items()) for point in series.points}) == 1


def test_what_is_there_stays(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = daily(tmp_path, 1, 1.0)
    first, _ = done(capsys, "import", "pytest-benchmark", str(path), "--history", url)
    copy = tmp_path / "copy.json"
    shutil.copy(path, copy)
    os.utime(copy, (0, 0))
    again, _ = done(capsys, "import", "auto", str(copy), "--history", url)
    assert first.split()[0] == "new" and again.split()[0] == "same"
    assert first.split()[1:] == again.split()[1:]
    with History.open(url) as history:
        assert len(history.runs()) == 1


def test_companions_are_read_along(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """asv's benchmarks.json above a result names its parameters and units."""
    (result,) = (DATA / "asv" / "planted").glob("071b*.json")
    done(capsys, "import", "auto", str(result), "--history", url)
    estimates = DATA / "criterion" / "sums" / "fast" / "10" / "new" / "estimates.json"
    done(capsys, "import", "auto", str(estimates), "--history", url)
    with History.open(url) as history:
        assert history.keys(metric="track_tok_per_s") and history.keys(metric="typical_ns")


def test_of_criterions_folder_the_newest_alone(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = done(capsys, "import", "auto", str(DATA / "criterion"), "--history", url, "--json")
    (line,) = json.loads(out)
    assert line["added"] == "new" and line["text"].startswith("2 benchmarks of criterion")


def edited(path: Path, **fields: object) -> Path:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return path


def test_a_file_of_the_future_is_refused(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would stay the newest run for ever; a clock may be some hours ahead."""
    late = edited(daily(tmp_path, 1, 1.0), datetime="2999-01-01T00:00:00")
    out, err = done(capsys, "import", "auto", str(late), "--history", url, code=2)
    assert not out and f"{late}: got the date 2999-01-01, which lies in the future" in err
    soon = (datetime.now(UTC) + timedelta(hours=20)).isoformat()
    done(capsys, "import", "auto", str(edited(late, datetime=soon)), "--history", url)
    old = edited(late, datetime="0001-01-01T00:00:00")
    out, _ = done(capsys, "import", "auto", str(old), "--history", url)
    assert out.split()[1].startswith("00010101T000000Z-")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("benchmarks", {}, "benchmarks: got {}, wanted a list"),
        ("benchmarks", [7], "benchmarks[0]: got 7, wanted an object"),
        ("datetime", 7, "datetime: got 7, wanted text"),
        ("machine_info", "x", "machine_info: got 'x', wanted an object"),
        ("commit_info", {"dirty": "no"}, "commit_info.dirty: got 'no', wanted true or false"),
        (
            "benchmarks",
            [{"fullname": "a", "stats": {"median": "1", "rounds": 1}}],
            "benchmarks[0].stats.median: got '1', wanted a number",
        ),
        (
            "benchmarks",
            [{"fullname": "a", "stats": {"median": 1.0, "rounds": -1}}],
            "benchmarks[0].stats.rounds: got -1, wanted at least 0",
        ),
        (
            "benchmarks",
            [{"fullname": "a", "stats": {"median": 1.0, "rounds": 1.5}}],
            "benchmarks[0].stats.rounds: got 1.5, wanted a whole number",
        ),
    ],
)
def test_a_wrong_value_is_named_in_the_words_of_json(
    tmp_path: Path,
    url: str,
    field: str,
    value: object,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = edited(daily(tmp_path, 1, 1.0), **{field: value})
    _, err = done(capsys, "import", "pytest-benchmark", str(path), "--history", url, code=2)
    assert f"{path}: {message}. Next: " in err


def test_one_of_something_is_no_plural(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = daily(tmp_path, 1, 1.0)
    one = json.loads(path.read_text())["benchmarks"][0]
    edited(path, benchmarks=[one, one])
    _, err = done(capsys, "import", "auto", str(path), "--history", url)
    assert "1 name stands several times" in err and "1 run: 1 new, 0 replaced" in err
    _, err = done(capsys, "export", "github-action-benchmark", "--history", url)
    assert "1 run exported\n" in err
    _, err = done(capsys, "prune", "--keep-last", "1", "--history", url)
    assert "0 of 1 run would go" in err


@pytest.mark.parametrize("commit", ["zzz; rm -rf /", "abc", "a" * 65, "v1.0"])
def test_what_is_no_commit_is_left_out(
    tmp_path: Path, url: str, commit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = edited(daily(tmp_path, 1, 1.0), commit_info={"id": commit, "project": "p"})
    out, err = done(capsys, "import", "auto", str(path), "--history", url)
    assert "no commit" in out
    assert f"commit {commit!r} is left out, wanted 4 to 64 hexadecimal digits" in err
    with History.open(url) as history:
        assert history.run("latest").info.commit is None


@pytest.mark.parametrize("name", ["one.json", "data.js", "one.jsonl", "sums/one.json"])
def test_a_folder_of_several_formats_is_refused(
    tmp_path: Path, url: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever of them lies among criterion's."""
    folder = tmp_path / "results"
    shutil.copytree(DATA / "criterion", folder)
    shutil.copy(daily(tmp_path, 1, 1.0), folder / name)
    for kind in ("auto", "criterion"):
        out, err = done(capsys, "import", kind, str(folder), "--history", url, code=2)
        assert not out and f"and 1 of something else: {name}. Next: " in err
    with History.open(url) as history:
        assert not history.runs()


def test_options_fill_in_what_a_file_leaves_out(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--suite", "s", "--card", "c", "--commit", "abcd", "--date", "2026-01-02"]
    done(capsys, "import", "bencher", str(DATA / "bencher.json"), "--history", url, *words)
    with History.open(url) as history:
        (info,) = history.runs()
    assert (info.suite, info.card, info.commit) == ("s", "c", "abcd")
    assert info.measured_utc == datetime(2026, 1, 2, tzinfo=UTC)


def test_a_measure_of_bencher_keeps_the_direction_that_the_history_knows(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done(capsys, "import", "auto", str(daily(tmp_path, 1, 1.0)), "--history", url)
    done(capsys, "export", "bencher", "--history", url, "--out", str(tmp_path / "bmf.json"))
    words = ["bencher", str(tmp_path / "bmf.json"), "--history", url, "--card", HOST]
    done(capsys, "import", *words, "--suite", "planted", "--date", "2026-02-01")
    with History.open(url) as history:
        assert history.metric("median_s").better == "lower" and history.metric("median_s").unit
        (series,) = history.every_series(cell_id="bench.py::test_a")
    assert [point.value for point in series.points] == [1.0, 1.0]


def test_an_export_imported_into_its_own_history_is_a_run_of_its_own(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done(capsys, "import", "auto", str(DATA / "google.json"), "--history", url)
    with History.open(url) as history:
        before = history.run("latest")
    page = str(tmp_path / "data.js")
    _, err = done(capsys, "export", "github-action-benchmark", "--history", url, "--out", page)
    assert "numbers are missing" in err and "counter_foo" in err
    out, _ = done(capsys, "import", "auto", page, "--history", url)
    again, _ = done(capsys, "import", "auto", page, "--history", url)
    assert out.startswith("new ") and again.startswith("same ")
    with History.open(url) as history:
        assert history.run(before.info.run_id) == before
        suites = {info.suite: info.origin for info in history.runs()}
        assert suites == {
            before.info.suite: "google-benchmark",
            f"github-action-benchmark: {before.info.suite}": "github-action-benchmark",
        }


GREEN = DATA.parent / "runs" / "h100-demo" / "green"


def exported(tmp_path: Path, capsys: pytest.CaptureFixture[str], **fields: object) -> Path:
    """A measured run's data.js, whose every entry says ``fields`` of its run."""
    out, _ = done(capsys, "export", "github-action-benchmark", "--run", str(GREEN))
    page = json.loads(out.removeprefix("window.BENCHMARK_DATA = "))
    for entries in page["entries"].values():
        for entry in entries:
            entry["perfbench"] |= fields
    path = tmp_path / "data.js"
    path.write_text(f"window.BENCHMARK_DATA = {json.dumps(page)}")
    return path


def test_an_import_never_joins_or_replaces_what_was_measured(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done(capsys, "history", "add", str(GREEN), "--history", url)
    with History.open(url) as history:
        measured, series = history.run("latest"), list(history.every_series())
    path = exported(tmp_path, capsys, origin="perfbench", is_dirty=True)
    done(capsys, "import", "auto", str(path), "--history", url)
    with History.open(url) as history:
        assert history.run(measured.info.run_id) == measured
        assert list(history.every_series(suite=measured.info.suite)) == series
        (own,) = history.runs(origin="github-action-benchmark")
        assert history.runs(origin="perfbench") == history.runs(suite=measured.info.suite)
    assert own.segment["exported_from"] == "perfbench"
    cell = measured.cells[0].cell_id
    words = ["history", "show", cell, "--history", url, "--suite", own.suite]
    out, _ = done(capsys, *words)
    assert "from github-action-benchmark" in out and "MEASURED" not in out
    (row,) = json.loads(done(capsys, *words, "--json")[0])
    assert row["origin"] == "github-action-benchmark" and "reproduce" in row


def test_an_exported_demonstration_stays_one(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = exported(tmp_path, capsys, injections=["slow"])
    done(capsys, "import", "auto", str(path), "--history", url)
    with History.open(url) as history:
        assert history.runs() == [] and history.keys() == []
        (info,) = history.runs(demonstrations=True)
        assert info.injections == ("slow",)
    words = ["--history", url, "--run", info.run_id]
    for format_ in ("bencher", "customBiggerIsBetter"):
        out, err = done(capsys, "export", format_, *words, code=2)
        assert not out and "has injected faults (slow)" in err and "Next: " in err
    out, _ = done(capsys, "export", "github-action-benchmark", *words)
    page = json.loads(out.removeprefix("window.BENCHMARK_DATA = "))
    assert all(key.endswith(" | INJECTED") for key in page["entries"])


def test_a_metric_of_perfbench_in_another_unit_is_refused(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"name": "tok_per_s", "title": "", "unit": "MB/s", "better": "higher"}
    path = exported(tmp_path, capsys, metric=other)
    _, err = done(capsys, "import", "auto", str(path), "--history", url, code=2)
    assert "got tok_per_s in 'MB/s', wanted 'tok/s'" in err


def test_a_file_that_names_a_measured_suite_and_card_is_refused(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever wants them joined says so."""
    done(capsys, "history", "add", str(GREEN), "--history", url)
    with History.open(url) as history:
        (measured,) = history.runs()
    whole = json.loads(daily(tmp_path, 1, 1.0).read_text())
    whole["commit_info"]["project"], whole["machine_info"]["node"] = measured.suite, measured.card
    path = tmp_path / "named.json"
    path.write_text(json.dumps(whole))
    _, err = done(capsys, "import", "auto", str(path), "--history", url, code=2)
    assert "of which the history has runs that perfbench measured" in err and "Next: " in err
    with History.open(url) as history:
        assert history.runs() == [measured]
    words = ["--history", url, "--suite", measured.suite]
    assert done(capsys, "import", "auto", str(path), *words)[0].startswith("new ")


def test_since_limits_an_export(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(daily(tmp_path, number, 1.0)) for number in range(5)]
    done(capsys, "import", "auto", *paths, "--history", url)
    out, _ = done(
        capsys, "export", "github-action-benchmark", "--history", url, "--since", "2026-01-04"
    )
    page = json.loads(out.removeprefix("window.BENCHMARK_DATA = "))
    assert [len(entries) for entries in page["entries"].values()] == [2]
    out, _ = done(capsys, "export", "customSmallerIsBetter", "--history", url, "--run", "latest")
    assert [one["name"] for one in json.loads(out)] == [
        "bench.py::test_a [median_s]",
        "bench.py::test_b[a/b] [median_s]",
    ]


def test_a_run_is_exported_without_a_history(capsys: pytest.CaptureFixture[str]) -> None:
    green = DATA.parent / "runs" / "h100-demo" / "green"
    out, _ = done(capsys, "export", "bencher", "--run", str(green))
    found = json.loads(out)
    assert found and all("tok_per_s" in measures for measures in found.values())


def test_an_export_never_takes_the_place_of_a_device(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done(capsys, "import", "auto", str(daily(tmp_path, 1, 1.0)), "--history", url)
    out = tmp_path / "out.js"
    os.mkfifo(out)
    _, err = done(
        capsys, "export", "github-action-benchmark", "--out", str(out), "--history", url, code=2
    )
    assert out.is_fifo() and "out.js cannot be written: it is there and is no regular file" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("import", "vibes", "x.json"), "got the format 'vibes'"),
        (("import", "auto", "/dev/zero"), "it is a device"),
        (("import", "auto", "missing.json"), "missing.json cannot be read: No such file"),
        (("import", "auto", str(DATA / "custom.json")), "does not say whether more is better"),
        (("import", "asv", str(DATA / "google.json")), "google.json: commit_hash: it is missing"),
        (("import", "auto", str(DATA)), " of something else: asv/bench"),
        (("import", "auto", PYTEST, "--commit", "zz"), "--commit: got 'zz', wanted 4 to 64 hex"),
        (("import", "auto", PYTEST, "--suite", ""), "--suite: got '', wanted a name"),
        (("import", "auto", PYTEST, "--card", " "), "--card: got ' ', wanted a name"),
        (("export", "vibes"), "got the format 'vibes'"),
        (("export", "bencher", "--since", "3d"), "got --since and one run"),
        (("export", "bencher"), "the history holds no such run"),
    ],
)
def test_a_mistake_is_one_line(
    words: tuple[str, ...], message: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = done(capsys, *words, "--history", url, code=2)
    assert not out and len(err.splitlines()) == 1
    assert message in err and "Next: " in err


def test_one_damaged_file_of_many_stores_nothing(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [daily(tmp_path, number, 1.0) for number in range(3)]
    paths[1].write_text(paths[1].read_text()[:-5])
    words = ("import", "pytest-benchmark", *map(str, paths), "--history", url)
    _, err = done(capsys, *words, code=2)
    assert f"{paths[1]}:1:" in err
    with History.open(url) as history:
        assert history.runs() == []


def test_a_name_in_brackets_is_shown_as_it_is(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the brackets that hold the parameters are no part of a benchmark's name."""
    stats = {"median": 1.0, "rounds": 5}
    entries = [
        {"fullname": "[bold]mark[/bold]", "params": None, "param": None, "stats": stats},
        {"fullname": "a.py::f[[red]-2]", "params": {"n": 2}, "param": "[red]-2", "stats": stats},
    ]
    whole = {"datetime": START.isoformat(), "benchmarks": entries}
    file = tmp_path / "b.json"
    file.write_text(json.dumps(whole))
    done(capsys, "import", "pytest-benchmark", str(file), "--history", url)
    with History.open(url) as history:
        (run,) = (history.run(info.run_id) for info in history.runs())
    axes = [dict(cell.axes) for cell in run.cells]
    assert {"benchmark": "[bold]mark[/bold]"} in axes
    assert {"benchmark": "a.py::f", "n": 2} in axes
    for cell in run.cells:
        words = ("history", "show", cell.cell_id, "--metric", "median_s", "--history", url)
        assert done(capsys, *words)[0].startswith(f"{cell.cell_id}: ")
