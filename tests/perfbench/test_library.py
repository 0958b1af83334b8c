"""`perfbench.run` and `perfbench.check`: what the commands do, without their prints and exits."""

from __future__ import annotations

import inspect
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import perfbench
from perfbench.commands import app
from perfbench.commands.outcome import Outcome
from perfbench.records import read_run
from tests.perfbench.ab_bench import LONG, SHORT, Bench

REAL_REPORT = Outcome.write_report

ROOT = Path(__file__).parents[2]


@pytest.fixture
def _promoted(bench: Bench) -> None:
    """A baseline of 1000 tok/s."""
    assert bench.run("run", "small.yaml", "--out", "first") == 0
    (first,) = Path("first").iterdir()
    assert bench.run("baseline", "promote", str(first)) == 0


def the_verdict(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    """Exit code and --json of a command."""
    capsys.readouterr()
    code = app.invoke([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["run", "check"])
def test_arguments_are_the_options(name: str) -> None:
    """All but --json, with the same defaults."""
    function = getattr(perfbench, name)
    command = typer.main.get_command(app.app).commands[name]
    options = {one.name: one.default for one in command.params} | {"matrix": inspect._empty}
    found = {one.name: one.default for one in inspect.signature(function).parameters.values()}
    del options["as_json"]
    assert found.keys() == options.keys()
    same = {key: value for key, value in options.items() if key not in ("out", "matrix")}
    assert {key: found[key] for key in same} == same and str(options["out"]) == str(found["out"])


@pytest.mark.usefixtures("_promoted")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, []),
        ({"strict": True, "no_confirm": True}, ["--strict", "--no-confirm"]),
        ({"only": "seq_len=128"}, ["--only", "seq_len=128"]),
        ({"only": ["seq_len=128", "seq_len=256"]}, None),
        ({"baseline": "reports/baselines/cpu/small.json"}, None),
        ({"baseline": Path("gone.json")}, ["--baseline", "gone.json"]),
        ({"inject": f"slowdown=40%@{LONG}"}, ["--inject", f"slowdown=40%@{LONG}"]),
    ],
)
@pytest.mark.parametrize("speed", [1000.0, 800.0])
def test_check_finds_what_the_command_finds(
    options: dict[str, Any],
    words: list[str] | None,
    speed: float,
    bench: Bench,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code, headline, verdicts and reasons; and the manifest holds the command to type."""
    bench.current.speed = bench.b.speed = speed
    capsys.readouterr()
    random.seed(3)  # of the executor's noise
    found = perfbench.check("small.yaml", seed=7, out="mine", **options)
    assert capsys.readouterr() == ("", "")
    assert found.folder is not None
    argv = read_run(found.folder).manifest.argv
    if words is not None:
        assert set(words) <= set(argv)
    random.seed(3)
    at = argv.index("mine")
    code, verdict = the_verdict(capsys, *argv[1:at], "theirs", *argv[at + 1 :])
    theirs = verdict["headline"].replace(verdict["run_dir"], str(found.folder))  # what to promote
    assert (found.exit_code, found.headline) == (code, theirs)
    assert [(one.cell_id, one.verdict, one.reason) for one in found.verdicts] == [
        (one["cell_id"], one["verdict"], one["reason"]) for one in verdict["cells"]
    ]
    assert found.ok == (code == 0) and found.text.splitlines()[0]


def test_run_measures_and_judges_by_the_hard_gates(bench: Bench) -> None:
    found = perfbench.run(Path("small.yaml"), only="seq_len=128")
    assert found.exit_code is perfbench.Exit.OK and found.headline.startswith("MEASURED, exit 0")
    (cell,) = found.verdicts
    assert cell == perfbench.CellResult(SHORT, None, cell.reason, cell.tok_per_s, None, None)
    assert cell.tok_per_s == pytest.approx(1000.0, rel=0.01)
    rows = found.rows
    assert set(rows.cell_id) == {SHORT} and len(rows) == 4 and found.folder is not None
    again = perfbench.run("small.yaml", resume=found.folder)
    assert again.folder == found.folder and len(again.verdicts) == 2
    assert perfbench.run("small.yaml", resume="latest").folder == found.folder


def test_warnings_are_messages(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """No baseline: said before the minutes are spent, and exit 9."""
    found = perfbench.check("small.yaml")
    assert found.exit_code == 9 and not found.ok
    assert found.findings[0].startswith("NO_BASELINE: ")
    assert any("Measuring all the same" in one for one in found.messages)
    assert capsys.readouterr() == ("", "")
    assert app.invoke(["gate", str(found.folder)]) == 9
    assert "NO_BASELINE" in capsys.readouterr().out  # and the next command prints again


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ({"matrix": "gone.yaml"}, 2, "cannot read"),
        ({"matrix": "@cpux"}, 2, "did you mean 'cpu'"),
        ({"only": "path=v9"}, 2, "v9"),
        ({"budget": "soon"}, 2, "--budget 'soon'"),
        ({"budget": -1.0}, 2, "--budget"),
        ({"seed": -1}, 2, "seed=-1"),
        ({"seed": True}, 2, "seed=True"),
        ({"seed": 1.5}, 2, "seed=1.5"),
        ({"only": 128}, 2, "only=128"),
        ({"only": [b"path=v2"]}, 2, "path=v2"),
        ({"resume": "latest"}, 2, "holds no run"),
        ({"inject": "fire@path=v2,seq_len=128"}, 2, "fire"),
        ({"source_commit": "f" * 40}, 2, "--source-commit"),
    ],
)
@pytest.mark.parametrize("name", ["run", "check"])
def test_the_commands_errors_are_exceptions(
    name: str,
    arguments: dict[str, Any],
    code: int,
    message: str,
    bench: Bench,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(perfbench.PerfbenchError, match=message) as refused:
        getattr(perfbench, name)(**{"matrix": "small.yaml", **arguments})
    assert refused.value.exit_code == code
    assert capsys.readouterr() == ("", "")


def test_a_skipped_machine_is_no_run(bench: Bench) -> None:
    text = Path("small.yaml").read_text(encoding="utf-8")
    target = "{gpu: H100, on_mismatch: skip}"
    Path("skips.yaml").write_text(text.replace("{gpu: none}", target), encoding="utf-8")
    found = perfbench.run("skips.yaml")
    assert found.ok and found.folder is None and found.verdicts == () and found.messages
    with pytest.raises(perfbench.PerfbenchError, match="skips this machine"):
        _ = found.rows


def test_an_interrupt_is_the_callers(bench: Bench) -> None:
    bench.current.interrupt_at = 1
    with pytest.raises(KeyboardInterrupt, match="--resume"):
        perfbench.run("small.yaml")


def test_an_interrupt_of_the_trace_is_the_callers_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller's loop went on, as if nobody had pressed Ctrl-C; the verdict stays in the folder."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    first = perfbench.run("small.yaml", out="first")
    assert bench.run("baseline", "promote", str(first.folder), "--to", "base.json") == 0
    monkeypatch.setattr("perfbench.commands.check.trace_worst", interrupted)
    monkeypatch.setattr(Outcome, "write_report", REAL_REPORT)
    bench.current.speed = 500.0
    with pytest.raises(KeyboardInterrupt):
        perfbench.check("small.yaml", baseline="base.json", no_confirm=True, out="second")
    (folder,) = Path("second").iterdir()
    assert json.loads((folder / "verdict.json").read_bytes())["exit_code"] == 7


def test_what_is_public_is_loaded_at_its_first_use() -> None:
    """`import perfbench` costs nothing heavy, and an unknown name lists those that there are."""
    code = "import sys, perfbench; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "typer", "pydantic", "pandas"} & set(loaded)
    assert all(getattr(perfbench, name) is not None for name in perfbench.__all__)
    with pytest.raises(AttributeError, match="it has CellResult, .* run"):
        _ = perfbench.measure  # type: ignore[attr-defined]


SCRIPT = """
import perfbench
found = perfbench.run("@cpu", only=["path=dense", "seq_len=128", "workload=forward"])
assert found.ok and len(found.rows) == 2, found.text
print("measured once")
"""


def test_a_script_without_a_guard_measures(tmp_path: Path) -> None:
    """No `if __name__ == "__main__"`: measuring processes do not run the caller's script again."""
    (tmp_path / "mine.py").write_text(SCRIPT, encoding="utf-8")
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "measured once\n"), done.stdout + done.stderr
    assert done.stderr == ""
