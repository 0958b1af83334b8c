"""What a run would do: every cell with its Route and reasons, what is excluded, and about how long
it takes.

Needs no GPU and no torch: the capability is probed by the caller, or assumed by the GPU's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nsa.routing import Capability, Route, RouteError
from nsa.settings import Settings, load
from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import attention_calls, memory
from perfbench.matrix import matrix as matrices
from perfbench.matrix.matrix import Excluded, Matrix
from perfbench.matrix.own_step import own_steps_of, step_folder
from perfbench.matrix.peers import why_skipped
from perfbench.older_nsa import steps_off
from perfbench.records import (
    BOUNDS,
    CACHED,
    TRAINING,
    BranchLine,
    Cell,
    Expect,
    OwnStepFile,
    PlannedCell,
    RouteLine,
    bounds_of,
    settings_of,
    why_not_here,
)

# Means of committed runs, against whose durations tests/perfbench/test_plan_minutes.py holds them.
# A child that leaves the forkserver, builds the model and checks parity; on a GPU it creates a CUDA
# context, and its share of the block's start is in it.
START_S = {"cuda": 8.0, "cpu": 0.9}
# The forkserver of a block imports torch.
BLOCK_S = {"cuda": 0.0, "cpu": 4.2}
# Once a cell, in its first process: the proofs of the step and at its length, and the compiler.
# On a GPU those of a forward are within its start; those of a training step compile kernels.
PROOF_S = {"cuda": 20.0, "cpu": 0.5}
COMPILE_S = 20.0  # of training steps on an H200; what a CPU takes was not measured
# Once a run: the kernels of decode and of its proofs, which the first cells build side by side.
# Four cells took 67 s in the first block of a fresh machine, and 5 to 7 in the next.
DECODE_S = 25.0
# A process, its CUDA context, 0.3 s of warm-up and 0.3 s of samples.
SENTINEL_S = {"cuda": 2.5, "cpu": 1.5}
# Of a user's own step: the harness plans nothing inside it.
OWN_ROUTE = RouteLine(
    branches=[],
    counters=[],
    notes=[
        "a user's own step: its code chooses what runs, and what it does not declare is not proved"
    ],
)
END_S = 1.0  # GEMM, profile of the first replicate, giving the CUDA context back


@dataclass(frozen=True, slots=True)
class Plan:
    """``estimate_s`` is an estimate for an idle machine: starts, proofs, compilers, warm-ups and
    timed windows, not the seconds of slow single steps.
    """

    cells: list[PlannedCell]
    excluded: list[Excluded]
    warnings: list[str]
    estimate_s: float
    replicates: int
    least_bytes: int = 0  # of memory, by the cell that needs the most; at least
    wrong_paths: tuple[str, ...] = ()  # cells whose `expect` their Route violates, and how
    own_steps: tuple[OwnStepFile, ...] = ()  # the files of the user's own steps
    skipped: tuple[str, ...] = ()  # why peers serve no cell here; the cells are among ``excluded``


def build_plan(
    matrix: Matrix,
    *,
    only: list[str],
    capability: Capability,
    settings: Settings,
    own_folder: Path | None = None,
) -> Plan:
    """Route every selected cell; PerfbenchError(USAGE) names each cell that no route can serve, and
    every reason. Cells whose peer is absent, or does not fit, are excluded with that reason; USAGE
    where they are all.

    ``own_folder``: where the user's own steps are looked for first, by default the folder of the
    matrix. Their modules are found, and not imported.
    """
    selected, excluded = matrices.cells(matrix, only)
    planned: list[PlannedCell] = []
    refused: dict[str, list[str]] = {}
    own_steps = own_steps_of(
        matrix.path, (one.cell for one in selected), own_folder or step_folder(matrix.path)
    )
    skipped: list[Excluded] = []
    for one in selected:
        cell = one.cell
        if reason := why_not_here(
            cell, on_gpu=capability.sm is not None
        ) or attention_calls.why_not(cell, matrix.model):
            refused.setdefault(reason, []).append(cell.cell_id)
            continue
        if cell.is_own_step:
            planned.append(
                PlannedCell(
                    cell_id=cell.cell_id,
                    axes=cell,
                    config_sha256=one.config_sha256,
                    route=OWN_ROUTE,
                    expect=one.expect,
                )
            )
            continue
        peer = matrix.peers.get(cell.path)  # also of a cell whose package nsa itself calls
        if peer and (reason := why_skipped(peer, cell, matrix.model, capability)):
            skipped.append(Excluded(cell.cell_id, reason))
            continue
        try:
            route = route_cell(matrix, cell, capability, settings)
        except RouteError as error:
            refused.setdefault(str(error), []).append(cell.cell_id)
            continue
        planned.append(
            PlannedCell(
                cell_id=cell.cell_id,
                axes=cell,
                config_sha256=one.config_sha256,
                route=route_line(route),
                expect=one.expect,
                layers=attention_calls.layer_calls(cell, matrix.model),
            )
        )
    if matrix.limits.oom != "find_boundary":  # which looks for what does not fit
        refused |= memory.too_large((cell.axes for cell in planned), matrix.model, capability)
    if refused:
        raise PerfbenchError(Exit.USAGE, _refusal(matrix, refused))
    if not planned:
        raise PerfbenchError(Exit.USAGE, _nothing_left(matrix, skipped))
    wrong = _expectations_at_odds(planned)
    unmeasured = [] if capability.sm is not None else _bounds_of_a_gpu(planned)
    return Plan(
        planned,
        [*excluded, *skipped],
        [*matrices.warnings(matrix), *wrong, *unmeasured],
        estimate_s(matrix, [cell.axes for cell in planned], capability),
        matrix.measure.processes,
        max((memory.least_bytes(cell.axes, matrix.model) for cell in planned), default=0),
        tuple(wrong),
        own_steps,
        tuple(dict.fromkeys(one.reason for one in skipped)),
    )


def route_cell(matrix: Matrix, cell: Cell, capability: Capability, settings: Settings) -> Route:
    """The Route of one cell; RouteError where its request cannot be served.

    Its ``without`` is a setting of its process alone.
    """
    own = settings_of(cell)
    settings = load({**settings.given(), **own}) if own else settings
    peer = matrix.peer_of(cell)
    return attention_calls.route_of(cell, matrix.model, settings, capability, peer)


@lru_cache(maxsize=64)  # Routes do not name lengths, so a matrix has few
def route_line(route: Route) -> RouteLine:
    """The Route as the run file stores it; cells of one Route share the object."""
    return RouteLine(
        branches=[
            BranchLine(
                branch=b.branch,
                implementation=b.implementation,
                kernel=b.kernel,
                provider=b.provider,
                reason=b.reason,
                syncs=b.syncs,
                repeatable=b.repeatable,
            )
            for b in route.branches
        ],
        counters=list(route.counters),
        rejected=[{"alternative": r.alternative, "reason": r.reason} for r in route.rejected],
        notes=list(route.notes),
        off=list(steps_off(route)),
    )


def estimate_s(matrix: Matrix, cells: Sequence[Cell], capability: Capability) -> float:
    """Cells x replicates x (start, shared by those that prepare together, + warm-up + timed window
    + end), the forkserver and sentinels of each block, and once a cell its proofs and its compiler,
    in seconds of an idle machine.
    """
    measure = matrix.measure
    window_s = (
        measure.max_s
        if measure.samples is None
        else min(measure.max_s, measure.samples * measure.min_sample_ms / 1000)
    )
    device = "cpu" if capability.sm is None else "cuda"
    alone_s = END_S if capability.sm is not None else 0.0
    cell_s = (
        START_S[device] / measure.prepare_together + measure.shortest_warmup_s + window_s + alone_s
    )
    block_s = BLOCK_S[device] + len(cells) * cell_s + len(matrix.sentinels) * SENTINEL_S[device]
    compiled = sum(cell.compile == "on" for cell in cells)
    proved = sum(device == "cpu" or cell.workload in TRAINING for cell in cells)
    built_s = DECODE_S if device == "cuda" and any(c.workload in CACHED for c in cells) else 0.0
    return measure.processes * block_s + proved * PROOF_S[device] + compiled * COMPILE_S + built_s


def _refusal(matrix: Matrix, refused: dict[str, list[str]]) -> str:
    lines = [f"{matrix.path}: no route can serve {sum(map(len, refused.values()))} cell(s):"]
    for reason, cell_ids in refused.items():
        lines += [f"  {cell_id}" for cell_id in cell_ids]
        lines.append(f"    {reason}")
    lines.append(
        "Next: add the cells to `exclude:` with a reason, set fa2: [auto] or [off], or leave them"
        " out with --only"
    )
    return "\n".join(lines)


def _nothing_left(matrix: Matrix, skipped: list[Excluded]) -> str:
    """A run that has nothing to measure is no run."""
    reasons = dict.fromkeys(one.reason for one in skipped)
    return "\n".join(
        (
            f"{matrix.path}: nothing is left to measure, {_count(len(skipped), 'cell')} skipped:",
            *(f"  {reason}" for reason in reasons),
            "Next: install what is missing, or select other cells",
        )
    )


def _expectations_at_odds(planned: list[PlannedCell]) -> list[str]:
    """Cells that will end as WRONG_PATH, known before a second is spent on them."""
    found = []
    for cell in planned:
        expect: Expect = cell.expect
        odds = [
            f"expects {c}, which its route lacks"
            for c in expect.engaged
            if c not in cell.route.counters and not cell.axes.is_own_step
        ]
        odds += [
            f"forbids {c}, which its route takes"
            for c in expect.forbidden
            if c in cell.route.counters
        ]
        if odds:
            found.append(
                f"{cell.cell_id} will be WRONG_PATH: {'; '.join(odds)}"
                f" ({', '.join(cell.route.counters)})"
            )
    return found


def _bounds_of_a_gpu(planned: list[PlannedCell]) -> list[str]:
    """Cells of a CPU whose bounds nothing here can be held against."""
    return [
        f"{cell.cell_id} will be FAILED: a CPU has no number for {', '.join(names)}"
        for cell in planned
        if (names := [name for name in bounds_of(cell.expect) if BOUNDS[name].needs_gpu])
    ]


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as data that `json.dumps` takes."""
    return {
        "cells": [cell.model_dump(mode="json") for cell in plan.cells],
        "excluded": [{"cell_id": e.cell_id, "reason": e.reason} for e in plan.excluded],
        "warnings": plan.warnings,
        "replicates": plan.replicates,
        "estimate_s": plan.estimate_s,
        "least_memory_bytes": plan.least_bytes,
        "own_steps": [one.model_dump() for one in plan.own_steps],
    }


