"""Runs a plan: opens or resumes the run file, and measures into it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from nsa.config import nearest_name
from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import Matrix, Plan, sentinels_of
from perfbench.records import (
    CardLine,
    Environment,
    Injection,
    Manifest,
    Replicate,
    Resumed,
    Run,
    RunWriter,
    SentinelLine,
    Source,
    create_run,
    new_run_id,
    open_for_resume,
    read_run,
    utc_now,
)
from perfbench.runner.attempts import Ledger
from perfbench.runner.executor import Executor
from perfbench.runner.loop import Budget, measure_all
from perfbench.runner.progress import Progress, SilentProgress
from perfbench.runner.recorder import Recorder
from perfbench.runner.resume import check_cells, check_same_machine, selected
from perfbench.runner.schedule import CellSchedule

_INJECTION = re.compile(r"(?:(slowdown)=([0-9.]+)%|(oom|hang|segv))@(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that ended by itself; ``missing`` lists the replicates that the budget left out."""

    folder: Path
    run: Run
    missing: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What a run measures and what its manifest records of it.

    ``plan`` holds every cell of the matrix, so that a later slice can join the run; ``only``
    selects those to measure now. ``injections`` are planted faults as `--inject` spells them.
    """

    plan: Plan
    matrix: Matrix
    environment: Environment
    source: Source
    argv: list[str]
    seed: int
    only: list[str] = field(default_factory=list)
    injections: list[str] = field(default_factory=list)
    cards: list[CardLine] = field(default_factory=list)  # of a fleet
    prior_half_pct: dict[str, float] = field(default_factory=dict)  # as the manifest has it

    def manifest(self) -> Manifest:
        """Of a new run that begins now."""
        now = datetime.now(UTC)
        excluded = [{"cell_id": one.cell_id, "reason": one.reason} for one in self.plan.excluded]
        return Manifest(
            run_id=new_run_id(now, self.environment.gpu_slug, self.source.commit),
            created_utc=now.isoformat(timespec="seconds"),
            argv=self.argv,
            seed=self.seed,
            injections=self.injections,
            source=self.source,
            matrix_name=self.matrix.name,
            matrix_path=self.matrix.path,
            matrix_text=self.matrix.text,
            matrix_sha256=self.matrix.sha256,
            replicates=self.plan.replicates,
            sentinels=sentinels_of(self.matrix, self.plan.cells),
            only=self.only,
            cells=self.plan.cells,
            excluded=excluded,
            environment=self.environment,
            trained_blocks=self.matrix.trained,
            own_steps=list(self.plan.own_steps),
            peers=list(self.matrix.peers.values()),
            cards=self.cards,
            prior_half_pct=self.prior_half_pct,
        )


def run_matrix(
    spec: RunSpec,
    executor: Executor,
    *,
    runs_dir: Path,
    budget_s: float | None = None,
    resume: Path | None = None,
    progress: Progress | None = None,
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Finished:
    """Measure what ``spec`` selects, in a new folder under ``runs_dir`` or resuming ``resume``.

    A resumed run keeps its own seed, injections, sentinels and number of replicates. ``now`` must
    be monotonic: the wall clock may step back. INTERRUPTED with the command that resumes after
    Ctrl-C; nothing written is lost.
    """
    with opened_run(spec, runs_dir, resume) as opened:
        writer = opened.writer
        recorder = Recorder(
            manifest=opened.manifest,
            matrix=spec.matrix,
            executor=executor,
            writer=writer,
            ledger=Ledger(spec.matrix.measure.throttle_retries, opened.rows),
            faults=opened.faults,
            progress=progress or SilentProgress(),
            card=spec.environment.gpu_uuid_sha256,
            budget=Budget.of(budget_s, now),
            model=spec.matrix.model.to_mapping(),
            pause=pause,
        )
        missing = _measure(CellSchedule(recorder, opened.cell_ids), recorder)
    return Finished(writer.folder, read_run(writer.folder), missing)


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run file that is being written: the cells to measure now, and what it ``found`` there
    where it is resumed.
    """

    writer: RunWriter
    manifest: Manifest
    cell_ids: set[str]
    faults: list[Injection]
    found: Run | None = None

    @property
    def rows(self) -> list[Replicate | SentinelLine]:
        """What the ledger begins with."""
        return [] if self.found is None else [*self.found.replicates, *self.found.sentinels]


