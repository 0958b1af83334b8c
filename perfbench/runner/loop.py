"""The main loop of `run` and `ab`: block by block, what is due, until all of it is measured, the
budget is spent or somebody presses Ctrl-C.

A schedule says what is due and measures it; the loop holds the order of blocks, the budget, the
interrupt and the progress.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from perfbench.errors import Exit, PerfbenchError
from perfbench.runner.progress import Progress

NUM_SHOWN = 10  # of the replicates that a spent budget left


class BudgetSpent(Exception):
    """No further replicate may start in this invocation."""


@dataclass(slots=True)
class Budget:
    """Seconds that one invocation may spend; ``deadline`` is a reading of ``now``, which must be
    monotonic: the wall clock may step back.
    """

    deadline: float | None = None
    now: Callable[[], float] = time.monotonic

    @classmethod
    def of(cls, budget_s: float | None, now: Callable[[], float] = time.monotonic) -> Budget:
        """``budget_s`` from this moment on; None is no limit."""
        return cls(None if budget_s is None else now() + budget_s, now)

    @property
    def left_s(self) -> float:
        """Infinite without a limit."""
        return float("inf") if self.deadline is None else self.deadline - self.now()

    def check(self, ahead_s: float = 0.0) -> None:
        """BudgetSpent where nothing may start ``ahead_s`` seconds from now."""
        if self.deadline is not None and self.now() + ahead_s >= self.deadline:
            raise BudgetSpent


class Schedule(Protocol):
    """What one command measures: `run` each cell once a block, `ab` each cell on both sides."""

    num_blocks: int
    num_cells: int
    rows_per_cell: int  # that one cell of one block adds: 1 of `run`, 2 of `ab`

    def due(self, block: int) -> list[str]:
        """The cells that still lack a row of this block, in the order of measuring."""
        ...

    def rounds(self) -> list[tuple[int, list[str]]]:
        """(block, the cells of it that are due), in the order of measuring; a block may come in
        several rounds.
        """
        ...

    def is_due(self, cell_id: str, block: int) -> bool: ...

    def begin_block(self, block: int, cell_ids: Sequence[str]) -> None:
        """Called before the first cell of a block that has any; ``cell_ids`` are what was due."""
        ...

    def measure(self, cell_id: str, block: int, later: int) -> None:
        """Measure and store one cell; ``later`` blocks hold it too, and end with it where it
        fails.
        """
        ...

    def kept(self) -> str:
        """What an interruption leaves on the disk, for a sentence."""
        ...

    def resume_command(self) -> str: ...


def measure_all(schedule: Schedule, progress: Progress, budget: Budget) -> list[tuple[str, int]]:
    """Measure what is due; returns the (cell, block) that the budget left unmeasured.

    INTERRUPTED with the command that resumes after Ctrl-C; nothing written is lost.
    """
    rounds = schedule.rounds()
    num_due = sum(len(cell_ids) for _, cell_ids in rounds)
    total = schedule.num_cells * schedule.num_blocks
    progress.start(total * schedule.rows_per_cell, (total - num_due) * schedule.rows_per_cell)
    later = Counter(cell_id for _, cell_ids in rounds for cell_id in cell_ids)
    try:
        for block, cell_ids in rounds:
            _measure_block(schedule, budget, block, cell_ids, later)
        return []
    except BudgetSpent:
        missing = [
            (cell_id, block)
            for block, cell_ids in rounds
            for cell_id in cell_ids
            if schedule.is_due(cell_id, block)
        ]
        progress.note(
            f"the budget is spent; not measured: {_shown(missing)}. Resume with"
            f" {schedule.resume_command()}"
        )
        return missing
    except KeyboardInterrupt:
        raise PerfbenchError(
            Exit.INTERRUPTED,
            f"interrupted with {schedule.kept()}. Next: {schedule.resume_command()}",
        ) from None
    finally:
        progress.stop()


def _measure_block(
    schedule: Schedule, budget: Budget, block: int, cell_ids: Sequence[str], later: Counter[str]
) -> None:
    has_begun = False
    for cell_id in cell_ids:
        later[cell_id] -= 1
        if not schedule.is_due(cell_id, block):
            # It failed in an earlier block: one row records that, and repeating it would only cost
            # GPU minutes.
            continue
        budget.check()
        if not has_begun:
            schedule.begin_block(block, cell_ids)
            has_begun = True
        schedule.measure(cell_id, block, later[cell_id])


def _shown(missing: Sequence[tuple[str, int]]) -> str:
    shown = ", ".join(f"{cell_id} #{block}" for cell_id, block in missing[:NUM_SHOWN])
    more = len(missing) - NUM_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
