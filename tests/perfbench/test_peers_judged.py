"""What a gate asks of a peer's rows: who was imported, in each process and in the baseline's."""

from __future__ import annotations

from typing import Any

import pytest

from perfbench.errors import Exit
from perfbench.gate.baseline import baseline_of_run
from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy
from perfbench.records.baseline_file import Baseline
from perfbench.records.cells import Cell
from perfbench.records.rows import LoadedPeer, Run
from tests.perfbench import builders as b

POLICY = GatePolicy()


def run_of(*loaded: LoadedPeer | None) -> Run:
    """One cell of dense_fa4, a row for each peer that its process had imported."""
    cell = b.planned_cell(Cell("attention", 1024, "dense_fa4"))
    rows = [b.replicate(cell, number, peer=one) for number, one in enumerate(loaded)]
    return b.with_rows(b.make_run([cell], replicates=len(loaded)), rows)


def test_one_peer_in_every_process_is_green() -> None:
    judgement = judge(run_of(*[b.loaded_peer("dense_fa4")] * 3), None, POLICY)
    assert judgement.exit_code is Exit.OK and judgement.cells[0].cand_tok_per_s


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": "dense_fa4 2.0"}, "dense_fa4 1.0, file 000000000000 and dense_fa4 2.0"),
        ({"file_sha256": "1" * 64}, "file 000000000000 and dense_fa4 1.0, file 111111111111"),
        ({"commit": "c" * 40}, "commit cccccccccccc"),
        ({"name": "flex"}, "flex was imported, the plan says dense_fa4"),
    ],
)
def test_two_peers_behind_one_cell_are_no_number(changes: dict[str, Any], said: str) -> None:
    first = b.loaded_peer("dense_fa4")
    judgement = judge(run_of(first, first.model_copy(update=changes)), None, POLICY)
    assert judgement.exit_code is Exit.ENVIRONMENT
    assert said in judgement.cells[0].reason and judgement.cells[0].cand_tok_per_s is None


def test_a_row_that_names_no_peer_is_not_proved() -> None:
    judgement = judge(run_of(b.loaded_peer("dense_fa4"), None), None, POLICY)
    assert judgement.exit_code is Exit.FAILED
    assert "no record of what was imported (replicate 1)" in judgement.cells[0].reason


def test_another_peer_than_the_baselines_is_said() -> None:
    before = run_of(*[b.loaded_peer("dense_fa4")] * 3)
    base = baseline_of_run(before)
    assert isinstance(base, Baseline)
    assert not [one for one in judge(before, base, POLICY).notes if "baseline's" in one]
    after = run_of(*[b.loaded_peer("dense_fa4", version="dense_fa4 2.0")] * 3)
    assert judge(after, base, POLICY).notes[-1] == (
        "dense_fa4 is not the baseline's: dense_fa4 1.0, file 000000000000, now dense_fa4 2.0,"
        " file 000000000000"
    )
