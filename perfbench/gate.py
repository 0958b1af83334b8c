"""Judge a run, with or without a baseline: hard gates first, then speed. Pure: no file, no clock, no torch.

Speed here is the median over replicates against the baseline's median; a better rule replaces ``_speed`` alone.
A cell that is NEW where the policy says ``new: fail`` is FAILED: nothing proves that it is not a slow one renamed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from perfbench.axes import AXES, Cell, select
from perfbench.hardgate import Ground, cell_findings
from perfbench.judgement import BaselineOrigin, BaselineProblem, CellVerdict, Finding, Judgement, summarise, unproved
from perfbench.policy import GatePolicy
from perfbench.result import METHOD_VERSION, Environment, PlannedCell, Replicate, Run, Status
from perfbench.verdict import EXIT_OF, Exit, PerfbenchError, Verdict

if TYPE_CHECKING:
    from perfbench.baseline import Baseline, BaselineCell

__all__ = ["BaselineProblem", "CellVerdict", "Finding", "Judgement", "judge", "reproduce", "selected_ids", "usable"]

Axes = Mapping[str, str | int]
HOST_NOISE_PCT = 50.0  # range of a host-bound cell's wall time between processes on one idle H100; a larger drop is no noise


def judge(run: Run, baseline: Baseline | BaselineProblem | None, policy: GatePolicy, *, strict: bool = False) -> Judgement:
    """Return the verdict of every cell and of the run; the same inputs give the same verdicts.

    ``baseline`` None: only the hard gates (what ``run`` alone does). ``strict`` fails WATCH, BLIND and UNSTABLE.
    """
    known = None if baseline is None or isinstance(baseline, BaselineProblem) else baseline
    rows = _rows_by_cell(run)
    base_cells = {} if known is None else known.cells
    axes_of = {cell_id: dict(cell.axes) for cell_id, cell in base_cells.items()} | {c.cell_id: dict(c.axes) for c in run.manifest.cells}
    selected = selected_ids(run, axes_of)
    planned = [cell for cell in run.manifest.cells if cell.cell_id in selected or cell.cell_id in rows]

    findings = _run_findings(run, rows)
    if isinstance(baseline, BaselineProblem):
        findings.append(Finding(baseline.verdict, "baseline", baseline.message))
    if known is not None:
        findings += _incomparable(run, known)
    mixed = next((f.reason for f in findings if f.verdict in (Verdict.ENV, Verdict.INCOMPARABLE)), None)

    context = _Context(run, policy, baseline, mixed, _train_speeds(planned, rows), Ground.of(run))
    cells = [_judge_cell(context, cell, rows.get(cell.cell_id, []), base_cells.get(cell.cell_id)) for cell in planned]
    gone = sorted(set(base_cells) & selected - {cell.cell_id for cell in run.manifest.cells})
    cells += [_missing(run, policy, cell_id, base_cells[cell_id]) for cell_id in gone]
    findings += _nothing(run, known, cells, findings)
    return summarise(cells, findings, policy, strict, _origin(known))


def selected_ids(run: Run, axes_of: Mapping[str, Axes]) -> set[str]:
    """Which of the named cells this run was asked to measure, over all its slices.

    A plan that holds only its own selection cannot be widened by a later ``--resume``, so later selections count
    only where the plan holds more.
    """
    first = _chosen(axes_of, run.manifest.only)
    if all(cell.cell_id in first for cell in run.manifest.cells):
        return first
    return first.union(*(_chosen(axes_of, slice_.only) for slice_ in run.resumed))


def usable(rows: Iterable[Replicate]) -> list[Replicate]:
    """Finished, unthrottled replicates with a speed; of a repeated replicate number the last row counts."""
    ok = {row.replicate: row for row in rows if row.status is Status.OK and row.tok_per_s is not None and not _throttled(row)}
    return list(ok.values())


def reproduce(run: Run, cell_id: str) -> str:
    """The command that measures this one cell again."""
    matrix, only = shlex.quote(run.manifest.matrix_path), shlex.quote(f"cell={cell_id}")
    return f"perfbench run {matrix} --only {only}"


@dataclass(frozen=True, slots=True)
class _Context:
    run: Run
    policy: GatePolicy
    baseline: Baseline | BaselineProblem | None
    mixed: str | None  # why no speed of this run may be compared
    train_speeds: Mapping[tuple[tuple[str, str | int], ...], float]
    ground: Ground


def _rows_by_cell(run: Run) -> dict[str, list[Replicate]]:
    rows: dict[str, list[Replicate]] = {}
    for row in run.replicates:
        rows.setdefault(row.cell_id, []).append(row)
    return rows


def _chosen(axes_of: Mapping[str, Axes], only: list[str]) -> set[str]:
    if not only:
        return set(axes_of)
    try:
        cells = {cell_id: Cell(**{name: axes[name] for name in AXES if name in axes}) for cell_id, axes in axes_of.items()}  # type: ignore[arg-type]
        chosen = set(select(cells.values(), only))
    except (ValueError, TypeError) as error:
        raise PerfbenchError(Exit.USAGE, f"the run file's own selection cannot be read: {error}; measure again") from error
    return {cell_id for cell_id, cell in cells.items() if cell in chosen}


def _differences(mine: Mapping[str, object], theirs: Mapping[str, object]) -> str:
    keys = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
    return "; ".join(f"{key}: {theirs.get(key)} -> {mine.get(key)}" for key in keys)


def _run_findings(run: Run, rows: Mapping[str, list[Replicate]]) -> list[Finding]:
    """What is wrong with the run as a whole, before any baseline."""
    found = []
    first: Environment = run.manifest.environment
    for resumed in run.resumed:
        if changed := _differences(resumed.environment.fingerprint(), first.fingerprint()):
            text = f"resumed {resumed.resumed_utc} in another environment, so its cells mix two machines: {changed}; measure again on one"
            found.append(Finding(Verdict.ENV, "resumed", text))
    if strangers := sorted(set(rows) - {cell.cell_id for cell in run.manifest.cells}):
        text = f"{len(strangers)} measured cells are not in the run's plan, e.g. {strangers[0]}: the file was edited or two runs share it"
        found.append(Finding(Verdict.FAILED, "strangers", text))
    return found


def _incomparable(run: Run, baseline: Baseline) -> list[Finding]:
    mine: dict[str, object] = {**run.manifest.environment.fingerprint(), "method_version": run.manifest.method_version}
    theirs: dict[str, object] = {**baseline.environment, "method_version": baseline.method_version}
    if not (changed := _differences(mine, theirs)):
        return []
    hint = "promote a run made here (README: rebaseline), or gate on the machine of the baseline"
    if baseline.method_version > METHOD_VERSION:
        hint = "the baseline was made by a newer perfbench: update this one"
    return [Finding(Verdict.INCOMPARABLE, "fingerprint", f"not the baseline's environment (baseline -> now): {changed}; {hint}")]


def _twin_key(axes: Axes) -> tuple[tuple[str, str | int], ...]:
    return tuple(sorted((name, value) for name, value in axes.items() if name != "workload"))


def _train_speeds(planned: list[PlannedCell], rows: Mapping[str, list[Replicate]]) -> dict[tuple[tuple[str, str | int], ...], float]:
    speeds = {}
    for cell in planned:
        if cell.axes.get("workload") == "train" and (good := usable(rows.get(cell.cell_id, []))):
            speeds[_twin_key(cell.axes)] = min(_speeds(good))
    return speeds


def _speeds(rows: Iterable[Replicate]) -> list[float]:
    return [row.tok_per_s for row in rows if row.tok_per_s is not None]


def _throttled(row: Replicate) -> bool:
    return row.telemetry is not None and row.telemetry.throttled is True


def _judge_cell(context: _Context, cell: PlannedCell, rows: list[Replicate], base: BaselineCell | None) -> CellVerdict:
    again = reproduce(context.run, cell.cell_id)
    axes = dict(cell.axes)
    base_speed = None if base is None else median(base.tok_per_s)
    train = context.train_speeds.get(_twin_key(cell.axes)) if cell.axes.get("workload") == "forward" else None
    if hard := cell_findings(cell, rows, train, context.ground):
        # No speed beside it: a number is published only with its proof.
        reason = "; ".join(f.reason if f.verdict is hard[0].verdict else f"{f.verdict.value}: {f.reason}" for f in hard)
        return CellVerdict(cell.cell_id, axes, hard[0].verdict, reason, base_speed, replicates=len(usable(rows)), reproduce=again)
    good = usable(rows)
    discarded = len({row.replicate for row in rows}) - len(good)
    if not good:
        reason = f"all {discarded} replicates were throttled while timing ({_clock_events(rows)}): cool the card, then measure again"
        return CellVerdict(cell.cell_id, axes, Verdict.ENV, reason, base_speed, reproduce=again)
    verdict, reason = _speed(context, cell, good, base, discarded)
    speed, spread = median(_speeds(good)), _spread_pct(good)
    change = None if base_speed is None else change_pct(speed, base_speed)
    return CellVerdict(cell.cell_id, axes, verdict, reason, base_speed, speed, change, len(good), spread, again)


def _clock_events(rows: list[Replicate]) -> str:
    events = sorted({event for row in rows if row.telemetry for event in row.telemetry.clock_event_reasons})
    return ", ".join(events) or "no clock event was recorded"


def _spread_pct(rows: list[Replicate]) -> float | None:
    speeds = _speeds(rows)
    return None if len(speeds) < 2 else 100 * (max(speeds) - min(speeds)) / median(speeds)


def change_pct(candidate: float, base: float) -> float:
    """Change of tok/s in per cent; rounded so that exactly the tolerance is not beyond it."""
    return round(100 * (candidate / base - 1), 9)


def _speed(
    context: _Context, cell: PlannedCell, good: list[Replicate], base: BaselineCell | None, discarded: int
) -> tuple[Verdict | None, str]:
    """The verdict on speed of a cell that passed every hard gate."""
    policy, least = context.policy, context.policy.min_replicates
    if discarded and len(good) < least:
        return Verdict.UNSTABLE, f"{discarded} replicates were throttled and discarded, {len(good)} are left and {least} are wanted"
    if context.baseline is None:
        return None, "not compared: no baseline was asked for"
    if isinstance(context.baseline, BaselineProblem):
        return None, "not compared: the baseline cannot be used"
    if context.mixed is not None:
        return Verdict.INCOMPARABLE, "not compared: environments differ (see the run's findings)"
    if base is None:
        reason = "the baseline has no such cell; promote a run that has it"
        return (Verdict.NEW, reason) if policy.new == "warn" else (Verdict.FAILED, f"NEW, and the policy says new: fail; {reason}")
    if base.config_sha256 != cell.config_sha256:
        text = f"another config under the same name (baseline {base.config_sha256[:12]}, now {cell.config_sha256[:12]})"
        return Verdict.INCOMPARABLE, f"{text}: promote a new baseline if the change was meant"
    return _compare(policy, cell, good, base)


def _compare(policy: GatePolicy, cell: PlannedCell, good: list[Replicate], base: BaselineCell) -> tuple[Verdict, str]:
    speed, base_speed, tolerance = median(_speeds(good)), median(base.tok_per_s), policy.tolerance_pct
    change = change_pct(speed, base_speed)
    measured = f"{speed:,.1f} tok/s against {base_speed:,.1f}: {change:+.2f} % (tolerance {tolerance:g} %)"
    rerouted = sorted(cell.route.counters) != sorted(base.counters)
    note = f"; the route changed from {' '.join(sorted(base.counters))} to {' '.join(sorted(cell.route.counters))}" if rerouted else ""
    if min(len(good), len(base.tok_per_s)) < policy.min_replicates:
        counts = f"{len(good)} replicates here, {len(base.tok_per_s)} in the baseline"
        return Verdict.WATCH, f"too few to judge ({counts}, {policy.min_replicates} wanted): {measured}{note}"
    if change < -tolerance:
        # What became host bound may be a new Python loop, so only a baseline that already was excuses a drop.
        if base.host_bound and change >= -HOST_NOISE_PCT:
            return Verdict.BLIND, f"host bound: wall tok/s is not gated, it follows the CPU; {measured}{note}"
        return Verdict.REGRESSED, f"{measured}{note}{_host_note(good, base)}"
    return (Verdict.FASTER if change > tolerance else Verdict.SAME), f"{measured}{note}"


def _host_note(good: list[Replicate], base: BaselineCell) -> str:
    if base.host_bound:
        return f"; host bound, but its noise explains no drop beyond {HOST_NOISE_PCT:g} %"
    return "; host bound now, and not in the baseline" if any(row.host_bound for row in good) else ""


def _missing(run: Run, policy: GatePolicy, cell_id: str, base: BaselineCell) -> CellVerdict:
    why = next((str(one.get("reason", "")) for one in run.manifest.excluded if one.get("cell_id") == cell_id), "")
    reason = f"in the baseline, but not in the plan{f' (excluded: {why})' if why else ''}: measure it, or promote a baseline without it"
    verdict = Verdict.MISSING if policy.missing == "fail" else Verdict.WATCH
    return CellVerdict(cell_id, dict(base.axes), verdict, reason, median(base.tok_per_s), reproduce=reproduce(run, cell_id))


def _nothing(run: Run, baseline: Baseline | None, cells: list[CellVerdict], findings: list[Finding]) -> list[Finding]:
    """A gate that compared nothing is not green."""
    if not run.replicates:
        return [Finding(Verdict.FAILED, "nothing", f"nothing was measured: {len(run.manifest.cells)} cells planned, no replicate recorded")]
    red = any(EXIT_OF[f.verdict] is not Exit.OK for f in findings) or any(cell.exit_code is not Exit.OK for cell in cells)
    if baseline is None or red or any(cell.compared for cell in cells):
        return []
    text = f"nothing was compared: none of the {len(cells)} cells is in the baseline ({len(baseline.cells)} cells)"
    return [Finding(Verdict.FAILED, "nothing", f"{text}; is it the baseline of this matrix?")]


def _origin(baseline: Baseline | None) -> BaselineOrigin | None:
    if baseline is None:
        return None
    source = baseline.source
    dirty, proved = source.dirty_sha256 is not None, unproved(source) is None
    return BaselineOrigin(baseline.matrix_name, baseline.run_id, baseline.promoted_utc, source.commit, dirty, proved)
