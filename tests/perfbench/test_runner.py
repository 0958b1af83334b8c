"""The runner with a fake executor in milliseconds: order, jobs and rows, what is skipped, injected
or prepared ahead, progress.
"""

import pathlib
import random
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from nsa.capability import assumed
from nsa.settings import Settings
from perfbench.errors import Exit, PerfbenchError
from perfbench.machine import gpu
from perfbench.machine.environment import TargetFit
from perfbench.matrix import matrix as matrices
from perfbench.matrix import plan as plans
from perfbench.records import run_file
from perfbench.records.job import Job
from perfbench.records.rows import Status
from perfbench.runner import progress
from perfbench.runner import run as runner
from perfbench.runner.executor import ForkServerExecutor, held_cards, prepared_executors
from perfbench.runner.progress import PlainProgress
from tests.perfbench.fake_nvml import Card, FakeNvml
from tests.perfbench.plan_cases import CODE
from tests.perfbench.runner_cases import (
    HERE,
    IDS,
    MATRIX,
    PLAN,
    TEXT,
    FakeExecutor,
    _first_in_order,
    cell_id,
    refused,
    run,
)


def test_every_cell_and_replicate_once_in_shuffled_blocks(tmp_path: pathlib.Path) -> None:
    executor = FakeExecutor()
    finished = run(tmp_path, executor)
    assert len(IDS) == 12 and len(executor.order) == 36 and executor.blocks == [0, 12, 24]
    orders = [[name for name, _ in executor.order[start : start + 12]] for start in executor.blocks]
    assert all(sorted(order) == sorted(IDS) for order in orders)
    assert [number for _, number in executor.order] == [0] * 12 + [1] * 12 + [2] * 12
    assert orders[0] != IDS and orders[0] != orders[1]
    expected = list(IDS)
    random.Random("7-0").shuffle(expected)
    assert orders[0] == expected
    assert [
        (row.cell_id, row.replicate) for row in finished.run.replicates
    ] == executor.order and finished.missing == []


def test_the_seed_decides_the_order_and_the_inputs(tmp_path: pathlib.Path) -> None:
    one, same, other = FakeExecutor(), FakeExecutor(), FakeExecutor()
    run(tmp_path, one), run(tmp_path, same), run(tmp_path, other, seed=8)
    assert one.jobs == same.jobs and one.order != other.order
    seeds = [job.seed for job in one.jobs]
    assert len(set(seeds)) == len(seeds), "fresh inputs for each replicate"


def test_a_job_says_everything(tmp_path: pathlib.Path) -> None:
    executor = FakeExecutor()
    run(tmp_path, executor)
    job = next(j for j in executor.jobs if j.cell_id == cell_id("train", 256, "v2"))
    planned = next(cell for cell in PLAN.cells if cell.cell_id == job.cell_id)
    assert (job.axes, job.config_sha256, job.plan, job.expect) == (
        planned.axes,
        planned.config_sha256,
        planned.route,
        planned.expect,
    )
    assert (job.device, job.timeout_s, job.measure) == ("cpu", 30.0, MATRIX.measure)
    assert job.model == MATRIX.model.to_mapping()
    assert {job.replicate for job in executor.jobs if job.profile} == {0}
    assert sum(job.profile for job in executor.jobs) == len(IDS)


def test_the_manifest_holds_the_whole_plan(tmp_path: pathlib.Path) -> None:
    injected = f"slowdown=10%@{IDS[0]}"
    finished = run(tmp_path, only=["seq_len=128"], injections=[injected])
    manifest = finished.run.manifest
    assert [cell.cell_id for cell in manifest.cells] == IDS and manifest.only == ["seq_len=128"]
    assert (manifest.seed, manifest.replicates, manifest.injections, manifest.matrix_text) == (
        7,
        3,
        [injected],
        TEXT,
    )
    assert manifest.source == CODE and manifest.environment == HERE
    assert finished.folder.name == manifest.run_id and "-cpu-aaaaaaaa-" in manifest.run_id


def test_rows_are_written_as_they_finish(tmp_path: pathlib.Path) -> None:
    seen = []

    def look(job: Job) -> None:
        seen.append(len(run_file.read_run(next(tmp_path.iterdir())).replicates))

    run(tmp_path, FakeExecutor(before=look))
    assert seen == list(range(36))


def test_only_measures_a_slice(tmp_path: pathlib.Path) -> None:
    executor = FakeExecutor()
    run(tmp_path, executor, only=["seq_len=128", "path=v2"])
    assert {name for name, _ in executor.order} == {
        cell_id("train", 128, "v2"),
        cell_id("forward", 128, "v2"),
    }
    refused(Exit.USAGE, "matches none", tmp_path, only=["seq_len=64"])
    assert len(list(tmp_path.iterdir())) == 1, "a refused run leaves no folder"


