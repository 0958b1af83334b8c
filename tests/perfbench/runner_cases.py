"""A plan of twelve cells, an executor that only pretends, and the runner called with both."""

import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from perfbench.errors import Exit, PerfbenchError
from perfbench.records.job import Job, failed
from perfbench.records.rows import Replicate, Status
from perfbench.runner import run as runner
from tests.perfbench import builders
from tests.perfbench.plan_cases import CODE, planned_from

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
MATRIX, PLAN = planned_from(TEXT)
IDS = [cell.cell_id for cell in PLAN.cells]


def cell_id(workload: str, seq_len: int, path: str) -> str:
    fa2 = "fa2=off," if path == "v2" else ""
    return f"dtype=fp32,{fa2}path={path},seq_len={seq_len},workload={workload}"


class FakeExecutor:
    """Green rows; ``ends`` maps a cell to the status that it ends with, ``before`` runs first and
    may raise.
    """

    def __init__(
        self,
        ends: dict[str, Status] | None = None,
        before: Callable[[Job], None] = lambda job: None,
    ) -> None:
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


def run(
    tmp_path: pathlib.Path, executor: FakeExecutor | None = None, **changes: Any
) -> runner.Finished:
    values: dict[str, Any] = {
        "runs_dir": tmp_path,
        "environment": HERE,
        "source": CODE,
        "argv": ["perfbench", "run", "m.yaml"],
        "seed": 7,
    }
    return runner.run(
        changes.pop("plan", PLAN),
        changes.pop("matrix", MATRIX),
        executor or FakeExecutor(),
        **{**values, **changes},
    )


def refused(
    code: Exit,
    words: str,
    tmp_path: pathlib.Path,
    executor: FakeExecutor | None = None,
    **changes: Any,
) -> str:
    with pytest.raises(PerfbenchError, match=words) as caught:
        run(tmp_path, executor, **changes)
    assert caught.value.exit_code is code
    return str(caught.value)


def _first_in_order(seed: int, first: str, others: list[str]) -> bool:
    order = list(IDS)
    random.Random(f"{seed}-0").shuffle(order)
    return all(order.index(first) < order.index(other) for other in others)
