"""What `check` does: measure, judge by the stored baseline, and measure what looks slower again
beside the baseline's commit.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from perfbench.commands import session
from perfbench.commands.session import Outcome, RunOptions
from perfbench.errors import PerfbenchError

if TYPE_CHECKING:
    from perfbench.gate import Judgement
    from perfbench.matrix import Matrix
    from perfbench.records import Baseline, BaselineProblem
    from perfbench.runner import Ground


def check(
    path: Path, options: RunOptions, baseline_path: Path | None, strict: bool, confirmed: bool
) -> Outcome | None:
    """None where the matrix skips this machine; ``confirmed`` False leaves what looks slower as
    WATCH.
    """
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
    """Leaves trace.json beside the run; starts nothing where nothing is red.

    The verdict stands, whatever the machine does.
    """
    from perfbench.machine import NvmlUnavailable
    from perfbench.runner import base_commits
    from perfbench.tracing import RED_VERDICTS, TracedSides, trace_on_red

    red = [cell.cell_id for cell in outcome.judgement.of(*RED_VERDICTS)]
    if not red:
        return
    try:
        matrix = session.matrix_of(outcome.run)
        bases = base_commits(red, found, session.policy_of(outcome.run))
        trace_on_red(
            outcome.judgement,
            TracedSides(outcome.run, matrix, _ground(matrix), bases),
            outcome.folder,
        )
    except (PerfbenchError, NvmlUnavailable, OSError) as error:
        session.warn(
            "no trace was taken of the red cells, and the verdict stands without:"
            f" {' '.join(str(error).split())}"
        )
    except KeyboardInterrupt:
        session.warn(
            "no trace was taken of the red cells, and the verdict stands without: interrupted"
        )


def _confirmed(
    outcome: Outcome, found: Baseline | BaselineProblem, options: RunOptions, left_s: float | None
) -> Judgement:
    from perfbench.gate import confirm_all, pairs_for
    from perfbench.runner import Task, base_commits, confirm_cells

    run, matrix, policy = (
        outcome.run,
        session.matrix_of(outcome.run),
        session.policy_of(outcome.run),
    )
    ground = _ground(matrix)
    task = Task(
        matrix,
        [],
        pairs_for(outcome.judgement, policy),
        run.manifest.seed,
        options.argv,
        run.manifest.injections,
        left_s,
    )
    commits = base_commits(outcome.judgement.to_confirm, found, policy)
    told = confirm_cells(run, outcome.folder, commits, task, ground)
    if told.reasons:
        session.warn(f"not all is confirmed: {told}")
    return confirm_all(outcome.judgement, told.measured, policy, told.reasons)


def _ground(matrix: Matrix) -> Ground:
    from perfbench.machine import check_target, collect_environment, no_color
    from perfbench.runner import Ground, progress_for

    fit = check_target(matrix.target)
    here, progress = collect_environment(fit.device), progress_for(no_color=no_color())
    return Ground(fit, session.capability_here(fit), here, session.CHECKOUT, progress, session.say)
