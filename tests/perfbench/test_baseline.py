"""Baselines: whatever the bytes, a clear message and exit 9; only a whole, green, clean run becomes
one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfbench.errors import Exit, PerfbenchError
from perfbench.gate.baseline import promote
from perfbench.gate.blind_cells import blind_cells
from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy
from perfbench.records import BaselineProblem
from perfbench.records.baseline_file import (
    SCHEMA_VERSION,
    Baseline,
    baseline_path,
    load_baseline,
    read_baseline,
    show_baseline,
)
from perfbench.records.cells import Cell
from perfbench.records.rows import Run, Source, Status
from perfbench.records.verdict import Verdict
from tests.perfbench import builders as b
from tests.perfbench.digested import edit_baseline

TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"
DENSE = "path=dense,seq_len=2048,workload=train"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return baseline_path(tmp_path / "baselines", "h100-80gb-hbm3", "nsa-h100")


def promoted(run: Run, path: Path, **options: Any) -> Baseline:
    return promote(run, path, promoted_utc=b.UTC, **options).baseline


def part(run: Run, workload: str, **manifest: Any) -> Run:
    """The slice of a run that ``--only workload=...`` gives."""
    cells = [cell for cell in run.manifest.cells if cell.axes.workload == workload]
    rows = [row for row in run.replicates if row.axes.workload == workload]
    return b.with_manifest(
        b.with_rows(run, rows), cells=cells, only=[f"workload={workload}"], **manifest
    )


# --- promote and load


def test_a_promoted_run_loads_and_judges_itself_green(target: Path) -> None:
    run = b.small_run(noise=0.01)
    written = promoted(run, target)
    loaded = load_baseline(target)
    assert loaded == written and set(loaded.cells) == {cell.cell_id for cell in run.manifest.cells}
    assert loaded.cells[TRAIN].tok_per_s == [row.tok_per_s for row in run.of_cell(TRAIN)]
    assert loaded.cells[TRAIN].counters == sorted(run.manifest.cells[0].route.counters)
    assert loaded.environment == run.manifest.environment.fingerprint()
    calm = {
        cell_id: cell.model_copy(update={"night_log_sd": 0.0})
        for cell_id, cell in loaded.cells.items()
    }
    assert (
        judge(run, loaded.model_copy(update={"cells": calm}), GatePolicy(), strict=True).exit_code
        is Exit.OK
    )
    assert judge(run, loaded, GatePolicy()).exit_code is Exit.OK


def test_the_bytes_are_deterministic_sorted_and_end_with_a_newline(target: Path) -> None:
    run = b.small_run()
    promoted(run, target)
    first = target.read_bytes()
    promoted(b.with_rows(run, list(reversed(run.replicates))), target)
    assert target.read_bytes() == first and first.endswith(b"}\n") and b"\r" not in first
    data = json.loads(first)
    assert list(data) == sorted(data) and list(data["cells"]) == sorted(data["cells"])


def test_nothing_but_the_file_is_left(target: Path) -> None:
    promoted(b.small_run(), target)
    assert [file.name for file in target.parent.iterdir()] == ["nsa-h100.json"]


def test_a_failed_write_keeps_the_old_file_and_exits_2(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promoted(b.small_run(), target)
    before = target.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PerfbenchError, match="No space left") as caught:
        promoted(b.small_run(noise=0.01), target)
    assert caught.value.exit_code is Exit.USAGE and target.read_bytes() == before
    assert len(list(target.parent.iterdir())) == 1


def test_an_unwritable_folder_exits_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PerfbenchError, match="cannot write the baseline") as caught:
        promoted(b.small_run(), tmp_path / "file" / "x.json")
    assert caught.value.exit_code in (Exit.USAGE, Exit.BASELINE)


def test_a_baseline_never_takes_the_place_of_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PerfbenchError, match="no regular file|cannot be read|it is a pipe"):
        promoted(b.small_run(), tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_unknown_fields_survive(target: Path) -> None:
    promoted(b.small_run(), target)
    edit_baseline(target, lambda content: content.update(later={"x": 1}))
    assert load_baseline(target).model_dump()["later"] == {"x": 1}


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda r: b.with_manifest(r, injections=["oom@cell"]), "injected faults"),
        (
            lambda r: b.with_manifest(r, source=Source(commit=b.COMMIT, dirty_sha256="d" * 64)),
            "uncommitted changes",
        ),
        (
            lambda r: b.with_manifest(
                r, source=Source(commit=b.COMMIT, dirty_sha256=None, reason="by hand")
            ),
            "unproved origin: got commit 4f1c",
        ),
        (
            lambda r: b.with_manifest(r, source=Source(commit=None, dirty_sha256=None)),
            "got commit unknown, not proved (no reason was",
        ),
        (lambda r: b.replace_rows(r, TRAIN, parity=None), "PARITY"),
        (lambda r: b.replace_rows(r, TRAIN, engaged={}), "WRONG_PATH"),
        (lambda r: b.replace_rows(r, TRAIN, samples_s=[1.0]), "IMPOSSIBLE"),
        (
            lambda r: b.change_rows(
                r, TRAIN, lambda row: b.failed(r.manifest.cells[0], Status.OOM, row.replicate)
            ),
            "FAILED",
        ),
        (lambda r: b.change_rows(r, TRAIN, lambda row: None), "MISSING"),
        (
            lambda r: b.change_rows(r, TRAIN, lambda row: row if row.replicate < 2 else None),
            "2 of 3",
        ),
        (lambda r: b.with_rows(r, []), "nothing was measured"),
        (lambda r: b.replace_rows(r, TRAIN, telemetry=b.telemetry(throttled=True)), "throttled"),
        (
            lambda r: b.change_rows(
                r,
                TRAIN,
                lambda row: (
                    row.model_copy(update={"telemetry": b.telemetry(throttled=True)})
                    if row.replicate
                    else row
                ),
            ),
            "1 of 3",
        ),
        (lambda r: b.resumed(r, environment=b.environment(driver="1")), "mix two machines"),
    ],
)
def test_what_must_not_become_a_baseline(
    change: Callable[[Run], Run], words: str, target: Path
) -> None:
    with pytest.raises(PerfbenchError, match="cannot become a baseline") as caught:
        promoted(change(b.small_run()), target)
    assert (
        caught.value.exit_code is Exit.USAGE and words in str(caught.value) and not target.exists()
    )


def test_a_dirty_tree_may_be_allowed_and_is_recorded(target: Path) -> None:
    dirty = b.with_manifest(b.small_run(), source=Source(commit=b.COMMIT, dirty_sha256="d" * 64))
    promotion = promote(dirty, target, allow_dirty=True)
    assert (
        load_baseline(target).allow_dirty and load_baseline(target).source.dirty_sha256 == "d" * 64
    )
    assert "uncommitted changes" in str(promotion) and "with uncommitted changes" in show_baseline(
        load_baseline(target)
    )


def test_code_of_unproved_origin_may_be_allowed_and_is_recorded(target: Path) -> None:
    by_hand = b.with_manifest(
        b.small_run(), source=Source(commit=b.COMMIT, dirty_sha256=None, reason="no git")
    )
    promotion = promote(by_hand, target, allow_dirty=True)
    assert load_baseline(target).allow_dirty and load_baseline(target).source.reason == "no git"
    assert "given by hand, not proved" in str(
        promotion
    ) and f"commit {b.COMMIT}, given by hand, not proved" in show_baseline(load_baseline(target))


def test_host_bound_is_kept_and_null_stays_null(target: Path) -> None:
    run = b.replace_rows(b.small_run(), TRAIN, host_bound=True)
    run = b.replace_rows(run, DENSE, host_bound=None)
    cells = promoted(run, target).cells
    assert (cells[TRAIN].host_bound, cells[DENSE].host_bound) == (True, None)


# --- slices


def test_a_slice_keeps_the_cells_that_it_did_not_select(target: Path) -> None:
    promoted(b.small_run(), target)
    newer = part(b.small_run(noise=0.01), "train", run_id="newer-run")
    promotion = promote(newer, target)
    baseline = load_baseline(target)
    assert (
        len(baseline.cells) == 4
        and promotion.kept == sorted(c for c in baseline.cells if "forward" in c)
        and promotion.removed == []
    )
    assert {
        cell.run_id == "newer-run" for id_, cell in baseline.cells.items() if "train" in id_
    } == {True}
    assert {
        cell.run_id == "newer-run" for id_, cell in baseline.cells.items() if "forward" in id_
    } == {False}
    assert "kept 2 cells" in str(promotion)


def test_a_slice_in_another_environment_keeps_nothing_and_says_so(target: Path) -> None:
    promoted(b.small_run(), target)
    promotion = promote(
        part(b.small_run(), "train", environment=b.environment(driver="580")), target
    )
    assert (
        promotion.kept == []
        and len(promotion.removed) == 2
        and len(load_baseline(target).cells) == 2
    )
    assert "removed 2 cells" in str(promotion) and "environment or method changed" in str(promotion)


def test_a_slice_drops_what_it_selected_and_no_longer_has(target: Path) -> None:
    promoted(b.small_run(), target)
    newer = part(b.small_run(), "train")
    cells = [cell for cell in newer.manifest.cells if cell.cell_id != TRAIN]
    newer = b.with_manifest(
        b.with_rows(newer, [row for row in newer.replicates if row.cell_id != TRAIN]), cells=cells
    )
    assert promote(newer, target).removed == [TRAIN]


def test_a_whole_run_merges_nothing(target: Path) -> None:
    promoted(b.small_run(), target)
    other = b.make_run([b.planned_cell(Cell("train", 512, "dense"))])
    promotion = promote(other, target)
    assert (
        list(load_baseline(target).cells) == ["path=dense,seq_len=512,workload=train"]
        and len(promotion.removed) == 4
    )


def test_a_damaged_file_is_replaced_by_a_whole_run_and_never_by_a_slice(target: Path) -> None:
    target.parent.mkdir(parents=True)
    target.write_text('{"schema_version": 1, "ce')
    with pytest.raises(PerfbenchError, match="not overwritten") as caught:
        promote(part(b.small_run(), "train"), target)
    assert caught.value.exit_code is Exit.BASELINE
    assert (
        "replaced an unusable file" in str(promote(b.small_run(), target))
        and len(load_baseline(target).cells) == 4
    )


def test_a_newer_file_is_never_overwritten(target: Path) -> None:
    target.parent.mkdir(parents=True)
    target.write_text(json.dumps({"schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(PerfbenchError, match=f"newer schema {SCHEMA_VERSION + 1}"):
        promote(b.small_run(), target)
    assert json.loads(target.read_text()) == {"schema_version": SCHEMA_VERSION + 1}


# --- damaged files


def damaged(path: Path, change: Callable[[dict[str, Any]], object]) -> BaselineProblem:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    problem = read_baseline(path)
    assert isinstance(problem, BaselineProblem) and problem.verdict is Verdict.CORRUPT
    with pytest.raises(PerfbenchError) as caught:
        load_baseline(path)
    assert caught.value.exit_code is Exit.BASELINE and str(caught.value) == problem.message
    return problem


def test_a_missing_file_is_no_baseline_and_says_how_to_make_one(target: Path) -> None:
    problem = read_baseline(target)
    assert (
        isinstance(problem, BaselineProblem)
        and problem.verdict is Verdict.NO_BASELINE
        and "baseline promote" in problem.message
    )
    with pytest.raises(PerfbenchError) as caught:
        load_baseline(target)
    assert caught.value.exit_code is Exit.BASELINE


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1, 2", b"\xff\xfe\x00", b"nul", b"{'a': 1}", b"[" * 100_000]
)
def test_what_is_not_json(data: bytes, target: Path) -> None:
    target.parent.mkdir(parents=True)
    target.write_bytes(data)
    problem = read_baseline(target)
    assert (
        isinstance(problem, BaselineProblem)
        and problem.verdict is Verdict.CORRUPT
        and "is not JSON" in problem.message
    )


def test_every_truncation_is_corrupt(target: Path) -> None:
    promoted(b.small_run(), target)
    whole = target.read_bytes()
    for length in range(0, len(whole) - 2, 97):
        target.write_bytes(whole[:length])
        assert isinstance(read_baseline(target), BaselineProblem)


def test_a_folder_is_corrupt_not_a_traceback(tmp_path: Path) -> None:
    problem = read_baseline(tmp_path)
    assert isinstance(problem, BaselineProblem) and "cannot be read" in problem.message


@pytest.mark.parametrize(
    "speeds",
    [[0.0], [-1.0], [float("nan")], [float("inf")], [], ["5"], [None], [True], [100.0, 0.0]],
)
def test_a_speed_that_is_none(speeds: list[Any], target: Path) -> None:
    promoted(b.small_run(), target)
    problem = damaged(target, lambda data: data["cells"][TRAIN].update(tok_per_s=speeds))
    assert "holds a speed that is none" in problem.message and TRAIN in problem.message


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("cells"),
        lambda data: data.update(cells={}),
        lambda data: data.update(cells=[1]),
        lambda data: data.pop("schema_version"),
        lambda data: data.update(schema_version="1"),
        lambda data: data.update(schema_version=True),
        lambda data: data.update(schema_version=0),
        lambda data: data.update(environment=None),
        lambda data: data["cells"][TRAIN].pop("config_sha256"),
        lambda data: data["cells"][TRAIN]["axes"].pop("path"),
        lambda data: data["cells"][TRAIN]["axes"].update(seq_len="2048"),
    ],
)
def test_the_wrong_shape(change: Callable[[dict[str, Any]], object], target: Path) -> None:
    promoted(b.small_run(), target)
    assert "has the wrong shape" in damaged(target, change).message


def test_a_newer_schema(target: Path) -> None:
    promoted(b.small_run(), target)
    assert (
        f"newer schema {SCHEMA_VERSION + 1}"
        in damaged(target, lambda data: data.update(schema_version=SCHEMA_VERSION + 1)).message
    )


@given(data=st.binary(max_size=200))
def test_no_bytes_make_a_traceback(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(data)
    assert isinstance(read_baseline(path), BaselineProblem)


@pytest.mark.parametrize("key", ["matrix_name", "promoted_utc", "environment", "cells"])
def test_a_lone_surrogate_can_be_printed(key: str, target: Path) -> None:
    promoted(b.small_run(), target)
    data = json.loads(target.read_text())
    data[key] = "\ud800" if isinstance(data[key], str) else {**data[key], "\ud800": "\ud800"}
    target.write_text(json.dumps(data))
    found = read_baseline(target)
    (found.message if isinstance(found, BaselineProblem) else show_baseline(found)).encode("utf-8")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
WHOLE = b.baseline_of(b.small_run()).model_dump(mode="json")


@given(key=st.sampled_from(sorted(WHOLE)), value=JSON)
def test_no_value_makes_a_traceback(
    key: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "value.json"
    path.write_text(json.dumps({**WHOLE, key: value}))
    found = read_baseline(path)
    message = found.message if isinstance(found, BaselineProblem) else show_baseline(found)
    message.encode("utf-8")


@given(field=st.sampled_from(sorted(WHOLE["cells"][TRAIN])), value=JSON)
def test_no_cell_makes_a_traceback_in_the_gate(
    field: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "cell.json"
    cells = {**WHOLE["cells"], TRAIN: {**WHOLE["cells"][TRAIN], field: value}}
    path.write_text(json.dumps({**WHOLE, "cells": cells}))
    found = read_baseline(path)
    if isinstance(found, Baseline):
        judge(b.with_manifest(b.small_run(), only=["workload=train"]), found, GatePolicy())


# --- between-session variance


def calibration(path: Path, gpu_slug: str = "h100-80gb-hbm3", **gate_sd: float) -> Path:
    """A calibration.json of three starts that covers TRAIN, or the cells named; the device is
    half as restless.
    """
    manifest = b.small_run().manifest
    configs = {cell.cell_id: cell.config_sha256 for cell in manifest.cells}
    cells = [
        {
            "cell_id": cell_id,
            "config_sha256": configs[cell_id],
            "night": {"starts": 3, "gate_sd": sd},
            "device_night": {"starts": 3, "gate_sd": sd / 2},
        }
        for cell_id, sd in (gate_sd or {TRAIN: 0.004}).items()
    ]
    path.write_text(
        json.dumps(
            {
                "gpu_slug": gpu_slug,
                "environment": manifest.environment.fingerprint(),
                "cells": cells,
            }
        )
    )
    return path


def test_a_calibration_tells_the_gate_how_restless_a_cell_is(target: Path, tmp_path: Path) -> None:
    """Without it sessions of 1 % are assumed, and no cell is proved the same."""
    run = b.small_run(noise=0.001)
    assert judge(run, promoted(run, target), GatePolicy()).counts == {"WATCH": 4}
    found = promote(run, target, promoted_utc=b.UTC, calibration=calibration(tmp_path / "c.json"))
    cell = load_baseline(target).cells[TRAIN]
    assert (cell.night_log_sd, cell.device_night_log_sd, cell.night_starts) == (0.004, 0.002, 3)
    judgement = judge(run, load_baseline(target), GatePolicy())
    assert (
        judgement.counts == {"SAME": 1, "WATCH": 3}
        and judgement.cells[0].evidence[0].between_session_sd == 0.004
    )
    assert any("of 1 of 4 cells" in note and DENSE in note for note in found.notes)
    assert promoted(run, target).cells[TRAIN] == cell  # a later baseline is as restless
    other = promoted(run, target, calibration=calibration(tmp_path / "c.json", **{DENSE: 0.003}))
    assert other.cells[TRAIN] == cell and other.cells[DENSE].night_log_sd == 0.003


def test_a_slice_takes_the_variance_of_the_cells_that_it_keeps(
    target: Path, tmp_path: Path
) -> None:
    run = b.small_run()
    promoted(run, target)
    forward = part(run, "forward")
    found = promote(
        forward, target, promoted_utc=b.UTC, calibration=calibration(tmp_path / "c.json")
    )
    assert TRAIN in found.kept and found.baseline.cells[TRAIN].night_log_sd == 0.004
    assert sorted(found.written) == sorted(cell.cell_id for cell in forward.manifest.cells)


def test_the_calibration_of_another_gpu_is_refused_before_anything_is_written(
    target: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        PerfbenchError, match="got a calibration of h200, wanted one of h100-80gb-hbm3"
    ) as caught:
        promoted(b.small_run(), target, calibration=calibration(tmp_path / "c.json", "h200"))
    assert caught.value.exit_code is Exit.USAGE and not target.exists()


def test_the_calibration_of_other_work_is_refused_before_anything_is_written(
    target: Path, tmp_path: Path
) -> None:
    """The same cell id under another model; and the same work under another torch."""
    run = b.small_run()
    planned, rows = (
        [one.model_copy(update={"config_sha256": "0" * 64}) for one in records]
        for records in (run.manifest.cells, run.replicates)
    )
    for foreign, words in (
        (
            b.with_manifest(b.with_rows(run, rows), cells=planned),
            f"of {TRAIN}, wanted 000000000000, the work that the run measured",
        ),
        (
            b.with_manifest(run, environment=b.environment(torch="2.14.0")),
            "got a calibration with torch 2.13.0, wanted 2.14.0",
        ),
    ):
        with pytest.raises(PerfbenchError, match=words) as caught:
            promoted(foreign, target, calibration=calibration(tmp_path / "c.json"))
        assert caught.value.exit_code is Exit.USAGE and not target.exists()


# --- names and text


def test_path_for_keeps_plain_names_and_encodes_odd_ones(tmp_path: Path) -> None:
    assert baseline_path(tmp_path, "cpu", "nsa-cpu") == tmp_path / "cpu" / "nsa-cpu.json"
    odd = baseline_path(tmp_path, "cpu", "../a|b\n")
    assert odd.parent == tmp_path / "cpu" and "/" not in odd.name and "\n" not in odd.name
    with pytest.raises(PerfbenchError, match="GPU slug"):
        baseline_path(tmp_path, "..", "x")


def test_show_names_run_environment_and_every_cell() -> None:
    text = show_baseline(b.baseline_of(b.small_run(noise=0.01), night_log_sd=0.0042))
    assert (
        "run base-run" in text
        and "driver 570.86.10" in text
        and all(cell in text for cell in (TRAIN, DENSE))
    )
    assert text.splitlines()[5].split() == [
        "cell",
        "tok/s",
        "n",
        "spread",
        "bound",
        "between",
        "sessions",
    ]
    assert text.splitlines()[6].endswith("GPU    0.42 %")
    assert (
        show_baseline(b.baseline_of(b.small_run(), night_log_sd=None))
        .splitlines()[6]
        .endswith("assumed")
    )


# --- what cannot be gated


def noisy(run: Run, cell_id: str, factors: tuple[float, ...], **changes: Any) -> Run:
    cell = next(one for one in run.manifest.cells if one.cell_id == cell_id)
    return b.change_rows(
        run,
        cell_id,
        lambda row: b.replicate(
            cell, row.replicate, tok_per_s=600 * factors[row.replicate], **changes
        ),
    )


def notes_of(run: Run, path: Path) -> list[str]:
    return promote(run, path, promoted_utc=b.UTC).notes


def test_a_noisy_run_is_promoted_with_a_warning_that_names_each_blind_cell(target: Path) -> None:
    """A run of ± 514 % became a baseline without a word."""
    run = noisy(b.small_run(noise=0.001), TRAIN, (0.4, 1.0, 2.5))
    head, line = notes_of(run, target)
    assert head.startswith("warning: 1 of 4 cells is too noisy to gate (BLIND): ")
    assert "Next: measure again on a quiet machine, or raise measure.processes" in head
    judged = {one.cell_id: one for one in judge(run, load_baseline(target), GatePolicy()).cells}
    assert judged[TRAIN].verdict is Verdict.BLIND and judged[TRAIN].mde_pct is not None
    assert line == f"  {TRAIN}: MDE {judged[TRAIN].mde_pct:,.1f} %"


def test_a_calm_run_is_promoted_without_a_warning(target: Path) -> None:
    assert notes_of(b.small_run(noise=0.001), target) == []


@pytest.mark.parametrize("every", [True, False])
def test_a_host_bound_cell_is_named_unless_its_device_time_gates_it(
    every: bool, target: Path
) -> None:
    profile = {"profile": b.profile()} if every else {}
    run = noisy(b.small_run(noise=0.001), TRAIN, (0.4, 1.0, 2.5), host_bound=True, **profile)
    assert any(TRAIN in note for note in notes_of(run, target)) is not every
    base = b.baseline_of(run)
    calm = {
        cell_id: cell.model_copy(update={"device_night_log_sd": 0.0})
        for cell_id, cell in base.cells.items()
    }
    base = base.model_copy(update={"cells": calm})
    judged = {one.cell_id: one for one in judge(run, base, GatePolicy()).cells}
    assert judged[TRAIN].verdict is Verdict.BLIND, "its wall time is not gated"
    assert judged[TRAIN].evidence[0].metric == ("device_time_s" if every else "tok_per_s")
    assert bool(blind_cells(run, base)) is not every
