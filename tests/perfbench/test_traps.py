"""What broke in other people's harnesses, one test for each number of the list from 29 to 50, with
the input that breaks it.

Numbers 1 to 28 are in tests/nsa/test_traps.py; the last test here counts that none is missing.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from perfbench import report, roofline
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import baseline, comparison
from perfbench.gate.coverage import usable
from perfbench.gate.judging import judge
from perfbench.machine import gpu, nvml
from perfbench.matrix.policy import Alias, GatePolicy, Policies
from perfbench.records import EXIT_OF, baseline_file, run_file
from perfbench.records.baseline_file import BaselineProblem
from perfbench.records.cells import Cell
from perfbench.records.rows import Run, Status
from perfbench.records.verdict import Verdict
from perfbench.report.rows import rows_of
from perfbench.runner.executor import ForkServerExecutor
from perfbench.text import ratio
from perfbench.worker import autotuner
from perfbench.worker.clock import CudaEventClock
from perfbench.worker.telemetry import NvmlSampler
from tests.perfbench import builders as b
from tests.perfbench import stub_measure as stub
from tests.perfbench.edits import edit, fail, reason_of, verdict_of
from tests.perfbench.fake_nvml import Card, FakeNvml, sampled
from tests.perfbench.matrix_text import VALID, edited, error_of, parse
from tests.perfbench.test_executor import STUB, facts, job, sleeping_parent, wait_until_gone

ROOT = pathlib.Path(__file__).parents[2]
POLICY = GatePolicy()
TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"
ONE, TWO = "GPU-1a2b0000-0000-0000-0000-000000000001", "GPU-1a2c0000-0000-0000-0000-000000000002"


@pytest.fixture(scope="module")
def executor() -> Iterator[ForkServerExecutor]:
    with ForkServerExecutor(STUB, cwd=ROOT) as made:
        yield made


def test_trap_29_yaml_that_says_something_else() -> None:
    """`fa2: [on, off]` parsed as booleans, `1e6` as a string, `010` as 8, duplicate keys
    last-wins.
    """
    assert parse().axes["fa2"] == ("on", "off")
    million = parse(edited("processes: 3, warmup_s: 1", "processes: 3, max_s: 1e3"))
    assert million.measure.max_s == 1000.0 and isinstance(million.measure.max_s, float)
    assert "010 is a number that readers take for another one" in error_of(
        edited("[128, 256, 512]", "[010, 256]")
    )
    assert "duplicate key 'name', first given in line 2" in error_of(VALID + "name: other\n")


@pytest.mark.parametrize(
    ("listed", "order", "uuid"),
    [
        ("1", None, TWO),
        (TWO, None, TWO),
        ("GPU-1a2c", None, TWO),
        ("MIG-5e", None, "MIG-5e6f"),
        ("1", "PCI_BUS_ID", TWO),
    ],
)
def test_trap_30_the_gpu_that_is_sampled_is_the_one_that_computes(
    listed: str, order: str | None, uuid: str
) -> None:
    """CUDA_VISIBLE_DEVICES=1: NVML index 0 samples another GPU; UUID, UUID prefix and MIG- forms;
    FASTEST_FIRST order.
    """
    cards = FakeNvml(
        Card(uuid=ONE),
        Card(uuid=TWO),
        Card(uuid="GPU-3", mig_mode=True, mig=[Card(uuid="MIG-5e6f")]),
    )
    found, reason = gpu.visible(listed, order, cards)
    assert [one.uuid for one in found] == [uuid], reason
    with NvmlSampler(found[0].uuid, module=cards).window():
        pass
    assert ("nvmlDeviceGetHandleByUUID", (uuid,)) in cards.calls
    mixed = FakeNvml(Card(uuid=ONE), Card(uuid=TWO, name="NVIDIA A100-SXM4-80GB"))
    assert gpu.visible("0", None, mixed)[0] == [], "only CUDA knows which is the fastest"
    assert [one.uuid for one in gpu.visible("0", "PCI_BUS_ID", mixed)[0]] == [ONE]


def test_trap_31_mig_has_no_utilisation_and_that_is_not_zero() -> None:
    """MIG: utilisation NOT_SUPPORTED shown as 0."""
    mig = FakeNvml(Card(uuid=ONE), fails={"nvmlDeviceGetUtilizationRates": 3})
    seen = sampled(mig, ONE, 0.25)
    assert seen.utilisation_pct is None and "NOT_SUPPORTED" in seen.absent["utilisation_pct"]
    run = b.small_run()
    shown = b.change_rows(run, TRAIN, lambda row: row.model_copy(update={"telemetry": seen}))
    row = next(
        one for one in rows_of(shown, judge(shown, None, POLICY)) if one.cell.cell_id == TRAIN
    )
    assert row.utilisation_pct is None and "NOT_SUPPORTED" in row.nulls["utilisation"]


@pytest.mark.parametrize(
    ("code", "step"),
    [(18, "reboot"), (9, "modprobe nvidia"), (12, "--gpus all"), (4, "/dev/nvidiactl")],
)
def test_trap_32_every_way_in_which_nvml_does_not_open_has_its_own_next_step(
    code: int, step: str
) -> None:
    """Driver upgraded under a running host (NVML code 18), no driver (9, 12), no permission (4)."""
    broken = FakeNvml(Card(uuid=ONE), fails={"nvmlInit": code})
    found, reason = gpu.visible(None, None, broken)
    assert found == [] and step in reason
    with NvmlSampler(ONE, module=broken).window() as window:
        pass
    assert window.result.power_w is None and step in window.result.absent["power_w"]
    others = [nvml.unavailable(other).advice for other in (18, 9, 12, 4) if other != code]
    assert nvml.unavailable(code).advice not in others


def test_trap_33_out_of_memory_is_a_status_and_leaves_nobody_behind(
    executor: ForkServerExecutor,
) -> None:
    """OOM kills the sweep; the orphan keeps the memory; OOM uploaded as 0.0."""
    row = executor.execute(job(stub.OOM))
    assert (row.status, row.tok_per_s, row.samples_s) == (Status.OOM, None, [])
    litter = executor.execute(job(stub.LITTER))
    helper = re.search(r"helper=(\d+)", litter.stderr_tail)
    assert helper and wait_until_gone(int(helper[1]))
    assert facts(executor.execute(job())), "the run continues"
    run = fail(b.small_run(), TRAIN, Status.OOM, reason="CUDA out of memory")
    cell = report.to_json(judge(run, None, POLICY))["cells"][0]
    assert (cell["verdict"], cell["cand_tok_per_s"]) == ("FAILED", None)


def test_trap_34_a_row_that_timed_out_has_no_ratio() -> None:
    """A timed-out row still yields a ratio."""
    run = b.small_run()
    late = b.change_rows(
        run,
        TRAIN,
        lambda row: (
            row.model_copy(update={"status": Status.TIMEOUT}) if row.replicate == 1 else row
        ),
    )
    assert [row.replicate for row in usable(late.of_cell(TRAIN))] == [
        0,
        2,
    ], "its speed is none, though one was written down"
    judgement = judge(late, b.baseline_of(run), POLICY)
    cell = next(one for one in judgement.cells if one.cell_id == TRAIN)
    assert (cell.verdict, cell.change_pct, cell.cand_tok_per_s) == (Verdict.FAILED, None, None)
    dense = "path=dense,seq_len=2048,workload=train"
    twin = b.change_rows(
        run,
        dense,
        lambda row: (
            row.model_copy(update={"status": Status.TIMEOUT}) if row.replicate == 1 else row
        ),
    )
    shown = {
        one.cell.cell_id: one.x_dense
        for one in rows_of(twin, judge(twin, b.baseline_of(run), POLICY))
    }
    assert (
        shown[TRAIN] is None
        and shown[dense] is None
        and shown[TRAIN.replace("train", "forward")] is not None
    )


def test_trap_35_a_renamed_cell_is_missing_unless_an_alias_says_where_it_went() -> None:
    """Renamed cell: history lost and the gate green."""
    run = b.small_run()
    base = b.baseline_of(run)
    renamed = base.model_copy(
        update={
            "cells": {"old" if cell == TRAIN else cell: one for cell, one in base.cells.items()}
        }
    )
    judgement = judge(run, renamed, POLICY)
    assert verdict_of(judgement, "old") is Verdict.MISSING and judgement.exit_code is Exit.FAILED
    config = run.manifest.cells[0].config_sha256
    followed = judge(run, renamed, Policies(POLICY, aliases={"old": Alias(TRAIN, config, config)}))
    assert verdict_of(followed, TRAIN) in (Verdict.SAME, Verdict.WATCH) and not any(
        cell.cell_id == "old" for cell in followed.cells
    )


@pytest.mark.parametrize("damage", ["zero", "nan", "missing", "truncated", "newer"])
def test_trap_36_a_baseline_that_cannot_judge_is_red(tmp_path: pathlib.Path, damage: str) -> None:
    """Baseline 0.0, NaN, missing, truncated JSON, newer schema."""
    run, file = b.small_run(), tmp_path / "b.json"
    whole = b.baseline_of(run).model_dump()
    if damage in ("zero", "nan"):
        whole["cells"][TRAIN]["tok_per_s"][0] = 0.0 if damage == "zero" else math.nan
    if damage == "newer":
        whole["schema_version"] = baseline_file.SCHEMA_VERSION + 1
    text = json.dumps(whole)
    if damage != "missing":
        file.write_text(text[: len(text) // 2] if damage == "truncated" else text)
    found = baseline_file.read_baseline(file)
    assert isinstance(found, BaselineProblem) and found.verdict is (
        Verdict.NO_BASELINE if damage == "missing" else Verdict.CORRUPT
    )
    judgement = judge(run, found, POLICY)
    assert judgement.exit_code is Exit.BASELINE and all(
        cell.change_pct is None for cell in judgement.cells
    )


def test_trap_37_the_exit_status_is_the_kind_of_failure_and_not_their_number() -> None:
    """Exit status 0 although cells failed; exit status = number of failures (wraps at 256)."""
    one = b.planned_cell(Cell("train", 2048, "v2", "on"))
    cells = [one.model_copy(update={"cell_id": f"{TRAIN},i={n}"}) for n in range(256)]
    run = Run(
        manifest=b.manifest(cells),
        replicates=[b.failed(cell, Status.CRASH, reason="x") for cell in cells],
    )
    assert judge(run, None, POLICY).exit_code is Exit.FAILED
    assert judge(fail(b.small_run(), TRAIN, Status.CRASH), None, POLICY).exit_code is Exit.FAILED
    assert all(0 <= int(code) < 256 for code in Exit)
    assert all(
        EXIT_OF[one] is not Exit.OK
        for one in Verdict
        if one in (Verdict.FAILED, Verdict.MISSING, Verdict.REGRESSED)
    )


def test_trap_38_two_writers_never_share_a_file(tmp_path: pathlib.Path) -> None:
    """Two writers, one file."""
    run = b.small_run()
    with run_file.create_run(tmp_path, run.manifest) as first:
        with pytest.raises(PerfbenchError, match="exists already"):
            run_file.create_run(tmp_path, run.manifest)
        with pytest.raises(PerfbenchError, match="another perfbench is writing"):
            run_file.open_for_resume(first.folder)
        first.append(run.replicates[0])
    assert len(run_file.read_run(first.folder).replicates) == 1


def test_trap_39_nothing_is_computed_from_what_was_rounded_to_be_shown() -> None:
    """Rounded ratio 0.00 divided by."""
    assert ratio(0.004) == "0.004" and ratio(0.0) != ratio(0.004), (
        "a small ratio is not shown as 0.00"
    )
    run = b.small_run()
    slow = b.replace_rows(run, TRAIN, tok_per_s=0.0041)
    half = b.replace_rows(run, TRAIN, tok_per_s=0.0082)
    change = next(
        one.change_pct
        for one in judge(half, b.baseline_of(slow), POLICY).cells
        if one.cell_id == TRAIN
    )
    assert change == pytest.approx(100.0)


def test_trap_40_times_are_seconds_whatever_their_size() -> None:
    """990 ns against 1.1 us compared as 990 against 1.1."""
    run = b.small_run(replicates=8)
    # work that any speed could do
    idle = b.physics(1.0, 1, flops=1.0, min_bytes=1.0, flops_per_s=1.0, bytes_per_s=1.0)
    sides = [
        b.replace_rows(run, TRAIN, tok_per_s=2048 / step_s, physics=idle)
        for step_s in (990e-9, 1.1e-6)
    ]
    judged = comparison.compare(sides[0], sides[1], POLICY, paired=True)
    cell = next(one for one in judged.cells if one.cell_id == TRAIN)
    assert (cell.verdict, round(cell.change_pct or 0.0, 6)) == (Verdict.REGRESSED, -10.0), cell
    names = {
        name for model in (run.replicates[0], run.manifest) for name in type(model).model_fields
    }
    assert not [name for name in names if re.search(r"_(ms|us|ns)$", name)], "storage is in seconds"


@pytest.mark.parametrize(
    "field", ["gpu_slug", "device_name", "driver", "cuda", "torch", "triton", "flash_provider"]
)
def test_trap_41_foreign_hardware_is_never_compared(field: str) -> None:
    """Foreign hardware compared silently."""
    run = b.small_run()
    base = b.baseline_of(run)
    foreign = base.model_copy(update={"environment": {**base.environment, field: "another"}})
    judgement = judge(run, foreign, POLICY)
    assert judgement.exit_code is Exit.ENVIRONMENT and {
        cell.verdict for cell in judgement.cells
    } == {Verdict.INCOMPARABLE}
    assert "another" in judgement.headline or any(
        "another" in finding.reason for finding in judgement.findings
    )


def test_trap_42_a_gate_that_compares_nothing_is_red() -> None:
    """A guard that compares zero cells."""
    run = b.small_run()
    lenient = GatePolicy(missing="warn", new="warn")
    other = b.baseline_of(b.make_run([b.planned_cell(Cell("train", 512, "masked", "off"))]))
    assert judge(run, other, lenient).exit_code is Exit.FAILED
    empty = b.with_manifest(b.with_rows(run, []), cells=[])
    assert (
        judge(empty, b.baseline_of(run), lenient).exit_code is Exit.FAILED
        and judge(empty, None, lenient).exit_code is Exit.FAILED
    )
    with pytest.raises(PerfbenchError, match="cells are excluded, nothing would be measured"):
        parse(
            edited(
                '  - {path: v1, seq_len: ">256", reason: "too slow"}',
                '  - {seq_len: ">=1", reason: "all"}',
            ).replace(INCLUDE, "")
        )


INCLUDE = "include:\n  - {path: reference, seq_len: 64, fa2: off}\n"


def test_trap_43_a_window_shorter_than_nvmls_own_has_no_utilisation() -> None:
    """Utilisation of a window shorter than NVML's."""
    seen = sampled(FakeNvml(Card(uuid=ONE)), ONE, 0.02, hertz=1000.0)
    assert (
        seen.utilisation_pct is None
        and "shorter than NVML's own" in seen.absent["utilisation_pct"]
        and seen.power_w is not None
    )


