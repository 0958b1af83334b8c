"""`perfbench history chart`: a series as the page draws it, in a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfbench.commands import options as opt
from perfbench.errors import Exit, PerfbenchError, unwritable

CellName = Annotated[
    str, typer.Argument(metavar="CELL", help="A cell's id, or AXIS=V,... that names one cell.")
]
Png = Annotated[Path, typer.Argument(metavar="FILE.png", help="Where the picture is written.")]
Metric = Annotated[str, typer.Option("--metric", metavar="NAME", help="E.g. device_ms, launches.")]
Card = Annotated[str | None, typer.Option("--card", metavar="SLUG", help="E.g. h200.")]
Suite = Annotated[str | None, typer.Option("--suite", metavar="NAME", help="A matrix's name.")]
ByCommit = Annotated[
    bool, typer.Option("--by-commit", help="By the age of the commits, not over time.")
]


def chart(
    cell: CellName,
    png: Png,
    metric: Metric = "tok_per_s",
    card: Card = None,
    suite: Suite = None,
    by_commit: ByCommit = False,
    history: opt.HistoryUrl = None,
) -> None:
    """Draw one series with its change points, levels and segments, for a Markdown page."""
    from perfbench.commands.console import print_text
    from perfbench.commands.history_table import named_cell
    from perfbench.history import open_history
    from perfbench.history.site import chart_png
    from perfbench.records import whole_file

    with open_history(history) as opened:
        keys = opened.keys(suite=suite, card=card, metric=metric)
        cell_id = named_cell(cell, {key.cell_id for key in keys})
        found = [key for key in keys if key.cell_id == cell_id]
        if len(found) > 1:
            several = "; ".join(f"--suite {key.suite} --card {key.card}" for key in found[:4])
            raise PerfbenchError(
                Exit.USAGE,
                f"{cell_id} is a cell of {len(found)} suites or cards, and a chart shows one."
                f" Next: add {several}",
            )
        drawn = chart_png(
            opened.series(found[0]),
            opened.change_points(cell_id=cell_id),
            opened.decisions(),
            axis="order" if by_commit else "time",
        )
    try:
        png.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(png) as partial:
            partial.write_bytes(drawn)
    except OSError as error:
        raise unwritable(png, error, "name another file") from error
    print_text(str(png))
