"""`perfbench report`: the report of a stored run, or of an `ab` folder, written again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfbench.commands import options as opt
from perfbench.errors import Exit, PerfbenchError

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
    from perfbench.commands.judging import judge_as_made, judge_stored, pair_outcome
    from perfbench.records import Baseline

    if (pair := pair_outcome(path, baseline_path)) is not None:
        return pair
    if baseline_path is not None:
        return judge_stored(path, baseline_path, strict=False)
    outcome = judge_as_made(path)
    here = out is None or out.resolve() == outcome.folder.resolve()
    if here and not isinstance(outcome.baseline, Baseline):
        _keep_verdict(outcome)
    return outcome


def _keep_verdict(outcome: Outcome) -> None:
    """USAGE where the folder's verdict.json has another exit code."""
    known = outcome.folder / "verdict.json"
    if not known.is_file():
        return
    try:
        before = json.loads(known.read_bytes()).get("exit_code")
    except (ValueError, AttributeError, RecursionError):
        return
    if before != outcome.judgement.exit_code:
        text = (
            f"{known} says exit {before}, and without a baseline this run is exit"
            f" {int(outcome.judgement.exit_code)}"
        )
        raise PerfbenchError(
            Exit.USAGE,
            f"{text}. Next: name what judged it with --baseline, or another folder with --out",
        )
