"""Baselines: files in git, one for each (GPU, matrix), changed only by ``promote`` in a reviewed commit."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any, Self
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from perfbench import nights
from perfbench.comparable import sentinel_rates
from perfbench.coverage import rows_by_cell, selected_ids, usable
from perfbench.gate import judge
from perfbench.judgement import BaselineProblem, shorten, unproved
from perfbench.policy import GatePolicy
from perfbench.reduced import side_of_rows
from perfbench.result import Environment, PlannedCell, Replicate, Run, Source
from perfbench.runfile import axes_problem
from perfbench.verdict import Exit, PerfbenchError, Verdict

SCHEMA_VERSION = 2  # 2: what host-bound cells and the sentinels are judged by
# A rate, or seconds. The bounds are beyond any machine, and keep the ratio of two such values within what a float holds.
Speed = Annotated[float, Field(gt=1e-12, lt=1e24, allow_inf_nan=False, strict=True)]


class BaselineCell(BaseModel):
    """One cell's speeds, and the run that measured it (a slice may be older than the rest).

    ``kernel_count`` and ``host_syncs`` are the most that a profile saw, ``kernels`` the longest first. ``night_log_sd`` and
    ``device_night_log_sd`` are the sd of ln tok/s and of ln device time between nights, where a calibration told them, from
    ``night_starts`` machine starts.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, frozen=True)
    axes: dict[str, str | int]
    config_sha256: str
    tok_per_s: list[Speed] = Field(min_length=1)  # one median for each replicate
    host_bound: bool | None
    counters: list[str]
    run_id: str
    commit: str | None
    night_log_sd: float | None = Field(default=None, ge=0, lt=10)
    device_night_log_sd: float | None = Field(default=None, ge=0, lt=10)
    night_starts: int | None = Field(default=None, ge=2)
    device_time_s: list[Speed] = []  # of one step, one for each replicate that profiled it
    kernel_count: int | None = Field(default=None, ge=0)
    host_syncs: int | None = Field(default=None, ge=0)
    kernels: list[str] = []
    tuned: dict[str, str] = {}

    @property
    def speed(self) -> float:
        """tok/s: the geometric mean over the replicates, as the comparison takes it."""
        return geometric_mean(self.tok_per_s)

    @model_validator(mode="after")
    def _axes_are_typed(self) -> Self:
        if problem := axes_problem(self.axes):
            raise ValueError(problem)
        return self


class Baseline(BaseModel):
    """A promoted run, reduced to what the gate reads. ``environment`` is ``Environment.fingerprint()``."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, frozen=True)
    schema_version: int = SCHEMA_VERSION
    method_version: int
    matrix_name: str
    matrix_sha256: str
    run_id: str
    promoted_utc: str
    source: Source
    allow_dirty: bool = False
    environment: dict[str, str | None]
    sentinels: dict[str, list[Speed]] = {}  # rates, one for each block; none in files older than schema 2
    cells: dict[str, BaselineCell] = Field(min_length=1)


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
        lines += [f"removed {len(self.removed)} cells: {', '.join(self.removed)}"] if self.removed else []
        return "\n".join([*lines, *self.notes, "commit the file, so that the change is reviewed"])


def path_for(root: Path, gpu_slug: str, matrix_name: str) -> Path:
    """``root/<gpu_slug>/<matrix>.json``, where ``root`` is usually ``reports/baselines``; odd characters are percent-encoded."""
    for what, name in (("GPU slug", gpu_slug), ("matrix name", matrix_name)):
        if not name or name in (".", ".."):
            raise PerfbenchError(Exit.USAGE, f"{what} {name!r} cannot name a baseline file; give it a name of letters, digits and dashes")
    return root / quote(gpu_slug, safe="") / f"{quote(matrix_name, safe='')}.json"


def load(path: Path) -> Baseline:
    """Return the baseline; PerfbenchError(Exit.BASELINE) says what is wrong with it, whatever its bytes."""
    found = read(path)
    if isinstance(found, BaselineProblem):
        raise PerfbenchError(Exit.BASELINE, found.message)
    return found


def read(path: Path) -> Baseline | BaselineProblem:
    """Like ``load``, but the problem is a value: what ``judge`` takes."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        text = f"no baseline at {path}; make one from a green run: perfbench baseline promote RUN --to {path}"
        return BaselineProblem(Verdict.NO_BASELINE, text)
    except (OSError, ValueError) as error:  # a folder, no permission, a NUL in the name
        return BaselineProblem(Verdict.CORRUPT, f"baseline {path} cannot be read: {error}; wanted a readable file")
    return _parse(data, f"baseline {path}")


