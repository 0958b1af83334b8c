"""Going on with a run: what is missing and no more, refused where it would mix two runs; kill -9
and Ctrl-C with real processes.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from perfbench.errors import Exit
from perfbench.matrix import matrix as matrices
from perfbench.matrix import plan as plans
from perfbench.records import run_file
from perfbench.records.job import Job
from perfbench.records.rows import Environment, Source, Status
from tests.perfbench import builders
from tests.perfbench.runner_cases import IDS, PLAN, TEXT, FakeExecutor, cell_id, refused, run

ROOT = pathlib.Path(__file__).parents[2]


def test_resume_completes_what_is_missing_in_the_same_order(tmp_path: pathlib.Path) -> None:
    whole = FakeExecutor()
    run(tmp_path / "whole", whole)

    def interrupt(job: Job) -> None:
        if len(first.jobs) == 17:
            raise KeyboardInterrupt

    first, second = FakeExecutor(before=interrupt), FakeExecutor()
    message = refused(
        Exit.INTERRUPTED,
        "interrupted",
        tmp_path / "cut",
        first,
        argv=["perfbench", "run", "m.yaml", "--seed", "7"],
    )
    folder = next((tmp_path / "cut").iterdir())
    assert f"perfbench run m.yaml --resume {folder}" in message and "17 finished" in message
    finished = run(tmp_path, second, resume=folder, seed=99)
    assert first.order + second.order == whole.order, "the stored seed wins"
    assert (
        len(finished.run.replicates) == 36
        and len(finished.run.resumed) == 1
        and finished.folder == folder
    )
    third = FakeExecutor()
    run(tmp_path, third, resume=folder)
    assert third.jobs == []


def test_slices_join_one_run(tmp_path: pathlib.Path) -> None:
    first = run(tmp_path, only=["seq_len=128"])
    second = run(tmp_path, resume=first.folder, only=["seq_len=256"])
    assert len(second.run.replicates) == 24 and [part.only for part in second.run.resumed] == [
        ["seq_len=256"]
    ]


def test_a_failed_cell_is_not_tried_again_on_resume(tmp_path: pathlib.Path) -> None:
    name = cell_id("train", 512, "v2")
    first = run(tmp_path, FakeExecutor({name: Status.TIMEOUT}))
    again = FakeExecutor()
    run(tmp_path, again, resume=first.folder)
    assert again.jobs == []


def test_resume_after_a_torn_line(tmp_path: pathlib.Path) -> None:
    first = run(tmp_path, only=["seq_len=128"])
    path = first.folder / run_file.RUN_FILE
    path.write_bytes(path.read_bytes()[:-50])
    again = FakeExecutor()
    finished = run(tmp_path, again, resume=first.folder, only=["seq_len=128"])
    assert again.order == [(row.cell_id, row.replicate) for row in first.run.replicates[-1:]]
    assert len(finished.run.replicates) == 12 and not finished.run.torn


def test_resume_on_another_card_of_the_same_model(tmp_path: pathlib.Path) -> None:
    first = run(tmp_path, only=["seq_len=128"], environment=builders.environment())
    other = builders.environment(gpu_uuid_sha256="cd" * 32)
    finished = run(tmp_path, resume=first.folder, environment=other)
    assert finished.run.resumed[0].environment.gpu_uuid_sha256 == "cd" * 32


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device_name", "NVIDIA H200"),
        ("torch", "2.11.0"),
        ("driver", "580.1"),
        ("gpu_slug", "h200"),
    ],
)
def test_resume_on_another_kind_of_machine_is_refused(
    tmp_path: pathlib.Path, key: str, value: str
) -> None:
    here: Environment = builders.environment()
    first = run(tmp_path, only=["seq_len=128"], environment=here)
    before = (first.folder / run_file.RUN_FILE).read_bytes()
    executor = FakeExecutor()
    message = refused(
        Exit.ENVIRONMENT,
        "cannot be resumed here",
        tmp_path,
        executor,
        resume=first.folder,
        environment=here.model_copy(update={key: value}),
    )
    assert f"{key} was {getattr(here, key)} and is {value}" in message
    assert executor.jobs == [] and (first.folder / run_file.RUN_FILE).read_bytes() == before


def test_resume_with_another_configuration_is_refused(tmp_path: pathlib.Path) -> None:
    first = run(tmp_path, only=["seq_len=128"])
    changed = [
        cell.model_copy(update={"config_sha256": "0" * 64}) if cell.cell_id == IDS[3] else cell
        for cell in PLAN.cells
    ]
    plan = plans.Plan(changed, [], [], 1.0, 3)
    assert IDS[3] in refused(
        Exit.USAGE, "configuration of cell", tmp_path, resume=first.folder, plan=plan
    )
    rerouted = [
        cell.model_copy(update={"route": cell.route.model_copy(update={"counters": ["sel.v1"]})})
        for cell in PLAN.cells
    ]
    refused(
        Exit.USAGE,
        "now routes to",
        tmp_path,
        resume=first.folder,
        plan=plans.Plan(rerouted, [], [], 1.0, 3),
    )
    slower = matrices.parse_matrix(
        TEXT.replace("processes: 3", "processes: 3, warmup_s: 1"), "m.yaml"
    )
    refused(Exit.USAGE, "measures with", tmp_path, resume=first.folder, matrix=slower)
    commented = matrices.parse_matrix(TEXT + "# a comment\n", "m.yaml")
    run(tmp_path, resume=first.folder, matrix=commented)


def test_resume_with_a_cell_that_was_not_planned_is_refused(tmp_path: pathlib.Path) -> None:
    part = plans.Plan(PLAN.cells[:4], [], [], 1.0, 3)
    first = run(tmp_path, plan=part)
    assert IDS[4] in refused(Exit.USAGE, "planned without cell", tmp_path, resume=first.folder)


@pytest.mark.parametrize(
    "source",
    [Source(commit="b" * 40, dirty_sha256=None), Source(commit="a" * 40, dirty_sha256="c" * 64)],
)
def test_resume_with_other_code_is_refused(tmp_path: pathlib.Path, source: Source) -> None:
    first = run(tmp_path, only=["seq_len=128"])
    refused(Exit.USAGE, "the code here is", tmp_path, resume=first.folder, source=source)


REAL = """
import dataclasses, itertools, pathlib, sys
sys.path.insert(0, {root!r})
from tests.perfbench import stub_measure
from tests.perfbench.plan_cases import CODE
from tests.perfbench.runner_cases import HERE, MATRIX, PLAN
from perfbench.errors import PerfbenchError
from perfbench.machine import TargetFit
from perfbench.runner import RunSpec, prepared_executors, run_matrix
from perfbench.runner.executor import ForkServerExecutor
resume = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None

