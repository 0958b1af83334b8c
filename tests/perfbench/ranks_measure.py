"""The real measuring function on several ranks; the job's seed plants a fault on the last one."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from nsa import engagement
from nsa.model import TinyLM
from perfbench.records import Job, Replicate
from perfbench.worker import measure as real
from perfbench.worker.clock import Clock
from perfbench.worker.parity import layer
from perfbench.worker.ranks import model
from perfbench.worker.ranks.world import current
from perfbench.worker.step_proof import prove
from perfbench.worker.telemetry import Sampler
from perfbench.worker.turn import Turn
from perfbench.worker.workloads import ranks_step, workload
from perfbench.worker.workloads.graphs import Compiled

KILLED, HANGS, OTHER_PATH, NOT_REDUCED, LOST, RAISES, NO_MEMORY, SLOW_WIRE, LATE = range(101, 110)
SLOW_S = 0.3  # of each reduction, many times what the step computes
LATE_S = 0.5  # behind the other rank, as after a profile
CALLS_BEFORE = 2  # of the model, green
steps: Any = ranks_step


class FakeGrapher:
    """Replays like a graph on a CPU: the same work on the same tensors, and nothing is counted."""

    stream = staticmethod(nullcontext)

    def warm(self, work: Callable[[], None]) -> None:
        work()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()

        def replay() -> None:
            token = engagement._ACTIVE.set(())
            work()
            engagement._ACTIVE.reset(token)

        return replay


def measure(job: Job, clock: Clock, sampler: Sampler, turn: Turn) -> Replicate:
    ranks = current()
    if ranks is not None:
        _without_machine_code()
    if ranks is not None and ranks.rank == ranks.size - 1:
        _plant(job.seed)
    return real.measure(job, clock, sampler, turn)


def _without_machine_code() -> None:
    """Which takes a minute, of the step and of the attention that is compared with the oracle."""
    seams: Any = layer
    seams.compiled_of = lambda function: function
    steps.Compiled = functools.partial(Compiled, backend="eager")
    steps.RanksGrapher = FakeGrapher


def _plant(fault: int) -> None:
    seams: Any = workload
    if fault == LATE:
        late: Any = real
        physics = real._physics

        def _physics_later(*given: Any) -> Any:
            time.sleep(LATE_S)
            return physics(*given)

        late._physics = _physics_later
    elif fault == NO_MEMORY:
        proof: Any = prove
        proof.begin_alike = _no_memory
    elif fault == OTHER_PATH:
        seams.TinyLM = lambda config, path, fa2: TinyLM(config, "masked", fa2)
    elif fault in _HOOKS:
        wrap: Any = model.wrap

        def wrapped(*given: Any) -> Any:
            made = wrap(*given)
            if hasattr(made, "set_custom_reduce_scatter"):  # fsdp, of its last group
                made.set_custom_reduce_scatter(_SlowReduceScatter())
                dist.all_gather = _slow_gather  # by which weights are gathered once, untimed
            else:
                made.register_comm_hook(None, _HOOKS[fault])
            return made

        steps.wrap = wrapped
    elif fault in (KILLED, HANGS, RAISES):
        seams.TinyLM = lambda *given: _Faulty(*given, fault)


def _no_memory(*given: Any) -> None:
    raise torch.OutOfMemoryError("planted")


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


def _slow(state, bucket):  # type: ignore[no-untyped-def]
    time.sleep(SLOW_S)
    return _reduced(bucket.buffer()).then(lambda found: found.value()[0])


_HOOKS = {NOT_REDUCED: _not_reduced, LOST: _lost, SLOW_WIRE: _slow}


def _slow_gather(parts: list[torch.Tensor], x: torch.Tensor, group: Any) -> None:
    time.sleep(SLOW_S)
    _GATHER(parts, x, group)


_GATHER = dist.all_gather


class _SlowReduceScatter:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        time.sleep(SLOW_S)
        dist.reduce_scatter_single(output_tensor, input_tensor, op, group)