@pytest.mark.parametrize(
    "status", [Status.OOM, Status.TIMEOUT, Status.CRASH, Status.PARITY, Status.WRONG_PATH]
)
def test_a_failed_cell_is_reported_once_and_the_run_goes_on(
    tmp_path: pathlib.Path, status: Status
) -> None:
    name = cell_id("train", 512, "v2")
    finished = run(tmp_path, FakeExecutor({name: status}))
    assert [(row.status, row.replicate) for row in finished.run.of_cell(name)] == [(status, 0)]
    assert len(finished.run.replicates) == 33 + 1


def test_a_cell_that_fails_later_keeps_what_it_had(tmp_path: pathlib.Path) -> None:
    executor = FakeExecutor()
    name = cell_id("forward", 256, "dense")

    def fail_in_block_1(job: Job) -> None:
        executor.ends = {name: Status.CRASH} if job.replicate == 1 else {}

    executor.before = fail_in_block_1
    rows = run(tmp_path, executor).run.of_cell(name)
    assert [row.status for row in rows] == [Status.OK, Status.CRASH]


def test_after_an_oom_longer_sequences_of_the_same_path_are_skipped(tmp_path: pathlib.Path) -> None:
    small, middle, large = (cell_id("train", seq_len, "v2") for seq_len in (128, 256, 512))
    ends = dict.fromkeys((small, middle, large), Status.OOM)
    executor = FakeExecutor(ends)
    finished = run(
        tmp_path,
        executor,
        seed=next(s for s in range(100) if _first_in_order(s, small, [middle, large])),
    )
    assert [name for name, _ in executor.order if name in ends] == [small]
    skipped = finished.run.of_cell(large)
    assert (
        [row.status for row in skipped] == [Status.SKIPPED]
        and small in skipped[0].reason
        and skipped[0].tok_per_s is None
    )
    assert len(finished.run.of_cell(cell_id("forward", 512, "v2"))) == 3, (
        "another workload is another path"
    )
    assert len(finished.run.of_cell(cell_id("train", 512, "dense"))) == 3


def test_oom_can_be_recorded_without_skipping(tmp_path: pathlib.Path) -> None:
    matrix = matrices.parse_matrix(TEXT.replace("record_and_skip_larger", "record"), "m.yaml")
    finished = run(tmp_path, FakeExecutor({cell_id("train", 128, "v2"): Status.OOM}), matrix=matrix)
    assert not [row for row in finished.run.replicates if row.status is Status.SKIPPED]


def test_shorter_sequences_are_not_skipped(tmp_path: pathlib.Path) -> None:
    finished = run(tmp_path, FakeExecutor({cell_id("train", 512, "v2"): Status.OOM}))
    assert len(finished.run.of_cell(cell_id("train", 128, "v2"))) == 3


def test_the_budget_starts_nothing_new_and_says_what_is_missing(tmp_path: pathlib.Path) -> None:
    ticks = iter(range(1000))
    said: list[str] = []
    reporter = PlainProgress(sys.stderr)
    reporter.note = said.append  # type: ignore[method-assign]
    executor = FakeExecutor()
    finished = run(
        tmp_path, executor, budget_s=10.0, now=lambda: float(next(ticks)), progress=reporter
    )
    assert len(executor.jobs) == 9 and len(finished.missing) == 27
    assert not set(finished.missing) & set(executor.order)
    assert (
        "the budget is spent" in said[-1]
        and "27" not in said[0]
        and str(finished.folder) in said[-1]
    )
    rest = FakeExecutor()
    assert run(tmp_path, rest, resume=finished.folder).missing == []
    assert sorted(rest.order) == sorted(finished.missing)


def test_injections_reach_their_cell_alone_and_stay_on_resume(tmp_path: pathlib.Path) -> None:
    name = IDS[5]
    executor, again = FakeExecutor(), FakeExecutor()
    first = run(tmp_path, executor, injections=[f"slowdown=10%@{name}"], only=["seq_len=128"])
    run(tmp_path, again, resume=first.folder)
    for job in executor.jobs + again.jobs:
        assert (job.injection is not None) == (job.cell_id == name)
    assert [
        job for job in executor.jobs + again.jobs if job.injection and job.injection.percent == 10.0
    ]
    refused(
        Exit.USAGE, "cannot join a run", tmp_path, resume=first.folder, injections=[f"oom@{name}"]
    )


def test_injection_syntax() -> None:
    name = IDS[0]
    found = runner.parse_injection(f"slowdown=12.5%@{name}", IDS)
    assert (found.kind, found.percent, found.cell_id) == ("slowdown", 12.5, name)
    assert runner.parse_injection(f"segv@{name}", IDS).percent is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slowdown@{}", "is not slowdown"),
        ("slowdown=10@{}", "is not slowdown"),
        ("slowdown=0%@{}", "more than 0"),
        ("slowdown=1e9%@{}", "is not slowdown"),
        ("slowdown=1.2.3%@{}", "more than 0"),
        ("oom=3%@{}", "is not slowdown"),
        ("explode@{}", "is not slowdown"),
        ("", "is not slowdown"),
        ("oom@{}0", "did you mean"),
        ("hang@", "has no cell"),
    ],
)
def test_bad_injections(text: str, words: str) -> None:
    with pytest.raises(PerfbenchError, match=words) as caught:
        runner.parse_injection(text.format(IDS[0]), IDS)
    assert caught.value.exit_code is Exit.USAGE


