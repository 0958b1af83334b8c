"""The same rows for a terminal: verdict first, every cell that is not green with its reason, then
the table.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from perfbench.errors import Exit
from perfbench.gate import Judgement, severity
from perfbench.records import FAIL_UNDER_STRICT, Run, Verdict
from perfbench.report.rows import Row, null_reasons, rows_of
from perfbench.report.tables import half, mde
from perfbench.text import NULL, fixed, number, plain, ratio, signed_pct

QUIET = (None, Verdict.SAME)
_COLOUR = {"SAME": "green", "MEASURED": "green", "FASTER": "cyan", "NEW": "cyan"} | {
    v.value: "yellow" for v in FAIL_UNDER_STRICT
}
MIN_WIDTH = 60
WIDE = 110  # from here on utilisation and memory have room
MAX_OPEN = 5  # reasons printed of each kind of open cells; the report has all


def table(run: Run, judgement: Judgement, *, width: int = 120, colour: bool = False) -> str:
    """Render for a terminal of ``width`` columns."""
    console = Console(
        file=io.StringIO(),
        width=max(width, MIN_WIDTH),
        force_terminal=colour,
        no_color=not colour,
        color_system="standard" if colour else None,
        highlight=False,
        legacy_windows=False,
        _environ={},
    )
    rows = rows_of(run, judgement)
    with console.capture() as captured:
        if run.manifest.injections:
            console.print(
                Text(
                    f"INJECTED FAULTS: {plain(', '.join(run.manifest.injections))}: a"
                    " demonstration",
                    style="bold magenta",
                )
            )
        console.print(Text(plain(judgement.headline), style=_style(judgement)))
        for finding in judgement.findings:
            console.print(Text(f"  {finding.verdict.value}: {plain(finding.reason)}", style="red"))
        for row, left in _told(rows):
            line = f"  {row.verdict} {plain(row.cell.cell_id)}: {plain(row.cell.reason)}"
            console.print(Text(line, style=_style_of(row)))
            if left:
                console.print(
                    Text(
                        f"  and {left} more {row.verdict}, as the table shows", style=_style_of(row)
                    )
                )
        console.print(_cells(rows, compared=judgement.baseline is not None, wide=width >= WIDE))
        for column, reason, cells in null_reasons(rows):
            console.print(
                Text(f"{column} {NULL}: {plain(reason)} ({len(cells)} cells)", style="dim")
            )
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def _told(rows: list[Row]) -> Iterator[tuple[Row, int]]:
    """Rows whose reason is printed, worst first; of open cells the first few, the last of them with
    how many are left.
    """
    loud = sorted((row for row in rows if row.cell.verdict not in QUIET), key=_worst_first)
    for verdict, members in groupby(loud, key=lambda row: row.cell.verdict):
        found = list(members)
        shown = MAX_OPEN if verdict in FAIL_UNDER_STRICT or verdict is Verdict.NEW else len(found)
        for place, row in enumerate(found[:shown], 1):
            yield row, len(found) - shown if place == shown else 0


def _worst_first(row: Row) -> tuple[int, int]:
    return severity(Verdict(row.verdict))


def _style_of(row: Row) -> str:
    return _COLOUR.get(row.verdict, "red")


def _style(judgement: Judgement) -> str:
    if judgement.exit_code is not Exit.OK:
        return "bold red"
    return "bold yellow" if judgement.of(*FAIL_UNDER_STRICT) else "bold green"


def _cells(rows: list[Row], *, compared: bool, wide: bool) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    shown.add_column("cell", overflow="fold", ratio=1)
    names = [
        "tok/s",
        *(("change", "MDE") if compared else ("± 95 %",)),
        "dev ms",
        "x dense",
        "% floor",
        "bound",
    ]
    for name in [*names, *(("util", "GiB") if wide else ())]:
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("verdict", no_wrap=True)
    for row in rows:
        values = [
            number(row.tok_per_s),
            *(
                (signed_pct(row.cell.change_pct), mde(row.cell.mde_pct))
                if compared
                else (half(row.half_pct),)
            ),
        ]
        values += [
            number(row.device_ms),
            ratio(row.x_dense),
            fixed(row.floor_pct, 1),
            row.bound or NULL,
        ]
        values += [number(row.utilisation_pct, 2), fixed(row.memory_gib, 1)] if wide else []
        verdict = Text(row.verdict, style=_style_of(row))
        shown.add_row(Text(plain(row.cell.cell_id)), *(Text(value) for value in values), verdict)
    return shown
