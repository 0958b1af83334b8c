"""The report's table of cells over pages: what they cost next to the same cells over contiguous
caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perfbench.records import PAGED
from perfbench.report.rows import Row, without
from perfbench.report.workloads import MIB, NO_NUMBER, Table
from perfbench.text import NULL, cell_code, fixed, number

TITLE = "Paged cache"
NOTE = (
    "paged / contiguous: the time of a step over that of the cell that is the same but for its"
    " cache, where this run has both; below 1 pages are faster. The interval is of 95 %, from the"
    " bands of both cells as if they were independent: ln(ratio) ± the root of the sum of their"
    " squares. A step over pages includes its plan on the host. MiB are of all layers, pages,"
    f" tables and counts included. {NO_NUMBER}"
)


@dataclass(frozen=True, slots=True)
class OverContiguous:
    """Time over time; ``low`` and ``high`` are its 95 % interval, None where either cell has no
    band.
    """

    ratio: float
    low: float | None
    high: float | None

    @property
    def text(self) -> str:
        interval = "" if self.low is None else f" ({self.low:.3f} to {self.high:.3f})"
        return f"{self.ratio:.3f}{interval}"


def over_contiguous(paged: Row, contiguous: Row | None) -> OverContiguous | None:
    """None where either has no speed."""
    if contiguous is None or paged.tok_per_s is None or contiguous.tok_per_s is None:
        return None
    ratio = contiguous.tok_per_s / paged.tok_per_s
    halves = [
        None if row.high is None or row.tok_per_s is None else math.log(row.high / row.tok_per_s)
        for row in (paged, contiguous)
    ]
    known = [half for half in halves if half is not None]
    if len(known) < len(halves):
        return OverContiguous(ratio, None, None)
    half = math.hypot(*known)
    return OverContiguous(ratio, ratio * math.exp(-half), ratio * math.exp(half))


def table(rows: Sequence[Row]) -> Table | None:
    """None where no cell is over pages."""
    twins = {without(row.cell.axes, "cache"): row for row in rows if row.cell.axes.cache != PAGED}
    lines = []
    for row in rows:
        if row.cell.axes.cache != PAGED:
            continue
        twin = twins.get(without(row.cell.axes, "cache"))
        found = over_contiguous(row, twin)
        lines.append(
            [
                cell_code(row.name),
                number(row.step_ms),
                number(None if twin is None else twin.step_ms),
                NULL if found is None else found.text,
                _mib(row),
                NULL if twin is None else _mib(twin),
            ]
        )
    head = [
        "cell",
        "ms a step",
        "contiguous, ms",
        "paged / contiguous (95 %)",
        "pages, MiB",
        "contiguous, MiB",
    ]
    return Table(TITLE, head, lines, NOTE) if lines else None


def _mib(row: Row) -> str:
    return fixed(None if row.cache is None else row.cache.memory_bytes / MIB, 1)
