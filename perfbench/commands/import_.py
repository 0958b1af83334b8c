"""`perfbench import`: what other tools measured, into the history."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfbench.commands import options as opt
from perfbench.commands.console import print_text, say, warn
from perfbench.errors import Exit, PerfbenchError
from perfbench.text import counted, plain

if TYPE_CHECKING:
    from perfbench.history import History, HistoryRun
    from perfbench.history.exchange import Imported, Stated

AUTO = "auto"
AHEAD = timedelta(days=1)  # of a machine whose clock is wrong
MEASURED_HERE = "perfbench"
Format = Annotated[
    str,
    typer.Argument(
        metavar="FORMAT",
        help="auto, pytest-benchmark, asv, github-action-benchmark, customBiggerIsBetter,"
        " customSmallerIsBetter, google-benchmark, criterion or bencher.",
    ),
]
Files = Annotated[
    list[Path],
    typer.Argument(metavar="FILE...", help="Files, or folders: asv's results, target/criterion."),
]
Suite = Annotated[
    str | None,
    typer.Option("--suite", metavar="NAME", help="Instead of what the files call the project."),
]
Card = Annotated[
    str | None,
    typer.Option("--card", metavar="NAME", help="Instead of what the files call the machine."),
]
OfCommit = Annotated[
    str | None, typer.Option("--commit", metavar="SHA", help="Of files that name none.")
]
Date = Annotated[
    str | None,
    typer.Option(
        "--date",
        metavar="DATE",
        help="Of files that name none; by default when the file was written.",
    ),
]


def import_(
    format_: Format,
    file: Files,
    suite: Suite = None,
    card: Card = None,
    commit: OfCommit = None,
    date: Date = None,
    history: opt.HistoryUrl = None,
    as_json: opt.Json = False,
) -> None:
    """Add what another tool measured to the history; what is there already stays."""
    from perfbench.commands.dates import moment_of
    from perfbench.history import open_history
    from perfbench.history.exchange import Stated

    now = datetime.now(UTC)
    when = None if date is None else moment_of(date, "--date", now)
    _check_stated(suite, card, commit)
    found = _read(format_, file, Stated(suite, card, commit, when))
    _check_past(found.runs, now)
    lines: list[dict[str, str]] = []
    with open_history(history) as opened:
        if suite is None:
            _check_apart(found.runs, opened)
        for run in found.runs:
            added = opened.add(_described(run, opened)).value
            lines.append(_line(run, added))
            if not as_json:
                print_text("{added:<8}  {run_id}  {text}".format(**lines[-1]))
    if as_json:
        print_text(json.dumps(lines, indent=2))
    for note in dict.fromkeys(found.notes):
        warn(note)
    counts = {word: sum(line["added"] == word for line in lines) for word in ("new", "replaced")}
    say(f"{counted(len(lines), 'run')}: {counts['new']} new, {counts['replaced']} replaced")


def _check_stated(suite: str | None, card: str | None, commit: str | None) -> None:
    from perfbench.history.exchange import COMMIT, is_commit

    for option, value in (("--suite", suite), ("--card", card)):
        if value is not None and not value.strip():
            raise PerfbenchError(
                Exit.USAGE, f"{option}: got {value!r}, wanted a name. Next: leave {option} out"
            )
    if commit is not None and not is_commit(commit):
        raise PerfbenchError(
            Exit.USAGE,
            f"--commit: got {commit[:60]!r}, wanted {COMMIT}. Next: git rev-parse HEAD prints them",
        )


def _check_past(runs: Iterable[HistoryRun], now: datetime) -> None:
    """USAGE: a file is of the future, beyond what clocks differ; it would stay the newest run."""
    for run in runs:
        if run.info.measured_utc > now + AHEAD:
            raise PerfbenchError(
                Exit.USAGE,
                f"{plain(run.info.folder)}: got the date {run.info.measured_utc:%Y-%m-%d}, which"
                " lies in the future. Next: correct the date in the file",
            )


def _read(named: str, paths: list[Path], stated: Stated) -> Imported:
    from perfbench.commands.import_files import sources_of
    from perfbench.history.exchange import READERS, ImportFormat, detect

    if named != AUTO and named not in list(ImportFormat):
        raise PerfbenchError(
            Exit.USAGE,
            f"got the format {named!r}, wanted {AUTO}, {', '.join(ImportFormat)}. Next: perfbench"
            f" import {AUTO} FILE...",
        )
    sources = sources_of(paths)
    return READERS[detect(sources) if named == AUTO else ImportFormat(named)](sources, stated)


def _check_apart(runs: Iterable[HistoryRun], history: History) -> None:
    """USAGE: a file calls its suite and machine as a suite and card that were measured here. Its
    numbers come without their proof, and would join those series.
    """
    every = history.runs(demonstrations=True)
    measured = {(one.suite, one.card) for one in every if one.origin == MEASURED_HERE}
    for run in runs:
        if (run.info.suite, run.info.card) in measured:
            raise PerfbenchError(
                Exit.USAGE,
                f"{plain(run.info.folder)}: names suite {run.info.suite!r} on {run.info.card!r},"
                " of which the history has runs that perfbench measured. Next: name"
                " another with --suite NAME, or the same to join them",
            )


def _described(run: HistoryRun, history: History) -> HistoryRun:
    """Metrics that the file neither gives a unit nor a direction are what the history says."""
    known = {}
    for name, metric in run.metrics.items():
        if not metric.unit and metric.better == "neither":
            with suppress(PerfbenchError):  # it has none of this name
                known[name] = history.metric(name)
    return replace(run, metrics={**run.metrics, **known}) if known else run


def _line(run: HistoryRun, added: str) -> dict[str, str]:
    info = run.info
    missing = sum(one.value is None for cell in run.cells for one in cell.measured.values())
    plural = "" if len(run.cells) == 1 else "s"
    text = f"{len(run.cells)} benchmark{plural} of {info.suite}, {info.card}"
    text += f", commit {info.commit[:12]}" if info.commit else ", no commit"
    text += f", {info.measured_utc:%Y-%m-%d %H:%M} UTC"
    text += f", {missing} without a number" if missing else ""
    return {"added": added, "run_id": info.run_id, "file": info.folder, "text": text}
