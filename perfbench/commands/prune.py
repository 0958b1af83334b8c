"""`perfbench prune`: delete the runs of a history that a policy lets go."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfbench.commands import options as opt
from perfbench.commands.console import print_text, say
from perfbench.errors import Exit, PerfbenchError
from perfbench.text import counted

if TYPE_CHECKING:
    from perfbench.history import History, RunInfo, SeriesKey, StoredRun

OlderThan = Annotated[
    str | None, typer.Option("--older-than", metavar="TIME", help="Runs of before, e.g. 400d.")
]
Weekly = Annotated[
    str | None,
    typer.Option(
        "--keep-weekly-after",
        metavar="TIME",
        help="Of runs from before, e.g. 90d: all but the last of each week and cell.",
    ),
]
KeepLast = Annotated[
    int | None,
    typer.Option(
        "--keep-last",
        min=1,
        metavar="N",
        help="The newest N runs of each cell stay; without another option all others go.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Delete them; without it they are listed.")]


def prune(
    older_than: OlderThan = None,
    keep_weekly_after: Weekly = None,
    keep_last: KeepLast = None,
    yes: Yes = False,
    history: opt.HistoryUrl = None,
    as_json: opt.Json = False,
) -> None:
    """List the runs that a policy lets go, or delete them. Runs of baselines, of change points and
    of decisions stay.
    """
    from perfbench.commands.dates import length_of
    from perfbench.history import PrunePolicy, open_history, to_prune

    def age(text: str | None, option: str) -> timedelta | None:
        return None if text is None else length_of(text, option)

    policy = PrunePolicy(
        age(older_than, "--older-than"), age(keep_weekly_after, "--keep-weekly-after"), keep_last
    )
    if policy.is_empty:
        raise PerfbenchError(
            Exit.USAGE,
            "got no policy, wanted --older-than, --keep-weekly-after or --keep-last. Next:"
            " perfbench prune --older-than 400d",
        )
    with open_history(history) as opened:
        infos = {one.run_id: one for one in opened.runs(demonstrations=True)}
        stay = named_by_baselines() | _of_changes(opened)
        leaving = to_prune(_stored(opened, infos), policy, datetime.now(UTC), stay)
        if yes:
            opened.delete_runs(leaving)
        gone = [infos[run_id] for run_id in leaving]
    if as_json:
        about = {"deleted": yes, "runs": leaving, "of": len(infos)}
        print_text(json.dumps(about, indent=2))
    elif gone:
        print_text("\n".join(f"{one.run_id}  {one.suite}, {one.card}" for one in gone))
    if yes:
        say(f"{len(leaving)} of {counted(len(infos), 'run')} deleted")
    else:
        then = "; --yes deletes them" if leaving else ""
        say(f"{len(leaving)} of {counted(len(infos), 'run')} would go{then}")


def _stored(history: History, infos: Mapping[str, RunInfo]) -> list[StoredRun]:
    """The runs with their cells. A run of perfbench has every metric of each of its cells, so that
    one is asked for; one of another tool may have any.
    """
    from perfbench.history import StoredRun

    metrics: dict[tuple[str, str, str], list[SeriesKey]] = {}
    for key in history.keys(demonstrations=True):
        metrics.setdefault((key.suite, key.card, key.cell_id), []).append(key)
    cells: dict[str, set[tuple[str, str, str]]] = {run_id: set() for run_id in infos}
    for cell, keys in metrics.items():
        speed = [key for key in keys if key.metric == "tok_per_s"]
        for key in speed or keys:
            for point in history.series(key, demonstrations=True).points:
                cells.setdefault(point.run_id, set()).add(cell)
    return [
        StoredRun(run_id, one.measured_utc, frozenset(cells[run_id]), bool(one.injections))
        for run_id, one in infos.items()
    ]


def named_by_baselines() -> set[str]:
    """Runs that a file in reports/baselines names; BASELINE where one cannot be read, since nobody
    knows then which run it needs.
    """
    from perfbench.commands.baseline_source import BASELINES
    from perfbench.records import load_baseline

    found = set[str]()
    for path in sorted(Path(BASELINES).rglob("*.json")):
        baseline = load_baseline(path)
        found |= {baseline.run_id, *(cell.run_id for cell in baseline.cells.values())}
    return found


def _of_changes(history: History) -> set[str]:
    """The runs on both sides of each change point, and those of decisions."""
    changes = history.change_points()
    sides = {run_id for one in changes for run_id in (one.before_run_id, one.run_id)}
    return sides | {one.run_id for one in history.decisions()}
