"""What `check` does: measure, judge by the stored baseline, and measure what looks slower again beside the baseline's commit."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from perfbench import session
from perfbench.session import Outcome, RunOptions

if TYPE_CHECKING:
    from perfbench.baseline import Baseline
    from perfbench.judgement import BaselineProblem, Judgement
    from perfbench.matrix import Matrix
    from perfbench.policy import Policies
    from perfbench.recheck import Ground


def check(path: Path, options: RunOptions, baseline_path: Path | None, strict: bool, confirmed: bool) -> Outcome | None:
    """None where the matrix skips this machine; ``confirmed`` False leaves what looks slower as WATCH."""
    began = time.monotonic()
    session.warn_of_baseline(path, baseline_path)
    folder = session.measure(path, options)
    if folder is None:
        return None
    outcome, found = session.screen(folder, baseline_path, strict)
    if confirmed and outcome.judgement.to_confirm:
        left_s = None if options.budget_s is None else options.budget_s - (time.monotonic() - began)
        outcome = replace(outcome, judgement=_confirmed(outcome, found, options, left_s))
    _trace_reds(outcome, found)
    return outcome


def _trace_reds(outcome: Outcome, found: Baseline | BaselineProblem) -> None:
    """Leaves trace.json beside the run; starts nothing where nothing is red."""
    from perfbench import trace

    red = [cell.cell_id for cell in outcome.judgement.of(*trace.RED)]
    if red:
        matrix = session.matrix_of(outcome.run)
        bases = _commits(red, found, session.policy_of(outcome.run))
        trace.on_red(outcome.judgement, trace.Sides(outcome.run, matrix, _ground(matrix), bases), outcome.folder)


def _confirmed(outcome: Outcome, found: Baseline | BaselineProblem, options: RunOptions, left_s: float | None) -> Judgement:
    from perfbench import gate, recheck, settle
    from perfbench.pair import Task

    run, matrix, policy = outcome.run, session.matrix_of(outcome.run), session.policy_of(outcome.run)
    if left_s is not None and left_s <= 0:
        reason = "the budget is spent. Next: a larger --budget, with --resume"
        return gate.conclude(outcome.judgement, None, None, policy, reason)
    ground = _ground(matrix)
    task = Task(matrix, [], settle.pairs_for(outcome.judgement, policy), run.manifest.seed, options.argv, run.manifest.injections, left_s)
    told = recheck.confirm(run, outcome.folder, _commits(outcome.judgement.to_confirm, found, policy), task, ground)
    if told.reason:
        session.warn(f"not all is confirmed: {told.reason}")
    return gate.conclude(outcome.judgement, told.base, told.candidate, policy, told.reason)


def _ground(matrix: Matrix) -> Ground:
    from perfbench import environment
    from perfbench.progress import progress_for
    from perfbench.recheck import Ground

    fit = environment.check_target(matrix.target)
    here, progress = environment.collect(fit.device), progress_for(no_color=environment.no_color())
    return Ground(fit, session.capability_here(fit), here, session.CHECKOUT, progress, session.say)


def _commits(cells: list[str], found: Baseline | BaselineProblem, policy: Policies) -> dict[str, str | None]:
    """Which commit the baseline of each cell was measured at, under its former name where it was renamed."""
    from perfbench.judgement import BaselineProblem

    known = {} if isinstance(found, BaselineProblem) else dict(found.cells)
    former = {alias.cell_id: old for old, alias in policy.aliases.items()}
    names = {cell_id: cell_id if cell_id in known else former.get(cell_id, cell_id) for cell_id in cells}
    # A run of uncommitted changes is not its commit: beside that one nothing would be confirmed.
    dirty = None if isinstance(found, BaselineProblem) or found.source.dirty_sha256 is None else found.run_id
    clean = {name: cell.commit for name, cell in known.items() if dirty is None or cell.run_id != dirty}
    return {cell_id: clean.get(name) for cell_id, name in names.items()}
