"""`perfbench comment`: one comment on a pull request for all runs of it, rewritten in place."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfbench.commands import options as opt
from perfbench.commands.console import print_text, say, warn
from perfbench.errors import Exit, PerfbenchError

if TYPE_CHECKING:
    from perfbench.commands.outcome import Outcome
    from perfbench.posting import PullRequest
    from perfbench.report import AbsentRun, CommentedRun

BOT = "github-actions[bot]"  # whose token a workflow gets
Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...", help="Run or `ab` folders, or folders of such, as artifacts unpack."
    ),
]
Post = Annotated[
    bool,
    typer.Option(
        "--post",
        help="Post it with the token in GITHUB_TOKEN; where that may not, into the step summary.",
    ),
]
Pull = Annotated[
    int | None,
    typer.Option(
        "--pr", min=1, metavar="N", help="The pull request. Default: that of GitHub's event."
    ),
]
Expected = Annotated[
    list[str] | None,
    typer.Option(
        "--expect",
        metavar="MATRIX",
        help="A matrix, or its file, of which a run must be there, as often as it is named:"
        " without one it is MISSING.",
    ),
]
Key = Annotated[
    str, typer.Option("--key", help="Comments of another key are others: one for each.")
]
Author = Annotated[
    str,
    typer.Option("--author", metavar="LOGIN", help="Who GITHUB_TOKEN is: its comments are ours."),
]


def comment(
    runs: Runs,
    post: Post = False,
    pr: Pull = None,
    baseline: opt.BaselinePath = None,
    expect: Expected = None,
    key: Key = "perfbench",
    author: Author = BOT,
) -> None:
    """Print, or post, what a pull request shows of its runs. No verdict is changed: exit 0."""
    from perfbench.machine import workflow_page
    from perfbench.report import comment_text

    found, unread = _found(runs, baseline)
    absent = [*unread, *_absent(expect or [], found)]
    try:
        text = comment_text(found, absent, page=workflow_page(), key=key)
    except ValueError as error:
        places = ", ".join(repr(run.as_posix()) for run in runs)
        text = f"{error}, at or below {places}. Next: name a run's folder, or --expect its matrix"
        raise PerfbenchError(Exit.USAGE, text) from None
    if not post:
        print_text(text)
    elif problem := _posted(text, pr, author):
        _shown_instead(text, problem)


def _found(
    paths: Sequence[Path], baseline: Path | None
) -> tuple[list[CommentedRun], list[AbsentRun]]:
    """Every run at or below ``paths``, and those that are there and cannot be read. A folder that
    is not there holds none: an artifact that was never uploaded.
    """
    from perfbench.commands.keeping import runs_below
    from perfbench.report import AbsentRun

    found: list[CommentedRun] = []
    unread: list[AbsentRun] = []
    for path in paths:
        for folder in runs_below(path) if path.is_dir() else [path] if path.exists() else []:
            try:
                found.append(_judged(folder, baseline))
            except (PerfbenchError, ValueError) as error:
                unread.append(AbsentRun(folder.name, str(error)))
    return found, unread


def _judged(folder: Path, baseline: Path | None) -> CommentedRun:
    """As its verdict.json says, which the gate wrote; judged here where there is none, or where
    ``baseline`` is named.
    """
    from perfbench.commands.judging import judge_as_made, judge_stored, pair_outcome
    from perfbench.report import CommentedRun, read_verdict, verdict_file

    stored = folder / "verdict.json"
    if baseline is None and stored.exists():
        return CommentedRun(read_verdict(stored), folder.as_posix())
    outcome = pair_outcome(folder, baseline)
    if outcome is None:
        outcome = (
            judge_as_made(folder)
            if baseline is None
            else judge_stored(folder, baseline, strict=False)
        )
        _refuse_broken_off(outcome)
    return CommentedRun(verdict_file(outcome.judgement, outcome.run), folder.as_posix())


def _refuse_broken_off(outcome: Outcome) -> None:
    """FAILED for a run that is green so far and whose command never wrote its verdict: a job that
    was killed is not a green one.
    """
    if outcome.judgement.exit_code is not Exit.OK or (outcome.folder / "verdict.json").exists():
        return
    run, cells = outcome.run, outcome.judgement.cells
    due = run.manifest.replicates * len(cells)
    done = sum(len({row.replicate for row in run.of_cell(cell.cell_id)}) for cell in cells)
    if done < due:
        raise PerfbenchError(
            Exit.FAILED,
            f"got {done} of {due} replicates and no verdict.json, wanted a run that came to its end"
            f". Next: see the log of its job, or --resume {shlex.quote(str(outcome.folder))}",
        )


def _absent(expected: Sequence[str], found: Sequence[CommentedRun]) -> list[AbsentRun]:
    from perfbench.report import AbsentRun

    here = Counter(one.name for one in found)
    # two runners of one card may share a matrix: each is to leave a run
    wanted = Counter(Path(name).name.removesuffix(".yaml").lstrip("@") for name in expected)
    reason = "no run was left behind; see the log of its job"
    return [AbsentRun(name, reason) for name in (wanted - here).elements()]


def _posted(text: str, number: int | None, author: str) -> str:
    """'' where the comment is on the pull request; else why it is not."""
    from perfbench.posting import CannotSend, upsert_comment

    to = _pull_request(number)
    if isinstance(to, str):
        return to
    try:
        done = upsert_comment(to, text, author)
    except CannotSend as error:
        rights = "; the token may not write here, as that of a fork's pull request"
        return f"{error}{rights if error.status in (401, 403, 404) else ''}"
    say(f"{'created' if done.created else 'updated'} the comment on pull request {to.number}")
    if done.author and done.author != author:
        warn(
            f"the comment is by {done.author}, not {author}, so the next one will not find it."
            f" Next: --author {done.author}"
        )
    return ""


def _pull_request(number: int | None) -> PullRequest | str:
    """Where the comment goes; why there is no such place, as text."""
    from perfbench.machine import environment_variable, pull_request_number
    from perfbench.posting import PullRequest

    if number is None and (number := pull_request_number()) is None:
        return "this event has no pull request"
    token = (environment_variable("GITHUB_TOKEN") or "").strip()
    if not token:
        return "GITHUB_TOKEN is not set"
    api = environment_variable("GITHUB_API_URL") or "https://api.github.com"
    try:
        return PullRequest(api, environment_variable("GITHUB_REPOSITORY") or "", number, token)
    except ValueError as error:
        return str(error)


def _shown_instead(text: str, problem: str) -> None:
    """The comment in the step summary with one line that says why it is there; on stdout where
    there is no summary.
    """
    from perfbench.machine import step_summary
    from perfbench.report import append_summary

    line = f"This comment is here, and on no pull request: {problem}."
    warn(f"no comment was posted: {problem}")
    shown = f"{text}\n{line}\n"
    path = step_summary()
    if path is None:
        print_text(shown)
    elif lost := append_summary(path, shown):
        warn(lost)
