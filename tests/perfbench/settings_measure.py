"""A measuring function for real child processes that says which settings nsa reads there: instant,
and without torch.
"""

from __future__ import annotations

import json

from nsa import settings
from perfbench.records.job import Job, failed
from perfbench.records.rows import Replicate, Status
from perfbench.worker.clock import Clock
from perfbench.worker.telemetry import Sampler
from perfbench.worker.turn import Turn


def measure(job: Job, clock: Clock, sampler: Sampler, turn: Turn) -> Replicate:
    """A row whose reason is what the environment set for nsa, as JSON."""
    turn()
    return failed(job, Status.WRONG_PATH, json.dumps(settings.current().given()))
