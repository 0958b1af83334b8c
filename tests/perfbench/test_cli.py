"""The command line from outside: what goes to stdout, what to stderr, and every exit code, with a
fake executor.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import nsa.settings
from perfbench.commands import app, measuring, outcome
from perfbench.records import failed, run_file
from perfbench.records.job import Job
from perfbench.records.rows import PlannedCell, Replicate, Status
from tests.perfbench import builders

ROOT = Path(__file__).parents[2]
MATRIX = """\
version: 1
name: small
target: {gpu: none}
model: tiny
axes: {workload: [forward], seq_len: [128, 256], path: [v2, dense], fa2: [off], dtype: [fp32]}
measure: {processes: 2}
gate: {min_effect_pct: 20, tolerance_pct: 5, min_replicates: 2}
"""
V2 = "dtype=fp32,fa2=off,path=v2,seq_len=256,workload=forward"
SHORT = "path=v2,seq_len=256"  # without what all cells share


@dataclass
class FakeExecutor:
    """Answers every job with a green row, except where a test says otherwise."""

    speed: dict[str, float] = field(default_factory=dict)
    status: dict[str, Status] = field(default_factory=dict)
    interrupt_at: int | None = None
    jobs: list[Job] = field(default_factory=list)

    def new_block(self) -> None: ...

    def close(self) -> None: ...

    def prepare(self, jobs: Sequence[Job]) -> None: ...

    def execute(self, job: Job) -> Replicate:
        if len(self.jobs) == self.interrupt_at:
            raise KeyboardInterrupt
        self.jobs.append(job)
        if (status := self.status.get(job.cell_id, Status.OK)) is not Status.OK:
            return failed(job, status, f"{status} by the test")
        fields = {
            "cell_id": job.cell_id,
            "axes": job.axes,
            "config_sha256": job.config_sha256,
            "route": job.plan,
            "expect": job.expect,
        }
        cell = PlannedCell(**fields, layers=job.model["num_layers"])
        return builders.replicate(
            cell, job.replicate, tok_per_s=self.speed.get(job.cell_id, 1000.0), gpu=False
        )


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeExecutor:
    """An empty folder with small.yaml, whose code is of no checkout, and a fake executor."""
    fake = FakeExecutor()

    @contextmanager
    def prepared(fit: object) -> Iterator[tuple[FakeExecutor]]:
        yield (fake,)

    monkeypatch.setattr(measuring, "prepared_executors", prepared)
    monkeypatch.setattr(outcome, "CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(MATRIX, encoding="utf-8")
    return fake


def run_folder() -> Path:
    """The newest run."""
    return max(Path("reports/runs").iterdir(), key=lambda folder: folder.stat().st_mtime_ns)


def promote() -> None:
    assert app.invoke(["run", "small.yaml"]) == 0
    assert app.invoke(["baseline", "promote", str(run_folder()), "--allow-dirty"]) == 0


def test_run_prints_a_table_and_writes_a_report(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.invoke(["run", "small.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("MEASURED, exit 0: 4 cells")
    assert SHORT in out and "every cell: dtype=fp32,fa2=off,workload=forward" in out
    assert "8 of 8 replicates" in err and "report.md" in err
    assert {"run.jsonl", "report.md"} <= {file.name for file in run_folder().iterdir()}
    assert len(executor.jobs) == 8


def test_json_is_all_that_stdout_carries(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.invoke(["run", "small.yaml", "--json", "--only", "path=v2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["exit_code"] == 0
    assert Path(printed["run_dir"]) == run_folder()
    assert {cell["axes"]["path"] for cell in printed["cells"]} == {"v2"}


def test_check_against_its_own_baseline_is_green(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    promote()
    assert Path("reports/baselines/cpu/small.json").exists()
    assert app.invoke(["check", "small.yaml", "--strict"]) == 0
    assert "4 of 4 cells compared" in capsys.readouterr().out
    assert app.invoke(["baseline", "show", "reports/baselines/cpu/small.json"]) == 0
    assert V2 in capsys.readouterr().out


def test_a_run_that_is_judged_by_itself_is_called_that(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    """It printed a table of +0.00 % without a word."""
    promote()
    promoted, said = str(run_folder()), "compared with itself: the base of 4 of 4 cells is this"
    capsys.readouterr()
    assert app.invoke(["gate", promoted]) == 0
    assert capsys.readouterr().out.startswith(f"{said} very run, so their changes mean nothing: ")
    assert app.invoke(["compare", promoted, promoted]) == 0
    assert capsys.readouterr().out.startswith(said)
    assert app.invoke(["gate", promoted, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["headline"].startswith(said)
    assert app.invoke(["run", "small.yaml"]) == 0
    capsys.readouterr()
    other = str(run_folder())
    assert other != promoted and app.invoke(["gate", other]) == 0
    assert app.invoke(["compare", promoted, other]) == 0
    assert "compared with itself" not in capsys.readouterr().out


def test_a_slower_cell_whose_base_is_unknown_is_suspect_and_is_named(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stored baseline alone makes nothing red; tests/perfbench/test_ab.py has the
    confirmation.
    """
    promote()
    executor.speed[V2] = 600.0
    assert app.invoke(["check", "small.yaml"]) == 7
    assert "knows no commit of" in capsys.readouterr().err
    assert app.invoke(["gate", str(run_folder())]) == 7
    said = "v2 256 forward -40.0 % (1,000 -> 600 tok/s), 2 and 2 processes: SUSPECT, exit 7"
    assert capsys.readouterr().out.startswith(said)
    assert (
        app.invoke(
            [
                "report",
                str(run_folder()),
                "--baseline",
                "reports/baselines/cpu/small.json",
                "--out",
                "again",
            ]
        )
        == 7
    )
    assert "SUSPECT, exit 7" in Path("again/report.md").read_text(encoding="utf-8")