def test_trap_44_events_are_read_after_the_last_has_completed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Events read before they completed."""
    finished = False

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None: ...

        def synchronize(self) -> None:
            nonlocal finished
            finished = True

        def elapsed_time(self, end: Any) -> float:
            return 12.0 if finished else 0.0  # an old time

    monkeypatch.setitem(
        sys.modules,
        "torch",
        SimpleNamespace(cuda=SimpleNamespace(Event=Event, synchronize=lambda: None)),
    )
    assert CudaEventClock().time_steps(lambda: None, 3) == 0.012


def test_trap_45_another_choice_of_the_autotuner_is_an_explained_change() -> None:
    """Re-autotuning between runs changes the kernel."""
    run = b.small_run(replicates=8)
    first, then = (
        edit(run, TRAIN, tuned={"nsa.kernel[64]": f"BLOCK: {size}"}) for size in (64, 128)
    )
    slower = edit(b.scale_rows(then, TRAIN, 0.9), TRAIN, tuned={"nsa.kernel[64]": "BLOCK: 128"})
    cell = next(
        one
        for one in comparison.compare(first, slower, POLICY, paired=True).cells
        if one.cell_id == TRAIN
    )
    reported = " ".join([cell.reason, *cell.notes])
    assert "BLOCK: 128 instead of BLOCK: 64" in reported and "explained change" in reported
    assert baseline.baseline_of_run(first).cells[TRAIN].tuned == {"nsa.kernel[64]": "BLOCK: 64"}  # type: ignore[union-attr]
    assert autotuner.choices({}) == {}, "without Triton nothing can have been tuned"


NASTY = "a/b|c\nd é\u0416%,=`<x>"


def test_trap_46_names_of_any_characters(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names with `/`, `|`, newlines, non-ASCII; cp1252 default encoding."""
    path = baseline_file.baseline_path(tmp_path, "h100", NASTY)
    assert path.parent == tmp_path / "h100" and path.name.isascii() and "\n" not in path.name
    run = b.with_manifest(b.small_run(), matrix_name=NASTY, matrix_path=NASTY)
    with run_file.create_run(tmp_path, run.manifest) as writer:
        writer.append(run.replicates[0])
    assert run_file.read_run(writer.folder).manifest.matrix_name == NASTY
    assert len(writer.path.read_bytes().splitlines()) == 2 and writer.path.read_bytes().isascii()
    written = report.render(run, judge(run, None, POLICY), tmp_path / "out")
    text = next(file for file in written if file.name == "report.md").read_bytes().decode("utf-8")
    assert "\u0416" in text and not any(line.startswith("d é") for line in text.splitlines())
    matrix = tmp_path / "m.yaml"
    matrix.write_bytes(VALID.replace("too slow", "zu langsam: é \u0416").encode("utf-8"))
    for name, value in {
        "PYTHONUTF8": "0",
        "LC_ALL": "C",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONCOERCECLOCALE": "0",
    }.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "perfbench", "plan", str(matrix), "--gpu", "h100"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0 and "zu langsam: é \u0416" in done.stdout.decode("utf-8"), (
        done.stderr
    )


