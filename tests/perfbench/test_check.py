"""The second stage of `check`: what it confirms against the commit of the baseline, by fake
executors.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from perfbench.commands import outcome
from perfbench.gate.sequential import LOOKS
from perfbench.records import run_file
from perfbench.runner.ab import pair, schedule, version_plan
from tests.perfbench import repositories
from tests.perfbench.ab_bench import LONG, SHORT, Bench
from tests.perfbench.digested import edit_baseline
from tests.perfbench.repositories import git

REAL_PLAN = version_plan.plan_of_version


def promote(bench: Bench) -> None:
    """A baseline of 1000 tok/s at the newest commit."""
    assert bench.run("run", "small.yaml", "--out", "first") == 0
    (first,) = Path("first").iterdir()
    assert bench.run("baseline", "promote", str(first)) == 0


def confirmed(out: str = "reports/runs") -> Path:
    (folder,) = Path(out).iterdir()
    return folder


def test_check_confirms_a_drop_before_it_is_red(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    promote(bench)
    bench.current.speed = bench.b.speed = 800.0
    capsys.readouterr()
    assert bench.run("check", "small.yaml") == 3
    out, err = capsys.readouterr()
    assert re.match(r"v2 \d+ forward -20\.\d % \(.* tok/s\), 4 pairs: REGRESSED, exit 3", out)
    assert re.search(
        r"2 cells are not proved as fast .* in interleaved pairs, 4 of each"
        r" \(about [\d.]+ minutes\), then more of those that are not settled, 40 at most"
        r" \([\d.]+ minutes\)",
        err,
    )
    folder = confirmed()
    found = pair.read_pair(folder / "confirm" / bench.commits[1][:12])
    assert found.base.manifest.source.commit == bench.commits[1]
    assert {row.cell_id for row in found.base.replicates} == {SHORT, LONG}
    # a drop of 20 % is settled by the first look
    assert len(bench.a.jobs) == len(bench.b.jobs) == 2 * LOOKS[0]
    plan = found.base.manifest.confirmation
    assert plan is not None and plan.tests == 2 and sorted(plan.cells) == sorted([SHORT, LONG])
    # the same bytes later: what was confirmed lies next to the run
    assert bench.run("gate", str(folder)) == 3
    assert capsys.readouterr().out == out
    assert bench.run("report", str(folder), "--baseline", "reports/baselines/cpu/small.json") == 3


def test_check_clears_what_only_the_current_machine_slowed(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    promote(bench)
    bench.current.speed, bench.a.speed, bench.b.speed = 800.0, 800.0, 800.0
    assert bench.run("check", "small.yaml", "--strict") == 0
    assert len(bench.a.jobs) == len(bench.b.jobs) == 2 * LOOKS[0]


def test_check_injects_into_the_candidate_alone(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    promote(bench)
    assert bench.run("check", "small.yaml", "--inject", f"slowdown=10%@{LONG}") == 3
    out = capsys.readouterr().out
    assert "v2 256 forward -10.0 % (1,000 -> 900 tok/s)" in out
    assert "pairs: REGRESSED, exit 3: 1 of 2 cells" in out
    assert {job.cell_id for job in bench.a.jobs} == {LONG}  # only what was screened
    assert all(job.injection is None for job in bench.a.jobs) and all(
        job.injection for job in bench.b.jobs
    )


def test_no_other_perfbench_comes_between_a_run_and_its_pairs(bench: Bench) -> None:
    promote(bench)
    bench.held.clear()
    bench.current.speed = bench.b.speed = 800.0
    assert bench.run("check", "small.yaml") == 3
    assert bench.held == [True, True]
    bench.held.clear()
    assert bench.run("run", "small.yaml") == 0
    assert bench.held == [False]


def test_nothing_is_confirmed_where_nothing_looks_slower(bench: Bench) -> None:
    promote(bench)
    assert bench.run("check", "small.yaml") == 0
    assert bench.a.jobs == [] and not (confirmed() / "confirm").exists()


def test_no_confirm_leaves_it_suspect(bench: Bench) -> None:
    promote(bench)
    bench.current.speed = 800.0
    assert bench.run("check", "small.yaml", "--no-confirm") == 7
    assert bench.run("check", "small.yaml", "--no-confirm", "--strict") == 7
    assert bench.a.jobs == []


def edit_cells(**changes: Any) -> None:
    """Of the baseline."""

    def change(content: dict[str, Any]) -> None:
        for cell in content["cells"].values():
            cell.update(changes)

    edit_baseline(Path("reports/baselines/cpu/small.json"), change)


@pytest.mark.parametrize(
    ("base", "why"), [("0" * 40, "does not have"), (None, "knows no commit of")]
)
def test_a_base_that_cannot_be_built_leaves_it_suspect(
    bench: Bench, capsys: pytest.CaptureFixture[str], base: str | None, why: str
) -> None:
    promote(bench)
    edit_cells(commit=base)
    bench.current.speed = 800.0
    assert bench.run("check", "small.yaml") == 7
    out, err = capsys.readouterr()
    assert "SUSPECT" in out and why in err and "not confirmed" in out
    assert bench.run("check", "small.yaml", "--strict") == 7


def test_a_base_whose_package_is_too_old_leaves_it_suspect(
    bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    promote(bench)
    git(tmp_path, "clone", "-q", str(bench.repository), "clone")
    old = tmp_path / "clone"
    shutil.rmtree(old / "nsa" / "routing")
    edit_cells(commit=repositories.commit(old, "before routing"))
    bench.current.speed = 800.0
    with pytest.MonkeyPatch.context() as patch:
        git(old, "checkout", "-q", bench.commits[1])
        patch.setattr(outcome, "CHECKOUT", old)
        patch.setattr(schedule, "plan_of_version", REAL_PLAN)
        assert bench.run("check", "small.yaml") == 7
    err = capsys.readouterr().err
    assert "lacks what this harness needs of nsa" in err and "nsa.routing" in err


def test_an_interrupted_confirmation_goes_on(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    promote(bench)
    bench.current.speed = bench.b.speed = 800.0
    bench.b.interrupt_at = 5
    assert bench.run("check", "small.yaml") == 130
    folder = confirmed()
    assert f"--resume {folder}" in capsys.readouterr().err
    bench.b.interrupt_at = None
    assert bench.run("check", "small.yaml", "--resume", str(folder)) == 3
    assert len(bench.b.jobs) >= 2 * LOOKS[0] and len(run_file.read_run(folder).replicates) == 8


def test_a_spent_budget_leaves_it_suspect(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from perfbench.commands import check

    promote(bench)
    bench.current.speed = 800.0
    readings = iter([0.0, 100.0])
    monkeypatch.setattr(
        check, "time", type("Clock", (), {"monotonic": staticmethod(lambda: next(readings))})
    )
    assert bench.run("check", "small.yaml", "--budget", "90s") == 7
    assert "the budget is spent" in " ".join(capsys.readouterr().out.split()) and bench.a.jobs == []
