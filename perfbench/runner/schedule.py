"""What one invocation of `run` measures: block r holds replicate r of every cell, in a random order
from the stored seed, so that a drift of the machine meets all cells alike; the sentinels come
first.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from perfbench.gate import least_sure_first
from perfbench.matrix import policies
from perfbench.records import Cell, Job, PlannedCell, without_resume
from perfbench.runner.attempts import family_of
from perfbench.runner.recorder import Recorder


class CellSchedule:
    """Each of the ``selected`` cells once a block, measured by one recorder."""

    rows_per_cell = 1

    def __init__(self, recorder: Recorder, selected: Collection[str]) -> None:
        self._recorder, self._manifest = recorder, recorder.manifest
        self._cells: Mapping[str, PlannedCell] = {
            cell.cell_id: cell for cell in self._manifest.cells if cell.cell_id in selected
        }
        self.num_blocks, self.num_cells = self._manifest.replicates, len(selected)
        self._due_now: Sequence[str] = ()
        self._places: dict[str, int] = {}
        self._jobs: dict[str, Job] = {}

    def due(self, block: int) -> list[str]:
        # All cells are shuffled, not only the selected, so that a resumed or sliced run keeps the
        # order of the complete one.
        shuffled = [cell.cell_id for cell in self._manifest.cells]
        random.Random(f"{self._manifest.seed}-{block}").shuffle(shuffled)
        if self._recorder.matrix.limits.oom == "find_boundary":
            shuffled = self._from_the_smallest(shuffled)
        return [
            cell_id
            for cell_id in shuffled
            if cell_id in self._cells and self.is_due(cell_id, block)
        ]

    def rounds(self) -> list[tuple[int, list[str]]]:
        """Block by block. Of a run with a budget and a baseline every cell first has what a verdict
        needs; what is left is measured of the least sure cells first, by the intervals of the
        baseline. So the order, and with it how many replicates a cell has, is fixed before the
        first of them.
        """
        blocks, prior = range(self.num_blocks), self._manifest.prior_half_pct
        if not prior or self._recorder.matrix.limits.oom == "find_boundary":
            return [(block, self.due(block)) for block in blocks]
        rules = policies(self._recorder.matrix)
        least = max((rules.of(cell_id).min_replicates for cell_id in self._cells), default=0)
        found = [(block, self.due(block)) for block in blocks[:least]]
        for group in least_sure_first(self._cells, prior):
            found += [
                (block, [cell_id for cell_id in self.due(block) if cell_id in group])
                for block in blocks[least:]
            ]
        return found

    def _from_the_smallest(self, shuffled: Sequence[str]) -> list[str]:
        """The same order, but each path's cells by batch and length in the places that they had
        together.
        """
        axes = {cell.cell_id: cell.axes for cell in self._manifest.cells}
        families: dict[Cell, list[str]] = {}
        for cell_id in shuffled:
            families.setdefault(family_of(axes[cell_id]), []).append(cell_id)
        ascending = {
            family: iter(sorted(ids, key=lambda one: (axes[one].batch, axes[one].seq_len)))
            for family, ids in families.items()
        }
        return [next(ascending[family_of(axes[cell_id])]) for cell_id in shuffled]

    def is_due(self, cell_id: str, block: int) -> bool:
        return self._recorder.is_due(self._cells[cell_id], block)

    def begin_block(self, block: int, cell_ids: Sequence[str]) -> None:
        self._due_now, self._jobs = cell_ids, {}
        self._places = {cell_id: place for place, cell_id in enumerate(cell_ids)}
        self._recorder.executor.new_block()
        self._recorder.measure_sentinels(block)

    def measure(self, cell_id: str, block: int, later: int) -> None:
        self._recorder.progress.begin(cell_id, block)
        if cell_id not in self._jobs:
            self._jobs = self._prepare(block, cell_id)
        self._recorder.measure(self._cells[cell_id], self._jobs[cell_id], later)

    def _prepare(self, block: int, first: str) -> dict[str, Job]:
        """The jobs from ``first`` on, which prepare side by side where the matrix allows it."""
        limit = self._recorder.matrix.measure.prepare_together
        following = (
            self._due_now[place] for place in range(self._places[first], len(self._due_now))
        )
        due = (cell_id for cell_id in following if self.is_due(cell_id, block))
        together = [self._cells[cell_id] for cell_id in islice(due, limit)]
        jobs = [
            self._recorder.job(cell, block, waiting_peers=len(together) - 1) for cell in together
        ]
        if len(jobs) > 1:
            self._recorder.executor.prepare(
                [job for job in jobs if not self._recorder.smaller_ran_out(job)]
            )
        return {job.cell_id: job for job in jobs}

    def kept(self) -> str:
        writer, ledger = self._recorder.writer, self._recorder.ledger
        return f"{ledger.num_replicates} finished replicates in {writer.folder}"

    def resume_command(self) -> str:
        return shlex.join(
            [*without_resume(self._manifest.argv), "--resume", str(self._recorder.writer.folder)]
        )
