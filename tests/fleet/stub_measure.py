"""What the cells of a fleet's tests do: the batch says how long a replicate takes, without
torch.
"""

from __future__ import annotations

import os
import time

from perfbench.machine import environment_variable
from perfbench.records import Job, Replicate, Status
from perfbench.worker.clock import Clock
from perfbench.worker.telemetry import Sampler
from perfbench.worker.turn import Turn

HANG = 5  # a batch


def measure(job: Job, clock: Clock, sampler: Sampler, turn: Turn) -> Replicate:
    """A row whose reason holds the process and its compiler's cache."""
    if job.axes.batch == HANG:
        time.sleep(600)
    turn()
    time.sleep(0.05)
    facts = (os.getpid(), environment_variable("TRITON_CACHE_DIR"))
    return Replicate(
        cell_id=job.cell_id,
        replicate=job.replicate,
        axes=job.axes,
        config_sha256=job.config_sha256,
        status=Status.OK,
        reason=" ".join(map(str, facts)),
        started_utc="2026-01-02T03:04:05+00:00",
        wall_s=0.05,
        steps_per_sample=1,
        tokens_per_step=job.axes.seq_len,
        samples_s=[0.05],
        tok_per_s=job.axes.seq_len / 0.05,
    )
