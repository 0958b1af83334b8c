"""Two versions of `nsa` measured in turns on one machine: what the machine does to one it does to
the other.

Pair by pair, each cell once for each side, the two adjacent in time; which side is first is said by
`gate.base_first`, four pairs a block. The cells of a confirmation are measured in groups, the worst
first, look by look until they are settled; a budget makes a group smaller, so that its cells reach
a look. Both servers stay alive, and only one child works at a
time; an idle server has never touched CUDA. No sentinels: the other side is the sentinel. A pair is
a folder with two ordinary run files, ``a/run.jsonl`` and ``b/run.jsonl``.
"""

from __future__ import annotations

import random
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from perfbench.gate import (
    MeasuredPairs,
    base_first,
    has_fresh_servers,
    interrupted_between,
)
from perfbench.matrix import policies, step_folder
from perfbench.records import PlannedCell, Replicate, Run, Status, without_resume
from perfbench.runner.ab import pair
from perfbench.runner.ab.checkout import Checkout
from perfbench.runner.ab.pair import Pair, PairSpec, is_pair
from perfbench.runner.ab.version_executor import prepared_versions
from perfbench.runner.ab.version_plan import VersionPlan, plan_of_version
from perfbench.runner.attempts import Ledger
from perfbench.runner.context import MeasuringContext
from perfbench.runner.executor import CardLost, Executor
from perfbench.runner.loop import Budget, measure_all
from perfbench.runner.progress import Progress
from perfbench.runner.recorder import Recorder
from perfbench.runner.run import parse_injection

GROUP = 12  # cells of a confirmation that are measured together: they share the servers' starts
SERVER_S = 6.0  # of both servers, which import torch


def measure_pair(
    spec: PairSpec,
    versions: tuple[Checkout, Checkout],
    context: MeasuringContext,
    folder: Path,
    *,
    resume: bool = False,
) -> Pair:
    """Plan both versions, each by its own code, and measure them in turns on this machine."""
    base, candidate = (
        plan_of_version(one, spec.matrix, spec.only, context.capability) for one in versions
    )
    if context.fleet is not None:
        return _on_fleet(spec, (base, candidate), context, folder, resume=resume)
    with prepared_versions(context.fit, versions) as (first, second):
        return interleave(spec, (base, candidate), (first, second), context, folder, resume=resume)


def _on_fleet(
    spec: PairSpec,
    versions: tuple[VersionPlan, VersionPlan],
    context: MeasuringContext,
    folder: Path,
    *,
    resume: bool,
) -> Pair:
    """All pairs on one card; where it is lost, what is missing on another, both halves of each pair
    on one. A pair's base is the commit that its checkout is named after.
    """
    assert context.fleet is not None
    while True:
        try:
            with context.fleet.versions(versions[0].checkout.name) as found:
                here = replace(context, environment=found.environment)
                return interleave(
                    spec, versions, found.executors, here, folder, resume=resume or is_pair(folder)
                )
        except CardLost as lost:
            context.say(str(lost))


