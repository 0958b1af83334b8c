"""A judged run as the history keeps it: every number by hand, and none without its proof."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean

import pytest

from perfbench.commands.judging import judge_as_made
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate.judging import judge
from perfbench.history.from_run import RunPlace, history_run, segment_of
from perfbench.history.nouns import METRICS, HistoryCell, HistoryRun, MeasuredValue
from perfbench.machine.source import commit_time
from perfbench.matrix.policy import GatePolicy
from perfbench.records.cells import Cell
from perfbench.records.rows import ConfirmationPlan, Run, Source, Status
from perfbench.records.verdict import Verdict
from perfbench.report.rows import rows_of
from tests.perfbench import builders as b
from tests.perfbench import test_boundary as boundary
from tests.perfbench.repositories import git

DATA = Path(__file__).parents[2] / "data"
POLICY = GatePolicy()
TRAIN, FORWARD = (
    f"fa2=on,path=v2,seq_len=2048,workload={workload}" for workload in ("train", "forward")
)
CELLS = [b.planned_cell(Cell(workload, 2048, "v2", "on")) for workload in ("train", "forward")]
SPEEDS = (90_000.0, 100_000.0, 110_000.0)


def alone(run: Run) -> HistoryRun:
    return history_run(run, judge(run, None, POLICY))


def cell(found: HistoryRun, cell_id: str = TRAIN) -> HistoryCell:
    (one,) = (one for one in found.cells if one.cell_id == cell_id)
    return one


def three_speeds() -> Run:
    rows = [b.replicate(CELLS[0], n, tok_per_s=speed) for n, speed in enumerate(SPEEDS)]
    return b.with_rows(b.make_run(CELLS[:1]), rows)


def values_of(one: HistoryCell) -> list[float]:
    return [found.value for found in one.measured.values() if found.value is not None]


def test_every_metric_has_its_value() -> None:
    """The geometric mean of three processes; what was profiled once counts once."""
    measured = cell(alone(three_speeds())).measured
    assert list(measured) == list(METRICS)
    speed = math.exp(fmean(map(math.log, SPEEDS)))
    wanted = {
        "tok_per_s": (speed, 3),
        "step_ms": (1e3 * 2048 / speed, 3),
        "device_ms": (20.0, 1),
        "launches": (420.0, 1),
        "host_syncs": (0.0, 1),
        "peak_memory_bytes": (float(int((1.1 + 2048 / 1500) * 2**30)), 3),
        "cold_start_s": (1.4, 3),
        "wall_s": (5.0, 3),
        "floor_fraction": (0.08, 3),
        "utilisation_pct": (93.0, 3),
        "sm_clock_mhz": (1980.0, 3),
    }
    for name, (value, count) in wanted.items():
        assert (measured[name].value, measured[name].count) == (pytest.approx(value), count), name
    assert measured["host_ms"] == MeasuredValue(None, reason="no profiled step saw a kernel")
    assert measured["energy_j_per_token"] == MeasuredValue(None, reason="not recorded")


def test_intervals_are_the_reports() -> None:
    run = b.make_run(CELLS, noise=0.02)
    judgement = judge(run, None, POLICY)
    bands = {row.cell.cell_id: (row.low, row.high) for row in rows_of(run, judgement)}
    for one in history_run(run, judgement).cells:
        speed, step = one.measured["tok_per_s"], one.measured["step_ms"]
        assert (speed.low, speed.high) == bands[one.cell_id] and speed.low < speed.value
        # slower is longer: the same interval, upside down
        assert step.low == pytest.approx(1e3 * 2048 / speed.high)
        assert step.high == pytest.approx(1e3 * 2048 / speed.low)
        assert one.measured["launches"].low is None  # a median's is not known


def test_throttled_processes_do_not_count() -> None:
    run = three_speeds()
    hot = b.telemetry(throttled=True)
    rows = [run.replicates[0].model_copy(update={"telemetry": hot}), *run.replicates[1:]]
    found = cell(history_run(run, judge(b.with_rows(run, rows), None, POLICY)))
    assert found.measured["tok_per_s"].count == 3  # of the run that is given, not of the verdict
    found = cell(alone(b.with_rows(run, rows)))
    assert found.measured["tok_per_s"].count == 2
    assert found.measured["tok_per_s"].value == pytest.approx(math.sqrt(SPEEDS[1] * SPEEDS[2]))


@pytest.mark.parametrize(
    ("change", "verdict", "why"),
    [
        ({"parity": b.parity(ok=False, max_error=1.0)}, Verdict.PARITY, "differs from the oracle"),
        ({"engaged": {"sel.reference": 240}}, Verdict.WRONG_PATH, "never ran"),
        ({"profile": b.profile(witness_ok=False)}, Verdict.WRONG_PATH, "other kernels"),
        ({"samples_s": []}, Verdict.IMPOSSIBLE, "cannot come from"),
        ({"parity": None}, Verdict.PARITY, "without a parity check"),
        ({"telemetry": b.telemetry(throttled=True)}, Verdict.UNSTABLE, "throttled"),
    ],
)
def test_no_number_without_its_proof(change: dict[str, object], verdict: Verdict, why: str) -> None:
    """Neither speed nor any other metric; the other cell keeps its numbers."""
    found = alone(b.replace_rows(b.make_run(CELLS), TRAIN, **change))
    bad = cell(found)
    assert bad.verdict == verdict.value and why in bad.reason
    assert values_of(bad) == [] and set(bad.measured) == set(METRICS)
    assert all(one.reason.startswith(f"{verdict.value}: ") for one in bad.measured.values())
    assert len(values_of(cell(found, FORWARD))) == 11


@pytest.mark.parametrize("status", [Status.OOM, Status.CRASH, Status.TIMEOUT, Status.SKIPPED])
def test_a_cell_that_failed_has_its_reason(status: Status) -> None:
    run = b.make_run(CELLS)
    run = b.change_rows(
        run, TRAIN, lambda row: b.failed(CELLS[0], status, row.replicate, "the card is too small")
    )
    bad = cell(alone(run))
    assert bad.verdict == "FAILED" and values_of(bad) == []
    assert bad.measured["wall_s"].reason.startswith(f"FAILED: {status.value}: the card is too")


def test_another_route_than_the_baselines_has_no_number() -> None:
    """Its speed was measured, of a path that the baseline does not have."""
    run = b.make_run(CELLS)
    base = b.baseline_of(run)
    other = base.cells[TRAIN].model_copy(update={"counters": ["sel.triton"]})
    base = base.model_copy(update={"cells": {**base.cells, TRAIN: other}})
    judgement = judge(run, base, POLICY)
    assert next(one for one in judgement.cells if one.cell_id == TRAIN).cand_tok_per_s is not None
    found = cell(history_run(run, judgement))
    assert found.verdict == "WRONG_PATH" and values_of(found) == []


def test_a_cell_of_the_baseline_that_is_gone_is_missing() -> None:
    whole = b.make_run(CELLS)
    found = history_run(
        b.make_run(CELLS[:1]), judge(b.make_run(CELLS[:1]), b.baseline_of(whole), POLICY)
    )
    gone = cell(found, FORWARD)
    assert (gone.verdict, values_of(gone)) == ("MISSING", [])
    assert "not in the plan" in gone.measured["tok_per_s"].reason


def test_a_machine_that_is_not_the_same_makes_no_point() -> None:
    """Two machines in one run, or one that its sentinels call slower: no commit did that."""
    run = b.make_run(CELLS)
    two = b.resumed(run, environment=b.environment(driver="580.1"))
    assert values_of(cell(alone(run))) and values_of(cell(alone(two))) == []
    assert "mix two machines" in cell(alone(two)).measured["tok_per_s"].reason
    watched, slow = (b.watched(run, {"gemm": [rate] * 2}) for rate in (700e12, 600e12))
    found = cell(history_run(slow, judge(slow, b.baseline_of(watched), POLICY)))
    assert values_of(found) == []
    assert "not as fast as the baseline's" in found.measured["tok_per_s"].reason


def test_a_cpu_has_no_device() -> None:
    run = b.make_run(b.cpu_cells(), gpu=False)
    measured = alone(run).cells[0].measured
    assert measured["tok_per_s"].value and measured["wall_s"].value
    reasons = {name: one.reason for name, one in measured.items() if one.value is None}
    assert reasons["device_ms"] == reasons["launches"] == "a CPU has no device"
    assert reasons["host_syncs"] == "a CPU has no device to wait for"
    assert reasons["utilisation_pct"] == "no NVIDIA GPU: NVML was not asked"
    assert reasons["floor_fraction"].startswith("no floor: the memory bandwidth")


def test_what_is_beyond_the_memory_boundary_is_kept(tmp_path: Path) -> None:
    """No failure, so no verdict; and no number."""
    run = boundary.measured(tmp_path)
    judgement = boundary.judged(run)
    found = history_run(run, judgement)
    judged = {one.cell_id for one in judgement.cells}
    beyond = [one for one in found.cells if one.cell_id not in judged]
    assert beyond and all(one.verdict is None and values_of(one) == [] for one in beyond)
    reasons = {one.reason for one in beyond}
    assert any(one.startswith("does not fit: oom: planted") for one in reasons)
    assert any(one.startswith("does not fit: not tried: ") for one in reasons)
    assert {one.cell_id for one in found.cells} == {one.cell_id for one in run.manifest.cells}


def test_the_run_itself() -> None:
    run = b.make_run(CELLS, injections=["slowdown=10%@x"], argv=["perfbench", "run", "a b.yaml"])
    made = datetime(2026, 1, 1, tzinfo=UTC)
    info = history_run(run, judge(run, None, POLICY), "# text", RunPlace("runs/1", made)).info
    assert (info.run_id, info.suite, info.card) == (
        run.manifest.run_id,
        "nsa-h100",
        "h100-80gb-hbm3",
    )
    assert info.measured_utc == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert (info.commit, info.branch, info.is_dirty) == (b.COMMIT, "main", False)
    assert (info.commit_utc, info.folder, info.report) == (made, "runs/1", "# text")
    assert info.command == "perfbench run 'a b.yaml'" and info.exit_code == 0
    assert info.injections == ("slowdown=10%@x",) and info.headline.startswith("MEASURED")
    assert info.origin == "perfbench"
    one = cell(alone(run))
    assert one.config_sha256 == CELLS[0].config_sha256
    assert one.axes["path"] == "v2" and one.axes["dtype"] == "bf16" and one.axes["batch"] == 1
    assert one.reproduce == f"perfbench run matrices/h100.yaml --only cell={TRAIN}"


@pytest.mark.parametrize(
    ("source", "is_dirty"),
    [
        (Source(commit="a" * 40, dirty_sha256="b" * 64), True),
        (Source(commit=None, dirty_sha256=None, reason="no git here"), None),
        (Source(commit="a" * 40, dirty_sha256=None, reason="given by --source-commit"), None),
    ],
)
def test_what_is_not_known_of_the_code_is_null(source: Source, is_dirty: bool | None) -> None:
    info = alone(b.with_manifest(b.make_run(CELLS), source=source)).info
    assert (info.commit, info.is_dirty) == (source.commit, is_dirty)


def test_a_segment_is_what_must_agree() -> None:
    """Another card of the same model is the same segment; another driver, torch, method, or a
    variable that changes speed, is not.
    """
    same = segment_of(b.manifest(CELLS))
    assert same["driver"] == "570.86.10" and same["method_version"] == "1"
    assert all(isinstance(value, str) for value in same.values())
    assert (
        segment_of(b.manifest(CELLS, environment=b.environment(gpu_uuid_sha256="c" * 64))) == same
    )
    for change in (
        {"driver": "580.1"},
        {"torch": "2.14.0"},
        {"speed_variables": {"OMP_NUM_THREADS": "1"}},
        {"speed_variables": {}, "nsa_settings": {"NSA_TRITON_JOIN": "0"}},
    ):
        assert segment_of(b.manifest(CELLS, environment=b.environment(**change))) != same
    assert segment_of(b.manifest(CELLS, method_version=2)) != same
    on_cpu = segment_of(b.manifest(b.cpu_cells(), gpu=False))
    assert "driver" not in on_cpu and on_cpu["cpu_count"] == "2"


def test_the_same_run_judged_otherwise_is_other_content() -> None:
    run = b.make_run(CELLS)
    first = alone(run).info.content_sha256
    assert (
        history_run(run, judge(run, None, POLICY), "text", RunPlace("x")).info.content_sha256
        == first
    )
    assert history_run(run, judge(run, b.baseline_of(run), POLICY)).info.content_sha256 != first
    assert alone(b.scale_rows(run, TRAIN, 0.99)).info.content_sha256 != first


def test_one_side_of_a_confirmation_is_no_run() -> None:
    plan = ConfirmationPlan(tests=1, looks=[4], cells=[TRAIN])
    with pytest.raises(PerfbenchError, match="one side of a confirmation") as refused:
        alone(b.make_run(CELLS, confirmation=plan))
    assert refused.value.exit_code is Exit.USAGE


@pytest.mark.parametrize("text", ["yesterday", "", "2026-01-02T03:04:05"])
def test_a_run_without_a_time_is_refused(text: str) -> None:
    with pytest.raises(PerfbenchError, match="created_utc is"):
        alone(b.make_run(CELLS, created_utc=text))


def test_git_is_asked_when_a_commit_was_made(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    sha = git(tmp_path, "rev-parse", "HEAD").strip()
    found = commit_time(tmp_path, sha)
    assert found is not None and found.utcoffset() == timedelta(0)
    assert found.timestamp() == int(git(tmp_path, "show", "-s", "--format=%ct", sha))
    assert commit_time(tmp_path, "0" * 40) is None
    assert commit_time(tmp_path, None) is None
    assert commit_time(tmp_path, "--output=x") is None and not (tmp_path / "x").exists()
    assert commit_time(tmp_path / "gone", sha) is None


@pytest.mark.parametrize(
    "folder",
    sorted(one.parent for name in ("run.jsonl", "run.jsonl.gz") for one in DATA.glob(f"**/{name}")),
    ids=lambda one: str(one.relative_to(DATA)),
)
def test_runs_of_every_age_become_points(folder: Path) -> None:
    """Every number is finite, and every null has its reason."""
    outcome = judge_as_made(folder)
    if outcome.run.manifest.confirmation is not None:
        return
    found = history_run(outcome.run, outcome.judgement)
    assert found.cells
    for one in found.cells:
        for value in one.measured.values():
            assert (value.value is None) == bool(value.reason)
            assert value.value is None or math.isfinite(value.value)
