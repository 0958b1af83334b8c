"""Explain: every number between the rows and the word, checked against arithmetic by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from perfbench import calibration
from perfbench.commands import app
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import explain
from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy, Policies
from perfbench.records import BaselineProblem
from perfbench.records.verdict import Verdict
from tests.perfbench import builders as b
from tests.perfbench.edits import conclude, edit

POLICY = GatePolicy()
TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"


def test_the_numbers_of_a_screen_follow_from_the_rows() -> None:
    run = b.small_run(replicates=3)
    planned = run.manifest.cells[0]
    one = b.make_run([planned], replicates=3)
    speeds = [990.0, 1000.0, 1012.0]
    slow = b.change_rows(
        one,
        TRAIN,
        lambda row: b.replicate(planned, row.replicate, tok_per_s=0.9 * speeds[row.replicate]),
    )
    base_run = b.change_rows(
        one, TRAIN, lambda row: b.replicate(planned, row.replicate, tok_per_s=speeds[row.replicate])
    )
    base = b.baseline_of(base_run)
    text = explain.explain_cell(slow, judge(slow, base, POLICY), TRAIN, POLICY, base)
    logs = [math.log(speed) for speed in speeds]
    mean = sum(logs) / 3
    sd = math.sqrt(sum((x - mean) ** 2 for x in logs) / 2)
    error = sd * math.sqrt(2 / 3)
    assert f"base: n 3, geometric mean {math.exp(mean):,.6g} tok/s" in text
    assert f"change: ln {math.log(0.9):+.6f} = -10.00 % of speed" in text
    assert (
        f"sd within the sides: {sd:.6f} (df 4)" in text
        and f"standard error: {error:.6f} (df 4)" in text
    )
    assert f"t: {math.log(0.9) / error:+.4f}, p that it is no slower: " in text
    assert "REGRESSED only after base and candidate were measured interleaved" in text
    assert "Exit: 7 by this cell alone; 7 for the whole run." in text
    assert f"perfbench run matrices/h100.yaml --only cell={TRAIN}" in text and text.startswith(
        f"{TRAIN}: SUSPECT\n"
    )


@pytest.mark.parametrize(
    "session, starts, words",
    [
        (None, None, "tok/s 1 %, assumed (no calibration measured it)"),
        (0.0042, 3, "tok/s 0.42 %, from 3 machine starts"),
        (0.0042, None, "tok/s 0.42 %, from a calibration"),  # a file older than the count
    ],
)
def test_the_between_session_variance_says_where_it_is_from(
    session: float | None, starts: int | None, words: str
) -> None:
    run = b.small_run()
    base = b.baseline_of(run, night_log_sd=session)
    cells = {
        cell_id: cell.model_copy(update={"night_starts": starts})
        for cell_id, cell in base.cells.items()
    }
    base = base.model_copy(update={"cells": cells})
    text = explain.explain_cell(run, judge(run, base, POLICY), TRAIN, POLICY, base)
    assert words in text and "device time 1 %, assumed" in text


def test_a_confirmed_cell_names_its_pairs_and_its_adjusted_p() -> None:
    run = b.small_run(replicates=8)
    slow = b.scale_rows(run, TRAIN, 0.9)
    base = b.baseline_of(run)
    text = explain.explain_cell(
        slow, conclude(judge(slow, base, POLICY), run, slow, POLICY), TRAIN, POLICY, base
    )
    assert (
        text.startswith(f"{TRAIN}: REGRESSED")
        and "Pairs, tok_per_s" in text
        and "; adjusted " in text
    )
    assert "Exit: 3 by this cell alone" in text and "interleaved with the candidate" in text


def test_planted_faults_are_reported_first() -> None:
    run = b.small_run()
    planted = b.with_manifest(run, injections=[f"slowdown=3%@{TRAIN}"])
    marked, plain = (
        explain.explain_cell(one, judge(one, None, POLICY), TRAIN, POLICY, None)
        for one in (planted, run)
    )
    assert (
        f"INJECTED FAULTS, a demonstration: slowdown=3%@{TRAIN}\n" in marked
        and "INJECTED" not in plain
    )


def test_an_override_is_reported_and_the_text_is_deterministic() -> None:
    run = b.small_run()
    base = b.baseline_of(run)
    policies = Policies(POLICY, {TRAIN: POLICY.model_copy(update={"tolerance_pct": 5.0})})
    first, second = (
        explain.explain_cell(run, judge(run, base, policies), TRAIN, policies, base)
        for _ in range(2)
    )
    assert (
        first == second
        and "Policy (an override of the matrix): min_effect 3 %, tolerance 5 %" in first
    )


@pytest.mark.parametrize("verdict", [None, Verdict.NO_BASELINE, Verdict.WRONG_PATH])
def test_a_cell_that_was_not_compared_says_so(verdict: Verdict | None) -> None:
    run = edit(b.small_run(), TRAIN, engaged={}) if verdict is Verdict.WRONG_PATH else b.small_run()
    base = (
        BaselineProblem(verdict, "no baseline at x.json")
        if verdict is Verdict.NO_BASELINE
        else None
    )
    text = explain.explain_cell(run, judge(run, base, POLICY), TRAIN, POLICY, base)
    assert "no speed would have changed this verdict" in text
    assert ("never ran" in text) is (verdict is Verdict.WRONG_PATH)
    assert ("no baseline at x.json" in text) is (verdict is Verdict.NO_BASELINE)


def test_an_unknown_cell_names_the_nearest() -> None:
    run = b.small_run()
    with pytest.raises(PerfbenchError, match="did you mean") as caught:
        explain.explain_cell(
            run, judge(run, None, POLICY), TRAIN.replace("2048", "2049"), POLICY, None
        )
    assert caught.value.exit_code is Exit.USAGE


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("screened", "`perfbench check` confirms it"),
        ("confirmed", "Measure more pairs: `perfbench ab"),
        ("cut short", "Measure the pairs that are missing (4 of 8 planned pairs were measured)"),
        ("too few", "Measure more processes, at least 3 on each side"),
    ],
)
def test_a_watch_says_what_comes_next(case: str, words: str) -> None:
    count = 2 if case == "too few" else 8
    run = b.small_run(replicates=count, noise=0.005)
    slow = b.scale_rows(run, TRAIN, 1.0)
    judgement = judge(slow, b.baseline_of(run), POLICY)
    if case in ("confirmed", "cut short"):
        planned = next(cell for cell in run.manifest.cells if cell.cell_id == TRAIN)
        other = b.change_rows(
            run,
            TRAIN,
            lambda row: b.replicate(
                planned, row.replicate, tok_per_s=54.0 * (960 + 10 * (row.replicate * 5 % 8))
            ),
        )
        flat = b.change_rows(
            run, TRAIN, lambda row: b.replicate(planned, row.replicate, tok_per_s=54_000.0)
        )
        if case == "cut short":
            flat, other = (
                b.change_rows(one, TRAIN, lambda row: row if row.replicate < 4 else None)
                for one in (flat, other)
            )
        judgement = conclude(judgement, flat, other, POLICY)
    text = explain.explain_cell(slow, judgement, TRAIN, POLICY, b.baseline_of(run))
    assert (
        text.startswith(f"{TRAIN}: WATCH")
        and words in text
        and "Gate it against a baseline" not in text
    )


@pytest.mark.parametrize(
    ("verdict", "words"),
    [(Verdict.NO_BASELINE, "baseline promote RUN"), (Verdict.CORRUPT, "from git")],
)
def test_a_baseline_that_cannot_judge_says_what_comes_next(verdict: Verdict, words: str) -> None:
    run, problem = b.small_run(), BaselineProblem(verdict, "x.json is no baseline")
    text = explain.explain_cell(run, judge(run, problem, POLICY), TRAIN, POLICY, problem)
    assert words in text and "Gate it against a baseline" not in text


def test_every_verdict_has_its_next_step() -> None:
    assert set(explain._NEXT) == set(Verdict) - {Verdict.WATCH}  # a WATCH has four


@pytest.mark.parametrize("as_json", [True, False])
def test_calibrate_prints_json_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    monkeypatch.setattr(calibration, "calibrate", lambda files, **_: "found")
    monkeypatch.setattr(calibration, "render_calibration", lambda found: f"# {found}")
    monkeypatch.setattr(calibration, "calibration_json", lambda found: json.dumps({"text": found}))
    run = Path(__file__).parents[1] / "data" / "runs" / "h100-gate" / "start-1"
    assert app.invoke(["calibrate", str(run), *(["--json"] if as_json else [])]) == 0
    assert capsys.readouterr().out == ('{"text": "found"}\n' if as_json else "# found\n")
