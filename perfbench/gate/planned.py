"""A plan judged by a baseline before anything is measured: the same cells, configs and Routes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from perfbench.errors import Exit, worst
from perfbench.gate.judgement import CellVerdict, Finding, Judgement, severity
from perfbench.gate.judging import origin_of, plan_difference, renamed_cells
from perfbench.matrix import Policies
from perfbench.records import EXIT_OF, Baseline, BaselineCell, PlannedCell, Verdict
from perfbench.text import counted, shorten


def judge_plan(
    planned: Sequence[PlannedCell],
    excluded: Mapping[str, str],
    baseline: Baseline,
    policies: Policies,
    *,
    selected: Collection[str] | None = None,
    findings: Sequence[Finding] = (),
) -> Judgement:
    """WRONG_PATH where a Route is not the baseline's, INCOMPARABLE for another config under the
    same name, MISSING for a cell of the baseline that is not planned (``excluded``: why, by id),
    NEW for one that the baseline lacks.

    ``selected``: the ids that were asked for; None for all. ``findings`` are those of the plan as a
    whole. A cell that is as in the baseline has no verdict: nothing of it was measured.
    """
    base_cells = renamed_cells(baseline.cells, policies)
    here = {cell.cell_id for cell in planned}
    cells = [_planned(cell, base_cells.get(cell.cell_id), policies) for cell in planned]
    cells += [
        _missing(cell_id, base, excluded.get(cell_id, ""), policies)
        for cell_id, base in sorted(base_cells.items())
        if cell_id not in here and (selected is None or cell_id in selected)
    ]
    found = [*findings]
    if not {*here} & {*base_cells}:
        text = (
            f"no planned cell is in the baseline of matrix {baseline.matrix_name}"
            f" ({len(planned)} planned, {len(base_cells)} there); is it that of this matrix?"
        )
        found.append(Finding(Verdict.FAILED, "nothing", text))
    exits = [EXIT_OF[one.verdict] for one in found] + [cell.exit_code for cell in cells]
    counts = Counter("PLANNED" if one.verdict is None else one.verdict.value for one in cells)
    code = worst(exits)
    headline = _headline(code, cells, found)
    origin = origin_of(baseline)
    return Judgement(code, headline, cells, found, policies.whole, False, origin, dict(counts))


def _planned(cell: PlannedCell, base: BaselineCell | None, policies: Policies) -> CellVerdict:
    verdict, reason = plan_difference(cell, base, policies.of(cell.cell_id))
    reason = reason or "planned as in the baseline"
    return CellVerdict(cell.cell_id, cell.axes, verdict, reason)


def _missing(cell_id: str, base: BaselineCell, why: str, policies: Policies) -> CellVerdict:
    verdict = Verdict.MISSING if policies.of(cell_id).missing == "fail" else Verdict.WATCH
    reason = (
        f"in the baseline, but not in the plan{f' (excluded: {why})' if why else ''}: plan it, or"
        " promote a baseline without it"
    )
    return CellVerdict(cell_id, base.axes, verdict, reason)


def _headline(code: Exit, cells: list[CellVerdict], findings: list[Finding]) -> str:
    """'WRONG_PATH, exit 4: 1 of 9 cells: ID: routed to ...', or that all is as in the baseline."""
    red = [cell for cell in cells if cell.verdict is not None and cell.exit_code is not Exit.OK]
    said = [(one.verdict, one.reason) for one in findings]
    said += [(one.verdict, f"{one.cell_id}: {one.reason}") for one in red if one.verdict]
    if said and code is not Exit.OK:
        verdict, reason = min(said, key=lambda one: severity(one[0]))
        where = f"{len(red)} of {counted(len(cells), 'cell')}: " if red else ""
        return f"{verdict.value}, exit {int(code)}: {where}{shorten(reason, 200)}"
    same = sum(cell.verdict is None for cell in cells)
    rest = f", {len(cells) - same} to read" if same < len(cells) else ""
    return f"PLANNED, exit 0: {same} of {counted(len(cells), 'cell')} as in the baseline{rest}"
