"""`perfbench gap`: floor, dense and expectation of each cell, and the chains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfbench.commands.app import invoke
from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy
from perfbench.records.cells import Cell
from perfbench.records.rows import Run
from perfbench.report.gap import Gaps, gaps
from tests.perfbench import builders as b

ROOT = Path(__file__).parents[2]
CHAIN = "reports/evidence/chain-h200"


def of(run: Run) -> Gaps:
    return gaps(run, judge(run, None, GatePolicy()))


def test_a_chain_is_read_from_the_slowest_to_what_is_switched_on() -> None:
    cells = [
        b.planned_cell(cell)
        for cell in (
            Cell("train", 2048, "masked", "on"),
            Cell("train", 2048, "v2", "on"),
            Cell("train", 2048, "v2", "off"),
            Cell("train", 2048, "dense"),
        )
    ]
    run = b.make_run(cells)
    for cell, speed in zip(cells, (4000.0, 3000.0, 1000.0, 12000.0), strict=True):
        run = b.replace_rows(run, cell.cell_id, tok_per_s=speed)
    (links,) = of(run).chains.values()
    assert [one.change for one in links] == ["v2", "fa2=on", "path=masked"]
    assert [one.tok_per_s for one in links] == pytest.approx([1000, 3000, 4000])
    assert [one.x_before for one in links] == [None, pytest.approx(3), pytest.approx(4 / 3)]
    assert [one.x_first for one in links] == [None, pytest.approx(3), pytest.approx(4)]


def test_a_cell_that_is_not_proved_has_no_number_and_no_part_in_the_ratios() -> None:
    cells = [b.planned_cell(Cell("train", 2048, path, "on")) for path in ("v2", "masked")]
    cells.append(b.planned_cell(Cell("train", 2048, "v2", "off")))
    run = b.make_run(cells)
    wrong = b.parity(ok=False, max_error=9.0)
    run = b.replace_rows(run, cells[0].cell_id, parity=wrong)
    found = of(run)
    (one,) = [gap for gap in found.cells if gap.cell_id == cells[0].cell_id]
    assert one.step_ms is None and one.x_floor is None and one.why == "PARITY"
    (links,) = found.chains.values()
    assert links[1].tok_per_s is None and links[1].x_before is None
    assert links[2].x_before == links[2].x_first


def test_dense_and_floor_come_from_the_run() -> None:
    run = b.small_run()
    by_cell = {one.cell_id: one for one in of(run).cells}
    v2, dense = (
        by_cell[name]
        for name in (
            "fa2=on,path=v2,seq_len=2048,workload=train",
            "path=dense,seq_len=2048,workload=train",
        )
    )
    assert v2.dense_ms == pytest.approx(dense.step_ms)
    assert v2.x_dense == pytest.approx(dense.step_ms / v2.step_ms)  # type: ignore[operator]
    row = next(row for row in run.replicates if row.cell_id == v2.cell_id)
    assert row.physics is not None and row.physics.floor_s is not None
    assert v2.floor_ms == pytest.approx(1e3 * row.physics.floor_s, rel=1e-6)


def test_the_command_prints_the_stored_chain(capsys: pytest.CaptureFixture[str]) -> None:
    """The same factors as reports/ablation.md has of this run, to the second digit."""
    assert invoke(["gap", str(ROOT / CHAIN)]) == 0
    out = capsys.readouterr().out
    assert "## Chain of seq_len=512, workload=train" in out
    assert "| cuda_graph=on | 110,038 | 10.71 | 216.2" in out
    assert invoke(["gap", str(ROOT / CHAIN), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (links,) = found["chains"].values()
    assert [one["change"] for one in links][-2:] == ["compile=on", "cuda_graph=on"]


def test_what_is_no_run_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert invoke(["gap", str(tmp_path)]) in (2, 9)
    assert "run.jsonl" in capsys.readouterr().err
