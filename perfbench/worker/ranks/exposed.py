"""What the communication of a step costs that its computation does not hide."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from perfbench.records import Job, RanksLine
from perfbench.worker.clock import Clock
from perfbench.worker.ranks.model import backend_of
from perfbench.worker.timing import Timed

SAMPLES = 5  # as long as the timed ones each
_NO_SWITCH = (
    f"torch {torch.__version__} gives fsdp no other collectives (set_custom_all_gather); compare"
    " with the step of world_size 1"
)


def ranks_line(
    job: Job, clock: Clock, unsynchronised: Callable[[], None] | None, timed: Timed
) -> RanksLine:
    """Times ``unsynchronised`` by ``clock``, the slowest rank's, after ``timed``; no rank's line.

    Weights differ between the ranks afterwards.
    """
    line = RanksLine(parallel=job.axes.parallel, backend=backend_of(job.device), ranks=[])
    if unsynchronised is None:
        absent = dict.fromkeys(("unsynchronised_step_s", "exposed_s"), _NO_SWITCH)
        return line.model_copy(update={"absent": absent})
    clock.time_steps(unsynchronised, 1)
    steps = timed.steps_per_sample
    alone_s = statistics.median(
        clock.time_steps(unsynchronised, steps) / steps for _ in range(SAMPLES)
    )
    found = {"unsynchronised_step_s": alone_s, "exposed_s": timed.step_s - alone_s}
    return line.model_copy(update=found)
