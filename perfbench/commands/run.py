"""`perfbench run`: measure a matrix, judge it by the hard gates, and write its report."""

from __future__ import annotations

from perfbench.commands import options as opt


def run(
    matrix: opt.MatrixArg,
    only: opt.Only = None,
    resume: opt.Resume = None,
    budget: opt.Budget = None,
    seed: opt.Seed = None,
    out: opt.Out = opt.RUNS,
    source_commit: opt.Commit = None,
    inject: opt.Inject = None,
    as_json: opt.Json = False,
) -> None:
    """Measure a matrix and write its report."""
    from perfbench.commands.judging import judge_alone
    from perfbench.commands.measuring import measure, measuring_context
    from perfbench.commands.names import named_cells
    from perfbench.commands.outcome import finish
    from perfbench.matrix import load_matrix

    loaded = load_matrix(matrix)
    options = opt.RunOptions(
        opt.argv(),
        named_cells(loaded, only, "cell="),
        resume,
        opt.seconds(budget),
        seed,
        out,
        source_commit,
        named_cells(loaded, inject, "@"),
    )
    context = measuring_context(loaded.target)
    outcome = None if context is None else judge_alone(measure(loaded, options, context))
    finish(outcome, as_json)