def show(baseline: Baseline) -> str:
    """A text table of what the baseline holds."""
    commit = ", ".join(part for part in ((baseline.source.commit or "")[:40], unproved(baseline.source)) if part)
    dirty = " with uncommitted changes" if baseline.source.dirty_sha256 else ""
    lines = [
        f"matrix {baseline.matrix_name} ({baseline.matrix_sha256[:12]}), promoted {baseline.promoted_utc}",
        f"run {baseline.run_id}, commit {commit}{dirty}, method version {baseline.method_version}",
        "; ".join(f"{key} {value if value is not None else '-'}" for key, value in sorted(baseline.environment.items())),
        "",
    ]
    width = max(len(cell_id) for cell_id in baseline.cells)
    lines.append(f"{'cell':<{width}} {'tok/s':>14} {'n':>3} {'spread':>8}  bound  between nights")
    for cell_id, cell in sorted(baseline.cells.items()):
        speeds = cell.tok_per_s
        spread = f"{100 * (max(speeds) - min(speeds)) / cell.speed:.2f} %" if len(speeds) > 1 else "-"
        bound = {True: "host", False: "GPU", None: "-"}[cell.host_bound]
        night = "assumed" if cell.night_log_sd is None else f"{100 * cell.night_log_sd:.2f} %"
        lines.append(f"{cell_id:<{width}} {cell.speed:>14,.1f} {len(speeds):>3} {spread:>8}  {bound:<5}  {night}")
    return "\n".join(lines)


def promote(
    run: Run, path: Path, *, allow_dirty: bool = False, promoted_utc: str | None = None, calibration: Path | None = None
) -> Promotion:
    """Make ``run`` the baseline at ``path``; PerfbenchError(Exit.USAGE) for a run that must not judge others.

    Nothing is merged: the file holds the run's cells. Only where the run was made with ``--only`` are the cells
    kept that it did not select, and only those of the same environment and method. ``promoted_utc`` defaults to now.
    ``calibration``: the calibration.json that tells how restless each cell is between nights; a cell that it does not know
    stays as restless as it was.
    """
    _refuse(run, allow_dirty)
    manifest = run.manifest
    told = {} if calibration is None else nights.read(calibration, manifest.environment.gpu_slug)
    cells = _cells(run)
    old, notes = _existing(path, bool(manifest.only))
    kept, removed = _keep(run, old, cells)
    cells = {**kept, **cells}
    before = {} if old is None else {cell_id: _nights_of(cell) for cell_id, cell in old.cells.items()}
    cells = {cell_id: cell.model_copy(update=before.get(cell_id, {}) | told.get(cell_id, {})) for cell_id, cell in cells.items()}
    if calibration is not None:
        found = sorted(set(told) & set(cells))
        rest = f"; {', '.join(sorted(set(cells) - set(told)))} not in it" if set(cells) - set(told) else ""
        notes.append(f"{calibration} tells the luck between nights of {len(found)} of {len(cells)} cells{rest}")
    if removed and old is not None and not _same_environment(run, old):
        notes.append("the environment or method changed, so no earlier cell could be kept")
    if manifest.source.dirty_sha256:
        notes.append("the measured tree had uncommitted changes; the file records it")
    if why := unproved(manifest.source):
        notes.append(f"the measured commit is {why}; the file records it")
    baseline = _baseline(run, cells, promoted_utc or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), allow_dirty)
    _write(path, baseline)
    return Promotion(path, baseline, sorted(set(cells) - set(kept)), sorted(kept), sorted(removed), notes)


def _nights_of(cell: BaselineCell) -> dict[str, float | int | None]:
    return {name: getattr(cell, name) for name in ("night_log_sd", "device_night_log_sd", "night_starts")}


def _refuse(run: Run, allow_dirty: bool) -> None:
    manifest, reasons = run.manifest, []
    if manifest.injections:
        reasons.append(f"it was made with injected faults ({', '.join(manifest.injections)}): such a run is a demonstration")
    if manifest.source.dirty_sha256 and not allow_dirty:
        reasons.append("its tree had uncommitted changes: commit them and measure again, or pass --allow-dirty, which is recorded")
    if (why := unproved(manifest.source)) and not allow_dirty:
        got = f"commit {manifest.source.commit}, {why}" if manifest.source.commit else f"commit {why}"
        next_ = "measure in a git checkout without --source-commit, or pass --allow-dirty, which is recorded"
        reasons.append(f"its code is of unproved origin: got {got}, wanted a commit that git itself names; {next_}")
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
    if reasons:
        raise PerfbenchError(Exit.USAGE, f"run {manifest.run_id} cannot become a baseline: {'; '.join(reasons)}")


