"""Runs a plan: every replicate in a random order drawn from a stored seed, each row on the disk before the next one.

Block r holds replicate r of every cell, so that a drift of the machine meets all cells alike.
"""

from __future__ import annotations

import random
import re
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from nsa.config import nearest_name
from perfbench import gpu, nvml, runfile
from perfbench.environment import TargetFit
from perfbench.isolate import Executor, ForkServerExecutor, failed, utc_now
from perfbench.job import Injection, Job
from perfbench.matrix import Matrix
from perfbench.plan import Plan
from perfbench.progress import Progress, SilentProgress
from perfbench.result import Environment, Manifest, ParityLine, PlannedCell, Replicate, Resumed, Run, Source, Status
from perfbench.resumable import check_cells, check_same_ground, selected
from perfbench.runfile import RunWriter
from perfbench.verdict import Exit, PerfbenchError

_INJECTION = re.compile(r"(?:(slowdown)=([0-9.]+)%|(oom|hang|segv))@(.*)", re.DOTALL)

__all__ = ["Finished", "parse_injection", "prepared", "run", "selected"]


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that ended by itself; ``missing`` lists the replicates that the budget left out."""

    folder: Path
    run: Run
    missing: list[tuple[str, int]] = field(default_factory=list)


@contextmanager
def prepared(fit: TargetFit, measure: str = "perfbench.measure:measure", *, module: Any | None = None) -> Iterator[Executor]:
    """The executor for a machine that ``check_target`` accepted: on a GPU, with its lock held and alone on it.

    Company is looked for before each block too: a sweep takes hours. ``module`` stands in for pynvml.
    """
    with ExitStack() as stack:
        seams: dict[str, Any] = {}
        if fit.gpu is not None:
            stack.enter_context(gpu.gpu_lock(fit.gpu.uuid))
            gpu.refuse_busy(fit.gpu, module)
            stack.enter_context(nvml.session(module))  # held open: without persistence mode each opening wakes the driver anew
            seams["used_memory"] = partial(gpu.used_memory, fit.gpu.uuid, module)
            seams["before_block"] = partial(gpu.refuse_busy, fit.gpu, module, patience_s=gpu.NVML_LAG_S)
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
) -> Finished:
    """Measure what ``only`` selects of ``plan``, in a new folder under ``runs_dir`` or going on with ``resume``.

    ``plan`` holds every cell of the matrix, so that a later slice can join the run. A resumed run keeps its own seed,
    injections and number of replicates. INTERRUPTED with the command to go on after Ctrl-C; nothing written is lost.
    """
    chosen = {cell.cell_id for cell in selected(plan.cells, only)}
    faults = [parse_injection(text, [cell.cell_id for cell in plan.cells]) for text in injections]
    with ExitStack() as stack:
        if resume is None:
            manifest, rows = _manifest(plan, matrix, environment, source, argv, seed, list(only), list(injections)), list[Replicate]()
            writer = stack.enter_context(runfile.create(runs_dir, manifest))
        else:
            if faults:
                raise PerfbenchError(Exit.USAGE, "--inject cannot join a run that has begun. Next: leave --resume away")
            writer, found = runfile.open_for_resume(resume)
            stack.enter_context(writer)
            # The ground first: where a setting has changed the routes, the setting is what to name.
            check_same_ground(found.manifest, environment, source, writer.path)
            check_cells(found.manifest, plan, matrix, only, writer.path)
            manifest, rows = found.manifest, list(found.replicates)
            faults = [parse_injection(text, [cell.cell_id for cell in manifest.cells]) for text in manifest.injections]
            writer.append(Resumed(resumed_utc=utc_now(), argv=argv, environment=environment, only=list(only)))
        sweep = _Sweep(manifest, matrix, executor, writer, rows, faults, progress or SilentProgress())
        missing = sweep.run(chosen, None if budget_s is None else now() + budget_s, now)
    return Finished(writer.folder, runfile.read(writer.folder), missing)


def parse_injection(text: str, cell_ids: Sequence[str]) -> Injection:
    """`slowdown=10%@CELL`, `oom@CELL`, `hang@CELL` or `segv@CELL`; USAGE names the nearest cell."""
    found = _INJECTION.fullmatch(text)
    if not found:
        raise PerfbenchError(Exit.USAGE, f"--inject {text!r} is not slowdown=10%@CELL, oom@CELL, hang@CELL or segv@CELL; write one of them")
    slowdown, amount, fault, cell_id = found.groups()
    if cell_id not in cell_ids:
        raise PerfbenchError(Exit.USAGE, f"--inject {text!r}: the plan has no cell {cell_id!r}{nearest_name(cell_id, list(cell_ids))}")
    if not slowdown:
        return Injection(kind=fault, cell_id=cell_id)
    percent = float(amount) if re.fullmatch(r"\d{1,4}(\.\d+)?", amount) else 0.0
    if not 0 < percent <= 1000:
        raise PerfbenchError(Exit.USAGE, f"--inject {text!r}: got {amount} %, wanted more than 0 and at most 1000; write e.g. slowdown=10%")
    return Injection(kind=slowdown, percent=percent, cell_id=cell_id)


def _manifest(
    plan: Plan, matrix: Matrix, environment: Environment, source: Source, argv: list[str], seed: int, only: list[str], injections: list[str]
) -> Manifest:
    now = datetime.now(UTC)
    return Manifest(
        run_id=runfile.new_run_id(now, environment.gpu_slug, source.commit),
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
        only=only,
        cells=plan.cells,
        excluded=[{"cell_id": one.cell_id, "reason": one.reason} for one in plan.excluded],
        environment=environment,
    )


@dataclass
class _Sweep:
    """One pass over the missing replicates; ``rows`` are all that the run holds so far."""

    manifest: Manifest
    matrix: Matrix
    executor: Executor
    writer: RunWriter
    rows: list[Replicate]
    faults: list[Injection]
    progress: Progress
    proofs: dict[str, ParityLine] = field(default_factory=dict)

    def run(self, chosen: Collection[str], deadline: float | None, now: Callable[[], float]) -> list[tuple[str, int]]:
        """Returns the replicates that the budget left unmeasured."""
        todo = self._todo(chosen)
        total = len(chosen) * self.manifest.replicates
        self.progress.start(total, total - len(todo))
        try:
            return self._measure(todo, deadline, now)
        except KeyboardInterrupt:
            raise PerfbenchError(Exit.INTERRUPTED, f"interrupted with {self._kept()}. Next: {self._go_on()}") from None
        except PerfbenchError as error:  # the machine can no longer measure, e.g. another process came to the GPU
            raise PerfbenchError(error.exit_code, f"{error}, then go on with {self._kept()}: {self._go_on()}") from None
        finally:
            self.progress.stop()

    def _todo(self, chosen: Collection[str]) -> list[tuple[PlannedCell, int]]:
        """What is not measured yet, block by block, each block in its own order."""
        finished = {(row.cell_id, row.replicate) for row in self.rows}
        order: list[tuple[PlannedCell, int]] = []
        for block in range(self.manifest.replicates):
            # All cells are shuffled, not only the chosen, so that a resumed or sliced run keeps the order of a whole one.
            shuffled = list(self.manifest.cells)
            random.Random(f"{self.manifest.seed}-{block}").shuffle(shuffled)
            order += [(cell, block) for cell in shuffled if cell.cell_id in chosen and (cell.cell_id, block) not in finished]
        return [(cell, block) for cell, block in order if not self._has_failed(cell.cell_id)]

    def _measure(self, todo: list[tuple[PlannedCell, int]], deadline: float | None, now: Callable[[], float]) -> list[tuple[str, int]]:
        current = -1
        jobs: dict[tuple[str, int], Job] = {}
        for done, (cell, block) in enumerate(todo):
            if self._has_failed(cell.cell_id):
                continue  # one row says it; repeating it would only cost GPU minutes
            if deadline is not None and now() >= deadline:
                return self._over_budget(todo[done:])
            if block != current:
                self.executor.new_block()
                current = block
            self.progress.begin(cell.cell_id, block)
            if (cell.cell_id, block) not in jobs:
                jobs = self._prepare(todo[done:], block)
            job = jobs[cell.cell_id, block]
            row = self._smaller_ran_out(cell, job) or self.executor.execute(job)
            self.rows.append(row)
            self.writer.append(row)
            self._keep_proof(cell, row)
            later = sum(1 for other, _ in todo[done + 1 :] if other.cell_id == cell.cell_id)
            self.progress.finished(row, covers=1 + (later if row.status is not Status.OK else 0))
        return []

    def _prepare(self, rest: list[tuple[PlannedCell, int]], block: int) -> dict[tuple[str, int], Job]:
        """The next jobs of this block, preparing side by side where the matrix allows it."""
        cells = [cell for cell, its_block in rest if its_block == block and not self._has_failed(cell.cell_id)]
        cells = cells[: self.matrix.measure.prepare_together]
        jobs = [self._job(cell, block, company=len(cells) - 1) for cell in cells]
        if len(jobs) > 1:
            self.executor.prepare([job for cell, job in zip(cells, jobs, strict=True) if not self._smaller_ran_out(cell, job)])
        return {(job.cell_id, job.replicate): job for job in jobs}

    def _keep_proof(self, cell: PlannedCell, row: Replicate) -> None:
        """A proof holds for its route, not for a length (parity has a length of its own), and for this sitting's card only.

        It costs 7 s of a fresh process on an H100 (cuDNN loads, and builds a plan for each shape), so it is made once.
        """
        if row.status is Status.WRONG_PATH:
            return  # it proved what ran, which is not what was planned
        if row.parity is not None and row.parity.ok and row.parity.proved_in is None:
            proof = row.parity.model_copy(update={"proved_in": f"{row.cell_id} #{row.replicate}"})
            self.proofs.setdefault(_proof_key(cell), proof)

    def _over_budget(self, rest: list[tuple[PlannedCell, int]]) -> list[tuple[str, int]]:
        missing = [(cell.cell_id, block) for cell, block in rest if not self._has_failed(cell.cell_id)]
        shown = ", ".join(f"{cell_id} #{block}" for cell_id, block in missing[:10])
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        self.progress.note(f"the budget is spent; not measured: {shown}{more}. Go on with --resume {shlex.quote(str(self.writer.folder))}")
        return missing

    def _has_failed(self, cell_id: str) -> bool:
        return any(row.cell_id == cell_id and row.status is not Status.OK for row in self.rows)

    def _smaller_ran_out(self, cell: PlannedCell, job: Job) -> Replicate | None:
        """A SKIPPED row where a shorter sequence of the same path ran out of memory, and this one has never succeeded."""
        if self.matrix.limits.oom != "record_and_skip_larger" or any(row.cell_id == cell.cell_id for row in self.rows):
            return None
        for row in self.rows:
            if row.status is Status.OOM and _same_but_shorter(row.axes, cell.axes):
                return failed(job, Status.SKIPPED, f"not tried: {row.cell_id} ran out of memory (limits.oom: record_and_skip_larger)")
        return None

    def _job(self, cell: PlannedCell, replicate: int, *, company: int) -> Job:
        return Job(
            cell_id=cell.cell_id,
            replicate=replicate,
            axes=cell.axes,
            config_sha256=cell.config_sha256,
            model=self.matrix.model.to_mapping(),
            measure=self.matrix.measure,
            timeout_s=self.matrix.limits.timeout_s,
            plan=cell.route,
            expect=cell.expect,
            device="cpu" if self.manifest.environment.gpu_slug == "cpu" else "cuda",
            seed=random.Random(f"{self.manifest.seed}-{cell.cell_id}-{replicate}").randrange(2**31),
            profile=replicate == 0,
            injection=next((fault for fault in self.faults if fault.cell_id == cell.cell_id), None),
            company=company,
            proof=self.proofs.get(_proof_key(cell)),
        )

    def _kept(self) -> str:
        return f"{len(self.rows)} finished replicates in {self.writer.folder}"

    def _go_on(self) -> str:
        return shlex.join([*_without_resume(self.manifest.argv), "--resume", str(self.writer.folder)])


def _proof_key(cell: PlannedCell) -> str:
    """Everything that the parity check depends on besides the model: all axes but the lengths, and the route."""
    axes = {name: value for name, value in cell.axes.items() if name not in ("seq_len", "batch")}
    return f"{sorted(axes.items())} {sorted(cell.route.counters)}"


def _same_but_shorter(axes: Mapping[str, Any], than: Mapping[str, Any]) -> bool:
    others = {key: value for key, value in axes.items() if key != "seq_len"} == {k: v for k, v in than.items() if k != "seq_len"}
    return others and axes["seq_len"] < than["seq_len"]


def _without_resume(argv: Sequence[str]) -> list[str]:
    """The command without what a resumed run brings along itself."""
    kept: list[str] = []
    skip = False
    for word in argv:
        if skip:
            skip = False
        elif word in ("--resume", "--inject", "--seed"):
            skip = True
        elif not word.startswith(("--resume=", "--inject=", "--seed=")):
            kept.append(word)
    return kept
