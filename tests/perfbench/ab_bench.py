"""A repository of two commits and stand-ins for the machine: what the tests of `ab` and of
`check`'s second stage share.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nsa.routing import Capability
from nsa.settings import Settings
from perfbench.commands import app, measuring, outcome
from perfbench.machine.environment import TargetFit
from perfbench.matrix import plan as plans
from perfbench.matrix.matrix import Matrix
from perfbench.records.job import Job
from perfbench.records.rows import Replicate, Status
from perfbench.runner import executor
from perfbench.runner.ab import checkout, schedule, version_plan
from tests.perfbench import builders, repositories, version_measure

MATRIX = """\
version: 1
name: small
target: {gpu: none}
model: tiny
axes: {workload: [forward], seq_len: [128, 256], path: [v2], fa2: [off], dtype: [fp32]}
measure: {processes: 4}
gate: {min_effect_pct: 5, tolerance_pct: 1, min_replicates: 2, confirm_pairs: 8}
"""
SHORT, LONG = (f"dtype=fp32,fa2=off,path=v2,seq_len={n},workload=forward" for n in (128, 256))


@dataclass
class FakeSide:
    """One side's executor: green rows at ``speed``, written into the shared ``log``.

    ``hot``: throttled once.
    """

    name: str
    speed: float
    log: list[tuple[str, str, int]]
    ends: dict[str, Status] = field(default_factory=dict)
    hot: set[tuple[str, int]] = field(default_factory=set)
    interrupt_at: int | None = None
    jobs: list[Job] = field(default_factory=list)

    def new_block(self) -> None:
        self.log.append((self.name, "block", -1))

    def prepare(self, jobs: Sequence[Job]) -> None:
        self.log.append((self.name, "ready", -1))

    def close(self) -> None: ...

    def execute(self, job: Job) -> Replicate:
        if len(self.jobs) == self.interrupt_at:
            raise KeyboardInterrupt
        self.jobs.append(job)
        self.log.append((self.name, job.cell_id, job.replicate))
        if job.cell_id in self.ends:
            return executor.failed(job, self.ends[job.cell_id], "planted")
        slower = 1 - (job.injection.percent or 0.0) / 100 if job.injection else 1.0
        row = version_measure.row_of(job, self.speed * slower)
        if (job.cell_id, job.replicate) in self.hot:
            self.hot.discard((job.cell_id, job.replicate))
            return row.model_copy(
                update={"telemetry": builders.telemetry(gpu=False, throttled=True)}
            )
        return row


@dataclass
class Bench:
    """A repository of two commits (1000 and 900 tok/s), and what stands in for the machine."""

    repository: Path
    commits: list[str]
    a: FakeSide
    b: FakeSide
    current: FakeSide
    log: list[tuple[str, str, int]]
    held: list[bool]  # of each measurement: whether its cards were held before

    def run(self, *argv: str) -> int:
        return app.invoke(argv)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("ab") / "repository"
    return folder, repositories.make(folder, 1000.0, 900.0)


@pytest.fixture
def bench(
    template: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Bench:
    """In an empty folder with small.yaml; all executors are fakes."""
    monkeypatch.setattr(outcome, "CHECKOUT", template[0])
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(MATRIX, encoding="utf-8")
    random.seed(5)
    log: list[tuple[str, str, int]] = []
    made = Bench(
        *template,
        FakeSide("a", 1000.0, log),
        FakeSide("b", 1000.0, log),
        FakeSide("current", 1000.0, []),
        log,
        [],
    )

    @contextmanager
    def prepared(fit: TargetFit) -> Iterator[tuple[FakeSide]]:
        made.held.append(fit.held)
        yield (made.current,)

    @contextmanager
    def both(
        fit: TargetFit, sides: tuple[checkout.Checkout, checkout.Checkout]
    ) -> Iterator[tuple[FakeSide, FakeSide]]:
        made.held.append(fit.held)
        yield made.a, made.b

    monkeypatch.setattr(measuring, "prepared_executors", prepared)
    monkeypatch.setattr(schedule, "prepared_versions", both)
    monkeypatch.setattr(schedule, "plan_of_version", plan_here)  # half a second of process each
    monkeypatch.setattr(outcome.Outcome, "write_report", lambda judged, out=None: [])
    # Traces have tests of their own: tests/perfbench/test_trace.py.
    monkeypatch.setattr("perfbench.tracing.trace_on_red", lambda *arguments, **options: [])
    return made


def plan_here(
    one: checkout.Checkout, matrix: Matrix, only: Sequence[str], capability: Capability
) -> version_plan.VersionPlan:
    """The plan that the side's own process would return, whose nsa differs only in the marker."""
    return version_plan.VersionPlan(
        one,
        plans.build_plan(matrix, only=list(only), capability=capability, settings=Settings()),
        matrix.model.to_mapping(),
    )
