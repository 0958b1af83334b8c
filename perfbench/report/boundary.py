"""The largest batch that fits, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from perfbench.gate import boundaries, rows_by_cell
from perfbench.records import Run, Status
from perfbench.report.rows import GIB, Row
from perfbench.report.workloads import Table
from perfbench.text import NULL, escape, fixed, number

TITLE = "Memory boundary"


def table(run: Run, rows: Sequence[Row]) -> Table | None:
    """A line for each path and length whose batches reach the boundary; None where none does."""
    by_cell, shown = rows_by_cell(run), {row.cell.cell_id: row for row in rows}
    lines = []
    for one in boundaries(run.manifest.cells, by_cell):
        if not one.beyond:
            continue
        row = None if one.fits is None else shown.get(one.fits.cell_id)
        parts = [p for p in one.like.cell_id.split(",") if not p.startswith("batch=")]
        first, statuses = one.beyond[0], {r.status for r in by_cell[one.beyond[0].cell_id]}
        lines.append(
            [
                escape(", ".join(parts)),
                NULL if one.fits is None else f"{one.fits.axes.batch:,}",
                fixed(None if row is None else row.memory_gib, 2),
                number(None if row is None else row.tok_per_s),
                f"{first.axes.batch:,}" + ("" if Status.OOM in statuses else " (not tried)"),
            ]
        )
    if not lines:
        return None
    note = (
        "Batches are tried from the smallest, and each that fits is proved and timed like every"
        f" cell. A GiB is {GIB:,} bytes, at the peak of what torch allocated. A dash: not even the"
        " smallest batch fits, or not recorded."
    )
    head = [
        "cells",
        "largest batch that fits",
        "its memory, GiB",
        "its tok/s",
        "first that does not",
    ]
    return Table(TITLE, head, lines, note)
