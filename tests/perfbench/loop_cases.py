"""Jobs of workload train_loop on the CPU, and a step whose capture replays without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nsa import engagement
from nsa.train import step as train_step
from perfbench.records import Job, StepProof
from perfbench.worker.step_proof.prove import prove
from perfbench.worker.workloads import train_loop, workload
from perfbench.worker.workloads.graphs import Compiled
from tests.perfbench.jobs import TINY, job
from tests.perfbench.measure_cases import PROOF


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are made in the measuring process: no start of another one in each test."""
    monkeypatch.setattr(train_loop, "WORKERS", 0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that captures; graphs that nothing turns into machine code."""

    def capture(work: Callable[[], None], device: Any) -> Callable[[], None]:
        work()
        replays = iter(range(10**9))

        def replay() -> None:  # as a graph's: nothing is counted
            if next(replays) == 0:  # a capture runs nothing, and here it did
                return
            token = engagement._ACTIVE.set(())
            work()
            engagement._ACTIVE.reset(token)

        return replay

    body = train_step.TrainStep._body

    def of_fresh_tensors(self: Any, *rest: Any) -> None:
        self.witness.__self__._seen.clear()  # a graph fills the same ones, and calls no witness
        body(self, *rest)

    monkeypatch.setattr(train_step.TrainStep, "_body", of_fresh_tensors)
    monkeypatch.setattr(train_step, "why_no_graph", lambda config, world: "")
    monkeypatch.setattr(train_step, "capture", capture)
    monkeypatch.setattr(train_step.TrainStep, "_on_side_stream", lambda self, work: work())
    monkeypatch.setattr(workload, "Compiled", lambda module: Compiled(module, backend="eager"))


def of(path: str = "masked", seq_len: int = 112, **axes: Any) -> Job:
    asked = job(path, "train_loop", seq_len, proof=PROOF, batch=axes.pop("batch", 2))
    return asked.model_copy(update={"axes": replace(asked.axes, **axes)})


def step_of(asked: Job) -> StepProof:
    """The third step, or the first after a capture, whose gradients are clipped."""
    work = workload.build(asked)
    for _ in range(2 if asked.axes.cuda_graph == "off" else 1):
        work.step()
    line = prove(work, asked, TINY)
    work.close()
    return line
