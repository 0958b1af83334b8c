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


def test_options_fill_in_what_a_file_leaves_out(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--suite", "s", "--card", "c", "--commit", "abc", "--date", "2026-01-02"]
    done(capsys, "import", "bencher", str(DATA / "bencher.json"), "--history", url, *words)
    with History.open(url) as history:
        (info,) = history.runs()
    assert (info.suite, info.card, info.commit) == ("s", "c", "abc")
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


def test_an_export_imported_into_its_own_history_changes_nothing(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done(capsys, "import", "auto", str(DATA / "google.json"), "--history", url)
    with History.open(url) as history:
        before = history.run("latest")
    page = str(tmp_path / "data.js")
    _, err = done(capsys, "export", "github-action-benchmark", "--history", url, "--out", page)
    assert "numbers are missing" in err and "counter_foo" in err
    out, _ = done(capsys, "import", "auto", page, "--history", url)
    assert out.startswith("same ")
    with History.open(url) as history:
        assert history.run("latest") == before


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("import", "vibes", "x.json"), "got the format 'vibes'"),
        (("import", "auto", "/dev/zero"), "it is a device"),
        (("import", "auto", "missing.json"), "missing.json cannot be read: No such file"),
        (("import", "auto", str(DATA / "custom.json")), "does not say whether more is better"),
        (("import", "asv", str(DATA / "google.json")), "google.json: commit_hash: field required"),
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
