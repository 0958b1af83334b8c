"""Judged runs into the history: those that a command has just made, and those in folders."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from perfbench.commands.console import say, warn
from perfbench.errors import Exit, FewerRows, PerfbenchError
from perfbench.text import shown_address

if TYPE_CHECKING:
    from perfbench.commands.outcome import Outcome
    from perfbench.history import Added, History, HistoryRun


def keep(outcome: Outcome, url: str | None, *, silent: bool = False) -> None:
    """Add a run that was just judged where a history is configured.

    A history that cannot be reached costs one warning, with the command that adds the run later.
    So does Ctrl-C, which a caller from Python (``silent``) gets all the same.
    """
    from perfbench.machine import configured_history

    if (named := configured_history(url)) is None:
        return
    try:
        from perfbench.history import open_history  # needs packages of its own

        with open_history(named) as history:
            added = history.add(as_history_run(outcome), may_shrink=False)
    except (PerfbenchError, KeyboardInterrupt) as error:
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        where = [] if url is None else ["--history", shown_address(url)]
        fewer = isinstance(error, FewerRows)
        words = ["perfbench", "history", "add", str(outcome.folder), *["--force"] * fewer, *where]
        effect = "replaces the stored run by this one" if fewer else "adds it later"
        why = f"{' '.join(why.split())}. `{shlex.join(words)}` {effect}"
        warn(f"the run is not in the history: {why}")
        if silent and isinstance(error, KeyboardInterrupt):
            raise
    else:
        say(f"{shown_address(named)}: {added.value} {outcome.run.manifest.run_id}")


def add_folder(
    history: History, path: Path, *, may_shrink: bool = False
) -> Iterator[tuple[HistoryRun, Added]]:
    """Add the run, or both sides of the `ab` folder, at ``path``."""
    for outcome in judged_at(path):
        run = as_history_run(outcome)
        yield run, history.add(run, may_shrink=may_shrink)


def as_history_run(outcome: Outcome) -> HistoryRun:
    """With its report, and the time of its commit where the checkout here knows it."""
    from perfbench.commands.outcome import CHECKOUT
    from perfbench.history import RunPlace, history_run
    from perfbench.machine import commit_time

    commit = outcome.run.manifest.source.commit
    moment = commit_time(Path.cwd(), commit) or commit_time(CHECKOUT, commit)
    place = RunPlace(outcome.folder.as_posix(), moment)
    return history_run(outcome.run, outcome.judgement, outcome.report(), place)


def judged_at(path: Path) -> list[Outcome]:
    """The run at ``path`` as `report` judges it; of an `ab` folder both sides: the base by the hard
    gates, the candidate by its base.

    USAGE where the folder's verdict.json says otherwise, because its baseline is not here.
    """
    from perfbench.commands.judging import (
        check_known_verdict,
        judge_alone,
        judge_as_made,
        judge_pair_folder,
    )
    from perfbench.runner import are_paired, is_pair, read_pair

    if not is_pair(path):
        outcome = judge_as_made(path)
        check_known_verdict(outcome, "restore the baseline that judged it")
        return [outcome]
    pair = read_pair(path)
    if not are_paired(pair.base, pair.candidate):
        return [judge_as_made(path / "a"), judge_as_made(path / "b")]
    return [judge_alone(path / "a"), judge_pair_folder(path)]


def runs_named(path: Path, every: bool) -> list[Path]:
    """``path``, or ``every`` run below it; USAGE for a folder without one, or that only holds
    folders of runs.
    """
    below = list(runs_below(path)) if path.is_dir() else [path]
    if below and (every or below == [path]):
        return below
    if not below:
        problem, next_step = f"{path} holds no run", "name a run's folder"
    else:
        problem, next_step = f"{path} is no run, and holds {len(below)}", "add them with --all"
    raise PerfbenchError(Exit.USAGE, f"{problem}. Next: {next_step}")


def runs_below(folder: Path) -> Iterator[Path]:
    """Run and `ab` folders in ``folder``, in the order of their names. What lies in one is part of
    it, as the sides of a confirmation are; links are not followed.
    """
    from perfbench.records import has_run
    from perfbench.runner import is_pair

    if has_run(folder) or is_pair(folder):
        yield folder
        return
    try:
        inside = sorted(one for one in folder.iterdir() if one.is_dir() and not one.is_symlink())
    except OSError as error:
        raise PerfbenchError(
            Exit.USAGE, f"{folder} cannot be read: {error.strerror or error}. Next: see its rights"
        ) from None
    for one in inside:
        yield from runs_below(one)