def test_the_baseline_of_another_matrix_is_refused_in_one_line(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    promote()
    other = MATRIX.replace("name: small", "name: other").replace("forward", "train")
    assert "name: other" in other and "train" in other
    Path("other.yaml").write_text(other, encoding="utf-8")
    assert app.invoke(["run", "other.yaml"]) == 0
    capsys.readouterr()
    assert (
        app.invoke(["gate", str(run_folder()), "--baseline", "reports/baselines/cpu/small.json"])
        == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "got a baseline of matrix small for a run of matrix other, and they share no cell; wanted"
        " that of other. Next: " in line
    )


@pytest.mark.parametrize("command", ["gate", "report"])
def test_a_file_whose_end_was_cut_off_is_reported_on_stderr(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert app.invoke(["run", "small.yaml"]) == 0
    path = run_folder() / "run.jsonl"
    path.write_bytes(path.read_bytes()[:-100])
    capsys.readouterr()
    app.invoke([command, str(path.parent), *(["--out", "again"] if command == "report" else [])])
    assert (
        "was cut off and is left out; `perfbench run --resume` repairs the file"
        in capsys.readouterr().err
    )


def test_explain_names_the_cell_or_the_nearest(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    promote()
    capsys.readouterr()
    assert app.invoke(["explain", str(run_folder()), V2]) == 0
    assert V2 in capsys.readouterr().out
    assert app.invoke(["explain", str(run_folder()), V2.replace("256", "255")]) == 2
    assert repr(V2) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (Status.WRONG_PATH, 4),
        (Status.PARITY, 5),
        (Status.OOM, 6),
        (Status.TIMEOUT, 6),
        (Status.CRASH, 6),
    ],
)
def test_a_bad_cell_has_its_exit_code_and_the_rest_is_measured(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str], status: Status, code: int
) -> None:
    executor.status[V2] = status
    assert app.invoke(["run", "small.yaml"]) == code
    assert f"exit {code}: 1 of 4 cells: {SHORT}:" in capsys.readouterr().out
    assert len({job.cell_id for job in executor.jobs}) == 4


def test_warnings_fail_under_strict_only(executor: FakeExecutor) -> None:
    promote()
    path = run_folder() / "run.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))  # killed before its last row: one replicate of a cell
    assert app.invoke(["gate", str(run_folder())]) == 0
    assert app.invoke(["gate", str(run_folder()), "--strict"]) == 7


