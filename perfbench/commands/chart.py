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
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric", metavar="NAME", help="By default tok_per_s, or the only one that there is."
    ),
]
Card = Annotated[str | None, typer.Option("--card", metavar="SLUG", help="E.g. h200.")]
Suite = Annotated[str | None, typer.Option("--suite", metavar="NAME", help="A matrix's name.")]
ByCommit = Annotated[
    bool, typer.Option("--by-commit", help="By the age of the commits, not over time.")
]


def chart(
    cell: CellName,
    png: Png,
    metric: Metric = None,
    card: Card = None,
    suite: Suite = None,
    by_commit: ByCommit = False,
    history: opt.HistoryUrl = None,
) -> None:
    """Draw one series with its change points, levels and segments, for a Markdown page."""
    from perfbench.commands.console import print_text
    from perfbench.commands.history_choice import Scope, cell_and_metric
    from perfbench.history import open_history
    from perfbench.history.site import chart_png
    from perfbench.records import whole_file

    if png.suffix.lower() != ".png":
        raise PerfbenchError(
            Exit.USAGE, f"got {str(png)!r}, wanted a name that ends with .png. Next: name another"
        )
    with open_history(history) as opened:
        if metric is not None:
            opened.metric(metric)  # USAGE where no run has it
        cell_id, chosen = cell_and_metric(opened, cell, metric, Scope(suite, card))
        found = opened.keys(suite=suite, card=card, cell_id=cell_id, metric=chosen)
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
