"""The same rows for a terminal: verdict first, every cell that is not green with its reason, then the table."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table
from rich.text import Text

from perfbench.judgement import Judgement
from perfbench.report.rows import Row, null_reasons, rows_of
from perfbench.report.text import NULL, fixed, number, plain, ratio, signed_pct
from perfbench.result import Run
from perfbench.verdict import FAIL_UNDER_STRICT, Exit, Verdict

QUIET = (None, Verdict.SAME)
_COLOUR = {"SAME": "green", "MEASURED": "green", "FASTER": "cyan", "NEW": "cyan"} | {v.value: "yellow" for v in FAIL_UNDER_STRICT}
MIN_WIDTH = 60


def table(run: Run, judgement: Judgement, *, width: int, colour: bool) -> str:
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
            console.print(Text(f"INJECTED FAULTS: {plain(', '.join(run.manifest.injections))}: a demonstration", style="bold magenta"))
        console.print(Text(plain(judgement.headline), style=_style(judgement)))
        for finding in judgement.findings:
            console.print(Text(f"  {finding.verdict.value}: {plain(finding.reason)}", style="red"))
        for row in rows:
            if row.cell.verdict not in QUIET:
                line = f"  {row.verdict} {plain(row.cell.cell_id)}: {plain(row.cell.reason)}"
                console.print(Text(line, style=_COLOUR.get(row.verdict, "red")))
        console.print(_cells(rows, compared=judgement.baseline is not None))
        for column, reason, cells in null_reasons(rows):
            console.print(Text(f"{column} {NULL}: {plain(reason)} ({len(cells)} cells)", style="dim"))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def _style(judgement: Judgement) -> str:
    if judgement.exit_code is not Exit.OK:
        return "bold red"
    return "bold yellow" if judgement.of(*FAIL_UNDER_STRICT) else "bold green"


def _cells(rows: list[Row], *, compared: bool) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    shown.add_column("cell", overflow="fold", ratio=1)
    for name in ("tok/s", "spread", *(("change",) if compared else ()), "x dense", "% floor", "bound", "util", "GiB"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("verdict", no_wrap=True)
    for row in rows:
        values = [number(row.tok_per_s), f"{row.cell.spread_pct:.1f} %" if row.cell.spread_pct is not None else NULL]
        values += [signed_pct(row.cell.change_pct)] if compared else []
        values += [ratio(row.x_dense), fixed(row.floor_pct, 1), row.bound or NULL]
        values += [number(row.utilisation_pct, 2), fixed(row.memory_gib, 1)]
        verdict = Text(row.verdict, style=_COLOUR.get(row.verdict, "red"))
        shown.add_row(Text(plain(row.cell.cell_id)), *(Text(value) for value in values), verdict)
    return shown
