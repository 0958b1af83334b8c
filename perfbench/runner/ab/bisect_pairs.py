"""What a bisect measures and where: each pair of commits in a folder of its own, which a resumed
bisect finds again.
"""

from __future__ import annotations

import random
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from perfbench.errors import Exit, PerfbenchError, unwritable
from perfbench.gate import (
    LOOKS,
    MeasuredPairs,
    PairFound,
    SoughtDrop,
    StepFound,
    StepTurn,
    compare,
    judge_step,
    next_looks,
    pair_found,
)
from perfbench.matrix import Matrix, Policies, policies
from perfbench.records import ConfirmationPlan, Status, TrainedBlocks, whole_file
from perfbench.runner.ab.checkout import CannotBuild, checked_out
from perfbench.runner.ab.commits import Commit
from perfbench.runner.ab.pair import Pair, PairSpec, is_pair, read_pair
from perfbench.runner.ab.schedule import SERVER_S, measure_pair
from perfbench.runner.context import MeasuringContext

if TYPE_CHECKING:
    from perfbench.records import Run

BISECT_FILE = "bisect.json"
PAIRS_FOLDER = "pairs"


class BisectFile(BaseModel):
    """What a bisect was started with; nothing of it changes when it is resumed."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    version: int = 1
    good: str  # hashes
    bad: str
    every_parent: bool
    cell_id: str
    matrix_path: str
    matrix_text: str
    trained_blocks: TrainedBlocks | None = None  # of a cell with selection=trained
    seed: int
    argv: list[str]


def write_bisect(folder: Path, content: BisectFile) -> None:
    """USAGE where the folder cannot be made or written."""
    try:
        folder.mkdir(parents=True)
        with whole_file(folder / BISECT_FILE) as partial_file:
            partial_file.write_text(content.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise unwritable(folder, error, "choose another --out DIR") from None


def read_bisect(folder: Path) -> BisectFile:
    """USAGE where the folder holds none, or a damaged one."""
    path = folder / BISECT_FILE
    try:
        return BisectFile.model_validate_json(path.read_bytes())
    except OSError as error:
        why = error.strerror or str(error)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'JSON'}: {first['msg']}"
    raise PerfbenchError(
        Exit.USAGE,
        f"got --resume {folder}, where {BISECT_FILE} cannot be read ({why}), wanted the folder of a"
        " bisect. Next: name that one, or begin anew without --resume",
    )


@dataclass(frozen=True, slots=True)
class PairMeasurer:
    """Measures the pairs of one bisect into ``folder``; ``deadline`` is a reading of ``now``."""

    bisect: BisectFile
    matrix: Matrix
    folder: Path
    context: MeasuringContext
    deadline: float | None = None
    now: Callable[[], float] = time.monotonic

    def judge(self, name: str, base: Commit, candidate: Commit) -> PairFound:
        """By the gate's own rule; CannotBuild where a side cannot be measured."""
        found = self._measured(name, base, candidate, next_looks)
        if found is None:
            return PairFound(None, "the budget is spent", is_open=True)
        judgement = compare(found.base, found.candidate, policies(self.matrix), paired=True)
        (cell,) = (one for one in judgement.cells if one.cell_id == self.bisect.cell_id)
        is_open = bool(next_looks(self._pairs(found), policies(self.matrix)))
        return pair_found(cell, is_open=is_open, pair_s=_pair_s(found))

    def step(self, name: str, base: Commit, candidate: Commit, drop: SoughtDrop) -> StepFound:
        """SKIPPED with the reason where the candidate cannot be built or its cell fails.

        A fault of anything else ends the bisect, which can be resumed.
        """
        rules, folder = policies(self.matrix), self.folder / PAIRS_FOLDER / name
        if (
            is_pair(folder)
            and judge_step(self._pairs(read_pair(folder)), rules, drop).not_candidate
        ):
            shutil.rmtree(folder)  # it ended this bisect once: measured anew

        def looks(measured: MeasuredPairs, policy: Policies) -> dict[str, int]:
            wanted = judge_step(measured, policy, drop).wanted
            return {} if wanted is None else dict.fromkeys(measured.cell_ids, wanted)

        try:
            found = self._measured(name, base, candidate, looks)
        except CannotBuild as error:
            if error.version != candidate.sha:
                raise resumable(error, self.folder) from None  # of git, the disk, the good commit
            return StepFound(StepTurn.SKIPPED, f"it cannot be measured: {_one_line(str(error))}")
        if found is None:
            return StepFound(StepTurn.OPEN, "the budget is spent")
        step = judge_step(self._pairs(found), rules, drop)
        if step.not_candidate:
            why = f"{step.reason}, in a pair with {candidate}. Next: `perfbench doctor`"
            raise resumable(PerfbenchError(Exit.ENVIRONMENT, why), self.folder)
        return step

    def _pairs(self, found: Pair) -> MeasuredPairs:
        return MeasuredPairs(found.base, found.candidate, [self.bisect.cell_id])

    def _measured(
        self,
        name: str,
        base: Commit,
        candidate: Commit,
        looks: Callable[[MeasuredPairs, Policies], dict[str, int]],
    ) -> Pair | None:
        """The pair, as far as it could be measured; None where the budget left none of it."""
        folder, resume = self.folder / PAIRS_FOLDER / name, False
        if is_pair(folder):
            kept = read_pair(folder)
            if not looks(self._pairs(kept), policies(self.matrix)):
                return kept
            resume = True
        left_s = None if self.deadline is None else self.deadline - self.now()
        if left_s is not None and left_s <= 0:
            return read_pair(folder) if resume else None
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)  # killed before its first row
        spec = PairSpec(
            self.matrix,
            [f"cell={self.bisect.cell_id}"],
            LOOKS[-1],
            random.Random(f"{self.bisect.seed}-{name}").randrange(2**31),
            self.bisect.argv,
            budget_s=left_s,
            name=f"{self.folder.name}-{name}",
            plan=ConfirmationPlan(tests=1, looks=list(LOOKS), cells=[self.bisect.cell_id]),
            looks=looks,
        )
        repository = self.context.repository
        with (
            checked_out(base.sha, repository) as one,
            checked_out(candidate.sha, repository) as other,
        ):
            try:
                return measure_pair(spec, (one, other), self.context, folder, resume=resume)
            except CannotBuild:
                raise
            except PerfbenchError as error:
                if error.exit_code is Exit.INTERRUPTED:
                    raise interrupted(self.folder) from None
                raise resumable(error, self.folder) from None


def interrupted(folder: Path) -> PerfbenchError:
    """What Ctrl-C leaves, and the command that resumes."""
    return PerfbenchError(
        Exit.INTERRUPTED,
        f"interrupted with the finished pairs in {folder}. Next: {resume_command(folder)}",
    )


def resumable(error: PerfbenchError, folder: Path) -> PerfbenchError:
    """``error`` with the command that resumes, which is the step after its own."""
    return PerfbenchError(error.exit_code, f"{error}, then {resume_command(folder)}")


def resume_command(folder: Path) -> str:
    """A bisect's file holds the rest."""
    return shlex.join(["perfbench", "bisect", "--resume", str(folder)])


def _one_line(message: str) -> str:
    """Of a message with the last lines of a process, the error at their end."""
    first, *others = message.splitlines()
    words = [line for line in others if line[:1].strip() and not line.startswith("Next:")]
    return words[-1] if words else first


def _pair_s(found: Pair) -> float:
    """About the seconds of one pair: both processes, and both servers."""

    def of_side(run: Run) -> float:
        return median([row.wall_s for row in run.replicates if row.status is Status.OK] or [0.0])

    return of_side(found.base) + of_side(found.candidate) + SERVER_S
