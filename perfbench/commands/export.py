"""`perfbench export`: runs as the files of other tools."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfbench.commands import options as opt
from perfbench.commands.console import print_text, say, warn
from perfbench.errors import Exit, PerfbenchError, unwritable
from perfbench.text import counted

if TYPE_CHECKING:
    from perfbench.history import HistoryRun
    from perfbench.history.exchange import Exported

PAGE, BMF = "github-action-benchmark", "bencher"
CUSTOM = ("customBiggerIsBetter", "customSmallerIsBetter")
FORMATS = (PAGE, *CUSTOM, BMF)
Format = Annotated[str, typer.Argument(metavar="FORMAT", help=f"{', '.join(FORMATS)}.")]
Run = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="RUN",
        help="A run of the history, how its name begins, or `latest`; or a run's folder, which"
        " needs no history.",
    ),
]
Since = Annotated[
    str | None,
    typer.Option("--since", metavar="DATE", help="Runs from then on: 2026-11-23, 3d, monday."),
]
OfSuite = Annotated[
    str | None, typer.Option("--suite", metavar="NAME", help="Of a history: all by default.")
]
OfCard = Annotated[
    str | None, typer.Option("--card", metavar="NAME", help="Of a history: all by default.")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Instead of stdout.")]


def export(
    format_: Format,
    run: Run = None,
    since: Since = None,
    suite: OfSuite = None,
    card: OfCard = None,
    out: Out = None,
    history: opt.HistoryUrl = None,
) -> None:
    """Write the history as github-action-benchmark's data.js, or one run as its custom JSON or in
    Bencher's format.
    """
    from perfbench.commands.dates import moment_of

    if format_ not in FORMATS:
        raise PerfbenchError(
            Exit.USAGE,
            f"got the format {format_!r}, wanted one of {', '.join(FORMATS)}. Next: perfbench"
            f" export {PAGE}",
        )
    if since is not None and (run is not None or format_ != PAGE):
        raise PerfbenchError(
            Exit.USAGE,
            f"got --since and one run, wanted one of both. Next: leave out --since, or"
            f" export {PAGE}",
        )
    begin = None if since is None else moment_of(since, "--since", datetime.now(UTC))
    if run is not None and Path(run).exists():
        runs = _of_folder(Path(run))
    else:
        runs = _of_history(history, run, format_ == PAGE, (suite, card, begin))
    _write(_exported(format_, runs), out, len(runs))


def _of_folder(folder: Path) -> list[HistoryRun]:
    from perfbench.commands.keeping import as_history_run, judged_at

    return [as_history_run(outcome) for outcome in judged_at(folder)]


def _of_history(
    url: str | None,
    run: str | None,
    every: bool,
    wanted: tuple[str | None, str | None, datetime | None],
) -> list[HistoryRun]:
    """The named run; of all others those that are wanted, or the newest of them."""
    from perfbench.history import open_history

    suite, card, since = wanted
    with open_history(url) as opened:
        if run is not None:
            return [opened.run(run)]
        found = opened.runs(suite=suite, card=card, since=since)
        if not found:
            raise PerfbenchError(
                Exit.USAGE, "the history holds no such run. Next: perfbench history shows them"
            )
        return [opened.run(one.run_id) for one in (found if every else found[:1])]


def _exported(format_: str, runs: Sequence[HistoryRun]) -> Exported:
    from perfbench.history.exchange import custom, data_js, write_bencher

    if format_ == PAGE:
        return data_js(runs)
    if injected := next((one.info for one in runs if one.info.injections), None):
        faults = ", ".join(injected.injections)
        raise PerfbenchError(
            Exit.USAGE,
            f"run {injected.run_id} has injected faults ({faults}), for which {format_} has no"
            f" place. Next: perfbench export {PAGE}, which marks them",
        )
    if len(runs) != 1:
        raise PerfbenchError(
            Exit.USAGE,
            f"got {len(runs)} runs, wanted one for {format_}. Next: name one side of the pair",
        )
    return custom(format_, runs[0]) if format_ in CUSTOM else write_bencher(runs[0])


def _write(made: Exported, out: Path | None, count: int) -> None:
    from perfbench.records import whole_file

    if out is None:
        print_text(made.text)
    else:
        try:
            with whole_file(out) as partial:
                partial.write_text(made.text, encoding="utf-8")
        except OSError as error:
            raise unwritable(out, error, "name another file with --out") from None
    for note in made.notes:
        warn(note)
    say(f"{counted(count, 'run')} exported{'' if out is None else f' to {out}'}")
