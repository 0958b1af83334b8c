"""A matrix with sentinels, an executor whose cells throttle or fail on request, and the runner
called with both.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from perfbench.records.job import Job, failed
from perfbench.records.rows import PlannedCell, Replicate, Status
from perfbench.runner import run as runner
from tests.perfbench import builders
from tests.perfbench.plan_cases import CODE, planned_from

CARD, OTHER_CARD = "ab" * 32, "cd" * 32
SENTINELS = ("gemm", "copy", "sdpa_frozen")
TEXT = """\
version: 1
name: t
target: {gpu: none}
model: tiny
axes:
  workload: [forward]
  seq_len: [128, 256]
  path: [v2, dense]
  fa2: [off]
  dtype: [fp32]
measure: {processes: 3, throttle_retries: 2}
limits: {timeout_s: 30, oom: record_and_skip_larger}
sentinels: [gemm, copy, sdpa_frozen]
"""


class Executor:
    """Green rows; ``hot`` lists how often a cell (or sentinel) and replicate throttles first,
    ``ends`` how one fails.
    """

    def __init__(
        self,
        hot: dict[tuple[str, int], int] | None = None,
        ends: dict[tuple[str, int], Status] | None = None,
    ) -> None:
        self.hot, self.ends = dict(hot or {}), dict(ends or {})
        self.jobs: list[Job] = []
        self.log: list[str] = []
        self.prepared: list[list[str]] = []

    def new_block(self) -> None:
        self.log.append("block")

    def prepare(self, jobs: Sequence[Job]) -> None:
        self.prepared.append([job.cell_id for job in jobs])

    def execute(self, job: Job) -> Replicate:
        key = job.cell_id, job.replicate
        self.jobs.append(job)
        self.log.append(job.sentinel or job.cell_id)
        if key in self.ends:
            return failed(job, self.ends[key], "planted")
        hot = self.hot.get(key, 0) > 0
        self.hot[key] = self.hot.get(key, 0) - 1
        reasons = ["hw_thermal_slowdown"] if hot else []
        seen = builders.telemetry(throttled=hot, clock_event_reasons=reasons)
        cell = PlannedCell(
            cell_id=job.cell_id,
            axes=job.axes,
            config_sha256=job.config_sha256,
            route=job.plan,
        )
        speed = 100.0 + len(self.jobs)
        row = builders.replicate(
            cell, job.replicate, tok_per_s=speed, telemetry=seen, device_uuid_sha256=None
        )
        return row.model_copy(update={"axes": job.axes})

    def close(self) -> None: ...

    @property
    def cells(self) -> list[tuple[str, int]]:
        return [(job.cell_id, job.replicate) for job in self.jobs if job.sentinel is None]

    @property
    def sentinels(self) -> list[tuple[str, int]]:
        return [(job.sentinel, job.replicate) for job in self.jobs if job.sentinel is not None]


def run(
    folder: pathlib.Path,
    executor: Executor,
    text: str = TEXT,
    card: str | None = CARD,
    **changes: Any,
) -> runner.Finished:
    matrix, plan = planned_from(text)
    spec = runner.RunSpec(
        plan,
        matrix,
        builders.environment(gpu_uuid_sha256=card),
        CODE,
        ["perfbench", "run", "m.yaml"],
        seed=7,
        only=changes.pop("only", []),
        injections=changes.pop("injections", []),
    )
    values: dict[str, Any] = {
        "runs_dir": folder,
        "pause": lambda seconds: executor.log.append(f"pause {seconds:g}"),
    }
    return runner.run_matrix(spec, executor, **{**values, **changes})


IDS = [cell.cell_id for cell in planned_from(TEXT)[1].cells]
