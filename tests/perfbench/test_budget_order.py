"""A budget is spent on the least sure cells first, by what was known before the first replicate."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from perfbench.gate import least_sure_first, prior_half_pct
from perfbench.records import Job, Replicate
from perfbench.runner import run as runner
from tests.perfbench import builders as b
from tests.perfbench.plan_cases import planned_from
from tests.perfbench.runner_cases import IDS, TEXT, FakeExecutor, run

MATRIX, PLAN = planned_from(TEXT.replace("processes: 3", "processes: 5"))
# the last third of the plan is the least sure, one of them because nobody knows it
PRIOR = {cell_id: float(place) for place, cell_id in enumerate(IDS)}
UNKNOWN = IDS[0]
del PRIOR[UNKNOWN]


class Timed(FakeExecutor):
    """Every replicate takes one second of the budget, whatever its speed."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.clock_s, self._factor = 0.0, factor

    def execute(self, job: Job) -> Replicate:
        self.clock_s += 1.0
        row = super().execute(job)
        slower = job.replicate % 2 and job.cell_id in IDS[3:6]
        speed = self._factor * (0.5 if slower else 1.0)
        assert row.tok_per_s is not None
        return row.model_copy(
            update={
                "tok_per_s": row.tok_per_s * speed,
                "samples_s": [one / speed for one in row.samples_s],
            }
        )


def measured(tmp_path: Path, seconds: float, executor: Timed, **changes: object) -> runner.Finished:
    spec = {"plan": PLAN, "matrix": MATRIX, "prior_half_pct": PRIOR, **changes}
    return run(tmp_path, executor, budget_s=seconds, now=lambda: executor.clock_s, **spec)


def test_every_cell_has_what_a_verdict_needs_and_the_least_sure_have_more(tmp_path: Path) -> None:
    executor, cells = Timed(), len(IDS)
    extra = 2 * 3  # both further replicates of the first of four groups of three
    finished = measured(tmp_path, 3 * cells + extra - 0.5, executor)
    counts = Counter(cell_id for cell_id, _ in executor.order)
    richer = {cell_id for cell_id, count in counts.items() if count == 5}
    assert richer == {UNKNOWN, *IDS[-2:]} and set(counts.values()) == {3, 5}
    assert {cell_id for cell_id, _ in executor.order[: 3 * cells]} == set(IDS)
    assert len(finished.missing) == 2 * cells - extra


@pytest.mark.parametrize("seconds", [40.5, 47.5])
def test_what_is_measured_tonight_does_not_change_the_order(tmp_path: Path, seconds: float) -> None:
    """Else a cell that looks slow would be looked at more often, and its test would not hold."""
    one, other = Timed(), Timed(factor=0.5)
    measured(tmp_path / "one", seconds, one)
    measured(tmp_path / "other", seconds, other)
    assert one.order == other.order and len(one.order) > 36


def test_a_resumed_run_keeps_its_order_and_ends_whole(tmp_path: Path) -> None:
    first, rest = Timed(), Timed()
    finished = measured(tmp_path, 40.5, first)
    again = measured(tmp_path, 100.0, rest, prior_half_pct={}, resume=finished.folder)
    assert again.missing == [] and len(first.order + rest.order) == 5 * len(IDS)
    whole = Timed()
    measured(tmp_path / "whole", 100.0, whole)
    assert first.order + rest.order == whole.order


def test_without_a_baseline_it_goes_block_by_block(tmp_path: Path) -> None:
    executor = Timed()
    measured(tmp_path, 1000.0, executor, prior_half_pct={})
    assert [number for _, number in executor.order] == sorted(
        5 * list(range(5)) + 7 * [0, 1, 2, 3, 4]
    )


def test_the_prior_is_the_interval_of_the_baseline() -> None:
    """Against scipy's, of one cell alone, which no family moderates."""
    base = b.baseline_of(b.make_run(b.cpu_cells()[:1], gpu=False))
    ((cell_id, cell),) = base.cells.items()
    speeds = [100.0, 103.0, 99.0, 101.0]
    base = base.model_copy(
        update={"cells": {cell_id: cell.model_copy(update={"tok_per_s": speeds})}}
    )
    logs = np.log(speeds)
    low, high = scipy.stats.t.interval(0.95, 3, logs.mean(), scipy.stats.sem(logs))
    wanted = 100 * np.expm1((high - low) / 2)
    assert prior_half_pct(base)[cell_id] == pytest.approx(wanted, rel=1e-6)


def test_groups_hold_each_cell_once() -> None:
    groups = least_sure_first("abcdefghij", {"a": 3.0, "b": 9.0, "c": 1.0})
    assert sorted(itertools.chain(*groups)) == list("abcdefghij") and len(groups) == 4
    assert groups[0] == ["d", "e"] and groups[-1] == ["b", "a", "c"]
    assert least_sure_first([], {}) == []
