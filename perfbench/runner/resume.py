"""Whether a run may be resumed: the same cells, expectations, rules, settings, software and code,
or a message that says what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import Matrix, Plan, parse_matrix, policies
from perfbench.records import (
    Environment,
    Expect,
    Manifest,
    PlannedCell,
    Source,
    bounds_of,
    select_cells,
)


def selected(cells: Sequence[PlannedCell], only: Sequence[str]) -> list[PlannedCell]:
    """The cells that `--only` keeps, in the plan's order; USAGE where a term is malformed or keeps
    none.
    """
    by_cell = {cell.axes: cell for cell in cells}
    try:
        return [by_cell[cell] for cell in select_cells(by_cell, only)]
    except ValueError as error:
        raise PerfbenchError(Exit.USAGE, str(error)) from None


def check_cells(
    manifest: Manifest, plan: Plan, matrix: Matrix, only: Sequence[str], path: Path
) -> None:
    """Refuse (USAGE) to mix two configurations, routes, expectations, ways of timing or sets of
    rules in one run.
    """
    planned = {cell.cell_id: cell for cell in manifest.cells}
    for cell in selected(plan.cells, only):
        before = planned.get(cell.cell_id)
        if before is None:
            problem = f"the run was planned without cell {cell.cell_id}"
        elif before.config_sha256 != cell.config_sha256:
            problem = f"the configuration of cell {cell.cell_id} has changed since the run began"
        elif before.route.counters != cell.route.counters:
            problem = (
                f"cell {cell.cell_id} was planned as {before.route.counters} and now routes to"
                f" {cell.route.counters}"
            )
        elif before.expect != cell.expect:
            problem = (
                f"cell {cell.cell_id} was planned to show {_expected(before.expect)}, and the"
                f" matrix now expects {_expected(cell.expect)}"
            )
        else:
            continue
        raise PerfbenchError(
            Exit.USAGE, f"{path}: {problem}. Next: undo the change, or start a new run"
        )
    before_own = {one.workload: one.sha256 for one in manifest.own_steps}
    for one in plan.own_steps:
        if before_own.get(one.workload, one.sha256) != one.sha256:
            raise PerfbenchError(
                Exit.USAGE,
                f"{path}: {one.file} of workload {one.workload} has changed since the run began."
                " Next: undo the change, or start a new run",
            )
    if manifest.matrix_sha256 != matrix.sha256:
        before_text = parse_matrix(
            manifest.matrix_text, f"{path} (its matrix)", trained=manifest.trained_blocks
        )
        _check_rules(before_text, matrix, path)


def _check_rules(before: Matrix, now: Matrix, path: Path) -> None:
    """The run is judged by the text that it began with, so a section that changed since would be
    ignored in silence.
    """
    sections: tuple[tuple[str, object, object], ...] = (
        ("measures with", before.measure, now.measure),
        ("has limits", before.limits, now.limits),
        ("is judged by gate", before.gate, now.gate),
        ("is judged by overrides and aliases", _by_cell(before), _by_cell(now)),
        ("measures the sentinels", before.sentinels, now.sentinels),
    )
    for what, old, new in sections:
        if old != new:
            raise PerfbenchError(
                Exit.USAGE,
                f"{path} {what} {old}, the matrix now says {new}. Next: undo the change, or start a"
                " new run",
            )


def _by_cell(matrix: Matrix) -> tuple[object, object]:
    found = policies(matrix)
    return found.by_cell, found.aliases


def _expected(expect: Expect) -> str:
    parts = [
        f"{name} {', '.join(found)}"
        for name, found in (("engaged", expect.engaged), ("forbidden", expect.forbidden))
        if found
    ]
    parts += [f"{name} {most:g}" for name, most in bounds_of(expect).items()]
    return "; ".join(parts) or "nothing"


def check_same_machine(
    manifest: Manifest, environment: Environment, source: Source, path: Path
) -> None:
    """Refuse another kind of machine, software or NSA_* settings (ENVIRONMENT), and another state
    of the code (USAGE).
    """
    then, here = manifest.environment.fingerprint(), environment.fingerprint()
    if changed := [
        f"{key} was {then[key]} and is {here[key]}" for key in then if then[key] != here[key]
    ]:
        problem = f"{path} cannot be resumed here: {'; '.join(changed)}"
        raise PerfbenchError(
            Exit.ENVIRONMENT,
            f"{problem}. Next: resume it on the same model and software, or start a new run",
        )
    if changed := _changed_settings(manifest.environment.nsa_settings, environment.nsa_settings):
        problem = f"{path} cannot be resumed with other settings: {'; '.join(changed)}"
        raise PerfbenchError(
            Exit.ENVIRONMENT, f"{problem}. Next: set them as they were, or start a new run"
        )
    before_here = manifest.environment.speed_variables
    if before_here is not None and (
        changed := _changed_settings(before_here, environment.speed_variables or {})
    ):
        problem = f"{path} cannot be resumed with other variables: {'; '.join(changed)}"
        raise PerfbenchError(
            Exit.ENVIRONMENT, f"{problem}. Next: set them as they were, or start a new run"
        )
    before = manifest.source
    if (before.commit, before.dirty_sha256) != (source.commit, source.dirty_sha256):
        problem = f"{path} measures {_code(before)}, and the code here is {_code(source)}"
        raise PerfbenchError(Exit.USAGE, f"{problem}. Next: restore that code, or start a new run")


def _changed_settings(then: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    names = sorted(name for name in {*then, *here} if then.get(name) != here.get(name))
    return [
        f"{name} was {then.get(name, 'not set')} and is {here.get(name, 'not set')}"
        for name in names
    ]


def _code(source: Source) -> str:
    if source.commit is None:
        return f"of unknown origin ({source.reason})"
    return (
        f"{source.commit[:12]} with changes {source.dirty_sha256[:8]}"
        if source.dirty_sha256
        else source.commit[:12]
    )