def hang_at_the_eighth_job(executor):
    measured, jobs = executor.execute, itertools.count(1)
    def execute(job):
        if next(jobs) == 8:
            axes = dataclasses.replace(job.axes, batch=stub_measure.HANG)
            job = job.model_copy(update={{"axes": axes, "timeout_s": 3000.0}})
        return measured(job)
    executor.execute = execute

try:
    argv = ["perfbench", "run", "m.yaml"]
    spec = RunSpec(PLAN, MATRIX, HERE, CODE, argv, seed=7, only=["seq_len=128"])
    stub = lambda: ForkServerExecutor("tests.perfbench.stub_measure:measure")
    with prepared_executors(TargetFit("cpu", None), [stub]) as (executor,):
        if resume is None:
            hang_at_the_eighth_job(executor)
        run_matrix(spec, executor, runs_dir=pathlib.Path(sys.argv[1]), resume=resume)
except PerfbenchError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def real(tmp_path: pathlib.Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", REAL.format(root=str(ROOT)), str(tmp_path), *args]
        started.append(
            subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for_rows(tmp_path: pathlib.Path, rows: int) -> pathlib.Path:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for path in tmp_path.glob("*/run.jsonl"):
            if path.read_bytes().count(b"\n") > rows:
                return path.parent
        time.sleep(0.02)
    raise AssertionError("the run wrote no rows in 300 s")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_killed_in_the_middle_then_resumed(
    tmp_path: pathlib.Path,
    real: Callable[..., subprocess.Popen[str]],
    sent: signal.Signals,
    code: int,
) -> None:
    first = real()
    folder = wait_for_rows(tmp_path, 3)
    os.kill(first.pid, sent)
    said, _ = first.communicate(timeout=300)
    assert first.returncode == code
    if sent is signal.SIGINT:
        assert f"--resume {folder}" in said
    before = run_file.read_run(folder)
    assert 3 <= len(before.replicates) < 12
    second = real(str(folder))
    second.communicate(timeout=300)
    assert second.returncode == 0
    after = run_file.read_run(folder)
    assert after.replicates[: len(before.replicates)] == before.replicates, (
        "finished replicates survive"
    )
    assert (
        len({(row.cell_id, row.replicate) for row in after.replicates})
        == len(after.replicates)
        == 12
    )
    assert all(row.status is Status.OK for row in after.replicates) and len(after.resumed) == 1


def test_two_runs_cannot_resume_one_folder(
    tmp_path: pathlib.Path, real: Callable[..., subprocess.Popen[str]]
) -> None:
    real()
    folder = wait_for_rows(tmp_path, 1)
    refused(Exit.USAGE, "another perfbench is writing", tmp_path, resume=folder)
