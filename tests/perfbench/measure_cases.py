"""A workload that only counts its steps, a sampler that watches the timed window, and the measuring
function called with both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn

from nsa import engagement
from nsa.routing import BranchRoute
from perfbench.gate.hard_rules import ProofIndex, cell_findings
from perfbench.records import PlannedCell, Verdict
from perfbench.records.job import Job
from perfbench.records.rows import Replicate
from perfbench.worker import measure
from perfbench.worker.telemetry import Sampler, Window
from perfbench.worker.workloads import workload
from perfbench.worker.workloads.workload import Workload
from tests.perfbench import builders
from tests.perfbench.fakes import FakeClock, FakeSampler
from tests.perfbench.jobs import TINY, cell_of, route_of

STEP_S = 1 / 128  # exact in binary, so that counts of steps are exact too
PROOF = builders.parity(proved_in="another #0")
TELEMETRY = builders.telemetry(gpu=False)


@dataclass
class Stub:
    """A workload that only counts: each step engages what ``engages`` says for its number, once a
    layer.
    """

    engages: Callable[[int], tuple[BranchRoute, ...]]
    clock: FakeClock | None = None
    step_s: float = 0.0
    steps: int = 0
    model: nn.Module = field(default_factory=lambda: nn.Linear(1, 1))

    def step(self) -> None:
        for branch in self.engages(self.steps) * TINY.num_layers:
            engagement.record(branch)
        self.steps += 1
        if self.clock is not None:
            self.clock.advance(self.step_s)


def stub(monkeypatch: pytest.MonkeyPatch, path: str = "v2", **changes: Any) -> Stub:
    branches = route_of(cell_of(path)).branches
    made = Stub(changes.pop("engages", lambda _: branches), **changes)
    monkeypatch.setattr(workload, "build", lambda asked: Workload(made.step, 64, made.model))
    return made


def clock_faults(cell: PlannedCell, row: Replicate, *, gpu: bool) -> list[str]:
    """Why the gate calls the clock of ``row`` wrong; empty where it does not."""
    proofs = ProofIndex.of(builders.make_run([cell], gpu=gpu))
    findings = cell_findings(cell, [row], None, proofs)
    return [f.reason for f in findings if (f.verdict, f.rule) == (Verdict.IMPOSSIBLE, "clock")]


class Watch(FakeSampler):
    """Notes the clock and the steps when the timed window opens and closes."""

    def __init__(self, clock: FakeClock, counter: Stub | None = None) -> None:
        super().__init__(TELEMETRY)
        self._clock, self._counter = clock, counter
        self.opened_s = self.closed_s = -1.0
        self.steps_before = -1

    @contextmanager
    def window(self) -> Iterator[Window]:
        self.opened_s = self._clock.now()
        self.steps_before = self._counter.steps if self._counter else -1
        with super().window() as opened:
            yield opened
        self.closed_s = self._clock.now()


def run(asked: Job, clock: Any = None, sampler: Sampler | None = None) -> Replicate:
    return measure.measure(asked, clock or FakeClock(STEP_S), sampler or FakeSampler(TELEMETRY))


def no_build(asked: Job) -> Workload:
    raise AssertionError("the model was built for a cell that must not be timed")


def assert_no_speed(row: Replicate) -> None:
    assert row.tok_per_s is None and row.samples_s == [] and row.physics is None
