"""`perfbench ab`: two versions of the code measured in turns, the second judged by the first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from perfbench.commands import options as opt
from perfbench.errors import Exit, PerfbenchError

if TYPE_CHECKING:
    from perfbench.matrix import Matrix


def ab(
    rev_a: opt.RevA,
    rev_b: opt.RevB,
    matrix: opt.MatrixArg,
    pairs: opt.Pairs = None,
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
    from perfbench.commands.names import named_cells
    from perfbench.commands.outcome import finish
    from perfbench.matrix import load_matrix
    from perfbench.runner import (
        PairSpec,
        checked_out,
        held_cards,
        measure_pair,
        new_pair_folder,
    )
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
        named_cells(loaded, only, "cell=") or _cells_of(resume),
        _pairs(pairs, loaded),
        new_seed() if seed is None else seed,
        opt.argv(),
        named_cells(loaded, inject, "@"),
        budget_s,
    )
    with held_cards(context.fit) as fit:
        context = replace(context, fit=fit)
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


def _pairs(asked: int | None, matrix: Matrix) -> int:
    """USAGE for pairs that are no whole blocks, or that the matrix's policy cannot judge by."""
    from perfbench.gate import PAIRS_PER_BLOCK
    from perfbench.matrix import policies

    pairs = matrix.gate.confirm_pairs if asked is None else asked
    found = policies(matrix)
    least = max(one.min_replicates for one in (found.whole, *found.by_cell.values()))
    whole = -(-max(pairs, least) // PAIRS_PER_BLOCK) * PAIRS_PER_BLOCK
    if pairs != whole:
        got = f"got {pairs} pairs of each cell, wanted whole blocks of {PAIRS_PER_BLOCK}"
        if pairs < least:
            got += f" and at least the policy's min_replicates of {least}"
        raise PerfbenchError(Exit.USAGE, f"{got}. Next: --pairs {whole}")
    return pairs


def _cells_of(resume: opt.PairResume) -> list[str]:
    """The selection of a pair that is resumed; all cells of a new one."""
    from perfbench.runner import read_pair

    return [] if resume is None else read_pair(resume).candidate.manifest.only