@pytest.mark.parametrize(
    "content", [None, "{", '{"schema_version": 99}', '{"schema_version": 1, "cells": {}}']
)
def test_an_unusable_baseline_is_reported_first_and_exits_9(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    if content is not None:
        Path("base.json").write_text(content, encoding="utf-8")
    assert app.invoke(["check", "small.yaml", "--baseline", "base.json"]) == 9
    err = capsys.readouterr().err
    _load, warning, *_ = err.splitlines()
    assert warning.startswith("perfbench: warning: ") and "base.json" in warning
    assert len(executor.jobs) == 8  # nothing is lost: the run can be promoted


def test_an_interrupted_run_says_how_to_go_on_and_goes_on(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    executor.interrupt_at = 3
    assert app.invoke(["run", "small.yaml"]) == 130
    assert f"--resume {run_folder()}" in capsys.readouterr().err
    executor.interrupt_at = None
    assert app.invoke(["run", "small.yaml", "--resume", str(run_folder())]) == 0
    assert len(executor.jobs) == 8
    assert len(list(Path("reports/runs").iterdir())) == 1


def test_a_demonstration_cannot_become_a_baseline(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.invoke(["run", "small.yaml", "--inject", f"slowdown=10%@{V2}"]) == 0
    assert [job.injection.percent for job in executor.jobs if job.injection] == [10.0, 10.0]
    assert app.invoke(["baseline", "promote", str(run_folder())]) == 2
    assert "injected" in capsys.readouterr().err


def calibration(path: Path, **changes: object) -> str:
    """A calibration.json that knows one cell, from three machine starts."""
    manifest = run_file.read_run(run_folder()).manifest
    config = {cell.cell_id: cell.config_sha256 for cell in manifest.cells}[V2]
    cell = {
        "cell_id": V2,
        "config_sha256": config,
        "night": {"starts": 3, "gate_sd": 0.004},
        "device_night": None,
    }
    stored = {
        "gpu_slug": "cpu",
        "environment": manifest.environment.fingerprint(),
        "cells": [cell],
        **changes,
    }
    path.write_text(json.dumps(stored), encoding="utf-8")
    return str(path)


def test_promote_stores_the_between_session_variance(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    promote()
    again = [
        "baseline",
        "promote",
        str(run_folder()),
        "--allow-dirty",
        "--to",
        "reports/baselines/cpu/small.json",
    ]
    assert app.invoke([*again, "--calibration", calibration(Path("calibration.json"))]) == 0
    assert "gives the between-session variance of 1 of 4 cells" in capsys.readouterr().out
    cells = json.loads(Path("reports/baselines/cpu/small.json").read_text(encoding="utf-8"))[
        "cells"
    ]
    assert {
        cell_id: cell["night_log_sd"]
        for cell_id, cell in cells.items()
        if cell["night_log_sd"] is not None
    } == {V2: 0.004}
    assert app.invoke(["baseline", "show", "reports/baselines/cpu/small.json"]) == 0
    assert sum(line.endswith("0.40 %") for line in capsys.readouterr().out.splitlines()) == 1
    assert app.invoke(again) == 0  # without a calibration what was known stays
    assert (
        json.loads(Path("reports/baselines/cpu/small.json").read_text(encoding="utf-8"))["cells"][
            V2
        ]["night_starts"]
        == 3
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "cannot be read: No such file"),
        ({"gpu_slug": "h200"}, "got a calibration of h200, wanted one of cpu"),
        (
            {"cells": [{"cell_id": V2, "night_sd": 0.004}]},
            "is no calibration: cells.0.night: Field required",
        ),
    ],
)
def test_a_calibration_that_tells_nothing_exits_2_in_one_line(
    executor: FakeExecutor,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object] | None,
    message: str,
) -> None:
    assert app.invoke(["run", "small.yaml"]) == 0
    capsys.readouterr()
    file = "none.json" if changes is None else calibration(Path("calibration.json"), **changes)
    assert (
        app.invoke(
            ["baseline", "promote", str(run_folder()), "--allow-dirty", "--calibration", file]
        )
        == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and "Next: perfbench calibrate" in line
    assert not Path("reports/baselines").exists()


def test_budget_stops_before_the_next_replicate(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    # nothing measured is not green
    assert app.invoke(["run", "small.yaml", "--budget", "0.000001s"]) == 6
    assert "--resume" in capsys.readouterr().err
    assert executor.jobs == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["rnu", "small.yaml"], "run"),
        (["run", "small.yaml", "--onyl", "path=v2"], "--only"),
        (["run"], "MATRIX"),
        (["run", "absent.yaml"], "absent.yaml"),
        (["run", "broken.yaml"], "broken.yaml:3: "),
        (["run", "unroutable.yaml"], "fa2=on"),
        (["run", "small.yaml", "--only", "pth=v2"], "'path'"),
        (["run", "small.yaml", "--budget", "soon"], "30m"),
        (["run", "small.yaml", "--seed", "-1"], "--seed"),
        (["run", "small.yaml", "--inject", "flood@x"], "slowdown=10%"),
        (["run", "small.yaml", "--out", "small.yaml"], "small.yaml"),
        (["run", "small.yaml", "--resume", "nowhere"], "nowhere"),
        (["plan", "small.yaml", "--gpu", "h1000"], "'h100'"),
        (["gate", "absent"], "absent"),
        (["report", "small.yaml"], "small.yaml:1"),
        (["schema", "matrx"], "matrix"),
    ],
)
def test_usage_errors_exit_2_and_say_what_is_right(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    Path("broken.yaml").write_text("version: 1\nname: a\nname: b\n", encoding="utf-8")
    Path("unroutable.yaml").write_text(MATRIX.replace("fa2: [off]", "fa2: [on]"), encoding="utf-8")
    assert app.invoke(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert executor.jobs == []


def test_only_can_leave_out_what_cannot_be_routed(executor: FakeExecutor) -> None:
    Path("mixed.yaml").write_text(MATRIX.replace("fa2: [off]", "fa2: [on, off]"), encoding="utf-8")
    assert app.invoke(["run", "mixed.yaml"]) == 2
    assert app.invoke(["run", "mixed.yaml", "--only", "fa2=off"]) == 0


def test_an_absent_gpu_exits_8_and_skip_exits_0(
    executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("h100.yaml").write_text(MATRIX.replace("gpu: none", "gpu: H100"), encoding="utf-8")
    assert app.invoke(["run", "h100.yaml"]) == 8
    assert "H100" in capsys.readouterr().err
    Path("skip.yaml").write_text(
        MATRIX.replace("gpu: none", "gpu: H100, on_mismatch: skip"), encoding="utf-8"
    )
    assert app.invoke(["check", "skip.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "nothing measured" in err


def test_an_unknown_setting_exits_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], executor: FakeExecutor
) -> None:
    monkeypatch.setenv("NSA_USE_FA3", "1")
    nsa.settings.current.cache_clear()
    try:
        assert app.invoke(["plan", "small.yaml"]) == 2
    finally:
        monkeypatch.undo()
        nsa.settings.current.cache_clear()
    assert "NSA_USE_FA2" in capsys.readouterr().err


def test_plan_needs_no_gpu(executor: FakeExecutor, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.invoke(["plan", "small.yaml", "--gpu", "a100", "--only", "path=v2", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert [cell["axes"]["path"] for cell in planned["cells"]] == ["v2", "v2"]
    assert executor.jobs == []


@pytest.mark.parametrize("matrix", sorted(ROOT.glob("matrices/*.yaml")), ids=lambda path: path.name)
def test_every_matrix_of_the_project_plans(
    matrix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.invoke(["plan", str(matrix)]) == 0
    assert "Estimated" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["matrix", "result"])
def test_schemas_are_json_schemas(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.invoke(["schema", kind]) == 0
    assert {"$defs"} <= json.loads(capsys.readouterr().out).keys()


def test_doctor_speaks_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.invoke(["doctor", "--json"]) in (0, 8)
    assert "torch" in {line["what"] for line in json.loads(capsys.readouterr().out)}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.invoke(["--version"]) == 0
    assert capsys.readouterr().out.startswith("perfbench 0.")


def outside(replacement: str) -> subprocess.CompletedProcess[str]:
    """`perfbench plan` in a process of its own, its work replaced by a line of Python."""
    code = (
        "import os, signal, sys\nimport perfbench.matrix\nfrom perfbench.commands import app\n"
        f"def load(path):\n    {replacement}\nperfbench.matrix.load_matrix = load\n"
        "sys.argv = ['perfbench', 'plan', 'matrices/cpu.yaml']\nsys.exit(app.main())"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )


def test_a_bug_exits_1_and_keeps_its_traceback() -> None:
    done = outside("raise RuntimeError('broken inside')")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    file = Path(line.rpartition(" ")[2])
    assert "RuntimeError: broken inside" in file.read_text(encoding="utf-8")
    file.unlink()


@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_signals_have_their_exit_codes(signal: str, code: int) -> None:
    assert outside(f"os.kill(os.getpid(), signal.{signal})").returncode == code