def test_trap_47_an_unknown_card_has_no_peak() -> None:
    """Unknown GPU given another GPU's peak."""
    for name in ("NVIDIA H100 80GB HBM2", "NVIDIA A100", "NVIDIA B300", ""):
        found = roofline.judge_step(
            flops=1e12,
            min_bytes=1e9,
            step_s=1.0,
            gemm_flops_per_s=None,
            dtype="bf16",
            device_name=name,
            is_gpu=True,
        )
        assert (
            found.datasheet_bytes_per_s,
            found.datasheet_flops_per_s,
            found.l2_bytes,
            found.floor_s,
        ) == (None,) * 4
        assert found.floor_fraction is None and repr(name) in " ".join(found.notes)


def test_trap_48_a_line_that_was_cut_off_is_dropped_and_only_the_last(
    tmp_path: pathlib.Path,
) -> None:
    """Killed in the middle of a line."""
    run = b.small_run()
    with run_file.create_run(tmp_path, run.manifest) as writer:
        for row in run.replicates[:3]:
            writer.append(row)
    whole = writer.path.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    for cut in (last + 1, (last + len(whole)) // 2, len(whole) - 1):
        writer.path.write_bytes(whole[:cut])
        found = run_file.read_run(writer.folder)
        assert found.torn and found.replicates == run.replicates[:2]
    again, _ = run_file.open_for_resume(writer.folder)
    with again:
        again.append(run.replicates[2])
    assert writer.path.read_bytes() == whole
    writer.path.write_bytes(whole.replace(b'"kind": "replicate"', b'"kind": "repl', 1))
    with pytest.raises(PerfbenchError, match=r":2: "):
        run_file.read_run(writer.folder)


def test_trap_49_two_speeds_in_one_process_are_reported() -> None:
    """Bimodal samples."""
    run = b.small_run(replicates=8)
    fast = run.of_cell(TRAIN)[0].samples_s[0]
    mixed = [fast * (1.0 + 0.0004 * (n % 5)) for n in range(16)] + [
        fast * (1.25 + 0.0004 * (n % 5)) for n in range(14)
    ]
    rows = {
        "samples_s": mixed,
        "engaged": dict.fromkeys(run.manifest.cells[0].route.counters, 12 * 4 * 30),
    }
    middle = sorted(mixed)[14:16]
    speed = 4 * 2048 / (sum(middle) / 2)
    both = edit(run, TRAIN, **rows, tok_per_s=speed, physics=b.physics(speed, 2048))
    judgement = judge(both, b.baseline_of(both), POLICY)
    reported = " ".join(
        [
            reason_of(judgement, TRAIN),
            *next(one.notes for one in judgement.cells if one.cell_id == TRAIN),
        ]
    )
    assert (
        "two speeds within one process in 8 of 8 replicates" in reported
        and "47 % of the samples at the slower" in reported
    )
    alone = judge(run, b.baseline_of(run), POLICY)
    assert "two speeds" not in reason_of(alone, TRAIN)


def test_trap_50_the_parent_sleeps_while_its_child_measures(executor: ForkServerExecutor) -> None:
    """The parent spins while the child measures."""
    executor.execute(job())
    with sleeping_parent():
        assert executor.execute(job(stub.HANG, timeout_s=1.0)).status is Status.TIMEOUT


def test_every_trap_has_its_test() -> None:
    numbers = {
        int(found[1])
        for found in re.finditer(
            r"^def test_trap_(\d\d)_", pathlib.Path(__file__).read_text(), re.MULTILINE
        )
    }
    assert numbers == set(range(29, 51))
