"""A matrix measured on this machine: what `run`, `check`, `ab`, `trace` and `tune` share."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from perfbench.commands import outcome
from perfbench.commands.console import say, warn
from perfbench.commands.options import RunOptions, nsa_settings
from perfbench.errors import PerfbenchError
from perfbench.machine import (
    TargetFit,
    capability_here,
    check_target,
    collect_environment,
    load_now,
    no_color,
    source_of,
)
from perfbench.matrix import Matrix, Plan, Target, build_plan
from perfbench.runner import (
    MeasuringContext,
    RunSpec,
    SilentProgress,
    open_fleet,
    prepared_executors,
    progress_for,
    run_matrix,
    run_on_fleet,
)
from perfbench.text import counted

if TYPE_CHECKING:
    from nsa.routing import Capability
    from perfbench.runner.fleet import FleetOptions


def measuring_context(target: Target, *, silent: bool = False) -> MeasuringContext | None:
    """This machine for what ``target`` demands; None where that skips this machine.

    ``silent``: without progress.
    """
    fit = check_target(target)
    if fit.warning:
        warn(fit.warning)
    if fit.skip:
        return None
    load = load_now(None if fit.gpu is None else fit.gpu.uuid)
    if load.is_busy:
        warn(str(load))
    elif not silent:
        say(str(load))
    return MeasuringContext(
        fit,
        capability_here(fit),
        collect_environment(fit.device),
        outcome.CHECKOUT,
        SilentProgress() if silent else progress_for(no_color=no_color()),
        say,
    )


@contextmanager
def opened_context(
    target: Target, fleet: FleetOptions | None, *, silent: bool = False
) -> Iterator[MeasuringContext | None]:
    """`measuring_context`, or the cards of ``fleet``, whose agents end with the block."""
    if fleet is None:
        yield measuring_context(target, silent=silent)
        return
    with open_fleet(fleet, target, say) as opened:
        facts = opened.cards[0].facts
        if not silent:
            say(f"{counted(len(opened.cards), 'card')}: {', '.join(map(str, opened.cards))}")
        yield MeasuringContext(
            TargetFit("cpu" if target.is_cpu else "cuda", None),
            facts.capability,
            facts.environment,
            outcome.CHECKOUT,
            SilentProgress() if silent else progress_for(no_color=no_color()),
            say,
            opened,
        )


def measure(matrix: Matrix, options: RunOptions, context: MeasuringContext) -> Path:
    """Measure what ``options`` select and return the run's folder."""
    plan = _complete_plan(matrix, options.only, context.capability)
    for warning in (*plan.warnings, *plan.skipped):
        warn(warning)
    spec = RunSpec(
        plan,
        matrix,
        context.environment,
        source_of(context.repository, options.source_commit),
        options.argv,
        new_seed() if options.seed is None else options.seed,
        options.only,
        options.inject,
        [] if context.fleet is None else [card.line for card in context.fleet.cards],
        _prior(matrix, options, context),
    )
    if context.fleet is not None:
        return run_on_fleet(
            spec,
            context.fleet,
            runs_dir=options.out,
            budget_s=options.budget_s,
            resume=options.resume,
            progress=context.progress,
        ).folder
    with prepared_executors(context.fit) as (executor,):
        finished = run_matrix(
            spec,
            executor,
            runs_dir=options.out,
            budget_s=options.budget_s,
            resume=options.resume,
            progress=context.progress,
        )
    return finished.folder


def _prior(matrix: Matrix, options: RunOptions, context: MeasuringContext) -> dict[str, float]:
    """How unsure each cell is by its baseline, where a budget may leave some out; empty without one
    that can judge. A run that is resumed keeps its own.
    """
    if options.budget_s is None or options.resume is not None:
        return {}
    from perfbench.commands.baseline_source import judged_by
    from perfbench.gate import prior_half_pct
    from perfbench.records import Baseline

    found = judged_by(matrix, context.environment.gpu_slug, options.baseline).found
    return prior_half_pct(found) if isinstance(found, Baseline) else {}


def new_seed() -> int:
    return secrets.randbelow(2**31)


def _complete_plan(matrix: Matrix, only: list[str], capability: Capability) -> Plan:
    """Every cell, so that a later slice can join the run; or the selected ones, where others cannot
    be routed here.
    """
    settings = nsa_settings()
    if only and matrix.peers:  # says why, where every selected cell is skipped
        build_plan(matrix, only=only, capability=capability, settings=settings)
    try:
        return build_plan(matrix, only=[], capability=capability, settings=settings)
    except PerfbenchError:
        if not only:
            raise
        return build_plan(matrix, only=only, capability=capability, settings=settings)
