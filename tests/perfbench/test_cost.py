"""What a run cost and what the next one will: on stored runs, whose own lines say how long the card
was held.
"""

from __future__ import annotations

import itertools
from datetime import datetime
from pathlib import Path
from statistics import median

import pytest

from perfbench.gate import judge
from perfbench.matrix import GatePolicy
from perfbench.records import Run, read_run
from perfbench.report import cost

ROOT = Path(__file__).parents[2]
NIGHTS = (  # of one matrix and the same cells each, in the order of time
    ("reports/evidence/cpu-gate/start-1", "start-2", "start-3"),
    ("reports/evidence/h200-gate/start-1", "start-2", "start-3"),
    ("reports/evidence/nightly-h200/kernels", "../nightly-caught/first", "kernels-2"),
    ("reports/evidence/nightly-h200/gate", "gate-2"),
    ("tests/data/runs/h100-demo/base", "green"),
)


def stored(first: str, *others: str) -> list[Run]:
    home = (ROOT / first).parent
    runs = [read_run(ROOT / first), *(read_run(home / other) for other in others)]
    return sorted(runs, key=lambda run: run.manifest.created_utc)


@pytest.fixture(scope="module")
def nights() -> list[list[Run]]:
    return [stored(*names) for names in NIGHTS]


def held_s(run: Run) -> float:
    """Written independently of `cost`: from the first line to the end of the last process."""
    end = max(datetime.fromisoformat(r.started_utc).timestamp() + r.wall_s for r in run.replicates)
    return end - datetime.fromisoformat(run.manifest.created_utc).timestamp()


def test_the_error_that_the_report_states_is_that_of_the_stored_nights(
    nights: list[list[Run]],
) -> None:
    errors = [
        100 * abs(held_s(after) / cost.next_run_s(before) - 1)
        for runs in nights
        for before, after in itertools.pairwise(runs)
    ]
    assert len(errors) == 8
    assert abs(median(errors) - cost.USUAL_ERROR_PCT) < 1
    assert abs(max(errors) - cost.WORST_ERROR_PCT) < 1


def test_the_minutes_of_the_cells_are_those_of_the_card(nights: list[list[Run]]) -> None:
    """Of kernels-2 twelve prepare side by side: their own seconds are 1.7 times what passed."""
    for run in itertools.chain.from_iterable(nights):
        spent = sum(one.seconds for one in cost.cell_costs(run))
        assert 0.5 * held_s(run) < spent <= held_s(run) * (1 + 1e-9)
    kernels = nights[2][-1]
    assert sum(row.wall_s for row in kernels.replicates) > 1.5 * held_s(kernels)


def test_half_a_night_predicts_the_whole(nights: list[list[Run]]) -> None:
    (first, *_), whole = nights[0], nights[0][0]
    half = [row for row in first.replicates if row.replicate < 3]
    cut = first.model_copy(update={"replicates": half})
    assert cost.occupied_s(cut) < 0.75 * held_s(whole)
    assert cost.next_run_s(cut) == pytest.approx(held_s(whole), rel=0.25)


def test_the_phases_of_a_row_are_what_its_process_did() -> None:
    row = read_run(ROOT / "tests/data/runs/cpu").replicates[0]
    timed = row.model_copy(update={"phases_s": {"proof": 1.0, "timing": 2.0}, "wall_s": 4.0})
    assert cost.parts_of(timed) == {"proof": 1.0, "timing": 2.0, "other": 1.0}
    older = cost.parts_of(row.model_copy(update={"phases_s": {}}))
    assert older["timing"] == pytest.approx(sum(row.samples_s)) and older["other"] > 0


def test_the_table_says_what_was_bought(nights: list[list[Run]]) -> None:
    run = nights[3][0]
    found = cost.table(run, judge(run, None, GatePolicy()), [])
    assert found is not None and len(found.lines) == 9
    minutes = sum(float(line[2]) for line in found.lines)
    assert minutes == pytest.approx(held_s(run) / 60, rel=0.25)
    assert "GPU minutes" in found.note and "The next run of these cells: about 3." in found.note