def plan_text(plan: Plan, matrix: Matrix) -> str:
    """The plan for a reader: cells with their route, each route's reasons once, exclusions,
    warnings, minutes.
    """
    routes: dict[tuple[str, ...], str] = {}
    rows = []
    for cell in plan.cells:
        label = routes.setdefault(_reasons(cell.route), f"R{len(routes) + 1}")
        rows.append((cell.cell_id, label, "  ".join(_branch(b) for b in cell.route.branches)))
    width, label_width = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    width = max(width, len("cell"))
    model = matrix.model_name
    lines = [
        (
            f"{matrix.name}: model {model}, {_count(len(rows), 'cell')} x"
            f" {_count(plan.replicates, 'replicate')}"
        ),
        "",
    ]
    lines += [f"{'cell':<{width}}  {'why':<{max(label_width, 3)}}  route"]
    lines += [
        f"{cell_id:<{width}}  {label:<{max(label_width, 3)}}  {route}"
        for cell_id, label, route in rows
    ]
    lines += ["", "Why each route:"]
    for reasons, label in routes.items():
        lines += [
            f"{label:<{label_width}}  {reasons[0]}",
            *(f"{'':<{label_width}}  {reason}" for reason in reasons[1:]),
        ]
    lines += ["", *_render_excluded(plan.excluded)]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    lines.append(
        f"Estimated: {plan.estimate_s / 60:.1f} minutes on an idle machine (starts, proofs,"
        " warm-ups and timed windows; slow single steps come on top)"
    )
    lines += [
        f"Own step {one.workload}: {one.file}, sha256 {one.sha256[:12]}; `run` runs its code"
        for one in plan.own_steps
    ]
    if plan.least_bytes:
        lines.append(f"Memory: {memory.gib(plan.least_bytes)} at least, by the largest cell")
    elif plan.own_steps:
        lines.append("Memory: not known of a step of your own")
    return "\n".join(lines) + "\n"


def _branch(branch: BranchLine) -> str:
    named = f"{branch.branch}.{branch.implementation}"
    return named if branch.kernel == branch.implementation else f"{named}({branch.kernel})"


def _reasons(route: RouteLine) -> tuple[str, ...]:
    lines = [f"{_branch(b)}, {b.provider}: {b.reason}" for b in route.branches]
    lines += [f"not {r['alternative']}: {r['reason']}" for r in route.rejected]
    return (*lines, *(f"note: {note}" for note in route.notes))


def _render_excluded(excluded: list[Excluded]) -> list[str]:
    if not excluded:
        return ["Excluded: none"]
    by_reason: dict[str, list[str]] = {}
    for one in excluded:
        by_reason.setdefault(one.reason, []).append(one.cell_id)
    lines = [f"Excluded: {_count(len(excluded), 'cell')}"]
    for reason, cell_ids in by_reason.items():
        lines += [f"  {reason}:", *(f"    {cell_id}" for cell_id in cell_ids)]
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
