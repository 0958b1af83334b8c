"""The real measuring function on several ranks; the job's seed plants a fault on the last one."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist

from nsa.model import TinyLM
from perfbench.records import Job, Replicate
from perfbench.worker import measure as real
from perfbench.worker.clock import Clock
from perfbench.worker.ranks import model
from perfbench.worker.ranks.world import current
from perfbench.worker.telemetry import Sampler
from perfbench.worker.turn import Turn
from perfbench.worker.workloads import workload

KILLED, HANGS, OTHER_PATH, NOT_REDUCED, LOST, RAISES = range(101, 107)
CALLS_BEFORE = 2  # of the model, green


def measure(job: Job, clock: Clock, sampler: Sampler, turn: Turn) -> Replicate:
    ranks = current()
    if ranks is not None and ranks.rank == ranks.size - 1:
        _plant(job.seed)
    return real.measure(job, clock, sampler, turn)


def _plant(fault: int) -> None:
    seams: Any = workload
    if fault == OTHER_PATH:
        seams.TinyLM = lambda config, path, fa2: TinyLM(config, "masked", fa2)
    elif fault in (NOT_REDUCED, LOST):
        wrap: Any = model.wrap

        def wrapped(*given: Any) -> Any:
            made = wrap(*given)
            made.register_comm_hook(None, _not_reduced if fault == NOT_REDUCED else _lost)
            return made

        seams.wrap = wrapped
    elif fault in (KILLED, HANGS, RAISES):
        seams.TinyLM = lambda *given: _Faulty(*given, fault)


class _Faulty(TinyLM):
    def __init__(self, config: Any, path: Any, fa2: Any, fault: int) -> None:
        super().__init__(config, path, fa2)
        self.fault, self.calls = fault, 0

    def forward(self, *given: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls > CALLS_BEFORE:
            if self.fault == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == RAISES:
                raise RuntimeError("planted")
            while True:  # a signal ends one pause
                signal.pause()
        return super().forward(*given, **options)


def _reduced(x: torch.Tensor) -> Any:
    return dist.all_reduce(x / dist.get_world_size(), async_op=True).get_future()


# torch refuses hooks whose annotations are text
def _not_reduced(state, bucket):  # type: ignore[no-untyped-def]
    own = bucket.buffer().clone()
    return _reduced(bucket.buffer()).then(lambda found: own)


def _lost(state, bucket):  # type: ignore[no-untyped-def]
    return _reduced(torch.zeros_like(bucket.buffer())).then(lambda found: found.value()[0])
