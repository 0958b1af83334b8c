"""The report's table of the user's own steps: their file, what is proved of them and what is
not.
"""

from __future__ import annotations

from collections.abc import Sequence

from perfbench.records import Run
from perfbench.report.rows import Row
from perfbench.report.workloads import Table
from perfbench.text import NULL, cell_code, code, escape

TITLE = "User's own steps"
NOTE = (
    "A step of the user's own is compared, witnessed and bounded as far as it declares: by its own"
    " reference, not by this package's oracle. What it does not declare is not proved."
)


def table(run: Run, rows: Sequence[Row]) -> Table | None:
    """None where no cell is one."""
    files = {one.workload: one for one in run.manifest.own_steps}
    lines = []
    for row in rows:
        if not row.cell.axes.is_own_step:
            continue
        file, word = files.get(row.cell.axes.workload), row.cell.own
        lines.append(
            [
                cell_code(row.name),
                NULL if file is None else code(f"{file.file} {file.sha256[:12]}"),
                NULL if word is None else escape("; ".join(word.proved) or "nothing"),
                NULL if word is None else escape("; ".join(word.not_proved) or "-"),
            ]
        )
    head = ["cell", "file, sha256", "proved", "not proved"]
    return Table(TITLE, head, lines, NOTE, left=len(head)) if lines else None
