"""Runs on fleets: a tiny matrix of stubs on a CPU, planned as a command would."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from perfbench.machine import collect_environment, source_of
from perfbench.records import Replicate, read_run
from perfbench.runner import RunSpec, run_on_fleet
from perfbench.runner.executor import ROOT
from perfbench.runner.fleet import Fleet
from perfbench.runner.run import Finished
from tests.perfbench.plan_cases import planned_from

STUB = "tests.fleet.stub_measure:measure"
TEXT = """\
version: 1
name: fleet
target: {gpu: none}
model: tiny
axes:
  workload: [forward]
  seq_len: [64, 128, 192]
  path: [dense]
  dtype: [fp32]
measure: {processes: 5, warmup_s: 0.02, min_sample_ms: 20, samples: 3}
limits: {timeout_s: 60}
"""


Left = Callable[[], list[int]]


def spec_of(text: str, **changes: object) -> RunSpec:
    matrix, plan = planned_from(text)
    environment, source = collect_environment("cpu"), source_of(ROOT)
    made = RunSpec(plan, matrix, environment, source, ["perfbench", "run", "m.yaml"], seed=3)
    return replace(made, **changes)


class Watching:
    """A progress that gives each finished row to ``act``."""

    def __init__(self, act: Callable[[Replicate], None] = lambda row: None) -> None:
        self.notes: list[str] = []
        self._act = act

    def start(self, total: int, done: int) -> None: ...
    def begin(self, cell_id: str, replicate: int) -> None: ...
    def stop(self) -> None: ...

    def finished(self, row: Replicate, *, covers: int = 1) -> None:
        self._act(row)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def nothing_left() -> Left:
    """The measuring servers of these tests that are still there; it looks until there is none, for
    20 s.
    """

    def left() -> list[int]:
        deadline = time.monotonic() + 20
        while True:
            found = [one.pid for one in psutil.process_iter() if _is_measuring(one)]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    return left


def _is_measuring(one: psutil.Process) -> bool:
    try:
        words = " ".join(one.cmdline())
    except psutil.Error:
        return False
    return "perfbench.worker" in words and "tests.fleet" in words


def on_fleet(spec: RunSpec, fleet: Fleet, **options: Any) -> Finished:
    """As `perfbench run` calls it."""
    here = replace(spec, cards=[card.line for card in fleet.cards])
    return run_on_fleet(here, fleet, **options)


def rows_of(folder: Path) -> dict[tuple[str, int], str]:
    """(cell, replicate) -> node of the last row."""
    return {(row.cell_id, row.replicate): row.node or "" for row in read_run(folder).replicates}
