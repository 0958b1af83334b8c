"""Baselines: files in git, one for each (GPU, matrix), changed only by ``promote`` in a reviewed
commit.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from perfbench.errors import Exit, PerfbenchError
from perfbench.gate.blind_cells import blind_cells
from perfbench.gate.cards import cards_of, on_several
from perfbench.gate.cell_sides import side_of_rows
from perfbench.gate.comparable import environment_differences, sentinel_rates
from perfbench.gate.coverage import rows_by_cell, selected_ids, usable
from perfbench.gate.judging import judge
from perfbench.gate.loaded_peers import peer_of
from perfbench.gate.own_steps import files_of
from perfbench.gate.strictness import joint_rules
from perfbench.matrix import GatePolicy, JudgeRules, Policies
from perfbench.records import (
    Baseline,
    BaselineCell,
    BaselineProblem,
    Environment,
    PlannedCell,
    Replicate,
    Run,
    Verdict,
    read_baseline,
    read_calibration,
    variance_of_cells,
    write_baseline,
)


@dataclass(frozen=True, slots=True)
class Promotion:
    """What ``promote`` wrote; ``str()`` of it is the summary for the user."""

    path: Path
    baseline: Baseline
    written: list[str]
    kept: list[str]
    removed: list[str]
    notes: list[str]

    def __str__(self) -> str:
        lines = [f"{self.path}: {len(self.written)} cells of run {self.baseline.run_id}"]
        lines += [f"kept {len(self.kept)} cells that this run did not select"] if self.kept else []
        lines += (
            [f"removed {len(self.removed)} cells: {', '.join(self.removed)}"]
            if self.removed
            else []
        )
        return "\n".join([*lines, *self.notes, "commit the file, so that the change is reviewed"])


def promote(
    run: Run,
    path: Path,
    *,
    allow_dirty: bool = False,
    promoted_utc: str | None = None,
    calibration: Path | None = None,
    rules: JudgeRules | None = None,
) -> Promotion:
    """Make ``run`` the baseline at ``path``; PerfbenchError(Exit.USAGE) for a run that must not
    judge others.

    Nothing is merged: the file holds the run's cells. Only where the run was made with ``--only``
    are the cells kept that it did not select, and only those of the same environment and method.
    ``promoted_utc`` defaults to now.
    ``calibration``: the calibration.json with the variance of each cell between sessions; a
    cell that is not in it keeps the variance that it had.
    ``rules``: what the run's matrix demands, which later matrices are held against.
    """
    _refuse(run, allow_dirty)
    manifest = run.manifest
    known = (
        None
        if calibration is None
        else read_calibration(calibration, manifest.environment.gpu_slug)
    )
    cells = _cells(run)
    old, notes = _existing(path, bool(manifest.only))
    kept, removed = _keep(run, old, cells)
    cells = {**kept, **cells}
    configs = {cell_id: cell.config_sha256 for cell_id, cell in cells.items()}
    calibrated = (
        {}
        if known is None
        else variance_of_cells(known, manifest.environment.fingerprint(), configs)
    )
    before = (
        {}
        if old is None
        else {cell_id: _stored_variance(cell) for cell_id, cell in old.cells.items()}
    )
    cells = {
        cell_id: cell.model_copy(update=before.get(cell_id, {}) | calibrated.get(cell_id, {}))
        for cell_id, cell in cells.items()
    }
    if calibration is not None:
        rest = (
            f"; {', '.join(sorted(set(cells) - set(calibrated)))} not in it"
            if set(cells) - set(calibrated)
            else ""
        )
        notes.append(
            f"{calibration} gives the between-session variance of {len(calibrated)} of {len(cells)}"
            f" cells{rest}"
        )
    if removed and old is not None and not _same_environment(run, old):
        notes.append("the environment or method changed, so no earlier cell could be kept")
    if manifest.source.dirty_sha256:
        notes.append("the measured tree had uncommitted changes; the file records it")
    if why := manifest.source.unproved:
        notes.append(f"the measured commit is {why}; the file records it")
    promoted_utc = promoted_utc or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    baseline = _baseline(run, cells, promoted_utc, allow_dirty)
    if rules is not None:
        baseline = baseline.model_copy(update={"rules": rules.to_stored()})
        notes += _loosened(rules, old)
    notes += blind_cells(run, baseline, rules)
    baseline = write_baseline(path, baseline)
    return Promotion(
        path, baseline, sorted(set(cells) - set(kept)), sorted(kept), sorted(removed), notes
    )


def _loosened(rules: JudgeRules, old: Baseline | None) -> list[str]:
    """What the reviewer of the file must know: every key that judges more loosely than before."""
    if old is None or old.rules is None:
        return []
    try:
        before = JudgeRules.from_stored(old.rules)
    except ValueError:
        return []
    found = joint_rules(rules, before, Policies(GatePolicy()), old.cells).loosened
    return [f"loosened for every later run: {one}" for one in found]


def _stored_variance(cell: BaselineCell) -> dict[str, float | int | None]:
    return {
        name: getattr(cell, name)
        for name in ("night_log_sd", "device_night_log_sd", "night_starts")
    }


def _refuse(run: Run, allow_dirty: bool) -> None:
    manifest, reasons = run.manifest, []
    if manifest.injections:
        reasons.append(
            f"it was made with injected faults ({', '.join(manifest.injections)}): such a run is a"
            " demonstration"
        )
    if manifest.source.dirty_sha256 and not allow_dirty:
        reasons.append(
            "its tree had uncommitted changes: commit them and measure again, or pass"
            " --allow-dirty, which is recorded"
        )
    if (why := manifest.source.unproved) and not allow_dirty:
        got = (
            f"commit {manifest.source.commit}, {why}" if manifest.source.commit else f"commit {why}"
        )
        next_ = (
            "Next: pass --allow-dirty, which is recorded, or measure in a git checkout without"
            " --source-commit"
        )
        reasons.append(
            f"its code is of unproved origin: got {got}, wanted a commit that git itself names."
            f" {next_}"
        )
    judgement = judge(run, None, GatePolicy(min_replicates=1))
    if judgement.exit_code is not Exit.OK:
        reasons.append(f"it is red: {judgement.headline}")
    short = [
        f"{cell.cell_id} has {cell.replicates} of {manifest.replicates}"
        for cell in judgement.cells
        if cell.exit_code is Exit.OK and cell.replicates < manifest.replicates
    ]
    if short:
        which = f"usable replicates, throttled ones not counted: {'; '.join(short[:3])}"
        reasons.append(f"{len(short)} cells are partial ({which}): finish it with --resume")
    mixed = [
        f"{cell_id}: {why}"
        for cell_id, found in rows_by_cell(run).items()
        if run.manifest.cards and (why := on_several(usable(found)))
    ]
    if mixed:
        reasons.append(f"{len(mixed)} cells are of several cards ({'; '.join(mixed[:3])})")
    if reasons:
        raise PerfbenchError(
            Exit.USAGE, f"run {manifest.run_id} cannot become a baseline: {'; '.join(reasons)}"
        )


def baseline_of_run(run: Run, red: Collection[str] = ()) -> Baseline | BaselineProblem:
    """The base side of a comparison of two runs: not for a file, so nothing is refused but a run
    without any speed.

    ``red``: cells whose speed is not to be believed.
    """
    cells = {cell_id: cell for cell_id, cell in _cells(run).items() if cell_id not in red}
    if not cells:
        text = (
            f"the base run {run.manifest.run_id} holds no usable speed: got 0 cells, wanted one;"
            " gate it to see why"
        )
        return BaselineProblem(Verdict.NO_BASELINE, text)
    return _baseline(run, cells, run.manifest.created_utc, allow_dirty=True)


def _baseline(
    run: Run, cells: dict[str, BaselineCell], promoted_utc: str, allow_dirty: bool
) -> Baseline:
    manifest = run.manifest
    return Baseline(
        method_version=manifest.method_version,
        matrix_name=manifest.matrix_name,
        matrix_sha256=manifest.matrix_sha256,
        run_id=manifest.run_id,
        promoted_utc=promoted_utc,
        source=manifest.source,
        allow_dirty=allow_dirty,
        environment=manifest.environment.fingerprint(),
        settings=manifest.environment.settings(),
        sentinels=sentinel_rates(run),
        cells=cells,
        run_sha256=run.sha256,
    )


def _cells(run: Run) -> dict[str, BaselineCell]:
    rows = rows_by_cell(run)
    good = {cell.cell_id: (cell, usable(rows.get(cell.cell_id, []))) for cell in run.manifest.cells}
    return {
        cell_id: _cell(run, planned, found) for cell_id, (planned, found) in good.items() if found
    }


def _cell(run: Run, planned: PlannedCell, good: list[Replicate]) -> BaselineCell:
    side = side_of_rows(planned, good)
    return BaselineCell(
        axes=planned.axes,
        config_sha256=planned.config_sha256,
        tok_per_s=list(side.tok_per_s),
        host_bound=side.host_bound,
        counters=list(side.counters),
        run_id=run.manifest.run_id,
        commit=run.manifest.source.commit,
        device_time_s=list(side.device_time_s),
        host_time_s=list(side.host_time_s),
        kernel_count=None if side.kernel_count is None else side.kernel_count[1],
        host_syncs=None if side.host_syncs is None else side.host_syncs[1],
        kernels=list(side.kernels),
        tuned=dict(side.tuned),
        own_step_sha256=files_of(run).get(planned.axes.workload),
        peer=peer_of(good),
        cards=cards_of(good),
    )


def _existing(path: Path, partial: bool) -> tuple[Baseline | None, list[str]]:
    found = read_baseline(path)
    if not isinstance(found, BaselineProblem):
        return found, []
    if found.verdict is Verdict.NO_BASELINE:
        return None, []
    if partial or found.newer_schema:
        raise PerfbenchError(
            Exit.BASELINE,
            f"{found.message}; not overwritten: repair or delete it first, or promote a whole run",
        )
    return None, [f"replaced an unusable file: {found.message}"]


def _same_environment(run: Run, old: Baseline) -> bool:
    environment: Environment = run.manifest.environment
    return (
        not environment_differences(environment.fingerprint(), old.environment)
        and old.method_version == run.manifest.method_version
    )


def _keep(
    run: Run, old: Baseline | None, cells: dict[str, BaselineCell]
) -> tuple[dict[str, BaselineCell], set[str]]:
    """Split the earlier file's other cells into those that stay and those that go."""
    if old is None:
        return {}, set()
    axes_of = {cell_id: cell.axes for cell_id, cell in old.cells.items()} | {
        c.cell_id: c.axes for c in run.manifest.cells
    }
    selected = selected_ids(run, axes_of)
    others = {cell_id: cell for cell_id, cell in old.cells.items() if cell_id not in cells}
    kept = (
        {cell_id: cell for cell_id, cell in others.items() if cell_id not in selected}
        if _same_environment(run, old)
        else {}
    )
    return kept, set(others) - set(kept)
