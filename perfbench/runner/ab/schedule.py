"""Two versions of `nsa` measured in turns on one machine: what the machine does to one it does to
the other.

Block by block, each cell once for each side, the two adjacent in time, side a first in even blocks
and side b first in odd ones (ABBA). Both servers stay alive, and only one child works at a time; an
idle server has never touched CUDA. No sentinels: the other side is the sentinel. A pair is a folder
with two ordinary run files, ``a/run.jsonl`` and ``b/run.jsonl``.
"""

from __future__ import annotations

import random
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import interrupted_between
from perfbench.machine import (
    NVML_LAG_S,
    TargetFit,
    gpu_lock,
    nvml_session,
    refuse_busy,
    used_memory,
)
from perfbench.records import Environment, Job, PlannedCell, Replicate, Status
from perfbench.runner.ab import pair as pairs
from perfbench.runner.ab.checkout import CannotBuild, Side
from perfbench.runner.ab.version_plan import SidePlan
from perfbench.runner.attempts import Ledger
from perfbench.runner.executor import Executor, ForkServerExecutor
from perfbench.runner.progress import Progress
from perfbench.runner.run import parse_injection
from perfbench.runner.schedule import BudgetSpent, Sweep, without_resume
from perfbench.worker import MEASURE, NSA_WITNESS


class SideExecutor(ForkServerExecutor):
    """Measures one side's `nsa`.

    CannotBuild where its server does not start; a row of any other `nsa` is a bug, not a result.
    """

    def __init__(self, one: Side, measure: str, **seams: Any) -> None:
        super().__init__(measure, arguments=["--nsa", str(one.folder)], **seams)
        self._side = one

    def prepare(self, jobs: Sequence[Job]) -> None:
        try:
            super().prepare(jobs)
        except PerfbenchError as error:
            raise CannotBuild(
                f"{self._side.name} cannot be measured by this harness: {error}"
            ) from None

    def execute(self, job: Job) -> Replicate:
        row = super().execute(job)
        witness = (row.model_extra or {}).get(NSA_WITNESS)
        if row.status is Status.OK and witness != str(self._side.folder):
            problem = (
                f"got a row of {witness or 'an unknown nsa'}, wanted one of {self._side.folder}"
                f" ({self._side.name})"
            )
            raise PerfbenchError(
                Exit.INTERNAL,
                f"{problem}. Next: report it, this A/B would have compared a version with itself",
            )
        return row


@contextmanager
def prepared(
    fit: TargetFit,
    sides: tuple[Side, Side],
    measure: str = MEASURE,
    *,
    module: Any | None = None,
) -> Iterator[tuple[Executor, Executor]]:
    """Both sides' executors, with the GPU's lock held and alone on it.

    ``module`` stands in for pynvml.
    """
    with ExitStack() as stack:
        seams: dict[str, Any] = {}
        before_block: dict[str, Any] = {}  # of side a alone, whose block begins first
        if fit.gpu is not None:
            stack.enter_context(gpu_lock(fit.gpu.uuid))
            refuse_busy(fit.gpu, module)
            stack.enter_context(nvml_session(module))
            seams["used_memory"] = partial(used_memory, fit.gpu.uuid, module)
            before_block["before_block"] = partial(
                refuse_busy, fit.gpu, module, patience_s=NVML_LAG_S
            )
        first = stack.enter_context(SideExecutor(sides[0], measure, **seams, **before_block))
        second = stack.enter_context(SideExecutor(sides[1], measure, **seams))
        yield first, second


