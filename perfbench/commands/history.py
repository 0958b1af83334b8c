"""`perfbench history`: judged runs in a database, and what changed in it since.

`perfbench history CELL` is `perfbench history show CELL`.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from perfbench.commands import options as opt
from perfbench.commands.chart import chart
from perfbench.commands.console import print_text, say
from perfbench.errors import Exit, PerfbenchError, worst
from perfbench.text import shown_address

LIMIT = 30


class ShowByDefault(TyperGroup):
    """A group whose first word may be a CELL, or an option of `show`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in (*self.commands, "--help") and self._is_for_show(args[0])):
            args = ["show", *args]
        return super().parse_args(ctx, args)

    def _is_for_show(self, word: str) -> bool:
        """Not of a command that is misspelt, which its own message names."""
        from nsa.config import nearest_name

        is_near = "did you mean" in nearest_name(word, [*self.commands])
        return word.startswith("-") or "=" in word or not is_near


app = typer.Typer(
    help="Keep judged runs in a database, and show what changed since.",
    cls=ShowByDefault,
    rich_markup_mode=None,
)
Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...",
        help="Run folders, run.jsonl or run.jsonl.gz, folders of a `perfbench ab`; `latest`.",
    ),
]
All = Annotated[
    bool, typer.Option("--all", help="Each RUN is a folder: add every run that lies below it.")
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace a stored run by a copy with fewer rows, too."),
]
CellName = Annotated[
    str | None,
    typer.Argument(
        metavar="CELL",
        help="A cell's id, or AXIS=V,... of any axes that name one cell; none: the newest runs.",
        show_default=False,
    ),
]
Since = Annotated[
    str | None,
    typer.Option(
        "--since", metavar="DATE", help="From then on: 2026-11-23, 12h, 3d, 2w, monday, yesterday."
    ),
]
OfCommit = Annotated[
    str | None, typer.Option("--commit", metavar="SHA", help="Runs of this commit; 4 digits do.")
]
OfMetric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        help="E.g. device_ms; by default tok_per_s, or the only one that there is.",
    ),
]
OfCard = Annotated[
    str | None, typer.Option("--card", metavar="SLUG", help="E.g. h200; all by default.")
]
OfSuite = Annotated[
    str | None, typer.Option("--suite", metavar="NAME", help="A matrix's name; all by default.")
]
Limit = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Rows at most.")]
Demonstrations = Annotated[
    bool, typer.Option("--demonstrations", help="Runs with injected faults, too.")
]


@app.command()
def init(history: opt.HistoryUrl = None) -> None:
    """Make an empty history; one that is there stays as it is."""
    from perfbench.history import make_history

    found, address = make_history(history)
    with found:
        count = len(found.runs(demonstrations=True))
    held = f"holds {count} run{'s' * (count > 1)}" if count else "is empty"
    print_text(f"{shown_address(address)} {held}. Next: perfbench history add RUN...")


@app.command()
def upgrade(history: opt.HistoryUrl = None) -> None:
    """Bring a history that an older perfbench made to this one's tables."""
    from perfbench.history import upgrade_history

    address, before, now = upgrade_history(history)
    done = f"was {before} and is {now}" if before != now else f"is {now} already"
    print_text(f"{shown_address(address)} {done}")


@app.command()
def add(
    run: Runs,
    every: All = False,
    force: Force = False,
    history: opt.HistoryUrl = None,
    as_json: opt.Json = False,
) -> None:
    """Add runs, judged as `report` judges them; one that is there already stays."""
    from perfbench.commands.keeping import add_folder, runs_named
    from perfbench.commands.names import newest_run
    from perfbench.history import open_history

    lines, refused = list[dict[str, str]](), list[Exit]()
    with open_history(history) as opened:
        for named in run:
            try:
                home = newest_run(named) or named
                paths = runs_named(home, every)
            except PerfbenchError as error:
                _refuse(error, named, lines, refused, as_json)
                continue
            for path in paths:
                try:
                    for one, how in add_folder(opened, path, may_shrink=force):
                        about = {"added": how.value, "run_id": one.info.run_id}
                        about |= {"folder": path.as_posix(), "suite": one.info.suite}
                        about |= {"card": one.info.card, "headline": one.info.headline}
                        lines.append(about)
                        if not as_json:
                            what = "cell" if len(one.cells) == 1 else "cells"
                            what = f"{len(one.cells)} {what} of {one.info.suite}, {one.info.card}"
                            print_text(f"{how.value:<8}  {one.info.run_id}  {what}")
                except PerfbenchError as error:
                    _refuse(error, path, lines, refused, as_json)
    if as_json:
        print_text(json.dumps(lines, indent=2))
    say(_tally(lines))
    raise typer.Exit(worst(refused))


def _refuse(
    error: PerfbenchError,
    path: Path,
    lines: list[dict[str, str]],
    refused: list[Exit],
    as_json: bool,
) -> None:
    refused.append(error.exit_code)
    lines.append({"added": "refused", "folder": path.as_posix(), "reason": str(error)})
    if not as_json:
        print_text(f"{'refused':<8}  {path}: {error}")


def _tally(lines: list[dict[str, str]]) -> str:
    counts: dict[str, int] = {}
    for line in lines:
        counts[line["added"]] = counts.get(line["added"], 0) + 1
    return ", ".join(f"{count} {word}" for word, count in counts.items())


@app.command()
def show(
    cell: CellName = None,
    since: Since = None,
    commit: OfCommit = None,
    metric: OfMetric = None,
    card: OfCard = None,
    suite: OfSuite = None,
    limit: Limit = LIMIT,
    demonstrations: Demonstrations = False,
    history: opt.HistoryUrl = None,
    as_json: opt.Json = False,
) -> None:
    """What changed since: each value next to the one before it, newest first."""
    from perfbench.commands.dates import moment_of
    from perfbench.commands.history_table import Wanted, answer
    from perfbench.history import open_history

    begin = None if since is None else moment_of(since, "--since", datetime.now(UTC))
    wanted = Wanted(cell, begin, commit, metric, card, suite, limit, demonstrations)
    with open_history(history) as opened:
        found = answer(opened, wanted)
    print_text(json.dumps(found.to_json(), indent=2) if as_json else found.text())
    if found.left:
        say(f"{limit} of {limit + found.left} rows; --limit {limit + found.left} shows all")


app.command()(chart)
