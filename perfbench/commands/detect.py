"""`perfbench detect`: what changed in the history, first what is new and large."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated

import typer

from perfbench.commands import options as opt
from perfbench.commands.console import print_text, say
from perfbench.errors import Exit

CellName = Annotated[
    str | None,
    typer.Option(
        "--cell", metavar="CELL", help="A cell's id, or AXIS=V,... of any axes that name one."
    ),
]
MetricName = Annotated[
    str | None, typer.Option("--metric", metavar="NAME", help="E.g. tok_per_s, launches.")
]
Suite = Annotated[str | None, typer.Option("--suite", metavar="NAME", help="A matrix's name.")]
Card = Annotated[str | None, typer.Option("--card", metavar="SLUG", help="E.g. h200.")]
Since = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="DATE",
        help="Changes from then on: 2026-11-23, 12h, 3d, 2w, monday, yesterday. What was measured"
        " before still says what the level was.",
    ),
]
Every = Annotated[
    bool,
    typer.Option("--all", help="Changes that are no news, too: reported, accepted, noise."),
]
ReportOnly = Annotated[bool, typer.Option("--report-only", help="Exit 0, whatever became worse.")]
Forget = Annotated[
    bool, typer.Option("--forget", help="Do not remember what is printed: it stays new.")
]


def detect(
    suite: Suite = None,
    card: Card = None,
    cells: Annotated[
        list[str] | None,
        typer.Option(
            "--cell",
            metavar="CELL",
            help="A cell's id, or AXIS=V,... of any axes that name one; several times for several.",
        ),
    ] = None,
    metric: MetricName = None,
    since: Since = None,
    every: Every = False,
    report_only: ReportOnly = False,
    forget: Forget = False,
    history: opt.HistoryUrl = None,
    as_json: opt.Json = False,
) -> None:
    """Find steps and drifts in the history; each is reported once.

    Exit 3 where something new is worse. `perfbench triage` accepts a change or calls it noise.
    """
    from perfbench.commands.dates import moment_of
    from perfbench.commands.detect_findings import Looked, look
    from perfbench.history import open_history

    begin = None if since is None else moment_of(since, "--since", datetime.now(UTC))
    with open_history(history) as opened:
        looked = Looked(suite, card, tuple(cells or ()), metric, begin, every)
        found = look(opened, looked, remember=not forget)
    print_text(json.dumps(found.to_json(), indent=2) if as_json else found.text())
    say(found.summary())
    if found.is_worse and not report_only:
        raise typer.Exit(Exit.REGRESSED)
