"""Measures one run on the cards of a fleet: each card as one machine does it, block by block, all
replicates of a cell on one card, every row in one file.

Cells that a report sets next to each other (the dense twin, the forward and the step) lie on one
card. What a lost card has not finished is measured on another, from its first replicate on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import WHOLE
from perfbench.records import (
    Cell,
    PlannedCell,
    Replicate,
    Resumed,
    SentinelLine,
    read_run,
    utc_now,
)
from perfbench.runner.attempts import Ledger
from perfbench.runner.executor import CardLost
from perfbench.runner.fleet.card import FleetCard, RemoteExecutor
from perfbench.runner.fleet.fleet import Fleet
from perfbench.runner.loop import Budget, measure_all
from perfbench.runner.progress import Progress, SilentProgress
from perfbench.runner.recorder import Recorder
from perfbench.runner.run import Finished, OpenedRun, RunSpec, opened_run
from perfbench.runner.schedule import CellSchedule

LOOK_S = 0.2
END_S = 30.0  # for the threads of agents that were ended


def run_on_fleet(
    spec: RunSpec,
    fleet: Fleet,
    *,
    runs_dir: Path,
    budget_s: float | None = None,
    resume: Path | None = None,
    progress: Progress | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Finished:
    """As `run_matrix`, on every card of ``fleet``; ENVIRONMENT with the command that resumes where
    all of them are lost.
    """
    with opened_run(spec, runs_dir, resume) as opened:
        shared = _SharedProgress(progress or SilentProgress())
        one = _FleetRun(spec, fleet, opened, shared, Budget.of(budget_s, now))
        missing = one.measure()
    return Finished(opened.writer.folder, read_run(opened.writer.folder), missing)


class _SharedLedger(Ledger):
    """One for all cards, since a cell is on one of them: what ran out of memory there is not tried
    larger elsewhere.
    """

    def __init__(
        self, throttle_retries: int, rows: Iterable[Replicate | SentinelLine] = ()
    ) -> None:
        self._lock = threading.Lock()
        super().__init__(throttle_retries, rows)

    def add(self, row: Replicate | SentinelLine) -> None:
        with self._lock:
            super().add(row)

    def forget(self, cell_ids: Collection[str]) -> None:
        with self._lock:
            super().forget(cell_ids)

    def smaller_ran_out(self, cell_id: str, axes: Cell) -> str | None:
        with self._lock:
            return super().smaller_ran_out(cell_id, axes)


class _SharedProgress:
    """One count for all cards; a replicate that moved is not counted twice."""

    def __init__(self, shown: Progress) -> None:
        self._shown, self._lock = shown, threading.Lock()
        self._counted: set[tuple[str, int]] = set()

    def begin_all(self, total: int, done: int) -> None:
        self._shown.start(total, done)

    def end_all(self) -> None:
        self._shown.stop()

    def start(self, total: int, done: int) -> None: ...

    def begin(self, cell_id: str, replicate: int) -> None:
        with self._lock:
            self._shown.begin(cell_id, replicate)

    def finished(self, row: Replicate, *, covers: int = 1) -> None:
        with self._lock:
            key = (row.cell_id, row.replicate)
            self._shown.finished(row, covers=0 if key in self._counted else covers)
            self._counted.add(key)

    def note(self, text: str) -> None:
        with self._lock:
            self._shown.note(text)

    def stop(self) -> None: ...


@dataclass
class _FleetRun:
    """The cells of one run while they are measured; ``_waiting`` holds what each card is to take
    next, ``_busy`` the cards that measure.
    """

    spec: RunSpec
    fleet: Fleet
    opened: OpenedRun
    progress: _SharedProgress
    budget: Budget
    _ledger: _SharedLedger = field(init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _waiting: dict[FleetCard, list[str]] = field(default_factory=dict)
    _busy: set[FleetCard] = field(default_factory=set)
    _missing: list[tuple[str, int]] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        retries = self.spec.matrix.measure.throttle_retries
        self._ledger = _SharedLedger(retries, self.opened.rows)

    @property
    def _cells(self) -> dict[str, PlannedCell]:
        return {cell.cell_id: cell for cell in self.opened.manifest.cells}

    def measure(self) -> list[tuple[str, int]]:
        """Measure what is due; the (cell, block) that the budget left out."""
        self._waiting = {card: [] for card in self.fleet.alive}
        self._deal()
        blocks = self.opened.manifest.replicates
        total = len(self.opened.cell_ids) * blocks
        due = sum(self._num_due(cell_id) for cell_id in self.opened.cell_ids)
        self.progress.begin_all(total, total - due)
        try:
            self._measure_on_all()
        finally:
            self.progress.end_all()
        left = [cell_id for cell_id in sorted(self.opened.cell_ids) if self._num_due(cell_id)]
        if left and not self.fleet.alive:
            self._refuse_to_end(len(left))
        return self._missing

    def _measure_on_all(self) -> None:
        with ThreadPoolExecutor(len(self._waiting)) as pool:
            threads = [pool.submit(self._work, card) for card in self._waiting]
            try:
                self._await(threads)
            except KeyboardInterrupt:
                self._stop()
                raise PerfbenchError(
                    Exit.INTERRUPTED,
                    f"interrupted with {self._kept()}. Next: {self._resume_command()}",
                ) from None
            finally:
                self._stop(only_waiting=True)

    def _await(self, threads: Sequence[Future[None]]) -> None:
        """Looks now and then, so that Ctrl-C is heard; a fault in one thread ends the others."""
        waiting: set[Future[None]] = set(threads)
        while waiting:
            done, waiting = wait(waiting, timeout=LOOK_S, return_when=FIRST_EXCEPTION)
            for one in done:
                if error := one.exception():
                    self._stop()
                    raise error

    def _stop(self, *, only_waiting: bool = False) -> None:
        self._stopped.set()
        if not only_waiting:
            self.fleet.end()
        with self._changed:
            self._changed.notify_all()

    def _deal(self) -> None:
        """Each cell to the card that has begun it, or to the one with the least to do; the larger
        groups first.
        """
        homes = self._homes()
        due = [cell_id for cell_id in self._cells if self._is_due(cell_id)]
        stranded = [one for one in due if one in homes and homes[one] is None]
        if stranded:
            self._move(stranded, "the card that began them is not in the fleet")
        groups: dict[object, list[str]] = {}
        for cell_id in due:
            card = homes.get(cell_id)
            if card is not None:
                self._waiting[card].append(cell_id)
            else:
                groups.setdefault(self._group(cell_id), []).append(cell_id)
        for group in sorted(groups.values(), key=lambda ids: (-len(ids), ids[0])):
            least = min(self._waiting, key=lambda card: len(self._waiting[card]))
            self._waiting[least] += group

    def _homes(self) -> dict[str, FleetCard | None]:
        """Cell -> the card of its last row, None where it is not here; of cells that have rows."""
        found = self.opened.found
        here = {card.card: card for card in self.fleet.alive}
        rows = () if found is None else found.replicates
        return {row.cell_id: here.get(row.card or "") for row in rows}

    def _group(self, cell_id: str) -> object:
        axes = self._cells[cell_id].axes
        if self.spec.matrix.limits.oom == "find_boundary":  # from the smallest batch on
            return WHOLE.get(axes.workload, axes.workload), axes.dtype
        return axes.seq_len, axes.batch, axes.dtype

    def _work(self, card: FleetCard) -> None:
        """Measure on one card until nothing is left for it, or it is lost."""
        while cells := self._take(card):
            try:
                schedule = CellSchedule(self._recorder(card), cells)
                missing = measure_all(schedule, self.progress, self.budget)
            except CardLost as lost:
                self._lose(card, cells, str(lost))
                return
            with self._changed:
                self._missing += missing
                self._busy.discard(card)
                self._changed.notify_all()

    def _take(self, card: FleetCard) -> list[str]:
        """What the card measures next; empty once nothing can come to it any more."""
        with self._changed:
            while not self._stopped.is_set():
                if cells := self._waiting[card]:
                    self._waiting[card] = []
                    self._busy.add(card)
                    return cells
                if not self._busy and not any(self._waiting.values()):
                    self._changed.notify_all()
                    return []
                self._changed.wait(LOOK_S)
        return []

    def _lose(self, card: FleetCard, cells: Sequence[str], why: str) -> None:
        with self._changed:
            card.is_lost = True
            card.close()
            self._busy.discard(card)
            left = [*cells, *self._waiting.pop(card)]
            left = [cell_id for cell_id in left if self._is_due(cell_id)]
            if not self._stopped.is_set():
                self._give_away(card, left, why)
            self._changed.notify_all()

    def _give_away(self, card: FleetCard, left: list[str], why: str) -> None:
        cards = list(self._waiting)
        if not cards:
            self.progress.note(f"{card} is lost ({why}), and no other is left")
            return
        where = "its cells were finished" if not left else f"{len(left)} cells go elsewhere"
        self.progress.note(f"{card} is lost ({why}): {where}")
        if left:
            self._move(left, f"{card} was lost: {why}")
        groups: dict[object, list[str]] = {}
        for cell_id in left:
            groups.setdefault(self._group(cell_id), []).append(cell_id)
        for number, group in enumerate(groups.values()):
            self._waiting[cards[number % len(cards)]] += group

    def _move(self, cell_ids: Sequence[str], why: str) -> None:
        """The file says so before the first row of the other card."""
        manifest = self.opened.manifest
        self.opened.writer.append(
            Resumed(
                resumed_utc=utc_now(),
                argv=self.spec.argv,
                environment=manifest.environment,
                only=manifest.only,
                moved=sorted(cell_ids),
                reason=why,
            )
        )
        self._ledger.forget(set(cell_ids))

    def _recorder(self, card: FleetCard) -> Recorder:
        return Recorder(
            manifest=self.opened.manifest,
            matrix=self.spec.matrix,
            executor=RemoteExecutor(card),
            writer=self.opened.writer,
            ledger=self._ledger,
            faults=self.opened.faults,
            progress=self.progress,
            card=card.facts.environment.gpu_uuid_sha256,
            budget=self.budget,
            model=self.spec.matrix.model.to_mapping(),
            pause=self._pause,
            node=card.node,
        )

    def _pause(self, seconds: float) -> None:
        self._stopped.wait(seconds)

    def _is_due(self, cell_id: str) -> bool:
        return cell_id in self.opened.cell_ids and self._num_due(cell_id) > 0

    def _num_due(self, cell_id: str) -> int:
        blocks = range(self.opened.manifest.replicates)
        return sum(self._ledger.next_attempt(cell_id, block) is not None for block in blocks)

    def _refuse_to_end(self, left: int) -> None:
        names = ", ".join(map(str, self.fleet.cards))
        raise PerfbenchError(
            Exit.ENVIRONMENT,
            f"every card of the fleet is lost ({names}) and {left} cells are not finished; wanted"
            f" one that measures. Next: look at the nodes, then resume with {self._kept()}:"
            f" {self._resume_command()}",
        )

    def _schedule(self) -> CellSchedule:
        return CellSchedule(self._recorder(self.fleet.cards[0]), ())

    def _kept(self) -> str:
        return self._schedule().kept()

    def _resume_command(self) -> str:
        return self._schedule().resume_command()