def of_run(run: Run, red: Collection[str] = ()) -> Baseline | BaselineProblem:
    """The base side of a comparison of two runs: not for a file, so nothing is refused but a run without any speed.

    ``red``: cells whose speed is not to be believed.
    """
    cells = {cell_id: cell for cell_id, cell in _cells(run).items() if cell_id not in red}
    if not cells:
        text = f"the base run {run.manifest.run_id} holds no usable speed: got 0 cells, wanted one; gate it to see why"
        return BaselineProblem(Verdict.NO_BASELINE, text)
    return _baseline(run, cells, run.manifest.created_utc, allow_dirty=True)


def _baseline(run: Run, cells: dict[str, BaselineCell], promoted_utc: str, allow_dirty: bool) -> Baseline:
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
        sentinels=sentinel_rates(run),
        cells=cells,
    )


def _cells(run: Run) -> dict[str, BaselineCell]:
    rows = rows_by_cell(run)
    good = {cell.cell_id: (cell, usable(rows.get(cell.cell_id, []))) for cell in run.manifest.cells}
    return {cell_id: _cell(run, planned, found) for cell_id, (planned, found) in good.items() if found}


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
        kernel_count=None if side.kernel_count is None else side.kernel_count[1],
        host_syncs=None if side.host_syncs is None else side.host_syncs[1],
        kernels=list(side.kernels),
        tuned=dict(side.tuned),
    )


def _existing(path: Path, partial: bool) -> tuple[Baseline | None, list[str]]:
    found = read(path)
    if not isinstance(found, BaselineProblem):
        return found, []
    if found.verdict is Verdict.NO_BASELINE:
        return None, []
    if partial or found.newer_schema:
        raise PerfbenchError(Exit.BASELINE, f"{found.message}; not overwritten: repair or delete it first, or promote a whole run")
    return None, [f"replaced an unusable file: {found.message}"]


def _same_environment(run: Run, old: Baseline) -> bool:
    environment: Environment = run.manifest.environment
    return old.environment == environment.fingerprint() and old.method_version == run.manifest.method_version


def _keep(run: Run, old: Baseline | None, cells: dict[str, BaselineCell]) -> tuple[dict[str, BaselineCell], set[str]]:
    """Split the earlier file's other cells into those that stay and those that go."""
    if old is None:
        return {}, set()
    axes_of = {cell_id: dict(cell.axes) for cell_id, cell in old.cells.items()} | {c.cell_id: dict(c.axes) for c in run.manifest.cells}
    selected = selected_ids(run, axes_of)
    others = {cell_id: cell for cell_id, cell in old.cells.items() if cell_id not in cells}
    kept = {cell_id: cell for cell_id, cell in others.items() if cell_id not in selected} if _same_environment(run, old) else {}
    return kept, set(others) - set(kept)


def _parse(data: bytes, what: str) -> Baseline | BaselineProblem:
    def corrupt(text: str, *, newer: bool = False) -> BaselineProblem:
        return BaselineProblem(Verdict.CORRUPT, f"{what} {text}", newer)

    try:
        raw: Any = json.loads(data.decode("utf-8"))
        json.dumps(raw, ensure_ascii=False).encode("utf-8")  # an escaped lone surrogate parses, and could never be printed
    except (ValueError, RecursionError) as error:
        return corrupt(f"is not JSON (truncated?): {shorten(str(error))}; restore it from git, or promote a run again")
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        return corrupt("has the wrong shape: wanted an object with a schema_version; restore it from git, or promote a run again")
    if version > SCHEMA_VERSION:
        text = f"has the newer schema {shorten(str(version), 20)}, this perfbench reads up to {SCHEMA_VERSION}; update perfbench"
        return corrupt(text, newer=True)
    try:
        return Baseline.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)
    speeds = [one for one in first if "tok_per_s" in one["loc"]]
    where = ".".join(str(part) for part in (speeds or first)[0]["loc"])
    message = shorten(f"{where}: {(speeds or first)[0]['msg']}", 300)
    if speeds:
        return corrupt(f"holds a speed that is none (zero, negative, NaN, text or empty): {message}; a red run was promoted by hand?")
    return corrupt(f"has the wrong shape: {message}; restore it from git, or promote a run again")


def _write(path: Path, baseline: Baseline) -> None:
    """Write the whole file or nothing: a reader never sees half of it."""
    text = json.dumps(baseline.model_dump(mode="json"), indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        text = f"cannot write the baseline {path}: {error.strerror or error}; wanted a writable folder: change its rights, or give --to"
        raise PerfbenchError(Exit.USAGE, text) from error
