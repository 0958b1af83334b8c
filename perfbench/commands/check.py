"""`perfbench check`: measure, judge by the stored baseline, measure what looks slower again in
turns with the baseline's commit, and trace what is red or
SUSPECT.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from perfbench.commands import options as opt
from perfbench.commands.console import say, warn
from perfbench.errors import Exit, PerfbenchError

if TYPE_CHECKING:
    from perfbench.commands.outcome import Outcome
    from perfbench.matrix import Matrix
    from perfbench.runner import MeasuringContext


def check(
    matrix: opt.MatrixArg,
    only: opt.Only = None,
    baseline: opt.BaselinePath = None,
    strict: opt.Strict = False,
    resume: opt.Resume = None,
    budget: opt.Budget = None,
    seed: opt.Seed = None,
    out: opt.Out = opt.RUNS,
    source_commit: opt.Commit = None,
    inject: opt.Inject = None,
    no_confirm: opt.NoConfirm = False,
    executor: opt.ExecutorName = "local",
    cards: opt.Cards = None,
    executor_option: opt.ExecutorOption = None,
    history: opt.HistoryUrl = None,
    webhook: opt.WebhookUrl = None,
    as_json: opt.Json = False,
) -> None:
    """Measure, judge, confirm what is slower: for CI."""
    from perfbench.commands.notifying import check_address
    from perfbench.commands.outcome import finish
    from perfbench.matrix import load_matrix

    began = time.monotonic()
    check_address(webhook)
    loaded = load_matrix(matrix)
    where = (executor, cards, executor_option)
    typed = opt.TypedOptions(only, resume, budget, seed, out, source_commit, inject, *where)
    options = opt.RunOptions.parsed(loaded, opt.argv(), typed)
    by = JudgedAs(baseline, strict, no_confirm, began)
    keep = partial(_keep_and_notify, history=history, webhook=webhook)
    finish(check_and_judge(loaded, options, by), as_json, keep=keep)


def _keep_and_notify(outcome: Outcome, history: str | None, webhook: str | None) -> None:
    from perfbench.commands.keeping import keep
    from perfbench.commands.notifying import notify

    keep(outcome, history)
    notify(outcome, webhook)


@dataclass(frozen=True, slots=True)
class JudgedAs:
    """The options of `check` that say how it judges; its budget is counted from ``began``."""

    baseline: Path | None = None
    strict: bool = False
    no_confirm: bool = False
    began: float = field(default_factory=time.monotonic)


def check_and_judge(
    matrix: Matrix, options: opt.RunOptions, by: JudgedAs, *, silent: bool = False
) -> Outcome | None:
    """Measure, judge by the baseline, confirm and trace; None where ``matrix`` skips this
    machine.
    """
    from perfbench.commands.measuring import opened_context
    from perfbench.runner import held_cards

    with opened_context(matrix.target, options.fleet, silent=silent) as context:
        if context is None:
            refuse_loosened_skip(matrix)
            return None
        with held_cards(context.fit) as fit:  # pairs and traces follow, with what was spent so far
            held = replace(context, fit=fit)
            return _check_in(held, matrix, options, by, silent=silent)


def _check_in(
    context: MeasuringContext,
    matrix: Matrix,
    options: opt.RunOptions,
    by: JudgedAs,
    *,
    silent: bool,
) -> Outcome:
    from perfbench.commands.judging import screen
    from perfbench.commands.measuring import measure
    from perfbench.commands.outcome import matrix_of
    from perfbench.commands.own_code import refuse_stored_code
    from perfbench.matrix import step_folder

    warn_of_baseline(matrix, context, by.baseline)
    options = replace(options, baseline=by.baseline)
    outcome = screen(measure(matrix, options, context), by.baseline, by.strict)
    if options.resume is not None:  # what follows takes the run's own matrix
        refuse_stored_code(matrix_of(outcome.run), [step_folder(matrix.path)])
    if outcome.judgement.to_confirm and not by.no_confirm:
        spent_s = time.monotonic() - by.began
        left_s = None if options.budget_s is None else options.budget_s - spent_s
        outcome.write_for_machines()  # what is known so far, should this process be killed
        try:
            outcome = _confirmed(outcome, options, left_s, context)
        except (PerfbenchError, KeyboardInterrupt):
            leave_verdict(outcome.folder, by.baseline, by.strict)
            raise
    try:
        trace_worst(outcome, context)
    except KeyboardInterrupt:
        if silent:  # a caller from Python must not go on; what is known stays in the folder
            leave_verdict(outcome.folder, by.baseline, by.strict)
            raise
        warn("no trace was taken, and the verdict stands without: interrupted")
    return outcome


def refuse_loosened_skip(matrix: Matrix) -> None:
    """USAGE where the matrix skips this machine, and no baseline of it on the default branch
    does: nothing would be measured or judged, and exit 0.
    """
    from perfbench.commands.baseline_source import loosened_skip

    if problem := loosened_skip(matrix):
        raise PerfbenchError(
            Exit.USAGE,
            f"the matrix skips this machine, and loosens what judges it: {problem}. Next: undo it,"
            " or promote a run with it and have the baseline reviewed",
        )


def warn_of_baseline(matrix: Matrix, context: MeasuringContext, named: Path | None) -> None:
    """Say before the minutes are spent that the baseline cannot judge; the run is kept and can be
    promoted.
    """
    from perfbench.commands.baseline_source import judged_by
    from perfbench.gate import joint_rules
    from perfbench.matrix import JudgeRules, policies
    from perfbench.records import MAKE_ONE, BaselineProblem

    slug = context.environment.gpu_slug
    by = judged_by(matrix, slug, named)
    if isinstance(by.found, BaselineProblem):
        what = by.found.message.partition(MAKE_ONE)[0]
        warn(f"{what}. Measuring all the same; the run can be promoted")
    elif by.rules is not None:
        joint = joint_rules(JudgeRules.of(matrix), by.rules, policies(matrix), by.found.cells)
        for finding in joint.findings():
            warn(f"{finding.reason}. Measuring all the same, and exit 2")


def leave_verdict(folder: Path, baseline: Path | None, strict: bool) -> None:
    """Write what the screen and the finished pairs say of a run whose confirmation broke off, so
    that nobody finds an older verdict or none.
    """
    from perfbench.commands.judging import judge_stored

    try:
        outcome = judge_stored(folder, baseline, strict)
        outcome.write_report()
    except PerfbenchError as error:
        warn(f"no verdict was written: {error}")
    else:
        say(f"so far: {outcome.judgement.headline}")


def _confirmed(
    outcome: Outcome, options: opt.RunOptions, left_s: float | None, context: MeasuringContext
) -> Outcome:
    from perfbench.commands.outcome import matrix_of
    from perfbench.gate import plan_confirmation
    from perfbench.runner import PairSpec, base_commits, confirm_cells, shared_steps

    run, policy = outcome.run, outcome.policy
    plan = plan_confirmation(outcome.judgement)
    spec = PairSpec(
        matrix_of(run),
        [],
        plan.looks[-1],
        run.manifest.seed,
        options.argv,
        run.manifest.injections,
        left_s,
        plan=plan,
        policies=policy,
    )
    assert outcome.baseline is not None  # the screen judged by it
    asked = outcome.judgement.to_confirm
    shared = shared_steps(run, asked, outcome.baseline, context.repository)
    commits = base_commits(
        [cell_id for cell_id in asked if cell_id not in shared], outcome.baseline, policy
    )
    found = confirm_cells(run, outcome.folder, commits, spec, context)
    found = replace(found, reasons={**found.reasons, **shared})
    if found.reasons:
        warn(f"not all is confirmed: {found}")
    return outcome.confirmed(found)


def trace_worst(outcome: Outcome, context: MeasuringContext) -> None:
    """Leaves trace.json next to the run; starts nothing where nothing is red or SUSPECT.

    The verdict stands, whatever the machine does.
    """
    from perfbench.commands.outcome import matrix_of
    from perfbench.machine import NvmlUnavailable
    from perfbench.runner import base_commits
    from perfbench.tracing import TRACED_VERDICTS, TracedPair, trace_on_red

    cells = [cell.cell_id for cell in outcome.judgement.of(*TRACED_VERDICTS)]
    if not cells:
        return
    if context.fleet is not None:
        say("no trace was taken: on a node of the fleet, `perfbench trace RUN CELL` takes one")
        return
    assert outcome.baseline is not None  # the screen judged by it
    try:
        bases = base_commits(cells, outcome.baseline, outcome.policy)
        pair = TracedPair(outcome.run, matrix_of(outcome.run), context, bases)
        trace_on_red(outcome.judgement, pair, outcome.folder)
    except (PerfbenchError, NvmlUnavailable, OSError) as error:
        warn(f"no trace was taken, and the verdict stands without: {' '.join(str(error).split())}")
