"""A measuring function for real child processes of an A/B: its speed is what the imported `nsa`
says in nsa/marker.py.
"""

from __future__ import annotations

import random
import time

from perfbench.records.job import Job
from perfbench.records.rows import PlannedCell, Replicate
from perfbench.worker.clock import Clock
from perfbench.worker.telemetry import Sampler
from perfbench.worker.turn import Turn
from tests.perfbench import builders


def measure(job: Job, clock: Clock, sampler: Sampler, turn: Turn) -> Replicate:
    from nsa import marker  # type: ignore[attr-defined]  # the tests' repositories have it

    turn()
    at = time.monotonic_ns()
    slower = 1 - (job.injection.percent or 0.0) / 100 if job.injection else 1.0
    return row_of(job, marker.SPEED * slower).model_copy(
        update={"reason": f"at={at} file={marker.__file__}"}
    )


def row_of(job: Job, speed: float) -> Replicate:
    """A green row, with 0.1 % of noise that no two processes share."""
    cell = PlannedCell(
        cell_id=job.cell_id,
        axes=job.axes,
        config_sha256=job.config_sha256,
        route=job.plan,
        expect=job.expect,
        layers=job.model["num_layers"],
    )
    return builders.replicate(
        cell, job.replicate, tok_per_s=speed * random.gauss(1, 0.001), gpu=False
    )