@contextmanager
def opened_run(spec: RunSpec, runs_dir: Path, resume: Path | None) -> Iterator[OpenedRun]:
    """A new folder under ``runs_dir``, or ``resume``; USAGE or ENVIRONMENT where ``spec`` does not
    fit what was begun there.
    """
    cell_ids = {cell.cell_id for cell in selected(spec.plan.cells, spec.only)}
    faults = _faults(spec.injections, [cell.cell_id for cell in spec.plan.cells])
    with ExitStack() as stack:
        if resume is None:
            manifest = spec.manifest()
            writer = stack.enter_context(create_run(runs_dir, manifest))
            yield OpenedRun(writer, manifest, cell_ids, faults)
            return
        if faults:
            raise PerfbenchError(
                Exit.USAGE, "--inject cannot join a run that has begun. Next: omit --resume"
            )
        writer, found = open_for_resume(resume)
        stack.enter_context(writer)
        _note_resumed(spec, writer, found)
        manifest = found.manifest
        faults = _faults(manifest.injections, [cell.cell_id for cell in manifest.cells])
        yield OpenedRun(writer, manifest, cell_ids, faults, found)


def _faults(injections: Sequence[str], cell_ids: Sequence[str]) -> list[Injection]:
    return [parse_injection(text, cell_ids) for text in injections]


def _note_resumed(spec: RunSpec, writer: RunWriter, found: Run) -> None:
    """The file records that it is resumed, once it may be resumed here."""
    # The machine first: where a setting has changed the routes, the setting is what to name.
    check_same_machine(found.manifest, spec.environment, spec.source, writer.path)
    check_cells(found.manifest, spec.plan, spec.matrix, spec.only, writer.path)
    writer.append(
        Resumed(
            resumed_utc=utc_now(),
            argv=spec.argv,
            environment=spec.environment,
            only=list(spec.only),
            cards=spec.cards,
        )
    )


def _measure(schedule: CellSchedule, recorder: Recorder) -> list[tuple[str, int]]:
    try:
        return measure_all(schedule, recorder.progress, recorder.budget)
    except PerfbenchError as error:
        if error.exit_code is Exit.INTERRUPTED:
            raise
        # The machine can no longer measure, e.g. another process came to the GPU.
        step = f"then resume with {schedule.kept()}: {schedule.resume_command()}"
        raise PerfbenchError(error.exit_code, f"{error}, {step}") from None


def parse_injection(text: str, cell_ids: Sequence[str]) -> Injection:
    """`slowdown=10%@CELL`, `oom@CELL`, `hang@CELL` or `segv@CELL`; USAGE names the nearest cell."""
    found = _INJECTION.fullmatch(text)
    if not found:
        raise PerfbenchError(
            Exit.USAGE,
            f"--inject {text!r} is not slowdown=10%@CELL, oom@CELL, hang@CELL or segv@CELL; write"
            " one of them",
        )
    slowdown, amount, fault, cell_id = found.groups()
    if cell_id not in cell_ids:
        raise PerfbenchError(
            Exit.USAGE,
            f"--inject {text!r}: the plan has no cell"
            f" {cell_id!r}{nearest_name(cell_id, list(cell_ids))}",
        )
    if not slowdown:
        return Injection(kind=fault, cell_id=cell_id)
    percent = float(amount) if re.fullmatch(r"\d{1,4}(\.\d+)?", amount) else 0.0
    if not 0 < percent <= 1000:
        raise PerfbenchError(
            Exit.USAGE,
            f"--inject {text!r}: got {amount} %, wanted more than 0 and at most 1000; write e.g."
            " slowdown=10%",
        )
    return Injection(kind=slowdown, percent=percent, cell_id=cell_id)
