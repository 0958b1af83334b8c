"""Runs a plan: opens or resumes the run file, and lets the sweep measure into it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from nsa.config import nearest_name
from perfbench.errors import Exit, PerfbenchError
from perfbench.machine import (
    NVML_LAG_S,
    TargetFit,
    gpu_lock,
    nvml_session,
    refuse_busy,
    used_memory,
)
from perfbench.matrix import Matrix, Plan
from perfbench.records import (
    Environment,
    Injection,
    Manifest,
    Resumed,
    Run,
    Source,
    create_run,
    new_run_id,
    open_for_resume,
    read_run,
    utc_now,
)
from perfbench.runner.attempts import Ledger
from perfbench.runner.executor import Executor, ForkServerExecutor
from perfbench.runner.progress import Progress, SilentProgress
from perfbench.runner.resume import check_cells, check_same_ground, selected
from perfbench.runner.schedule import Sweep
from perfbench.worker import MEASURE

_INJECTION = re.compile(r"(?:(slowdown)=([0-9.]+)%|(oom|hang|segv))@(.*)", re.DOTALL)

__all__ = ["Finished", "parse_injection", "prepared", "run", "selected"]


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that ended by itself; ``missing`` lists the replicates that the budget left out."""

    folder: Path
    run: Run
    missing: list[tuple[str, int]] = field(default_factory=list)


@contextmanager
def prepared(
    fit: TargetFit, measure: str = MEASURE, *, module: Any | None = None
) -> Iterator[Executor]:
    """The executor for a machine that ``check_target`` accepted: on a GPU, with its lock held and
    alone on it.

    Company is looked for before each block too: a sweep takes hours. ``module`` stands in for
    pynvml.
    """
    with ExitStack() as stack:
        seams: dict[str, Any] = {}
        if fit.gpu is not None:
            stack.enter_context(gpu_lock(fit.gpu.uuid))
            refuse_busy(fit.gpu, module)
            stack.enter_context(
                nvml_session(module)
            )  # held open: without persistence mode each opening wakes the driver anew
            seams["used_memory"] = partial(used_memory, fit.gpu.uuid, module)
            seams["before_block"] = partial(refuse_busy, fit.gpu, module, patience_s=NVML_LAG_S)
        yield stack.enter_context(ForkServerExecutor(measure, **seams))


def run(
    plan: Plan,
    matrix: Matrix,
    executor: Executor,
    *,
    runs_dir: Path,
    environment: Environment,
    source: Source,
    argv: list[str],
    seed: int,
    only: Sequence[str] = (),
    injections: Sequence[str] = (),
    budget_s: float | None = None,
    resume: Path | None = None,
    progress: Progress | None = None,
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Finished:
    """Measure what ``only`` selects of ``plan``, in a new folder under ``runs_dir`` or going on
    with ``resume``.

    ``plan`` holds every cell of the matrix, so that a later slice can join the run. A resumed run
    keeps its own seed, injections, sentinels and number of replicates. ``now`` must be monotonic:
    the wall clock may step back. INTERRUPTED with the command to go on after Ctrl-C; nothing
    written is lost.
    """
    chosen = {cell.cell_id for cell in selected(plan.cells, only)}
    faults = [parse_injection(text, [cell.cell_id for cell in plan.cells]) for text in injections]
    with ExitStack() as stack:
        if resume is None:
            manifest = manifest_of(
                plan,
                matrix,
                environment,
                source,
                argv,
                seed,
                list(only),
                list(injections),
                list(matrix.sentinels),
            )
            ledger = Ledger(matrix.measure.throttle_retries)
            writer = stack.enter_context(create_run(runs_dir, manifest))
        else:
            if faults:
                raise PerfbenchError(
                    Exit.USAGE,
                    "--inject cannot join a run that has begun. Next: leave --resume away",
                )
            writer, found = open_for_resume(resume)
            stack.enter_context(writer)
            # The ground first: where a setting has changed the routes, the setting is what to name.
            check_same_ground(found.manifest, environment, source, writer.path)
            check_cells(found.manifest, plan, matrix, only, writer.path)
            manifest, ledger = (
                found.manifest,
                Ledger(matrix.measure.throttle_retries, [*found.replicates, *found.sentinels]),
            )
            faults = [
                parse_injection(text, [cell.cell_id for cell in manifest.cells])
                for text in manifest.injections
            ]
            writer.append(
                Resumed(resumed_utc=utc_now(), argv=argv, environment=environment, only=list(only))
            )
        sweep = Sweep(
            manifest=manifest,
            matrix=matrix,
            executor=executor,
            writer=writer,
            ledger=ledger,
            faults=faults,
            progress=progress or SilentProgress(),
            card=environment.gpu_uuid_sha256,
            now=now,
            pause=pause,
            deadline=None if budget_s is None else now() + budget_s,
        )
        missing = sweep.run(chosen)
    return Finished(writer.folder, read_run(writer.folder), missing)


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


def manifest_of(
    plan: Plan,
    matrix: Matrix,
    environment: Environment,
    source: Source,
    argv: list[str],
    seed: int,
    only: list[str],
    injections: list[str],
    sentinels: list[str],
) -> Manifest:
    now = datetime.now(UTC)
    return Manifest(
        run_id=new_run_id(now, environment.gpu_slug, source.commit),
        created_utc=now.isoformat(timespec="seconds"),
        argv=argv,
        seed=seed,
        injections=injections,
        source=source,
        matrix_name=matrix.name,
        matrix_path=matrix.path,
        matrix_text=matrix.text,
        matrix_sha256=matrix.sha256,
        replicates=plan.replicates,
        sentinels=sentinels,
        only=only,
        cells=plan.cells,
        excluded=[{"cell_id": one.cell_id, "reason": one.reason} for one in plan.excluded],
        environment=environment,
    )
