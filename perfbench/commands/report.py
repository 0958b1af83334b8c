"""`perfbench report`: the report of a stored run, or of an `ab` folder, written again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfbench.commands import options as opt

if TYPE_CHECKING:
    from perfbench.commands.outcome import Outcome

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Where to write; the run's folder by default."),
]


def report(
    run: opt.TraceArg,
    baseline: opt.BaselinePath = None,
    out: Out = None,
    as_json: opt.Json = False,
) -> None:
    """Write a run's report again, judged as its own command did, or by --baseline."""
    from perfbench.commands.outcome import finish

    finish(_judged(run, baseline, out), as_json, out)


def _judged(path: Path, baseline_path: Path | None, out: Path | None) -> Outcome:
    """Without a baseline as the run's own command judged it; a pair by its own base.

    USAGE where that would write over the verdict of a baseline that is not found here.
    """
    from perfbench.commands.judging import (
        check_known_verdict,
        judge_as_made,
        judge_stored,
        pair_outcome,
    )

    if (pair := pair_outcome(path, baseline_path)) is not None:
        return pair
    if baseline_path is not None:
        return judge_stored(path, baseline_path, strict=False)
    outcome = judge_as_made(path)
    if out is None or out.resolve() == outcome.folder.resolve():
        check_known_verdict(
            outcome, "name what judged it with --baseline, or another folder with --out"
        )
    return outcome
