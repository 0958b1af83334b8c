"""Two runs against each other: what `compare` and `ab` judge, by the gate's own engine."""

from __future__ import annotations

from dataclasses import replace

from perfbench import baseline as baselines
from perfbench import gate
from perfbench.judgement import CellVerdict, Judgement, summarise
from perfbench.policy import GatePolicy, Policies
from perfbench.result import Run
from perfbench.settle import settle
from perfbench.verdict import Exit, Verdict

SPEED_ONLY = (Verdict.SAME, Verdict.FASTER, Verdict.WATCH, Verdict.BLIND, Verdict.UNSTABLE)


def judge(base: Run, candidate: Run, policy: GatePolicy | Policies, *, paired: bool, strict: bool = False) -> Judgement:
    """The verdict of ``candidate`` against ``base``.

    ``paired``: the runs are the two sides of one interleaved measurement, replicate r beside replicate r, so a drop can be
    REGRESSED (Holm over all cells). Otherwise they are two nights, and a drop is at most WATCH, to be confirmed by `ab`. The
    hard gates hold for both: a base cell that fails one is not compared, and says why.
    """
    policies = Policies.over(policy)
    alone = {cell.cell_id: cell for cell in gate.judge(base, None, policies).cells}
    red = {cell_id: cell for cell_id, cell in alone.items() if cell.exit_code is not Exit.OK}
    judgement = gate.judge(candidate, baselines.of_run(base, red), policies, strict=strict)
    if red:
        judgement = _with_cells(judgement, [_not_believed(cell, red) for cell in judgement.cells])
    if not paired:
        return judgement
    compared = [cell.cell_id for cell in judgement.cells if cell.compared and cell.verdict in SPEED_ONLY]
    return settle(judgement, base, candidate, policies, compared)


def _not_believed(cell: CellVerdict, red: dict[str, CellVerdict]) -> CellVerdict:
    base = red.get(cell.cell_id)
    if base is None or cell.verdict is not Verdict.NEW:
        return cell
    return replace(cell, reason=f"the base's speed is not to be believed ({base.verdict}: {base.reason})")


def _with_cells(judgement: Judgement, cells: list[CellVerdict]) -> Judgement:
    return summarise(cells, judgement.findings, judgement.policy, judgement.strict, judgement.baseline, judgement.notes)
