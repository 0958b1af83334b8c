"""Every headline begins with what changed and by how much, then says how that was judged.

Row of the faults: the number last.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from perfbench.commands import outcome
from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy
from perfbench.records.verdict import Verdict
from tests.perfbench import builders as b
from tests.perfbench.ab_bench import LONG, Bench
from tests.perfbench.edits import conclude

NOISY = re.compile(r"-8[12]\.\d %(25)? \((999|1,00\d) -> 18\d tok/s\)")  # around what DROP says
REAL_REPORT = outcome.Outcome.write_report
DROP = "v2 256 forward -81.9 % (1,000 -> 181 tok/s)"


def steady(text: str) -> str:
    """``text`` without the noise of the fake measurements."""
    return NOISY.sub(r"-81.9 %\1 (1,000 -> 181 tok/s)", text)


@pytest.fixture
def slow(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """A candidate whose longer cell lost 81.9 % since its baseline; GitHub's runner around it."""
    assert bench.run("run", "small.yaml", "--out", "first") == 0
    (first,) = Path("first").iterdir()
    assert bench.run("baseline", "promote", str(first)) == 0
    monkeypatch.setattr(outcome.Outcome, "write_report", REAL_REPORT)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    return bench


@pytest.mark.parametrize(
    ("argv", "start", "judged"),
    [
        ([], f"{DROP}, 4 pairs", "REGRESSED, exit 3: 1 of 2 cells, confirmed in turns, adjusted p"),
        (
            ["--no-confirm"],
            f"{DROP}, 4 and 4 processes",
            "SUSPECT, exit 7: 1 of 2 cells, not confirmed",
        ),
    ],
)
def test_what_changed_comes_first_wherever_it_is_read(
    slow: Bench,
    argv: list[str],
    start: str,
    judged: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through `check` itself: terminal of any width, JSON, report, step summary, annotation and
    JUnit.
    """
    fault = ["--inject", f"slowdown=81.9%@{LONG}"]
    assert slow.run("check", "small.yaml", *argv, *fault) in (3, 7)
    printed = steady("".join(capsys.readouterr())).splitlines()
    error = next(line for line in printed if line.startswith("::error"))
    number = start.removeprefix("v2 256 forward ")
    assert f"::{number.replace('%', '%25')}: " in error
    (folder,) = Path("reports/runs").iterdir()
    for width in (1, 40, 60, 79, 80, 120, 400):
        monkeypatch.setenv("COLUMNS", str(width))
        slow.run("gate", str(folder))
        shown = steady(" ".join(capsys.readouterr().out.split()))
        loud, _, rest = shown.partition(": a demonstration ")
        assert "INJECTED FAULTS" in loud and rest.startswith(f"{start}: {judged}")
    slow.run("gate", str(folder), "--json")
    headline = json.loads(capsys.readouterr().out)["headline"]
    assert steady(headline).startswith(f"{start}: {judged}")
    for page in (folder / "report.md", Path("summary.md")):
        first = page.read_text(encoding="utf-8").splitlines()[0].replace("\\", "")
        assert steady(first).startswith(f"# 🔴 {start}: {judged}")
    suite = ET.parse(folder / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    failure = suite.find(f"testcase[@name='{LONG}']/failure")
    assert failure is not None and steady(str(failure.get("message"))).startswith(f"{number}: ")
    named = suite.find("properties/property[@name='headline']")
    assert named is not None and steady(str(named.get("value"))).startswith(start)


def test_of_what_was_cut_short_the_number_is_there_and_first() -> None:
    """An instance of the fault: 'cut short: 11 of 40 planned pairs; it holds at ...' was all."""
    run = b.small_run(replicates=8)
    cell = run.manifest.cells[0].cell_id
    slow = b.scale_rows(run, cell, 0.181)
    first = judge(slow, b.baseline_of(run), GatePolicy())
    base, candidate = (b.with_manifest(one, replicates=40) for one in (run, slow))
    settled = conclude(first, base, candidate, GatePolicy())
    assert re.match(
        r".* -81\.9 % \([\d,]+ -> [\d,]+ tok/s\), 8 pairs: REGRESSED, exit 3: 1 of 4 cells,"
        r".*; cut short: 8 of 40 planned pairs$",
        settled.headline,
    )


@pytest.mark.parametrize(
    ("factor", "verdict", "start"),
    [
        (1.3, Verdict.FASTER, "v2 2048 train +30.0 %"),
        (1.0, Verdict.SAME, ""),
    ],
)
def test_a_green_headline_begins_with_the_largest_change(
    factor: float, verdict: Verdict, start: str
) -> None:
    """The best of what is faster; else the worst of what is the same."""
    run = b.small_run(replicates=8)
    cell = run.manifest.cells[0].cell_id
    screened = b.scale_rows(run, cell, min(factor, 2 - factor))
    first = judge(screened, b.baseline_of(run), GatePolicy())
    settled = conclude(first, run, b.scale_rows(run, cell, factor), GatePolicy())
    assert settled.headline.startswith(start)
    assert re.match(rf".* [+-][\d.]+ % \(.*\), .*: {verdict}, exit 0", settled.headline)


def test_more_work_is_what_changed_where_no_time_did() -> None:
    """Launches of a host-bound cell rose: they come first, not a change of 0.0 %."""
    run = b.small_run(replicates=8)
    cell = run.manifest.cells[0].cell_id
    base = b.replace_rows(run, cell, host_bound=True, profile=b.profile(kernel_count=910))
    now = b.replace_rows(run, cell, host_bound=True, profile=b.profile(kernel_count=938))
    first = judge(now, b.baseline_of(base), GatePolicy())
    for found in (first, conclude(first, base, now, GatePolicy())):
        assert re.match(
            r"v2 2048 train kernel launches rose from 910 to 938 a step, .*:"
            r" (SUSPECT|REGRESSED), exit \d",
            found.headline,
        )


def test_a_change_that_is_none_has_no_sign_of_a_drop() -> None:
    run = b.small_run(replicates=8)
    cell = run.manifest.cells[0].cell_id
    found = judge(b.scale_rows(run, cell, 0.9999), b.baseline_of(run), GatePolicy())
    assert "-0.0 %" not in found.headline
