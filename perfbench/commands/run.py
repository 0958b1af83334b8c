"""`perfbench run`: measure a matrix, judge it by the hard gates, and write its report."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from perfbench.commands import options as opt

if TYPE_CHECKING:
    from perfbench.commands.outcome import Outcome
    from perfbench.matrix import Matrix


def run(
    matrix: opt.MatrixArg,
    only: opt.Only = None,
    resume: opt.Resume = None,
    budget: opt.Budget = None,
    seed: opt.Seed = None,
    out: opt.Out = opt.RUNS,
    source_commit: opt.Commit = None,
    inject: opt.Inject = None,
    executor: opt.ExecutorName = "local",
    cards: opt.Cards = None,
    executor_option: opt.ExecutorOption = None,
    history: opt.HistoryUrl = None,
    as_json: opt.Json = False,
) -> None:
    """Measure a matrix and write its report."""
    from perfbench.commands.keeping import keep
    from perfbench.commands.outcome import finish
    from perfbench.matrix import load_matrix

    loaded = load_matrix(matrix)
    where = (executor, cards, executor_option)
    typed = opt.TypedOptions(only, resume, budget, seed, out, source_commit, inject, *where)
    outcome = run_and_judge(loaded, opt.RunOptions.parsed(loaded, opt.argv(), typed))
    finish(outcome, as_json, keep=partial(keep, url=history))


def run_and_judge(
    matrix: Matrix, options: opt.RunOptions, *, silent: bool = False
) -> Outcome | None:
    """Measure, and judge by the hard gates; None where ``matrix`` skips this machine."""
    from perfbench.commands.judging import judge_alone
    from perfbench.commands.measuring import measure, opened_context

    with opened_context(matrix.target, options.fleet, silent=silent) as context:
        return None if context is None else judge_alone(measure(matrix, options, context))
