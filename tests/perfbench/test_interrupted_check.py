"""A `check` that is stopped while it confirms leaves a verdict, and `report` finds the same one.

Row of the faults: an interrupted `check`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from perfbench.commands import app, outcome
from perfbench.errors import Exit
from perfbench.gate.sequential import LOOKS
from perfbench.runner.ab import confirm
from tests.perfbench.ab_bench import Bench

REAL_REPORT = outcome.Outcome.write_report
BASELINE = Path("reports/baselines/cpu/small.json")


@pytest.fixture
def slow(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A baseline of 1000 tok/s, and code that is 20 % slower; reports are written."""
    monkeypatch.setattr(outcome.Outcome, "write_report", REAL_REPORT)
    typed(bench, monkeypatch, "run", "small.yaml", "--out", "first", exits=0)
    (first,) = Path("first").iterdir()
    typed(bench, monkeypatch, "baseline", "promote", str(first), exits=0)
    bench.current.speed = bench.b.speed = 800.0
    return bench


def typed(bench: Bench, monkeypatch: pytest.MonkeyPatch, *argv: str, exits: int) -> None:
    """The command line as a user types it, which the manifest keeps."""
    monkeypatch.setattr(sys, "argv", ["perfbench", *argv])
    assert bench.run(*argv) == exits


def verdict() -> Any:
    (folder,) = Path("reports/runs").iterdir()
    return json.loads((folder / "verdict.json").read_bytes())


def run_folder() -> str:
    (folder,) = Path("reports/runs").iterdir()
    return str(folder)


@pytest.mark.parametrize("jobs", [0, 2 * LOOKS[0] - 1])  # no pair at all; one short of a look
def test_the_verdict_is_written_at_an_interrupt(
    slow: Bench, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    slow.b.interrupt_at = jobs
    typed(slow, monkeypatch, "check", "small.yaml", exits=130)
    stored = verdict()
    gated = app.invoke(["gate", run_folder()])
    assert (
        stored["exit_code"] == gated == (7 if jobs == 0 else 3) and stored["baseline"] is not None
    )
    assert app.invoke(["report", run_folder()]) == gated
    assert verdict()["exit_code"] == gated
    report = (Path(run_folder()) / "report.md").read_text(encoding="utf-8")
    assert f"exit {gated}" in report


def test_the_verdict_of_the_screen_is_there_before_anything_is_confirmed(
    slow: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, not terminated: nothing runs any more."""
    seen = []

    def killed(*arguments: object, **options: object) -> None:
        seen.append(verdict()["exit_code"])
        raise SystemExit(137)

    monkeypatch.setattr(confirm, "measure_pair", killed)
    typed(slow, monkeypatch, "check", "small.yaml", exits=137)
    assert seen == [Exit.STRICT]
    assert app.invoke(["report", run_folder()]) == Exit.STRICT


@pytest.mark.parametrize("option", [("--baseline", "kept.json"), ("--baseline=kept.json",)])
def test_report_judges_by_the_baseline_that_check_was_given(
    slow: Bench, monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...]
) -> None:
    BASELINE.rename("kept.json")
    typed(slow, monkeypatch, "check", "small.yaml", *option, "--no-confirm", exits=7)
    assert app.invoke(["report", run_folder()]) == 7
    Path("kept.json").unlink()  # then nothing is written over its verdict
    assert app.invoke(["report", run_folder()]) == 2
    assert verdict()["exit_code"] == 7
    # and elsewhere the red run is not green, but not judged
    assert app.invoke(["report", run_folder(), "--out", "again"]) == Exit.BASELINE
    assert "NO_BASELINE, exit 9" in Path("again/report.md").read_text(encoding="utf-8")


def test_report_of_a_plain_run_has_no_baseline(
    slow: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(slow, monkeypatch, "run", "small.yaml", exits=0)
    assert app.invoke(["report", run_folder()]) == 0
    assert verdict()["baseline"] is None
