"""What a test reads of a judgement, and the ways in which it breaks one cell of a green run."""

from __future__ import annotations

from perfbench.gate.confirmation import MeasuredPairs, confirm_all
from perfbench.gate.judgement import Judgement
from perfbench.matrix.policy import GatePolicy, Policies
from perfbench.records.rows import Run, Status
from perfbench.records.verdict import Verdict
from tests.perfbench import builders as b


def verdict_of(judgement: Judgement, cell_id: str) -> Verdict | None:
    return next(cell.verdict for cell in judgement.cells if cell.cell_id == cell_id)


def reason_of(judgement: Judgement, cell_id: str) -> str:
    return next(cell.reason for cell in judgement.cells if cell.cell_id == cell_id)


def conclude(
    judgement: Judgement,
    base_run: Run | None,
    candidate_run: Run | None,
    policy: GatePolicy | Policies,
    reason: str = "",
) -> Judgement:
    """Judge every screened cell by the pairs of one base and one candidate run; ``reason`` says why
    there are none.
    """
    ids = judgement.to_confirm
    pairs = [MeasuredPairs(base_run, candidate_run, ids)] if base_run and candidate_run else []
    return confirm_all(judgement, pairs, policy, dict.fromkeys(ids, reason) if reason else {})


def edit(run: Run, cell_id: str, **changes: object) -> Run:
    return b.change_rows(run, cell_id, lambda row: row.model_copy(update=changes))


def only_rows(run: Run, cell_id: str, numbers: set[int]) -> Run:
    return b.change_rows(run, cell_id, lambda row: row if row.replicate in numbers else None)


def throttle(run: Run, cell_id: str, numbers: set[int]) -> Run:
    hot = b.telemetry(throttled=True, clock_event_reasons=["hw_thermal_slowdown"])
    return b.change_rows(
        run,
        cell_id,
        lambda row: row.model_copy(update={"telemetry": hot}) if row.replicate in numbers else row,
    )


def fail(run: Run, cell_id: str, status: Status, **fields: object) -> Run:
    cell = next(c for c in run.manifest.cells if c.cell_id == cell_id)
    return b.change_rows(run, cell_id, lambda row: b.failed(cell, status, row.replicate, **fields))
