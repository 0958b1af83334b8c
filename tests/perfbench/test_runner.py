"""The sweep with a fake executor in milliseconds; kill -9, Ctrl-C and resume with real processes."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from nsa.capability import assumed
from nsa.settings import Settings
from perfbench import gpu, progress, runfile, runner
from perfbench import matrix as matrices
from perfbench import plan as plans
from perfbench.axes import Cell
from perfbench.environment import TargetFit
from perfbench.isolate import failed
from perfbench.job import Job
from perfbench.progress import PlainProgress
from perfbench.result import Environment, PlannedCell, Replicate, Source, Status
from perfbench.verdict import Exit, PerfbenchError
from tests.perfbench import builders
from tests.perfbench.fake_nvml import Card, FakeNvml

ROOT = pathlib.Path(__file__).parents[2]
CODE = Source(commit="a" * 40, dirty_sha256=None)
HERE = builders.environment(gpu=False)
TEXT = """\
version: 1
name: t
target: {gpu: none}
model: tiny
axes:
  workload: [train, forward]
  seq_len: [128, 256, 512]
  path: [v2, dense]
  fa2: [off]
  dtype: [fp32]
measure: {processes: 3}
limits: {timeout_s: 30, oom: record_and_skip_larger}
"""
MATRIX = matrices.parse(TEXT, "m.yaml")
PLAN = plans.build(MATRIX, only=[], capability=assumed("none"), settings=Settings())
IDS = [cell.cell_id for cell in PLAN.cells]


def cell_id(workload: str, seq_len: int, path: str) -> str:
    return f"dtype=fp32,{'fa2=off,' if path == 'v2' else ''}path={path},seq_len={seq_len},workload={workload}"


class FakeExecutor:
    """Green rows; ``ends`` maps a cell to the status that it ends with, ``before`` runs first and may raise."""

    def __init__(self, ends: dict[str, Status] | None = None, before: Callable[[Job], None] = lambda job: None) -> None:
        self.ends, self.before = ends or {}, before
        self.jobs: list[Job] = []
        self.blocks: list[int] = []
        self.prepared: list[list[tuple[str, int]]] = []
        self.closed = False

    def new_block(self) -> None:
        self.blocks.append(len(self.jobs))

    def prepare(self, jobs: Sequence[Job]) -> None:
        self.prepared.append([(job.cell_id, job.replicate) for job in jobs])

    def execute(self, job: Job) -> Replicate:
        self.before(job)
        self.jobs.append(job)
        status = self.ends.get(job.cell_id, Status.OK)
        if status is not Status.OK:
            return failed(job, status, "planted")
        planned = next(cell for cell in PLAN.cells if cell.cell_id == job.cell_id)
        return builders.replicate(planned, job.replicate, gpu=False)

    def close(self) -> None:
        self.closed = True

    @property
    def order(self) -> list[tuple[str, int]]:
        return [(job.cell_id, job.replicate) for job in self.jobs]


def run(tmp_path: pathlib.Path, executor: FakeExecutor | None = None, **changes: Any) -> runner.Finished:
    values: dict[str, Any] = {
        "runs_dir": tmp_path,
        "environment": HERE,
        "source": CODE,
        "argv": ["perfbench", "run", "m.yaml"],
        "seed": 7,
    }
    return runner.run(changes.pop("plan", PLAN), changes.pop("matrix", MATRIX), executor or FakeExecutor(), **{**values, **changes})


def refused(code: Exit, words: str, tmp_path: pathlib.Path, executor: FakeExecutor | None = None, **changes: Any) -> str:
    with pytest.raises(PerfbenchError, match=words) as caught:
        run(tmp_path, executor, **changes)
    assert caught.value.exit_code is code
    return str(caught.value)


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
    assert [(row.cell_id, row.replicate) for row in finished.run.replicates] == executor.order and finished.missing == []


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
    assert (job.axes, job.config_sha256, job.plan, job.expect) == (planned.axes, planned.config_sha256, planned.route, planned.expect)
    assert (job.device, job.timeout_s, job.measure) == ("cpu", 30.0, MATRIX.measure)
    assert job.model == MATRIX.model.to_mapping()
    assert {job.replicate for job in executor.jobs if job.profile} == {0}
    assert sum(job.profile for job in executor.jobs) == len(IDS)


def test_the_manifest_holds_the_whole_plan(tmp_path: pathlib.Path) -> None:
    injected = f"slowdown=10%@{IDS[0]}"
    finished = run(tmp_path, only=["seq_len=128"], injections=[injected])
    manifest = finished.run.manifest
    assert [cell.cell_id for cell in manifest.cells] == IDS and manifest.only == ["seq_len=128"]
    assert (manifest.seed, manifest.replicates, manifest.injections, manifest.matrix_text) == (7, 3, [injected], TEXT)
    assert manifest.source == CODE and manifest.environment == HERE
    assert finished.folder.name == manifest.run_id and "-cpu-aaaaaaaa-" in manifest.run_id


def test_rows_are_written_as_they_finish(tmp_path: pathlib.Path) -> None:
    seen = []

    def look(job: Job) -> None:
        seen.append(len(runfile.read(next(tmp_path.iterdir())).replicates))

    run(tmp_path, FakeExecutor(before=look))
    assert seen == list(range(36))


def test_only_measures_a_slice(tmp_path: pathlib.Path) -> None:
    executor = FakeExecutor()
    run(tmp_path, executor, only=["seq_len=128", "path=v2"])
    assert {name for name, _ in executor.order} == {cell_id("train", 128, "v2"), cell_id("forward", 128, "v2")}
    refused(Exit.USAGE, "matches none", tmp_path, only=["seq_len=64"])
    assert len(list(tmp_path.iterdir())) == 1, "a refused run leaves no folder"


@pytest.mark.parametrize("status", [Status.OOM, Status.TIMEOUT, Status.CRASH, Status.PARITY, Status.WRONG_PATH])
def test_a_failed_cell_is_said_once_and_the_sweep_goes_on(tmp_path: pathlib.Path, status: Status) -> None:
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
    finished = run(tmp_path, executor, seed=next(s for s in range(100) if _first_in_order(s, small, [middle, large])))
    assert [name for name, _ in executor.order if name in ends] == [small]
    skipped = finished.run.of_cell(large)
    assert [row.status for row in skipped] == [Status.SKIPPED] and small in skipped[0].reason and skipped[0].tok_per_s is None
    assert len(finished.run.of_cell(cell_id("forward", 512, "v2"))) == 3, "another workload is another path"
    assert len(finished.run.of_cell(cell_id("train", 512, "dense"))) == 3


def _first_in_order(seed: int, first: str, others: list[str]) -> bool:
    order = list(IDS)
    random.Random(f"{seed}-0").shuffle(order)
    return all(order.index(first) < order.index(other) for other in others)


def test_oom_can_be_recorded_without_skipping(tmp_path: pathlib.Path) -> None:
    matrix = matrices.parse(TEXT.replace("record_and_skip_larger", "record"), "m.yaml")
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
    finished = run(tmp_path, executor, budget_s=10.0, now=lambda: float(next(ticks)), progress=reporter)
    assert len(executor.jobs) == 9 and len(finished.missing) == 27
    assert not set(finished.missing) & set(executor.order)
    assert "the budget is spent" in said[-1] and "27" not in said[0] and str(finished.folder) in said[-1]
    rest = FakeExecutor()
    assert run(tmp_path, rest, resume=finished.folder).missing == []
    assert sorted(rest.order) == sorted(finished.missing)


def test_resume_completes_what_is_missing_in_the_same_order(tmp_path: pathlib.Path) -> None:
    whole = FakeExecutor()
    run(tmp_path / "whole", whole)

    def interrupt(job: Job) -> None:
        if len(first.jobs) == 17:
            raise KeyboardInterrupt

    first, second = FakeExecutor(before=interrupt), FakeExecutor()
    message = refused(Exit.INTERRUPTED, "interrupted", tmp_path / "cut", first, argv=["perfbench", "run", "m.yaml", "--seed", "7"])
    folder = next((tmp_path / "cut").iterdir())
    assert f"perfbench run m.yaml --resume {folder}" in message and "17 finished" in message
    finished = run(tmp_path, second, resume=folder, seed=99)
    assert first.order + second.order == whole.order, "the stored seed wins"
    assert len(finished.run.replicates) == 36 and len(finished.run.resumed) == 1 and finished.folder == folder
    third = FakeExecutor()
    run(tmp_path, third, resume=folder)
    assert third.jobs == []


def test_slices_join_one_run(tmp_path: pathlib.Path) -> None:
    first = run(tmp_path, only=["seq_len=128"])
    second = run(tmp_path, resume=first.folder, only=["seq_len=256"])
    assert len(second.run.replicates) == 24 and [part.only for part in second.run.resumed] == [["seq_len=256"]]


def test_a_failed_cell_is_not_tried_again_on_resume(tmp_path: pathlib.Path) -> None:
    name = cell_id("train", 512, "v2")
    first = run(tmp_path, FakeExecutor({name: Status.TIMEOUT}))
    again = FakeExecutor()
    run(tmp_path, again, resume=first.folder)
    assert again.jobs == []


def test_resume_after_a_torn_line(tmp_path: pathlib.Path) -> None:
    first = run(tmp_path, only=["seq_len=128"])
    path = first.folder / runfile.FILE_NAME
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


@pytest.mark.parametrize(("key", "value"), [("device_name", "NVIDIA H200"), ("torch", "2.11.0"), ("driver", "580.1"), ("gpu_slug", "h200")])
def test_resume_on_another_kind_of_machine_is_refused(tmp_path: pathlib.Path, key: str, value: str) -> None:
    here: Environment = builders.environment()
    first = run(tmp_path, only=["seq_len=128"], environment=here)
    before = (first.folder / runfile.FILE_NAME).read_bytes()
    executor = FakeExecutor()
    message = refused(
        Exit.ENVIRONMENT, "cannot go on here", tmp_path, executor, resume=first.folder, environment=here.model_copy(update={key: value})
    )
    assert f"{key} was {getattr(here, key)} and is {value}" in message
    assert executor.jobs == [] and (first.folder / runfile.FILE_NAME).read_bytes() == before


def test_resume_with_another_configuration_is_refused(tmp_path: pathlib.Path) -> None:
    first = run(tmp_path, only=["seq_len=128"])
    changed = [cell.model_copy(update={"config_sha256": "0" * 64}) if cell.cell_id == IDS[3] else cell for cell in PLAN.cells]
    plan = plans.Plan(changed, [], [], 1.0, 3)
    assert IDS[3] in refused(Exit.USAGE, "configuration of cell", tmp_path, resume=first.folder, plan=plan)
    rerouted = [cell.model_copy(update={"route": cell.route.model_copy(update={"counters": ["sel.v1"]})}) for cell in PLAN.cells]
    refused(Exit.USAGE, "now routes to", tmp_path, resume=first.folder, plan=plans.Plan(rerouted, [], [], 1.0, 3))
    slower = matrices.parse(TEXT.replace("processes: 3", "processes: 3, warmup_s: 1"), "m.yaml")
    refused(Exit.USAGE, "measures with", tmp_path, resume=first.folder, matrix=slower)
    commented = matrices.parse(TEXT + "# a comment\n", "m.yaml")
    run(tmp_path, resume=first.folder, matrix=commented)


def test_resume_with_a_cell_that_was_not_planned_is_refused(tmp_path: pathlib.Path) -> None:
    part = plans.Plan(PLAN.cells[:4], [], [], 1.0, 3)
    first = run(tmp_path, plan=part)
    assert IDS[4] in refused(Exit.USAGE, "planned without cell", tmp_path, resume=first.folder)


@pytest.mark.parametrize("source", [Source(commit="b" * 40, dirty_sha256=None), Source(commit="a" * 40, dirty_sha256="c" * 64)])
def test_resume_with_other_code_is_refused(tmp_path: pathlib.Path, source: Source) -> None:
    first = run(tmp_path, only=["seq_len=128"])
    refused(Exit.USAGE, "the code here is", tmp_path, resume=first.folder, source=source)


def test_injections_reach_their_cell_alone_and_stay_on_resume(tmp_path: pathlib.Path) -> None:
    name = IDS[5]
    executor, again = FakeExecutor(), FakeExecutor()
    first = run(tmp_path, executor, injections=[f"slowdown=10%@{name}"], only=["seq_len=128"])
    run(tmp_path, again, resume=first.folder)
    for job in executor.jobs + again.jobs:
        assert (job.injection is not None) == (job.cell_id == name)
    assert [job for job in executor.jobs + again.jobs if job.injection and job.injection.percent == 10.0]
    refused(Exit.USAGE, "cannot join a run", tmp_path, resume=first.folder, injections=[f"oom@{name}"])


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


def test_plain_progress_has_counts_and_eta(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter(range(0, 1000, 10))
    reporter = PlainProgress(sys.stderr, now=lambda: float(next(seconds)))
    run(tmp_path, FakeExecutor({cell_id("train", 128, "v2"): Status.TIMEOUT}), only=["seq_len=128"], progress=reporter)
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert said.out == "" and lines[0] == "perfbench: 12 of 12 replicates to measure"
    assert len(lines) == 11 and lines[-1].startswith("perfbench: [12/12]") and lines[-1].endswith("ETA 0:00")
    assert any("timeout: planted" in line for line in lines) and any("tok/s, ETA 1:50" in line or "ETA 1:" in line for line in lines)


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
    with runner.prepared(TargetFit("cpu", None), "tests.perfbench.stub_measure:measure") as executor:
        executor.new_block()


def test_prepared_on_a_gpu_holds_its_lock_and_refuses_company(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    card = Card()
    nvml = FakeNvml(card)
    fit = TargetFit("cuda", gpu.GpuHandle(card.uuid, card.name, 0))
    with runner.prepared(fit, module=nvml):
        assert nvml.opened == 1, "held open, so that the driver stays awake between replicates"
        with pytest.raises(PerfbenchError, match="another perfbench measures"), runner.prepared(fit, module=nvml):
            pass
    assert nvml.opened == 0
    card.processes = [SimpleNamespace(pid=4321, usedGpuMemory=None)]
    for _ in range(2):
        with pytest.raises(PerfbenchError, match="4321") as caught, runner.prepared(fit, module=nvml):
            pass
        assert caught.value.exit_code is Exit.ENVIRONMENT


REAL = """
import pathlib, sys
sys.path.insert(0, {root!r})
from tests.perfbench.test_runner import CODE, HERE, MATRIX, PLAN
from perfbench import runner
from perfbench.environment import TargetFit
from perfbench.verdict import PerfbenchError
resume = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
try:
    with runner.prepared(TargetFit("cpu", None), "tests.perfbench.stub_measure:slow_measure") as executor:
        runner.run(PLAN, MATRIX, executor, runs_dir=pathlib.Path(sys.argv[1]), environment=HERE, source=CODE,
                   argv=["perfbench", "run", "m.yaml"], seed=7, only=["seq_len=128"], resume=resume)
