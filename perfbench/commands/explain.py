"""`perfbench explain`: why a cell got its verdict, in plain words and with the numbers between."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perfbench.commands import options as opt
from perfbench.commands.console import print_text
from perfbench.errors import Exit
from perfbench.text import shorten

if TYPE_CHECKING:
    from perfbench.commands.outcome import Outcome
    from perfbench.gate import CellVerdict

MOST_COMMITS = 10  # of a list that is to be read


def explain(
    run: opt.TraceArg,
    cell: opt.CellArg,
    baseline: opt.BaselinePath = None,
    as_json: opt.Json = False,
) -> None:
    """Say in plain words why a cell got its verdict."""
    from perfbench.commands.judging import judge_stored, pair_outcome
    from perfbench.commands.names import named_cell
    from perfbench.gate import baseline_of_run, explain_cell
    from perfbench.report import to_json

    pair = pair_outcome(run, baseline)
    outcome = pair or judge_stored(run, baseline, strict=False)
    cell = named_cell(cell, (one.axes for one in outcome.judgement.cells), str(run))
    found = outcome.baseline
    if outcome.base_run is not None:
        found = baseline_of_run(outcome.base_run)
    assert found is not None  # a run is judged by a baseline, a pair by its base
    text = explain_cell(outcome.run, outcome.judgement, cell, outcome.policy, found)
    (judged,) = (one for one in outcome.judgement.cells if one.cell_id == cell)
    change = change_of(judged, outcome, run)
    if as_json:
        verdict = to_json(outcome.judgement, outcome.run)
        (line,) = (one for one in verdict["cells"] if one["cell_id"] == cell)
        about = {name: verdict[name] for name in ("run", "baseline", "policy", "findings")}
        content = {**about, "cell": line, "explanation": text.splitlines()}
        content |= {"commits": list(change.commits), "next": list(change.commands)}
        print_text(json.dumps(content, indent=2))
        return
    lines = [*change.commits, *(f"next: {command}" for command in change.commands)]
    print_text("\n".join([text, *lines]))


@dataclass(frozen=True, slots=True)
class CodeChange:
    """``commits``: a sentence, then a commit a line; ``commands`` to be typed next."""

    commits: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


def change_of(cell: CellVerdict, outcome: Outcome, run_path: Path) -> CodeChange:
    """The commits from the base to the candidate that touch what is measured, and the commands that
    look further; empty for a cell that is neither red nor SUSPECT.
    """
    from perfbench.commands.outcome import CHECKOUT
    from perfbench.records import Verdict
    from perfbench.runner import CannotBuild, changes_between
    from perfbench.tracing import TRACED_VERDICTS

    verdict = cell.verdict
    if cell.exit_code is Exit.OK and verdict is not Verdict.SUSPECT:
        return CodeChange()
    traced = verdict in TRACED_VERDICTS
    trace = (shlex.join(["perfbench", "trace", str(run_path), cell.cell_id]),) if traced else ()
    base, manifest = _base_commit(cell.cell_id, outcome), outcome.run.manifest
    candidate = manifest.source.commit
    if base is None or candidate is None:
        which = "base" if base is None else "candidate"
        return CodeChange((f"Commits: that of the {which} is not known.",), trace)
    between = f"between {base[:12]} and {candidate[:12]}"
    try:
        found = changes_between(base, candidate, CHECKOUT, MOST_COMMITS)
    except CannotBuild as error:
        return CodeChange((f"Commits {between}: {error}",), trace)
    more = found.count - len(found.lines)
    commits = (
        f"Commits {between} that touch nsa/: {found.count}",
        *(f"  {shorten(line)}" for line in found.lines),
        *((f"  and {more} more",) if more > 0 else ()),
    )
    if manifest.source.dirty_sha256 is not None:
        return CodeChange((*commits, "  and changes that were never committed"), trace)
    slower = verdict in (Verdict.REGRESSED, Verdict.SUSPECT) and not manifest.injections
    if not (slower and found.is_ancestor and found.count):
        return CodeChange(commits, trace)
    words = ["--good", base[:12], "--bad", candidate[:12], "--matrix", manifest.matrix_path]
    return CodeChange(commits, (*trace, shlex.join(["perfbench", "bisect", *words, cell.cell_id])))


def _base_commit(cell_id: str, outcome: Outcome) -> str | None:
    """Of the pair's base, else of the cell's baseline; None where that names none, or code that was
    never committed.
    """
    from perfbench.runner import base_commits, is_commit

    if outcome.base_run is None:
        assert outcome.baseline is not None  # what judged the run
        return base_commits([cell_id], outcome.baseline, outcome.policy)[cell_id]
    source = outcome.base_run.manifest.source
    clean = source.dirty_sha256 is None and is_commit(source.commit)
    return source.commit if clean else None
