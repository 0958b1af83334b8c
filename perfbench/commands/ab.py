"""`perfbench ab`: two versions of the code measured in turns, the second judged by the first."""

from __future__ import annotations

from perfbench.commands import options as opt
from perfbench.errors import Exit, PerfbenchError


def ab(
    rev_a: opt.RevA,
    rev_b: opt.RevB,
    matrix: opt.MatrixArg,
    blocks: opt.Blocks = None,
    only: opt.Only = None,
    strict: opt.Strict = False,
    resume: opt.PairResume = None,
    budget: opt.Budget = None,
    seed: opt.Seed = None,
    out: opt.PairOut = opt.RUNS,
    inject: opt.PairInject = None,
    as_json: opt.Json = False,
) -> None:
    """Measure two versions in turns and compare them."""
    from perfbench.commands.judging import judge_pair
    from perfbench.commands.measuring import measuring_context, new_seed
    from perfbench.commands.outcome import finish
    from perfbench.matrix import load_matrix
    from perfbench.runner import PairSpec, checked_out, measure_pair, new_pair_folder
    from perfbench.tracing import TracedPair, trace_on_red

    budget_s = opt.seconds(budget)
    loaded = load_matrix(matrix)
    context = measuring_context(loaded.target)
    if context is None:
        finish(None, as_json)
    if resume is not None and inject:
        raise PerfbenchError(
            Exit.USAGE, "--inject cannot join a pair that has begun. Next: omit --resume"
        )
    spec = PairSpec(
        loaded,
        only or _cells_of(resume),
        blocks or loaded.gate.confirm_blocks,
        new_seed() if seed is None else seed,
        opt.argv(),
        inject or [],
        budget_s,
    )
    with (
        checked_out(rev_a, context.repository) as a,
        checked_out(rev_b, context.repository) as b,
    ):
        folder = resume or new_pair_folder(out, context.environment, b.source.commit)
        found = measure_pair(spec, (a, b), context, folder, resume=resume is not None)
    outcome = judge_pair(found.base, found.candidate, found.folder, strict)
    bases = dict.fromkeys((cell.cell_id for cell in outcome.judgement.cells), rev_a)
    traced = TracedPair(found.candidate, loaded, context, bases, rev_b)
    trace_on_red(outcome.judgement, traced, found.folder)
    finish(outcome, as_json)


def _cells_of(resume: opt.PairResume) -> list[str]:
    """The selection of a pair that is resumed; all cells of a new one."""
    from perfbench.runner import read_pair

    return [] if resume is None else read_pair(resume).candidate.manifest.only