except PerfbenchError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def real(tmp_path: pathlib.Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", REAL.format(root=str(ROOT)), str(tmp_path), *args]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for_rows(tmp_path: pathlib.Path, rows: int) -> pathlib.Path:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for path in tmp_path.glob("*/run.jsonl"):
            if path.read_bytes().count(b"\n") > rows:
                return path.parent
        time.sleep(0.02)
    raise AssertionError("the run wrote no rows in 20 s")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_killed_in_the_middle_then_resumed(
    tmp_path: pathlib.Path, real: Callable[..., subprocess.Popen[str]], sent: signal.Signals, code: int
) -> None:
    first = real()
    folder = wait_for_rows(tmp_path, 3)
    os.kill(first.pid, sent)
    said, _ = first.communicate(timeout=10)
    assert first.returncode == code
    if sent is signal.SIGINT:
        assert f"--resume {folder}" in said
    before = runfile.read(folder)
    assert 3 <= len(before.replicates) < 12
    second = real(str(folder))
    second.communicate(timeout=30)
    assert second.returncode == 0
    after = runfile.read(folder)
    assert after.replicates[: len(before.replicates)] == before.replicates, "finished replicates survive"
    assert len({(row.cell_id, row.replicate) for row in after.replicates}) == len(after.replicates) == 12
    assert all(row.status is Status.OK for row in after.replicates) and len(after.resumed) == 1


def test_two_runs_cannot_resume_one_folder(tmp_path: pathlib.Path, real: Callable[..., subprocess.Popen[str]]) -> None:
    real()
    folder = wait_for_rows(tmp_path, 1)
    refused(Exit.USAGE, "another perfbench is writing", tmp_path, resume=folder)


class Prover(FakeExecutor):
    """As a measuring process does: a row carries the proof that it was given, or one of its own."""

    def execute(self, job: Job) -> Replicate:
        self.before(job)
        self.jobs.append(job)
        status = self.ends.get(job.cell_id, Status.OK)
        proof = job.proof or builders.parity(worst=f"made for {job.cell_id} #{job.replicate}", ok=status is not Status.PARITY)
        if status is not Status.OK:
            proved = status in (Status.PARITY, Status.WRONG_PATH)
            ran = builders.planned_cell(Cell("train", 128, "v1", "off", dtype="fp32"), gpu=False).route
            route = ran if status is Status.WRONG_PATH else job.plan
            return failed(job, status, "planted").model_copy(update={"parity": proof if proved else None, "route": route})
        planned = PlannedCell(cell_id=job.cell_id, axes=job.axes, config_sha256=job.config_sha256, route=job.plan, expect=job.expect)
        return builders.replicate(planned, job.replicate, gpu=False, parity=proof)

    def unproved(self) -> list[str]:
        """Cells that had to prove themselves, in order."""
        return [job.cell_id for job in self.jobs if job.proof is None]


def planned_from(text: str) -> tuple[matrices.Matrix, plans.Plan]:
    matrix = matrices.parse(text, "m.yaml")
    return matrix, plans.build(matrix, only=[], capability=assumed("none"), settings=Settings())


def kind_of(job: Job) -> tuple[str | int, str | int]:
    return job.axes["workload"], job.axes["path"]


def test_a_route_is_proved_once_a_sitting(tmp_path: pathlib.Path) -> None:
    executor = Prover()
    finished = run(tmp_path, executor)
    kinds = [(workload, path) for workload in ("train", "forward") for path in ("v2", "dense")]
    assert len(executor.unproved()) == 4 and sorted(kind_of(job) for job in executor.jobs if job.proof is None) == sorted(kinds)
    for kind in kinds:
        first, *later = [job for job in executor.jobs if kind_of(job) == kind]
        assert first.proof is None and len(later) == 8 and {job.axes["seq_len"] for job in later} == {128, 256, 512}
        made = builders.parity(worst=f"made for {first.cell_id} #{first.replicate}", proved_in=f"{first.cell_id} #{first.replicate}")
        assert [job.proof for job in later] == [made] * 8, "the first row's own, and it says whose"
    assert [row.parity.proved_in is None for row in finished.run.replicates if row.parity] == [job.proof is None for job in executor.jobs]


def test_a_proof_serves_other_lengths_and_batches_alone(tmp_path: pathlib.Path) -> None:
    text = (
        TEXT.replace("[train, forward]", "[train]")
        .replace("[128, 256, 512]", "[128, 256]\n  batch: [1, 2]")
        .replace("processes: 3", "processes: 1")
    )
    text = text.replace("[v2, dense]", "[v2, masked, v1, auto]").replace("fa2: [off]", "fa2: [off, auto]").replace("[fp32]", "[fp32, bf16]")
    matrix, plan = planned_from(text)
    executor = Prover()
    run(tmp_path, executor, matrix=matrix, plan=plan)
    assert len(executor.jobs) == 64 and len(executor.unproved()) == 16
    for job in executor.jobs:
        if job.proof:
            prover = next(j for j in executor.jobs if job.proof.proved_in == f"{j.cell_id} #{j.replicate}")
            assert all(prover.axes[axis] == job.axes[axis] for axis in ("workload", "path", "fa2", "dtype"))


def test_a_proof_does_not_serve_another_route(tmp_path: pathlib.Path) -> None:
    """The same axes but the length, and yet another path: `adaptive` takes v1 below 1024 tokens and v2 from there."""
    text = (
        TEXT.replace("[v2, dense]", "[adaptive]")
        .replace("[128, 256, 512]", "[256, 512, 1024, 2048]")
        .replace("[train, forward]", "[train]")
    )
    matrix, plan = planned_from(text)
    executor = Prover()
    run(tmp_path, executor, matrix=matrix, plan=plan)
    assert len(executor.jobs) == 12 and len(executor.unproved()) == 2
    for job in executor.jobs:
        if job.proof:
            prover = next(j for j in executor.jobs if job.proof.proved_in == f"{j.cell_id} #{j.replicate}")
            assert prover.plan.counters == job.plan.counters


@pytest.mark.parametrize("status", [Status.PARITY, Status.CRASH, Status.OOM, Status.TIMEOUT])
def test_a_failed_parity_proves_nothing(tmp_path: pathlib.Path, status: Status) -> None:
    """Nor does a row that ended before its proof: the next cell of the route makes its own."""
    ends = dict.fromkeys((cell_id("train", seq_len, "v2") for seq_len in (128, 256)), status)
    matrix = matrices.parse(TEXT.replace("record_and_skip_larger", "record"), "m.yaml")
    executor = Prover(ends)
    seed = next(s for s in range(1000) if all(_first_in_order(s, name, [cell_id("train", 512, "v2")]) for name in ends))
    run(tmp_path, executor, matrix=matrix, seed=seed)
    mine = [job for job in executor.jobs if kind_of(job) == ("train", "v2")]
    assert [job.proof for job in mine[:3]] == [None] * 3 and mine[2].cell_id == cell_id("train", 512, "v2")
    assert {job.proof.proved_in for job in mine[3:] if job.proof} == {f"{mine[2].cell_id} #0"} and len(mine) == 5


def test_a_proof_ends_with_its_sitting(tmp_path: pathlib.Path) -> None:
    """A resumed run may be on another card: what was proved there is proved again here."""
    first, second = Prover(), Prover()
    folder = run(tmp_path, first, only=["seq_len=128"]).folder
    run(tmp_path, second, resume=folder)
    assert len(first.unproved()) == 4 and len(second.unproved()) == 4 and len(second.jobs) == 24
    own = {f"{job.cell_id} #{job.replicate}" for job in second.jobs if job.proof is None}
    assert {job.proof.proved_in for job in second.jobs if job.proof} == own


def test_a_proof_of_what_ran_is_not_one_of_what_was_planned(tmp_path: pathlib.Path) -> None:
    """A row that took another path than planned was proved on that path."""
    astray = cell_id("train", 128, "v2")
    executor = Prover({astray: Status.WRONG_PATH})
    seed = next(s for s in range(1000) if _first_in_order(s, astray, [cell_id("train", n, "v2") for n in (256, 512)]))
    run(tmp_path, executor, seed=seed)
    mine = [job for job in executor.jobs if kind_of(job) == ("train", "v2")]
    assert mine[0].cell_id == astray and mine[1].proof is None
    assert all(job.proof is not None and astray not in str(job.proof.proved_in) for job in mine[2:])


def test_those_that_prepare_together_are_of_one_block_and_know_their_company(tmp_path: pathlib.Path) -> None:
    matrix = matrices.parse(TEXT.replace("processes: 3", "processes: 2, prepare_together: 5"), "m.yaml")
    executor = FakeExecutor()
    run(tmp_path, executor, matrix=matrix, plan=plans.build(matrix, only=[], capability=assumed("none"), settings=Settings()))
    assert [len(batch) for batch in executor.prepared] == [5, 5, 2] * 2
    assert [key for batch in executor.prepared for key in batch] == executor.order
    assert [job.company for job in executor.jobs] == ([4] * 10 + [1] * 2) * 2


def test_without_the_option_nothing_prepares_ahead(tmp_path: pathlib.Path) -> None:
    executor = FakeExecutor()
    run(tmp_path, executor)
    assert executor.prepared == [] and {job.company for job in executor.jobs} == {0}


def test_what_a_smaller_cell_rules_out_does_not_prepare(tmp_path: pathlib.Path) -> None:
    matrix = matrices.parse(TEXT.replace("processes: 3", "processes: 1, prepare_together: 2"), "m.yaml")
    executor = FakeExecutor({cell_id("train", 128, "v2"): Status.OOM})
    finished = run(
        tmp_path, executor, matrix=matrix, plan=plans.build(matrix, only=[], capability=assumed("none"), settings=Settings()), seed=3
    )
    skipped = {row.cell_id for row in finished.run.replicates if row.status is Status.SKIPPED}
    at = executor.order.index((cell_id("train", 128, "v2"), 0))
    later = {name for batch in executor.prepared for name, _ in batch} - {name for name, _ in executor.order[: at + 2]}
    assert skipped and not skipped & later
