"""Judge a run, with or without a baseline: hard gates first, then speed.

Pure: no file, no clock, no torch.

This is stage 1: it calls nothing REGRESSED. What it screens is WATCH, or SUSPECT where the screen
rejects it, until `confirm_all` judges base and candidate measured interleaved in one session; where
that cannot be done it stays so: SUSPECT fails, WATCH fails under `--strict`. A cell that is NEW
where the policy says ``new: fail`` is FAILED: nothing proves that it is not a slow one renamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import TYPE_CHECKING

from perfbench.errors import Exit
from perfbench.gate.boundary import beyond_boundary
from perfbench.gate.cards import (
    between_session_sd,
    cards_of,
    moved_cards,
    on_other_cards,
    on_several,
)
from perfbench.gate.cell_sides import CellSides, side_of_baseline, side_of_rows
from perfbench.gate.comparable import (
    incomparable,
    run_findings,
    unrecorded_settings,
    unverified,
    unwatched,
)
from perfbench.gate.confirmation import range_over_mean_pct, verdict_with
from perfbench.gate.coverage import (
    clock_events,
    missing,
    nothing_compared,
    reproduce,
    rows_by_cell,
    selected_ids,
    usable,
)
from perfbench.gate.hard_rules import WHOLE, ProofIndex, cell_findings
from perfbench.gate.intervals import bands
from perfbench.gate.judgement import (
    BaselineOrigin,
    CellVerdict,
    Finding,
    Judgement,
    StepCost,
    severity,
    summarise,
)
from perfbench.gate.loaded_peers import changed_peers
from perfbench.gate.own_steps import changed_files, own_line
from perfbench.gate.speed_rule import priors_of, screen
from perfbench.gate.step_bounds import bound_findings
from perfbench.gate.suspicion import mark_suspects, settle_command
from perfbench.matrix import GatePolicy, Policies
from perfbench.records import BaselineProblem, Cell, PlannedCell, Replicate, Run, Verdict

if TYPE_CHECKING:
    from perfbench.records import Baseline, BaselineCell


def judge(
    run: Run,
    baseline: Baseline | BaselineProblem | None,
    policy: GatePolicy | Policies,
    *,
    strict: bool = False,
    same_route: bool = True,
) -> Judgement:
    """Return the verdict of every cell and of the run; the same inputs give the same verdicts.

    ``baseline`` None: only the hard gates (what ``run`` alone does). ``strict`` fails WATCH, BLIND
    and UNSTABLE.
    ``same_route``: a cell on another Route than its base is WRONG_PATH; of two runs it is a note.
    ``policy``: one for all cells, or `matrix.policies` with its overrides and aliases.
    """
    policies = Policies.over(policy)
    known = None if baseline is None or isinstance(baseline, BaselineProblem) else baseline
    rows = rows_by_cell(run)
    base_cells = {} if known is None else renamed_cells(known.cells, policies)
    axes_of = {cell_id: cell.axes for cell_id, cell in base_cells.items()} | {
        c.cell_id: c.axes for c in run.manifest.cells
    }
    selected = selected_ids(run, axes_of)
    planned = [
        cell for cell in run.manifest.cells if cell.cell_id in selected or cell.cell_id in rows
    ]
    if policies.finds_boundary:
        beyond = beyond_boundary(planned, rows, base_cells)
        planned = [cell for cell in planned if cell.cell_id not in beyond]

    findings = run_findings(run, rows)
    if isinstance(baseline, BaselineProblem):
        findings.append(Finding(baseline.verdict, "baseline", baseline.message))
    if known is not None:
        findings += incomparable(run, known, policies.whole)
    mixed = next(
        (f.reason for f in findings if f.verdict in (Verdict.ENV, Verdict.INCOMPARABLE)), None
    )
    moved: Mapping[str, str] = {}
    if known is not None and run.manifest.cards:
        moved = moved_cards(run, known, policies.whole.sentinel_band_pct)
        findings += [Finding(Verdict.ENV, "sentinel moved", why) for why in moved.values()]

    context = _Context(
        run,
        policies,
        baseline,
        mixed,
        _whole_speeds(planned, rows),
        ProofIndex.of(run),
        same_route,
        moved,
    )
    first = [
        _prejudge(context, cell, rows.get(cell.cell_id, []), base_cells.get(cell.cell_id))
        for cell in planned
    ]
    priors = priors_of(
        [one.sides for one in first if one.sides is not None and not one.sides.too_few()],
        paired=False,
    )
    cells = [
        (
            one.verdict
            if one.sides is None
            else verdict_with(one.verdict, one.sides, screen(one.sides, priors))
        )
        for one in first
    ]
    compared = {one.sides.cell_id: one.sides for one in first if one.sides is not None}
    cells = mark_suspects(
        cells,
        policies,
        [cell_id for cell_id, sides in compared.items() if sides.more_work()],
        {cell_id: settle_command(run, cell_id, base_cells[cell_id].commit) for cell_id in compared},
    )
    gone = sorted(set(base_cells) & selected - {cell.cell_id for cell in run.manifest.cells})
    cells += [missing(run, policies.of(cell_id), cell_id, base_cells[cell_id]) for cell_id in gone]
    findings += nothing_compared(run, known, cells, findings)
    cells = [
        replace(cell, own=own_line(rows.get(cell.cell_id, []))) if cell.axes.is_own_step else cell
        for cell in cells
    ]
    if known is None:  # else what changed says how far the noise reaches
        cells = _with_intervals(cells, rows)
    notes = tuple(unverified(run, *([] if known is None else [known])))
    if known is not None and not mixed:
        notes += (*unwatched(run, known), *unrecorded_settings(run, known))
    if known is not None:
        notes += (*changed_files(run, known), *changed_peers(run, known))
        notes += tuple(on_other_cards(rows, known))
    return summarise(cells, findings, policies.whole, strict, origin_of(known), notes)


def _with_intervals(
    cells: list[CellVerdict], rows: Mapping[str, list[Replicate]]
) -> list[CellVerdict]:
    found = bands(rows)
    return [
        replace(
            cell,
            half_pct=100 * (found[cell.cell_id][1] / cell.cand_tok_per_s - 1),
            host_bound=any(row.host_bound for row in usable(rows[cell.cell_id])),
        )
        if cell.cell_id in found and cell.cand_tok_per_s is not None
        else cell
        for cell in cells
    ]


@dataclass(frozen=True, slots=True)
class _Context:
    run: Run
    policies: Policies
    baseline: Baseline | BaselineProblem | None
    mixed: str | None  # why no speed of this run may be compared
    whole_speeds: Mapping[Cell, float]  # of steps with a backward
    proofs: ProofIndex
    same_route: bool
    moved: Mapping[str, str]  # cards of a fleet that changed -> how


@dataclass(frozen=True, slots=True)
class _First:
    """A cell before its speed is compared; ``sides`` null: ``verdict`` is final."""

    verdict: CellVerdict
    sides: CellSides | None = None


def renamed_cells(cells: Mapping[str, BaselineCell], policies: Policies) -> dict[str, BaselineCell]:
    """The baseline's cells under their ids of today; a cell that was promoted under its new id
    needs no alias.
    """
    found = dict(cells)
    for old, alias in policies.aliases.items():
        if (cell := found.pop(old, None)) is None or alias.cell_id in found:
            continue
        renamed = (
            alias.config_sha256
            if cell.config_sha256 == alias.former_config_sha256
            else cell.config_sha256
        )
        found[alias.cell_id] = cell.model_copy(update={"config_sha256": renamed})
    return found


def _whole_speeds(
    planned: list[PlannedCell], rows: Mapping[str, list[Replicate]]
) -> dict[Cell, float]:
    """The slowest replicate of every cell whose step has a backward."""
    speeds = {}
    for cell in planned:
        if cell.axes.workload in WHOLE.values() and (good := usable(rows.get(cell.cell_id, []))):
            speeds[cell.axes] = min(row.tok_per_s for row in good if row.tok_per_s is not None)
    return speeds


def _prejudge(
    context: _Context, cell: PlannedCell, rows: list[Replicate], base: BaselineCell | None
) -> _First:
    """Hard gates, throttling, and whether there is anything to compare with."""
    again = reproduce(context.run, cell.cell_id)
    axes, base_speed = cell.axes, None if base is None else base.speed
    whole = (
        context.whole_speeds.get(replace(axes, workload=WHOLE[axes.workload]))
        if axes.workload in WHOLE
        else None
    )
    good = usable(rows)
    if hard := cell_findings(cell, rows, whole, context.proofs):
        # No speed next to it: a number is published only with its proof.
        reason = "; ".join(
            f.reason if f.verdict is hard[0].verdict else f"{f.verdict.value}: {f.reason}"
            for f in hard
        )
        return _First(
            CellVerdict(
                cell.cell_id,
                axes,
                hard[0].verdict,
                reason,
                base_speed,
                replicates=len(good),
                reproduce=again,
            )
        )
    discarded = len({row.replicate for row in rows}) - len(good)
    if not good:
        reason = (
            f"all {discarded} replicates were throttled while timing ({clock_events(rows)}): cool"
            " the card, then measure again"
        )
        return _First(
            CellVerdict(cell.cell_id, axes, Verdict.UNSTABLE, reason, base_speed, reproduce=again)
        )
    here = side_of_rows(cell, good)
    verdict, reason = _uncompared(context, cell, good, discarded, base)
    measured = CellVerdict(
        cell_id=cell.cell_id,
        axes=axes,
        verdict=verdict,
        reason=reason,
        base_tok_per_s=base_speed,
        cand_tok_per_s=geometric_mean(here.tok_per_s),
        change_pct=(
            None
            if base_speed is None
            else round(100 * (geometric_mean(here.tok_per_s) / base_speed - 1), 9)
        ),
        replicates=len(good),
        spread_pct=range_over_mean_pct(here.tok_per_s),
        reproduce=again,
        step=StepCost.of(good),
    )
    if bounds := bound_findings(cell, good, on_gpu=context.proofs.on_gpu):
        return _First(_beyond_bounds(measured, bounds))
    if reason or base is None:
        return _First(measured)
    return _First(
        measured,
        CellSides(
            cell.cell_id,
            context.policies.of(cell.cell_id),
            side_of_baseline(base),
            here,
            between_session_sd(base, good),
        ),
    )


def _beyond_bounds(measured: CellVerdict, found: list[Finding]) -> CellVerdict:
    """A cell whose speed is true and whose step costs too much: its number is published, and not
    compared.
    """
    reasons = [one.reason for one in found]
    verdicts = [one.verdict for one in found]
    if measured.verdict is not None and measured.exit_code is not Exit.OK:
        verdicts, reasons = [*verdicts, measured.verdict], [*reasons, measured.reason]
    return replace(measured, verdict=min(verdicts, key=severity), reason="; ".join(reasons))


def _uncompared(
    context: _Context,
    cell: PlannedCell,
    good: Sequence[Replicate],
    discarded: int,
    base: BaselineCell | None,
) -> tuple[Verdict | None, str]:
    """Why the speed of a cell that passed every hard gate is not compared; an empty reason where it
    can be.
    """
    policy = context.policies.of(cell.cell_id)
    least, usable_ = policy.min_replicates, len(good)
    # of one machine's run, which may be resumed on another card, the report says so
    mixed_cards = on_several(good) if context.run.manifest.cards else ""
    if discarded and usable_ < least:
        return (
            Verdict.UNSTABLE,
            (
                f"{discarded} replicates were throttled and discarded, {usable_} are left and"
                f" {least} are wanted"
            ),
        )
    if context.baseline is None:
        return None, f"not compared: {mixed_cards or 'no baseline was asked for'}"
    if isinstance(context.baseline, BaselineProblem):
        return None, "not compared: the baseline cannot be used"
    if context.mixed is not None:
        return Verdict.INCOMPARABLE, "not compared: environments differ (see the run's findings)"
    if mixed_cards:
        return Verdict.INCOMPARABLE, f"not compared: {mixed_cards}"
    if changed := [context.moved[card] for card in cards_of(good) if card in context.moved]:
        return Verdict.INCOMPARABLE, f"not compared: {changed[0]}"
    return plan_difference(cell, base, policy, same_route=context.same_route)


def plan_difference(
    cell: PlannedCell, base: BaselineCell | None, policy: GatePolicy, *, same_route: bool = True
) -> tuple[Verdict | None, str]:
    """How a planned cell differs from the baseline's in what is known before it runs; (None, '')
    where it is the same config on the same Route.
    """
    if base is None:
        reason = "the baseline has no such cell; promote a run that has it"
        return (
            (Verdict.NEW, reason)
            if policy.new == "warn"
            else (Verdict.FAILED, f"NEW, and the policy says new: fail; {reason}")
        )
    if base.config_sha256 != cell.config_sha256:
        text = (
            f"another config under the same name (baseline {base.config_sha256[:12]}, now"
            f" {cell.config_sha256[:12]})"
        )
        return Verdict.INCOMPARABLE, f"{text}: promote a new baseline if the change was meant"
    if same_route and set(base.counters) != set(cell.route.counters):
        ran, wanted = (" ".join(sorted(names)) for names in (cell.route.counters, base.counters))
        return (
            Verdict.WRONG_PATH,
            f"routed to {ran}, the baseline's Route is {wanted}: promote a new baseline if the"
            " change was meant",
        )
    return None, ""


def origin_of(baseline: Baseline | None) -> BaselineOrigin | None:
    if baseline is None:
        return None
    source = baseline.source
    dirty, proved = source.dirty_sha256 is not None, source.unproved is None
    return BaselineOrigin(
        baseline.matrix_name, baseline.run_id, baseline.promoted_utc, source.commit, dirty, proved
    )
