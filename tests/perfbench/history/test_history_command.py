"""`perfbench history`, and `run` and `check` that keep their runs by themselves."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import perfbench
from perfbench.commands import app, history_choice, options
from perfbench.commands.dates import length_of, moment_of
from perfbench.errors import Exit, PerfbenchError
from perfbench.history.nouns import Better, Metric, Series, SeriesPoint
from perfbench.history.since import change_rows
from perfbench.history.store import History
from perfbench.history.writing import Added
from tests.perfbench.ab_bench import LONG, SHORT, Bench
from tests.perfbench.digested import edit_run
from tests.perfbench.history.made_runs import FIRST, MEASURED, key, made_cell, made_run

DATA = Path(__file__).parents[2] / "data"
DEFAULT = Path("reports/history.sqlite")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERFBENCH_HISTORY", raising=False)


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line, which the run's manifest keeps."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["perfbench", *argv])
        code = app.invoke(argv)
    return code, *capsys.readouterr()


def run_ids() -> list[str]:
    with perfbench.open_history() as history:
        return [one.run_id for one in history.runs(demonstrations=True)]


def stored(*days: int, **fields: Any) -> None:
    """Runs of made-up cells in the default history."""
    with History.open(DEFAULT, create=True) as history:
        for day in days:
            history.add(made_run(day, **fields))


# Adding.


def test_runs_are_added_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "history", "init")[0] == 0
    folder = str(DATA / "runs" / "h100-gate" / "start-1")
    code, out, err = call(capsys, "history", "add", folder)
    assert code == 0 and re.fullmatch(r"new       \S+  \d+ cells of h100-gate, h100\S*\n", out)
    assert err == "perfbench: 1 new\n"
    code, out, err = call(capsys, "history", "add", folder, f"{folder}/run.jsonl.gz")
    assert (code, err) == (0, "perfbench: 2 same\n") and out.count("same") == 2
    assert len(run_ids()) == 1


def test_a_run_that_went_on_is_replaced(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "history", "init")[0] == 0
    assert bench.run("run", "small.yaml", "--only", "seq_len=128", "--history", "none") == 0
    (folder,) = Path("reports/runs").iterdir()
    assert call(capsys, "history", "add", "latest")[2] == "perfbench: 1 new\n"
    assert bench.run("run", "small.yaml", "--resume", str(folder), "--history", "none") == 0
    assert call(capsys, "history", "add", str(folder))[2] == "perfbench: 1 replaced\n"
    with perfbench.open_history() as history:
        assert {one.cell_id for one in history.run("latest").cells} == {SHORT, LONG}


def test_a_torn_copy_does_not_replace_the_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    """It replaced it, and the rows that it lacks were gone from the history."""
    whole, torn = Path("whole"), Path("torn")
    for home in (whole, torn):
        home.mkdir()
        packed = (DATA / "runs" / "cpu" / "run.jsonl.gz").read_bytes()
        (home / "run.jsonl").write_bytes(gzip.decompress(packed))
    kept = (torn / "run.jsonl").read_bytes().splitlines(keepends=True)
    last = max(at for at, line in enumerate(kept) if b'"kind": "replicate"' in line)
    (torn / "run.jsonl").write_bytes(b"".join(kept[:last]) + kept[last][:-30])
    assert call(capsys, "history", "init")[0] == 0
    assert call(capsys, "history", "add", "whole")[2] == "perfbench: 1 new\n"
    with perfbench.open_history() as history:
        before = history.run("latest")
    code, out, err = call(capsys, "history", "add", "torn")
    assert code == Exit.USAGE and "1 refused" in err
    assert re.fullmatch(
        r"refused   torn: run '\S+': this copy has fewer rows than the one in the history:"
        r" \S+ has \d+ of \d+ processes.*\. Next: add the whole run, or --force to keep this copy"
        r" instead\n",
        out,
    )
    with perfbench.open_history() as history:
        assert history.run("latest") == before
    assert call(capsys, "history", "add", "torn", "--force")[0] == 0
    with perfbench.open_history() as history:
        assert history.run("latest") != before
    assert "1 replaced" in call(capsys, "history", "add", "whole")[2]


def test_one_bad_run_does_not_lose_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """Damaged, torn, of a newer schema, no run, nothing there."""
    home = Path("runs")
    for name in ("damaged", "good", "newer", "torn"):
        (home / name).mkdir(parents=True)
        packed = (DATA / "runs" / "cpu" / "run.jsonl.gz").read_bytes()
        (home / name / "run.jsonl").write_bytes(gzip.decompress(packed))
        edit_run(home / name / "run.jsonl", lambda lines, own=name: lines[0].update(run_id=own))
    damaged = home / "damaged" / "run.jsonl"
    damaged.write_bytes(damaged.read_bytes().replace(b'"tok_per_s": ', b'"tok_per_s": 1', 1))
    edit_run(home / "newer" / "run.jsonl", lambda lines: lines[0].update(schema_version=99))
    torn = home / "torn" / "run.jsonl"
    torn.write_bytes(torn.read_bytes()[:-30])
    Path("empty").mkdir()
    assert call(capsys, "history", "init")[0] == 0
    code, out, err = call(capsys, "history", "add", "--all", str(home), "empty", "gone")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("refused", "new", "refused", "new"),
        *("refused", "refused"),
    ]
    assert "runs/damaged/run.jsonl:" in lines[0] and "CORRUPT" in lines[0]
    assert "schema" in lines[2]
    assert "empty holds no run. Next: name a run's folder" in lines[4]
    assert code == Exit.USAGE  # before BASELINE, of the damaged file alone, by severity
    assert "4 refused" in err and "2 new" in err and "cut off" in err
    assert sorted(run_ids()) == ["good", "torn"]


def test_what_is_added_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "history", "init")[0] == 0
    good = str(DATA / "runs" / "cpu")
    code, out, _ = call(capsys, "history", "add", good, "gone", "--json")
    first, second = json.loads(out)
    assert code == 2 and (first["added"], first["suite"]) == ("new", "cpu")
    assert second["added"] == "refused" and "gone" in second["reason"]


def test_a_pair_adds_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    """The base by the hard gates, the candidate by its base."""
    assert call(capsys, "history", "init")[0] == 0
    assert call(capsys, "history", "add", str(DATA / "runs" / "h200-drop"))[0] == 0
    with perfbench.open_history() as history:
        b, a = history.runs(demonstrations=True)
        verdicts = [history.run(one.run_id).cells[0].verdict for one in (a, b)]
        assert verdicts == [None, "REGRESSED"]
        assert [one.run_id for one in history.runs()] == [a.run_id]  # b is a demonstration


def test_sides_of_a_confirmation_are_part_of_their_run(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    promoted(bench)
    bench.current.speed = bench.b.speed = 800.0
    assert call(capsys, "check", "small.yaml", "--history", "none")[0] == 3
    (folder,) = Path("reports/runs").iterdir()
    assert call(capsys, "history", "init")[0] == 0
    code, out, _ = call(capsys, "history", "add", "--all", "reports/runs")
    assert (code, out.count("new"), out.count("\n")) == (0, 1, 1)
    (side,) = folder.glob("confirm/*/a")
    code, out, _ = call(capsys, "history", "add", str(side))
    assert code == 2 and "one side of a confirmation" in out
    with perfbench.open_history() as history:
        found = history.run("latest")
    assert {one.verdict for one in found.cells} == {"REGRESSED"} and found.info.exit_code == 3
    assert found.info.report.startswith("# ") and "REGRESSED" in found.info.report


def test_a_verdict_is_not_lost_with_its_baseline(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `report` refuses to write over it."""
    promoted(bench)
    assert call(capsys, "check", "small.yaml")[0] == 0
    (folder,) = Path("reports/runs").iterdir()
    (folder / "verdict.json").write_text('{"exit_code": 0}')
    shutil.rmtree("reports/baselines")
    assert call(capsys, "history", "init")[0] == 0
    code, out, _ = call(capsys, "history", "add", str(folder))
    assert code == 2 and "says exit 0, and without a baseline this run is exit 9" in out