def interleave(
    spec: PairSpec,
    versions: tuple[VersionPlan, VersionPlan],
    executors: tuple[Executor, Executor],
    context: MeasuringContext,
    folder: Path,
    *,
    resume: bool = False,
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Pair:
    """Measure the cells that ``versions`` plan into ``folder``, which is new or resumed.

    INTERRUPTED with the command that resumes after Ctrl-C.
    """
    open_one = pair.resume if resume else pair.create
    budget = Budget.of(spec.budget_s, now)
    with ExitStack() as stack:
        opened = [
            open_one(spec, version, folder, name, context.environment)
            for version, name in zip(versions, pair.NAMES, strict=True)
        ]
        for one in opened:
            stack.enter_context(one.writer)
        both = [
            _Version(
                name,
                Recorder(
                    manifest=one.manifest,
                    matrix=spec.matrix,
                    executor=executor,
                    writer=one.writer,
                    ledger=_ledger(one, other, spec.matrix.measure.throttle_retries),
                    faults=[
                        parse_injection(text, [cell.cell_id for cell in one.manifest.cells])
                        for text in one.manifest.injections
                    ],
                    progress=_Named(context.progress, name),
                    card=context.environment.gpu_uuid_sha256,
                    budget=budget,
                    model=version.model,
                    pause=pause,
                    own_folder=version.checkout.own_folder(step_folder(spec.matrix.path)),
                ),
                {row.cell_id for row in one.rows},
            )
            for one, other, executor, name, version in zip(
                opened, opened[::-1], executors, pair.NAMES, versions, strict=True
            )
        ]
        _measure(folder, both[0], both[1], spec, context.progress, budget)
    return pair.read_pair(folder)


def _measure(
    folder: Path,
    a: _Version,
    b: _Version,
    spec: PairSpec,
    progress: Progress,
    budget: Budget,
) -> None:
    """All pairs; of a pair with a plan, those that its looks want."""
    manifest = a.recorder.manifest
    planned = [cell_id for cell_id in a.cells if cell_id in b.cells]
    if manifest.confirmation is None:
        everything = dict.fromkeys(planned, manifest.replicates)
        measure_all(PairSchedule(folder, a, b, everything), progress, budget)
        return
    waiting = [cell_id for cell_id in manifest.confirmation.cells if cell_id in planned]
    while waiting:
        group, waiting = _group(folder, waiting, spec, budget.left_s)
        while wanted := _wanted(folder, group, spec):
            if measure_all(PairSchedule(folder, a, b, wanted), progress, budget):
                return
            if _wanted(folder, group, spec) == wanted:
                break  # its rows do not count, and are not measured again


def _group(
    folder: Path, waiting: Sequence[str], spec: PairSpec, left_s: float
) -> tuple[list[str], list[str]]:
    """The cells that are measured next, and those after them; settled ones are in neither."""
    found = pair.read_pair(folder)
    done = {
        cell_id: min(_num_pairs(side, cell_id) for side in (found.base, found.candidate))
        for cell_id in waiting
    }
    lacks = {
        cell_id: pairs - done[cell_id] for cell_id, pairs in _wanted(folder, waiting, spec).items()
    }
    size = group_size(lacks, spec.pair_s, left_s)
    return [*lacks][:size], [*lacks][size:]


def _num_pairs(side: Run, cell_id: str) -> int:
    return len({row.replicate for row in side.of_cell(cell_id)})


def group_size(lacks: Mapping[str, int], pair_s: Mapping[str, float], left_s: float) -> int:
    """How many of the next cells are measured together: GROUP, or as many as get the pairs that
    they lack for a look in ``left_s`` seconds, since a cell that is cut short of it is judged by
    none; one at least.
    """
    spent_s, most = 0.0, 0
    for size, (cell_id, pairs) in enumerate(list(lacks.items())[:GROUP]):
        spent_s += pairs * pair_s.get(cell_id, 0.0)
        most = max(most, pairs)
        if size and spent_s + most * SERVER_S > left_s:
            return size
    return min(GROUP, len(lacks))


def _wanted(folder: Path, group: Sequence[str], spec: PairSpec) -> dict[str, int]:
    found = pair.read_pair(folder)
    measured = MeasuredPairs(found.base, found.candidate, group)
    return spec.looks(measured, spec.policies or policies(spec.matrix))


def _ledger(one: pair.Opened, other: pair.Opened, retries: int) -> Ledger:
    return Ledger(retries, _kept(one, other, retries))


def _kept(one: pair.Opened, other: pair.Opened, retries: int) -> list[Replicate]:
    """The rows of ``one`` that a resumed pair keeps.

    Halves of pairs with an interruption between them are left out: they are measured again,
    adjacent in time. A throttled row whose retry never came is no half of a pair, but the next one
    is its retry.
    """
    rules = Ledger(retries)
    # the last one counts
    mine, theirs = (
        {(row.cell_id, row.replicate): row for row in side.rows} for side in (one, other)
    )
    resumed = [*one.resumed_utc, *other.resumed_utc]

    def is_kept(row: Replicate) -> bool:
        last, partner = mine[row.cell_id, row.replicate], theirs.get((row.cell_id, row.replicate))
        if row.status is not Status.OK or rules.attempt_after(last) is not None:
            return True
        return (
            partner is not None
            and rules.attempt_after(partner) is None
            and not interrupted_between(last, partner, resumed)
        )

    return [row for row in one.rows if is_kept(row)]


@dataclass
class _Version:
    """One side; ``measured`` are the cells that have a row, whatever its status."""

    name: str
    recorder: Recorder
    measured: set[str]
    cells: dict[str, PlannedCell] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = {cell.cell_id: cell for cell in self.recorder.manifest.cells}

    def is_due(self, cell_id: str, block: int) -> bool:
        return self.recorder.is_due(self.cells[cell_id], block)

    def measure(self, cell_id: str, block: int, later: int) -> None:
        cell = self.cells[cell_id]
        self.recorder.progress.begin(cell_id, block)
        self.recorder.measure(cell, self.recorder.job(cell, block), later)
        self.measured.add(cell_id)


class PairSchedule:
    """Cells that both versions plan, on both sides, the two adjacent in time; ``wanted``: cell ->
    how many pairs.

    Routes may differ. What only one side has is not compared. The loop's block is one pair of each
    cell.
    """

    rows_per_cell = 2

    def __init__(self, folder: Path, a: _Version, b: _Version, wanted: Mapping[str, int]) -> None:
        self._folder, self._a, self._b = folder, a, b
        self._manifest = a.recorder.manifest
        self._wanted = wanted
        self._has_begun = False
        self.num_blocks, self.num_cells = max(wanted.values(), default=0), len(wanted)

    def due(self, block: int) -> list[str]:
        shuffled = list(self._wanted)
        random.Random(f"{self._manifest.seed}-{block}").shuffle(shuffled)
        return [cell_id for cell_id in shuffled if self.is_due(cell_id, block)]

    def rounds(self) -> list[tuple[int, list[str]]]:
        return [(block, self.due(block)) for block in range(self.num_blocks)]

    def is_due(self, cell_id: str, block: int) -> bool:
        return block < self._wanted[cell_id] and bool(self._turns(cell_id, block))

    def _turns(self, cell_id: str, block: int) -> list[_Version]:
        """Who is to be measured, in order.

        After a failure of one side the other is still measured once, for its own proof.
        """
        turns = [self._a, self._b]
        if any(one.recorder.ledger.has_failed(cell_id) for one in turns):
            turns = [one for one in turns if cell_id not in one.measured]
        due = [one for one in turns if one.is_due(cell_id, block)]
        return due if base_first(self._manifest.seed, cell_id, block) else due[::-1]

    def begin_block(self, block: int, cell_ids: Sequence[str]) -> None:
        """Fresh servers for both where they are due; nothing is timed while one of them still
        imports.
        """
        if self._has_begun and not has_fresh_servers(block):
            return
        self._has_begun = True
        for one in (self._a, self._b):
            one.recorder.executor.new_block()
        for one in (self._a, self._b):
            one.recorder.executor.prepare([])

    def measure(self, cell_id: str, block: int, later: int) -> None:
        for one in self._turns(cell_id, block):
            one.measure(cell_id, block, later)

    def kept(self) -> str:
        return f"the finished pairs in {self._folder}"

    def resume_command(self) -> str:
        return shlex.join([*without_resume(self._manifest.argv), "--resume", str(self._folder)])


@dataclass
class _Named:
    """The progress of both sides; each line names the side of its row."""

    both: Progress
    name: str

    def start(self, total: int, done: int) -> None: ...

    def begin(self, cell_id: str, replicate: int) -> None:
        self.both.begin(f"{self.name}: {cell_id}", replicate)

    def finished(self, row: Replicate, *, covers: int = 1) -> None:
        self.both.finished(
            row.model_copy(update={"cell_id": f"{self.name}: {row.cell_id}"}), covers=covers
        )

    def note(self, text: str) -> None:
        self.both.note(f"{self.name}: {text}")

    def stop(self) -> None: ...