def interleave(
    task: pairs.Task,
    sides: tuple[Side, Side],
    plans: tuple[SidePlan, SidePlan],
    executors: tuple[Executor, Executor],
    *,
    folder: Path,
    environment: Environment,
    progress: Progress,
    resume: bool = False,
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> pairs.Pair:
    """Measure the cells that ``plans`` hold into ``folder``, new or going on.

    INTERRUPTED with the way on after Ctrl-C.
    """
    open_one = pairs.go_on if resume else pairs.create
    with ExitStack() as stack:
        opened = [
            open_one(task, sides[0], plans[0], folder, "a", environment),
            open_one(task, sides[1], plans[1], folder, "b", environment),
        ]
        for one in opened:
            stack.enter_context(one.writer)
        halves = [
            _Half(
                manifest=one.manifest,
                matrix=task.matrix,
                executor=executor,
                writer=one.writer,
                ledger=Ledger(
                    task.matrix.measure.throttle_retries,
                    _kept(one, other, task.matrix.measure.throttle_retries),
                ),
                faults=[
                    parse_injection(text, [cell.cell_id for cell in one.manifest.cells])
                    for text in one.manifest.injections
                ],
                progress=_Named(progress, name),
                card=environment.gpu_uuid_sha256,
                now=now,
                pause=pause,
                deadline=None if task.budget_s is None else now() + task.budget_s,
                model=plan.model,
                measured={row.cell_id for row in one.rows},
            )
            for one, other, executor, name, plan in zip(
                opened, opened[::-1], executors, pairs.NAMES, plans, strict=True
            )
        ]
        _Turns(folder, halves[0], halves[1], progress).run()
    return pairs.read(folder)


def _kept(one: pairs.Opened, other: pairs.Opened, retries: int) -> list[Replicate]:
    """The rows of ``one`` that a resumed pair goes on from.

    Halves of pairs that an interruption parted are left out: they are measured again, adjacent in
    time. A throttled row whose retry never came is no half of a pair, but the next one is its
    retry.
    """
    rules = Ledger(retries)
    mine, theirs = (
        {(row.cell_id, row.replicate): row for row in side.rows} for side in (one, other)
    )  # the last one counts
    resumed = [*one.resumed_utc, *other.resumed_utc]

    def is_kept(row: Replicate) -> bool:
        last, beside = mine[row.cell_id, row.replicate], theirs.get((row.cell_id, row.replicate))
        if row.status is not Status.OK or rules.attempt_after(last) is not None:
            return True
        return (
            beside is not None
            and rules.attempt_after(beside) is None
            and not interrupted_between(last, beside, resumed)
        )

    return [row for row in one.rows if is_kept(row)]


@dataclass
class _Half(Sweep):
    """One side; ``measured`` are the cells that have a row, whatever its end."""

    model: dict[str, Any] = field(default_factory=dict)
    measured: set[str] = field(default_factory=set)

    def measure(self, cell: PlannedCell, block: int, later: int) -> None:
        self.progress.begin(cell.cell_id, block)
        self._measure_cell(cell, self._job(cell, block, waiting_peers=0), later)
        self.measured.add(cell.cell_id)

    def due(self, cell: PlannedCell, block: int) -> bool:
        return self._is_due(cell, block)

    def _job(self, cell: PlannedCell, replicate: int, *, waiting_peers: int) -> Job:
        return (
            super()
            ._job(cell, replicate, waiting_peers=waiting_peers)
            .model_copy(update={"model": self.model})
        )


@dataclass
class _Turns:
    """The order: pairs, alternating."""

    folder: Path
    a: _Half
    b: _Half
    progress: Progress

    def run(self) -> None:
        blocks = {block: self._pairs(block) for block in range(self.a.manifest.replicates)}
        total = 2 * len(blocks) * len(self._cells())
        self.progress.start(total, total - 2 * sum(map(len, blocks.values())))
        try:
            for block, pairs in blocks.items():
                self._measure_block(block, pairs)
        except BudgetSpent:
            self._over_budget(blocks)
        except KeyboardInterrupt:
            raise PerfbenchError(
                Exit.INTERRUPTED,
                f"interrupted with the finished pairs in {self.folder}. Next: {self._go_on()}",
            ) from None
        finally:
            self.progress.stop()

    def _cells(self) -> list[tuple[PlannedCell, PlannedCell]]:
        """Each cell as each side plans it; routes may differ.

        What only one side has is not compared.
        """
        others = {cell.cell_id: cell for cell in self.b.manifest.cells}
        return [
            (cell, others[cell.cell_id]) for cell in self.a.manifest.cells if cell.cell_id in others
        ]

    def _pairs(self, block: int) -> list[tuple[PlannedCell, PlannedCell]]:
        shuffled = self._cells()
        random.Random(f"{self.a.manifest.seed}-{block}").shuffle(shuffled)
        return [pair for pair in shuffled if self._due(pair, block)]

    def _due(
        self, pair: tuple[PlannedCell, PlannedCell], block: int
    ) -> list[tuple[_Half, PlannedCell]]:
        """Who is to be measured, in order.

        After a failure of one side the other is still measured once, for its own proof.
        """
        turns = [(self.a, pair[0]), (self.b, pair[1])]
        if any(half.ledger.has_failed(cell.cell_id) for half, cell in turns):
            turns = [(half, cell) for half, cell in turns if cell.cell_id not in half.measured]
        due = [(half, cell) for half, cell in turns if half.due(cell, block)]
        return due if block % 2 == 0 else due[::-1]

    def _measure_block(self, block: int, pairs: list[tuple[PlannedCell, PlannedCell]]) -> None:
        began = False
        for pair in pairs:
            due = self._due(pair, block)
            if not due:
                continue
            self.a._check_budget()
            if not began:
                self._begin_block()
                began = True
            for half, cell in due:
                half.measure(cell, block, later=self.a.manifest.replicates - block - 1)

    def _begin_block(self) -> None:
        """Fresh servers for both; nothing is timed while one of them still imports."""
        for half in (self.a, self.b):
            half.executor.new_block()
        for half in (self.a, self.b):
            half.executor.prepare([])

    def _over_budget(self, blocks: dict[int, list[tuple[PlannedCell, PlannedCell]]]) -> None:
        missing = sum(
            1 for block, pairs in blocks.items() for pair in pairs if self._due(pair, block)
        )
        self.progress.note(
            f"the budget is spent; {missing} pairs are not measured. Go on with {self._go_on()}"
        )

    def _go_on(self) -> str:
        return shlex.join([*without_resume(self.a.manifest.argv), "--resume", str(self.folder)])


@dataclass
class _Named:
    """The progress of both, which says whose row it is."""

    whole: Progress
    name: str

    def start(self, total: int, done: int) -> None: ...

    def begin(self, cell_id: str, replicate: int) -> None:
        self.whole.begin(f"{self.name}: {cell_id}", replicate)

    def finished(self, row: Replicate, *, covers: int = 1) -> None:
        self.whole.finished(
            row.model_copy(update={"cell_id": f"{self.name}: {row.cell_id}"}), covers=covers
        )

    def note(self, text: str) -> None:
        self.whole.note(f"{self.name}: {text}")

    def stop(self) -> None: ...