def test_a_folder_of_runs_wants_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "history", "init")[0] == 0
    code, out, _ = call(capsys, "history", "add", str(DATA / "runs" / "h100-demo"))
    assert code == 2 and "is no run, and holds 3. Next: add them with --all" in out


# Where the history is.


def promoted(bench: Bench) -> None:
    assert bench.run("run", "small.yaml", "--out", "first") == 0
    (first,) = Path("first").iterdir()
    assert bench.run("baseline", "promote", str(first)) == 0


@pytest.mark.parametrize(
    "argv", [("history",), ("history", "add", "x"), ("prune", "--keep-last", "1")]
)
def test_no_history_says_how_to_make_one(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, *argv)
    assert (code, out) == (2, "")
    assert "Next: `perfbench history init`, or name one with --history URL" in err


def test_init_makes_an_empty_history_and_keeps_a_full_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(capsys, "history", "init")[1].startswith("reports/history.sqlite is empty. Next: ")
    assert "no run. Next: perfbench history add" in call(capsys, "history")[1]
    stored(1)
    assert "holds 1 run." in call(capsys, "history", "init")[1]
    code, out, _ = call(capsys, "history", "upgrade")
    assert code == 0 and "already" in out


def test_check_keeps_its_run_where_a_history_is(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what `history add` makes of it later is the same content."""
    promoted(bench)
    assert not DEFAULT.exists()  # no history, none made
    stored()
    code, _, err = call(capsys, "check", "small.yaml")
    (first,) = run_ids()
    assert code == 0 and f"reports/history.sqlite: new {first}" in err
    folder = Path("reports/runs") / first
    assert call(capsys, "history", "add", str(folder))[2] == "perfbench: 1 same\n"


def test_an_option_goes_before_the_variable_and_that_before_the_file(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored()
    for path in ("variable.sqlite", "option.sqlite"):
        assert call(capsys, "history", "init", "--history", path)[0] == 0
    monkeypatch.setenv("PERFBENCH_HISTORY", "variable.sqlite")
    only = ("run", "small.yaml", "--only", "seq_len=128")
    for where in ((), ("--history", "option.sqlite"), ("--history", "none")):
        assert call(capsys, *only, *where)[0] == 0
    counts = []
    for path in ("variable.sqlite", "option.sqlite", str(DEFAULT)):
        with perfbench.open_history(path) as history:
            counts.append(len(history.runs()))
    assert counts == [1, 1, 0] and len(run_ids()) == 1


@pytest.mark.parametrize(("speed", "code"), [(1000.0, 0), (800.0, 3)])
def test_a_history_that_is_not_reached_changes_no_verdict(
    speed: float, code: int, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    promoted(bench)
    bench.current.speed = bench.b.speed = speed
    url = "postgresql://me:secret@127.0.0.1:1/gone"
    found, out, err = call(capsys, "check", "small.yaml", "--history", url)
    assert found == code and f"exit {code}" in out
    (line,) = (one for one in err.splitlines() if "is not in the history" in one)
    (folder,) = Path("reports/runs").iterdir()
    later = f"`perfbench history add {folder} --history 'postgresql://me:***@127.0.0.1:1/gone'`"
    assert line.startswith("perfbench: warning: ") and line.endswith(f"{later} adds it later")
    assert "secret" not in err + out + (folder / "run.jsonl").read_text()


def test_the_advice_about_a_run_with_fewer_rows_is_a_command_that_works(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was `perfbench history add RUN` without --force, which is refused again."""
    stored()
    assert call(capsys, "run", "small.yaml")[0] == 0
    (run_id,) = run_ids()
    folder = Path("reports/runs") / run_id
    path = folder / "run.jsonl"
    manifest = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(manifest)  # rows were lost after the run was kept
    resumed = ("run", "small.yaml", "--only", "seq_len=128", "--resume", str(folder))
    code, _, err = call(capsys, *resumed)
    assert code == Exit.FAILED  # LONG is missing
    (line,) = (one for one in err.splitlines() if "is not in the history" in one)
    assert "this copy has fewer rows than the one in the history" in line
    (advice,) = re.findall(r"`(perfbench [^`]*)`", line)
    assert line.endswith(f"`{advice}` replaces the stored run by this one")
    code, _, err = call(capsys, *shlex.split(advice)[1:])
    assert (code, err) == (0, "perfbench: 1 replaced\n")
    with perfbench.open_history() as history:
        (long,) = (one for one in history.run(run_id).cells if one.cell_id == LONG)
        assert long.verdict == "MISSING"


def test_from_python_it_is_a_message(bench: Bench) -> None:
    promoted(bench)
    found = perfbench.check("small.yaml", history="gone.sqlite")
    assert found.ok and any("is not in the history" in one for one in found.messages)
    with History.open("mine.sqlite", create=True):
        pass
    found = perfbench.run("small.yaml", history=Path("mine.sqlite"))
    with perfbench.open_history("mine.sqlite") as history:
        assert found.folder is not None and history.run(found.folder.name).info.exit_code == 0
        assert "--history" not in history.run("latest").info.command


def test_ctrl_c_while_it_is_kept_changes_no_verdict(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller from Python gets it: their loop must not go on."""

    def interrupted(history: History, run: Any, **_: Any) -> Added:
        raise KeyboardInterrupt

    stored()
    monkeypatch.setattr(History, "add", interrupted)
    code, _, err = call(capsys, "run", "small.yaml", "--only", "seq_len=128")
    assert code == 0 and "is not in the history: interrupted. `perfbench history add" in err
    with pytest.raises(KeyboardInterrupt):
        perfbench.run("small.yaml", only="seq_len=128")


def test_the_url_is_no_part_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["run", "m.yaml", "--history", "postgresql://me:secret@h/d", "--seed", "1"]
    monkeypatch.setattr("sys.argv", ["perfbench", *words, "--history=x"])
    assert options.argv() == ["perfbench", "run", "m.yaml", "--seed", "1"]


# What changed since.


def speeds(*values: float, **fields: Any) -> None:
    """A run a day with these speeds of one cell, from FIRST on."""
    with History.open(DEFAULT, create=True) as history:
        for day, value in enumerate(values):
            one = MEASURED["tok_per_s"]
            measured = {"tok_per_s": type(one)(value, value * 0.99, value * 1.01, 3)}
            history.add(
                made_run(day, made_cell("path=v2,seq_len=128,workload=forward", measured), **fields)
            )


def test_a_cell_is_shown_newest_first(capsys: pytest.CaptureFixture[str]) -> None:
    speeds(100.0, 110.0, 99.0)
    for argv in (("history", "path=v2"), ("history", "show", "workload=forward,path=v2")):
        code, out, err = call(capsys, *argv)
        assert (code, err) == (0, "")
        assert out == (
            "path=v2,seq_len=128,workload=forward: speed, tok/s\n"
            "measured          commit      verdict  tok_per_s  ± 95 %    change  run\n"
            "2026-03-03 02:17  0002000200  PASS            99     1 %  -10.00 %  run-002\n"
            "2026-03-02 02:17  0001000100  PASS           110     1 %  +10.00 %  run-001\n"
            "2026-03-01 02:17  0000000000  PASS           100     1 %         -  run-000\n"
            "suite: nightly\n"
            "card: h200\n"
            "again: perfbench run nightly.yaml --only path=v2,seq_len=128,workload=forward\n"
        )


def test_since_and_commit_name_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """A change is against the run before, also where that is older than what is shown."""
    speeds(100.0, 110.0, 99.0)
    code, out, _ = call(capsys, "history", "--since", "2026-03-02T12:00")
    assert code == 0 and out == (
        "speed, tok/s\n"
        "\n"
        "2026-03-03 02:17  0002000200  nightly on h200  run-002\n"
        "cell                                  verdict  tok_per_s  ± 95 %    change  again\n"
        "path=v2,seq_len=128,workload=forward  PASS            99     1 %  -10.00 %"
        "  perfbench run nightly.yaml --only path=v2,seq_len=128,workload=forward\n"
    )
    found = json.loads(call(capsys, "history", "--commit", "0001", "--json")[1])
    assert [(one["run_id"], one["change_pct"]) for one in found] == [("run-001", 10.0)]
    assert found[0]["reproduce"].startswith("perfbench run nightly.yaml")
    code, out, err = call(capsys, "history", "--commit", "beef")
    assert (code, out) == (2, "") and "no run of a commit 'beef'. Next: " in err
    code, out, err = call(capsys, "history", "path=v2", "--limit", "1")
    assert "run-002" in out and "run-001" not in out
    assert err == "perfbench: 1 of 3 rows; --limit 3 shows all\n"


def test_runs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    speeds(100.0, 110.0)
    code, out, _ = call(capsys, "history")
    assert code == 0 and [line.split()[-3:] for line in out.splitlines()[1:]] == [
        ["run-001", "1", "PASS"],
        ["run-000", "1", "PASS"],
    ]
    assert [one["run_id"] for one in json.loads(call(capsys, "history", "--json")[1])] == [
        "run-001",
        "run-000",
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("path=v3",), "no cell 'path=v3'; cells: path=v2,seq_len=128,workload=forward. Next: "),
        (("seq_len=x",), "no cell 'seq_len=x'"),
        (("path=v2", "--suite", "nightyl"), "--suite: got 'nightyl', wanted one that the history"),
        (("path=v2", "--card", "h100"), "--card: got 'h100'"),
        (("path=v2", "--metric", "toks"), "no metric 'toks'"),
        (("--since", "soon"), "--since: got 'soon', wanted a date"),
        (("--since", "2999-01-01"), "lies in the future"),
        (("--history", "gone.sqlite"), "there is no history at"),
        (("--history", "none"), "got --history none, wanted a history. Next: "),
        (("init", "--history", "none"), "got --history none, wanted a history. Next: "),
        (("init", "--history", "gone/h.sqlite"), "/gone is not there. Next: make it first"),
        (("chart", "path=v2", "a.txt"), "got 'a.txt', wanted a name that ends with .png"),
    ],
)
def test_a_mistake_is_one_line(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds(100.0)
    code, out, err = call(capsys, "history", *argv)
    assert (code, out) == (2, "") and err.count("\n") == 1 and message in err
    assert "Next: " in err or "wanted" in err
    assert not Path("gone").exists() and not Path("a.txt").exists()


def test_a_variable_that_is_none_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the default's file is there."""
    speeds(100.0)
    monkeypatch.setenv("PERFBENCH_HISTORY", "none")
    code, _, err = call(capsys, "history")
    assert code == 2 and "PERFBENCH_HISTORY is none, wanted a history. Next: " in err


def test_the_usage_has_one_pair_of_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "history", "show", "--help")[1]
    assert "[CELL]" in out and "[[CELL]]" not in out


def test_a_misspelt_command_or_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    speeds(100.0)
    for argv, message in (
        (("history", "ad", "x"), "'add'"),
        (("history", "--sinec", "3d"), "--sin"),
    ):
        code, _, err = call(capsys, *argv)
        assert code == 2 and message in err


def test_cells_of_other_tools_are_found_by_a_part_of_their_name() -> None:
    names = {
        "tests/test_a.py::test_x[1]",
        "tests/test_a.py::test_y",
        "path=v2,seq_len=1,workload=forward",
    }
    assert history_choice.named_cell("TEST_X", names) == "tests/test_a.py::test_x[1]"
    assert history_choice.named_cell("path=v2", names) == "path=v2,seq_len=1,workload=forward"
    for text in ("test_a", "nothing"):
        with pytest.raises(PerfbenchError, match="names 2 cells|nothing"):
            history_choice.named_cell(text, names)


def imported(day: int, *metrics: str, cell_id: str = "bench/a.py::up30") -> None:
    """A run of another tool in the default history."""
    one = MEASURED["tok_per_s"]
    measured = {name: type(one)(1.0 + day, None, None, 5) for name in metrics}
    brought = [Metric(name, name, "s", Better.LOWER) for name in metrics if name != "tok_per_s"]
    cell = made_cell(cell_id, measured, verdict=None, reason="", config_sha256=None)
    run = made_run(day, cell, metrics=brought, origin="pytest-benchmark", suite="planted")
    with History.open(DEFAULT, create=True) as history:
        history.add(run)


@pytest.mark.parametrize(
    "argv",
    [
        ("bench/a.py::up30",),
        ("up30",),
        ("show", "up30"),
        ("--since", "2026-03-01", "--suite", "planted"),
        ("--commit", "0001", "--suite", "planted"),
    ],
)
@pytest.mark.parametrize("is_mixed", [False, True])
def test_the_only_metric_there_is_taken(
    argv: tuple[str, ...], is_mixed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for day in (1, 2):
        imported(day, "median_s")
    if is_mixed:
        speeds(100.0)
    code, out, err = call(capsys, "history", *argv, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found[-1]["run_id"] == "run-001" and len(found) in (1, 2)
    assert {(one["cell_id"], one["metric"]) for one in found} == {("bench/a.py::up30", "median_s")}


@pytest.mark.parametrize("argv", [("bench/a.py::up30",), ("up30",), ("--since", "2026-03-01")])
def test_of_several_metrics_one_is_to_be_named(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    imported(1, "cpu_s", "median_s")
    code, out, err = call(capsys, "history", *argv)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "has no tok_per_s; metrics: cpu_s, median_s. Next: --metric cpu_s" in err
    code, _, err = call(capsys, "history", "up30", "--metric", "device_ms")
    assert code == 2 and "bench/a.py::up30 has no device_ms; metrics: cpu_s, median_s" in err
    assert call(capsys, "history", *argv, "--metric", "median_s")[0] == 0


def test_an_exact_id_always_names_its_cell(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where it is part of others, holds `=`, or looks like an option."""
    speeds(100.0)
    names = ("up", "up30", "fib[n=3]", "--help")
    for day, name in enumerate(names, 1):
        imported(day, "median_s", cell_id=name)
    for name in names:
        code, out, _ = call(capsys, "history", "show", "--json", "--", name)
        assert code == 0 and [one["cell_id"] for one in json.loads(out)] == [name]
    code, out, _ = call(capsys, "history", "--", "--help")
    assert code == 0 and out.startswith("--help: median_s")
    code, _, err = call(capsys, "history", "show", "other")
    assert code == 2 and "no cell 'other'. Next: " in err


def test_a_value_has_the_digits_of_its_change(capsys: pytest.CaptureFixture[str]) -> None:
    speeds(0.0010043, 0.0010004, 0.0010039)
    out = call(capsys, "history", "path=v2")[1].splitlines()
    assert [line.split()[4] for line in out[2:5]] == ["0.001004", "0.001", "0.001004"]
    assert "+0.35 %" in out[2] and "-0.39 %" in out[3]


def test_a_chart_takes_the_only_metric(capsys: pytest.CaptureFixture[str]) -> None:
    for day in (1, 2, 3):
        imported(day, "median_s")
    speeds(100.0)
    code, _, err = call(capsys, "history", "chart", "bench/a.py::up30", "a.png")
    assert (code, err) == (0, "") and Path("a.png").read_bytes().startswith(b"\x89PNG")


def point(day: int, value: float | None, **segment: str) -> SeriesPoint:
    when = FIRST + timedelta(days=day)
    return SeriesPoint(f"r{day}", when, None, value, None, None, 1, None, "why", segment)


def changes(*points: SeriesPoint) -> list[tuple[float | None, str]]:
    with History.open("h.sqlite", create=True) as history:
        history.add(made_run())
        metric = history.metric("tok_per_s")
    rows = change_rows(Series(key(), metric, {}, points))
    assert [row.point for row in rows] == list(points)[::-1]
    return [(row.change_pct, row.remark) for row in rows]


def test_a_change_is_against_the_last_value_of_the_same_segment() -> None:
    assert changes(point(0, 100.0), point(1, None), point(2, 90.0)) == [
        (-10.0, ""),
        (None, "why"),
        (None, ""),
    ]
    found = changes(
        point(0, 100.0, torch="1"), point(1, 50.0, torch="2"), point(2, 51.0, torch="2")
    )
    assert found == [(2.0, ""), (None, "torch: 1 -> 2"), (None, "")]
    assert changes(point(0, 0.0), point(1, 5.0)) == [(None, ""), (None, "")]


def test_demonstrations_are_shown_on_request_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    speeds(100.0, 50.0, injections=("slowdown=50%@x",))
    code, out, err = call(capsys, "history", "path=v2")
    assert code == 2 and "no cell" in err
    code, out, _ = call(capsys, "history", "path=v2", "--demonstrations")
    assert code == 0 and out.count("INJECTED slowdown=50%@x") == 2
    assert "no run" in call(capsys, "history")[1]


# Times as people write them.

NOW = datetime(2026, 11, 25, 15, 30, tzinfo=UTC)  # a Wednesday


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2026-11-23", datetime(2026, 11, 23, tzinfo=UTC)),
        ("2026-11-23T08:00+02:00", datetime(2026, 11, 23, 6, tzinfo=UTC)),
        ("3d", NOW - timedelta(days=3)),
        ("2w", NOW - timedelta(weeks=2)),
        ("12h", NOW - timedelta(hours=12)),
        ("Monday", datetime(2026, 11, 23, tzinfo=UTC)),
        ("wednesday", datetime(2026, 11, 25, tzinfo=UTC)),
        ("thursday", datetime(2026, 11, 19, tzinfo=UTC)),
        ("today", datetime(2026, 11, 25, tzinfo=UTC)),
        ("yesterday", datetime(2026, 11, 24, tzinfo=UTC)),
    ],
)
def test_dates(text: str, wanted: datetime) -> None:
    assert moment_of(text, "--since", NOW) == wanted


@pytest.mark.parametrize(
    "text", ["", "d", "-3d", "3 d", "1e3d", "3y", "999999d", "moonday", "0001-01-01T00:00+14:00"]
)
def test_what_is_no_date(text: str) -> None:
    with pytest.raises(PerfbenchError, match="--since: got"):
        moment_of(text, "--since", NOW)
    with pytest.raises(PerfbenchError, match="--older-than: got"):
        length_of(text, "--older-than")


def test_added_words_are_those_that_are_printed() -> None:
    assert [one.value for one in Added] == ["new", "same", "replaced"]