def test_plain_progress_has_counts_and_eta(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter(range(0, 1000, 10))
    reporter = PlainProgress(sys.stderr, now=lambda: float(next(seconds)))
    run(
        tmp_path,
        FakeExecutor({cell_id("train", 128, "v2"): Status.TIMEOUT}),
        only=["seq_len=128"],
        progress=reporter,
    )
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert said.out == "" and lines[0] == "perfbench: 12 of 12 replicates to measure"
    assert (
        len(lines) == 11
        and lines[-1].startswith("perfbench: [12/12]")
        and lines[-1].endswith("ETA 0:00")
    )
    assert any("timeout: planted" in line for line in lines) and any(
        "tok/s, ETA 1:50" in line or "ETA 1:" in line for line in lines
    )


def test_the_bar_is_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(progress.progress_for(), PlainProgress)


def test_rich_bar(tmp_path: pathlib.Path) -> None:
    with (tmp_path / "out").open("w+") as stream:
        bar = progress.RichProgress(stream, no_color=True)
        run(tmp_path / "runs", FakeExecutor({IDS[0]: Status.CRASH}), progress=bar)
        stream.seek(0)
        shown = stream.read()
    assert "crash: planted" in shown and "36/36" in shown


def test_prepared_on_a_cpu_asks_no_gpu() -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> None:
            raise AssertionError(f"a CPU run asked NVML for {name}")

    stub = partial(ForkServerExecutor, "tests.perfbench.stub_measure:measure")
    cpu = TargetFit("cpu", None)
    with prepared_executors(cpu, [stub], module=Untouchable()) as (executor,):
        executor.new_block()


def test_prepared_on_a_gpu_holds_its_lock_and_refuses_company(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    card = Card()
    nvml = FakeNvml(card)
    fit = TargetFit("cuda", gpu.GpuHandle(card.uuid, card.name, 0))
    with prepared_executors(fit, module=nvml):
        assert nvml.opened == 1, "held open, so that the driver stays awake between replicates"
        with (
            pytest.raises(PerfbenchError, match="another perfbench measures"),
            prepared_executors(fit, module=nvml),
        ):
            pass
    assert nvml.opened == 0
    with held_cards(fit) as ours:
        for _ in range(2):  # a run and its pairs
            with prepared_executors(ours, module=nvml):
                pass
            with (
                pytest.raises(PerfbenchError, match="another perfbench measures"),
                prepared_executors(fit, module=nvml),
            ):
                pass
    card.processes = [SimpleNamespace(pid=4321, usedGpuMemory=None)]
    for _ in range(2):
        with (
            pytest.raises(PerfbenchError, match="4321") as caught,
            prepared_executors(fit, module=nvml),
        ):
            pass
        assert caught.value.exit_code is Exit.ENVIRONMENT


def test_those_that_prepare_together_are_of_one_block_and_know_their_company(
    tmp_path: pathlib.Path,
) -> None:
    matrix = matrices.parse_matrix(
        TEXT.replace("processes: 3", "processes: 2, prepare_together: 5"), "m.yaml"
    )
    executor = FakeExecutor()
    run(
        tmp_path,
        executor,
        matrix=matrix,
        plan=plans.build_plan(matrix, only=[], capability=assumed("none"), settings=Settings()),
    )
    assert [len(batch) for batch in executor.prepared] == [5, 5, 2] * 2
    assert [key for batch in executor.prepared for key in batch] == executor.order
    assert [job.waiting_peers for job in executor.jobs] == ([4] * 10 + [1] * 2) * 2


def test_without_the_option_nothing_prepares_ahead(tmp_path: pathlib.Path) -> None:
    executor = FakeExecutor()
    run(tmp_path, executor)
    assert executor.prepared == [] and {job.waiting_peers for job in executor.jobs} == {0}


def test_what_a_smaller_cell_rules_out_does_not_prepare(tmp_path: pathlib.Path) -> None:
    matrix = matrices.parse_matrix(
        TEXT.replace("processes: 3", "processes: 1, prepare_together: 2"), "m.yaml"
    )
    executor = FakeExecutor({cell_id("train", 128, "v2"): Status.OOM})
    finished = run(
        tmp_path,
        executor,
        matrix=matrix,
        plan=plans.build_plan(matrix, only=[], capability=assumed("none"), settings=Settings()),
        seed=3,
    )
    skipped = {row.cell_id for row in finished.run.replicates if row.status is Status.SKIPPED}
    at = executor.order.index((cell_id("train", 128, "v2"), 0))
    later = {name for batch in executor.prepared for name, _ in batch} - {
        name for name, _ in executor.order[: at + 2]
    }
    assert skipped and not skipped & later
