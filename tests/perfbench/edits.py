"""What a test reads of a judgement, and the ways in which it breaks one cell of a green run."""

from __future__ import annotations

from perfbench.gate.judging import Judgement
from perfbench.records.rows import Run, Status
from perfbench.records.verdict import Verdict
from tests.perfbench import builders as b


def verdict_of(judgement: Judgement, cell_id: str) -> Verdict | None:
    return next(cell.verdict for cell in judgement.cells if cell.cell_id == cell_id)


def reason_of(judgement: Judgement, cell_id: str) -> str:
    return next(cell.reason for cell in judgement.cells if cell.cell_id == cell_id)


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
