"""`perfbench triage`: what somebody decided about changes that were reported."""

from __future__ import annotations

import getpass
from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from perfbench.commands import detect as of_detect
from perfbench.commands import options as opt
from perfbench.commands.console import print_text, warn
from perfbench.errors import Exit, PerfbenchError

if TYPE_CHECKING:
    from perfbench.history import History


class Verb(StrEnum):
    """The command's words for a TriageKind."""

    ACCEPT = "accept"
    NOISE = "noise"
    NOTE = "note"
    UNDO = "undo"


Decision = Annotated[
    Verb,
    typer.Argument(
        metavar="accept|noise|note|undo",
        help="accept: the level since RUN is the level. noise: nothing changed there. note: a"
        " remark, shown with the change. undo: takes back all that was decided at RUN.",
    ),
]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's name as `detect` prints it, or how it begins; `latest`."
    ),
]
Note = Annotated[str, typer.Option("--note", metavar="TEXT", help="Why.")]
Author = Annotated[
    str | None,
    typer.Option("--author", metavar="NAME", help="Default: who you are on this computer."),
]


def triage(
    decision: Decision,
    run: RunName,
    note: Note = "",
    suite: of_detect.Suite = None,
    card: of_detect.Card = None,
    cell: of_detect.CellName = None,
    metric: of_detect.MetricName = None,
    author: Author = None,
    history: opt.HistoryUrl = None,
) -> None:
    """Accept a change, call it noise, or note something about it.

    It holds for every series, or for those that the options name; of two decisions about a change
    the last one wins. What is taken back are decisions for all of these series or for part of them.
    """
    from perfbench.commands.history_choice import named_cell
    from perfbench.history import Triage, TriageKind, open_history

    if decision is Verb.NOTE and not note:
        raise PerfbenchError(Exit.USAGE, "got no text, wanted a remark. Next: add --note TEXT")
    kinds = {
        Verb.ACCEPT: TriageKind.ACCEPTED,
        Verb.NOISE: TriageKind.NOISE,
        Verb.NOTE: TriageKind.NOTE,
    }
    with open_history(history) as opened:
        run_id = opened.run(run).info.run_id
        keys = opened.keys(suite=suite, card=card, metric=metric)
        cell_id = cell and named_cell(cell, {key.cell_id for key in keys})
        if decision is Verb.UNDO:
            print_text(_undone(opened, run_id, (suite, card, cell_id, metric)))
            return
        made = Triage(
            kinds[decision],
            run_id,
            note,
            author or _user(),
            datetime.now(UTC),
            suite,
            card,
            cell_id,
            metric,
        )
        matched = sum(made.matches(key) for key in opened.keys())  # noqa: SIM118
        if not matched:
            raise PerfbenchError(
                Exit.USAGE,
                "no series has this suite, card, cell and metric. Next: name one that `perfbench"
                " detect --all` prints",
            )
        opened.triage(made)
    print_text(f"{made.kind.value} at run {run_id}: {matched} series")


def _undone(opened: History, run_id: str, wanted: tuple[str | None, ...]) -> str:
    """Takes back what was decided at a run about these series; what it was."""
    made = [
        one
        for one in opened.decisions()
        if one.run_id == run_id
        and all(
            asked is None or asked == held
            for asked, held in zip(
                wanted, (one.suite, one.card, one.cell_id, one.metric), strict=True
            )
        )
    ]
    if not made:
        raise PerfbenchError(
            Exit.USAGE,
            f"nothing was decided at run {run_id} about these series alone. Next: name the series"
            " as the decision did, or none",
        )
    opened.undo(*made)
    kinds = ", ".join(one.kind.value for one in made)
    return f"taken back at run {run_id}: {kinds}"


def accept_promoted(
    run_id: str, suite: str, card: str, cell_ids: Iterable[str], url: str | None = None
) -> None:
    """A baseline was made of these cells: where a history is configured, their changes until this
    run are accepted.

    Never raises: a history that does not have the run, or cannot be reached, costs one warning.
    """
    from perfbench.machine import configured_history

    if configured_history(url) is None:
        return
    now, author = datetime.now(UTC), _user()
    try:
        from perfbench.history import Triage, TriageKind, open_history

        with open_history(url) as opened:
            about = (TriageKind.ACCEPTED, run_id, "promoted to baseline", author, now, suite, card)
            opened.triage(*(Triage(*about, cell_id) for cell_id in cell_ids))
    except PerfbenchError as error:
        why = " ".join(str(error).split())
        warn(
            f"the history does not know of this baseline: {why}. `perfbench history add` the run,"
            f" then `perfbench triage accept {run_id}`"
        )


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return "unknown"
