"""Interleaved pairs of one commit with itself, planted or not, as `calibrate` reports them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfbench.calibration import aa_pairs, certify, simulate
from perfbench.calibration import report_rule as telling
from perfbench.calibration.certify import Effort, Rate
from perfbench.commands import outcome
from perfbench.commands.calibrate import certify as certify_command
from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix.policy import GatePolicy, Policies
from perfbench.records.rows import Run, Source
from tests.perfbench import builders as b
from tests.perfbench.digested import write_run
from tests.perfbench.edits import edit

TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"
LITTLE = Effort(null_cell_sessions=24, null_alone=24, drops=6, claimed_drops=24, mode_trials=4)


def saved(
    folder: Path,
    base: Run,
    candidate: Run,
    *,
    name: str = "pair",
    injections: tuple[str, ...] = (),
) -> Path:
    """As `perfbench ab` leaves them."""
    base = b.with_manifest(base, run_id=f"{name}-a")
    candidate = b.with_manifest(candidate, run_id=f"{name}-b", injections=list(injections))
    for side, run in (("a", base), ("b", candidate)):
        home = folder / name / side
        home.mkdir(parents=True)
        write_run(home / "run.jsonl", run)
    return folder / name


@pytest.fixture(autouse=True)
def _default_policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The builders' runs hold no readable matrix."""
    if "unreadable" not in request.node.name:
        monkeypatch.setattr(aa_pairs, "_policies", lambda run: Policies(GatePolicy()))


def test_a_pair_of_an_unreadable_matrix_is_refused(tmp_path: Path) -> None:
    base = b.small_run(replicates=2)
    with pytest.raises(PerfbenchError, match="target: missing"):
        aa_pairs.read([saved(tmp_path, base, base)], slug(base))


def slug(run: Run) -> str:
    return run.manifest.environment.gpu_slug


def test_an_a_a_is_no_false_alarm_and_planted_work_is_found(tmp_path: Path) -> None:
    """5 % more work lowers tok/s by 1 - 1 / 1.05; the other cells of that pair are an A/A, too."""
    base = b.small_run(replicates=8)
    plain = saved(tmp_path, base, base)
    planted = saved(
        tmp_path,
        base,
        b.scale_rows(base, TRAIN, 1 / 1.05),
        name="worse",
        injections=(f"slowdown=5%@{TRAIN}",),
    )
    found = aa_pairs.read([planted, plain], slug(base))
    assert [one.extra_work_pct for one in found] == [0.0] * 7 + [5.0] and found[-1].cell_id == TRAIN
    assert (
        found[-1].verdict == "REGRESSED" and found[-1].pairs == 8 and found[-1].run_id == "worse-b"
    )
    assert found[-1].expected_pct == pytest.approx(-4.7619, abs=1e-4) and found[
        -1
    ].change_pct == pytest.approx(-4.7619, abs=1e-4)
    assert found[-1].lower_pct is not None and found[-1].upper_pct is not None
    assert found[-1].lower_pct <= found[-1].change_pct <= found[-1].upper_pct < -1
    assert {one.verdict for one in found[:-1]} == {"SAME"} and aa_pairs.false_alarms(found) == Rate(
        0, 7
    )


def test_a_cell_that_is_wrong_has_its_verdict_and_no_speed(tmp_path: Path) -> None:
    base = b.small_run(replicates=8)
    found = aa_pairs.read([saved(tmp_path, base, edit(base, TRAIN, engaged={}))], slug(base))
    wrong = {one.cell_id: one for one in found}
    assert (
        wrong[TRAIN].verdict == "WRONG_PATH"
        and wrong[TRAIN].change_pct is None
        and wrong[TRAIN].pairs == 0
    )
    assert aa_pairs.false_alarms(found) == Rate(0, 3), "what has no speed is no silent cell"


def test_a_false_alarm_counts() -> None:
    one = aa_pairs.RealPair("r", "c", 0.0, 0.0, "REGRESSED", 8, -2.0, -3.0, -1.1, "")
    planted = aa_pairs.RealPair("r", "d", 3.0, -2.9, "REGRESSED", 8, -2.9, -3.0, -1.1, "")
    assert aa_pairs.false_alarms([one, planted]) == Rate(1, 1) and aa_pairs.false_alarms(
        []
    ) == Rate(0, 0)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no pair", "wanted the folder of a `perfbench ab`"),
        ("other code", "wanted one commit twice"),
        ("unknown code", "wanted one commit twice"),
        ("other machine", "calibrate each by itself"),
        ("twice", "name each pair once"),
        ("another fault", "wanted slowdowns alone"),
    ],
)
def test_what_is_no_pair_of_one_commit_is_refused(fault: str, words: str, tmp_path: Path) -> None:
    base = b.small_run(replicates=2)
    other, injections = base, (f"oom@{TRAIN}",) if fault == "another fault" else ()
    if fault == "other code":
        other = b.with_manifest(
            base, source=Source(commit="f" * 40, dirty_sha256=None, branch=None, reason=None)
        )
    if fault == "unknown code":
        base = other = b.with_manifest(
            base, source=Source(commit=None, dirty_sha256=None, branch=None, reason="no git")
        )
    folder = tmp_path if fault == "no pair" else saved(tmp_path, base, other, injections=injections)
    machine = "a100" if fault == "other machine" else slug(base)
    with pytest.raises(PerfbenchError, match=words) as caught:
        aa_pairs.read([folder, folder] if fault == "twice" else [folder], machine)
    assert caught.value.exit_code is Exit.USAGE


def test_calibrate_tells_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(certify, "WORLDS", simulate.WORLDS[:1])
    monkeypatch.setattr(certify, "Effort", lambda: LITTLE)
    monkeypatch.setattr(outcome, "policy_of", lambda run: Policies(GatePolicy()))
    base = b.small_run(replicates=8)
    faults = (f"slowdown=5%@{TRAIN}",)
    planted = saved(
        tmp_path, base, b.scale_rows(base, TRAIN, 1 / 1.05), name="worse", injections=faults
    )
    missed = saved(tmp_path, base, base, name="missed", injections=(f"slowdown=1%@{TRAIN}",))
    torn = saved(
        tmp_path,
        base,
        edit(base, TRAIN, engaged={}),
        name="torn",
        injections=(f"slowdown=9%@{TRAIN}",),
    )
    alone = tmp_path / "run.jsonl"
    write_run(alone, base)
    certify_command([alone], 1, tmp_path / "out", pairs=[planted, missed, torn])
    text = capsys.readouterr().out
    assert (
        "with nothing planted 0 of 9 (at most 28.3 %) cells REGRESSED; real extra work found"
        " REGRESSED at 5 %" in text
    )
    assert "and not called slower at 1 % (SAME); 1 cell gave no speed to judge." in text
    (row,) = [line for line in text.splitlines() if line.startswith(f"| 9 | `{TRAIN}`")]
    assert "| WRONG_PATH: " in row, "with the reason"
    assert f"| 5 | `{TRAIN}` | 8 | -4.76 | -4.76 |" in text
    data = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert [one["extra_work_pct"] for one in data["pairs"]] == [0.0] * 9 + [1.0, 5.0, 9.0] and data[
        "pairs_red"
    ]["hits"] == 0
    certify_command([alone], 1, None)
    without = capsys.readouterr().out
    assert "No real pair was given" in without and f"None was given: {telling.HOW}" in without
