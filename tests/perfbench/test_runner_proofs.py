"""A parity proof serves the later cells of its own route in the same session, and no others."""

import pathlib

import pytest

from perfbench.matrix import matrix as matrices
from perfbench.records.cells import Cell
from perfbench.records.job import Job, failed
from perfbench.records.rows import PlannedCell, Replicate, Status
from tests.perfbench import builders
from tests.perfbench.plan_cases import planned_from
from tests.perfbench.runner_cases import TEXT, FakeExecutor, _first_in_order, cell_id, run


class Prover(FakeExecutor):
    """As a measuring process does: a row carries the proof that it was given, or one of its own."""

    def execute(self, job: Job) -> Replicate:
        self.before(job)
        self.jobs.append(job)
        status = self.ends.get(job.cell_id, Status.OK)
        proof = job.proof or builders.parity(
            worst=f"made for {job.cell_id} #{job.replicate}", ok=status is not Status.PARITY
        )
        if status is not Status.OK:
            proved = status in (Status.PARITY, Status.WRONG_PATH)
            ran = builders.planned_cell(
                Cell("train", 128, "v1", "off", dtype="fp32"), gpu=False
            ).route
            route = ran if status is Status.WRONG_PATH else job.plan
            return failed(job, status, "planted").model_copy(
                update={"parity": proof if proved else None, "route": route}
            )
        planned = PlannedCell(
            cell_id=job.cell_id,
            axes=job.axes,
            config_sha256=job.config_sha256,
            route=job.plan,
            expect=job.expect,
        )
        return builders.replicate(planned, job.replicate, gpu=False, parity=proof)

    def prover_of(self, job: Job) -> Job:
        """The job that made the proof which ``job`` was given."""
        assert job.proof is not None
        return next(
            one for one in self.jobs if job.proof.proved_in == f"{one.cell_id} #{one.replicate}"
        )

    def unproved(self) -> list[str]:
        """Cells that had to prove themselves, in order."""
        return [job.cell_id for job in self.jobs if job.proof is None]


def kind_of(job: Job) -> tuple[str | int, str | int]:
    return job.axes.workload, job.axes.path


def test_a_route_is_proved_once_a_session(tmp_path: pathlib.Path) -> None:
    executor = Prover()
    finished = run(tmp_path, executor)
    kinds = [(workload, path) for workload in ("train", "forward") for path in ("v2", "dense")]
    assert len(executor.unproved()) == 4 and sorted(
        kind_of(job) for job in executor.jobs if job.proof is None
    ) == sorted(kinds)
    for kind in kinds:
        first, *later = [job for job in executor.jobs if kind_of(job) == kind]
        assert (
            first.proof is None
            and len(later) == 8
            and {job.axes.seq_len for job in later} == {128, 256, 512}
        )
        made = builders.parity(
            worst=f"made for {first.cell_id} #{first.replicate}",
            proved_in=f"{first.cell_id} #{first.replicate}",
        )
        assert [job.proof for job in later] == [made] * 8, "the first row's own, and it says whose"
    assert [row.parity.proved_in is None for row in finished.run.replicates if row.parity] == [
        job.proof is None for job in executor.jobs
    ]


def test_a_proof_serves_other_lengths_and_batches_alone(tmp_path: pathlib.Path) -> None:
    text = (
        TEXT.replace("[train, forward]", "[train]")
        .replace("[128, 256, 512]", "[128, 256]\n  batch: [1, 2]")
        .replace("processes: 3", "processes: 1")
    )
    text = (
        text.replace("[v2, dense]", "[v2, masked, v1, auto]")
        .replace("fa2: [off]", "fa2: [off, auto]")
        .replace("[fp32]", "[fp32, bf16]")
    )
    matrix, plan = planned_from(text)
    executor = Prover()
    run(tmp_path, executor, matrix=matrix, plan=plan)
    assert len(executor.jobs) == 64 and len(executor.unproved()) == 16
    for job in executor.jobs:
        if job.proof:
            prover = executor.prover_of(job)
            assert all(
                getattr(prover.axes, axis) == getattr(job.axes, axis)
                for axis in ("workload", "path", "fa2", "dtype")
            )


def test_a_proof_does_not_serve_another_route(tmp_path: pathlib.Path) -> None:
    """The same axes but the length, and yet another path: `adaptive` takes v1 below 1024 tokens and
    v2 from there.
    """
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
            prover = executor.prover_of(job)
            assert prover.plan.counters == job.plan.counters


@pytest.mark.parametrize("status", [Status.PARITY, Status.CRASH, Status.OOM, Status.TIMEOUT])
def test_a_failed_parity_proves_nothing(tmp_path: pathlib.Path, status: Status) -> None:
    """A row that ended before its proof proves nothing either: the next cell of the route makes its
    own.
    """
    ends = dict.fromkeys((cell_id("train", seq_len, "v2") for seq_len in (128, 256)), status)
    matrix = matrices.parse_matrix(TEXT.replace("record_and_skip_larger", "record"), "m.yaml")
    executor = Prover(ends)
    seed = next(
        s
        for s in range(1000)
        if all(_first_in_order(s, name, [cell_id("train", 512, "v2")]) for name in ends)
    )
    run(tmp_path, executor, matrix=matrix, seed=seed)
    mine = [job for job in executor.jobs if kind_of(job) == ("train", "v2")]
    assert [job.proof for job in mine[:3]] == [None] * 3 and mine[2].cell_id == cell_id(
        "train", 512, "v2"
    )
    assert {job.proof.proved_in for job in mine[3:] if job.proof} == {
        f"{mine[2].cell_id} #0"
    } and len(mine) == 5


def test_a_proof_ends_with_its_session(tmp_path: pathlib.Path) -> None:
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
    seed = next(
        s
        for s in range(1000)
        if _first_in_order(s, astray, [cell_id("train", n, "v2") for n in (256, 512)])
    )
    run(tmp_path, executor, seed=seed)
    mine = [job for job in executor.jobs if kind_of(job) == ("train", "v2")]
    assert mine[0].cell_id == astray and mine[1].proof is None
    assert all(job.proof is not None and astray not in str(job.proof.proved_in) for job in mine[2:])


def test_all_replicates_of_a_cell_are_asked_for_the_digest_of_the_first_ones_inputs(
    tmp_path: pathlib.Path,
) -> None:
    executor = Prover()
    run(tmp_path, executor)
    for name in {job.cell_id for job in executor.jobs}:
        jobs = [job for job in executor.jobs if job.cell_id == name]
        first = next(job for job in jobs if job.replicate == 0)
        assert {job.proof_seed for job in jobs} == {first.seed}
        assert len({job.seed for job in jobs}) == len(jobs) == 3, "each times inputs of its own"
