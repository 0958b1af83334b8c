"""The second stage of `check`: what the screen found is measured again, beside the commit of the baseline, in turns.

A stored baseline shares no luck with tonight's machine, so it accuses and does not convict. What cannot be confirmed stays
WATCH with the reason. The pairs lie in the run's folder under ``confirm/``, where `gate` and `report` find them again.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from perfbench import ab, checkout, sideplan
from perfbench import pair as pairs
from perfbench.result import Run, Status
from perfbench.sweep import without_resume
from perfbench.verdict import Exit, PerfbenchError

if TYPE_CHECKING:
    from nsa.routing import Capability
    from perfbench.environment import TargetFit
    from perfbench.pair import Pair, Task
    from perfbench.progress import Progress
    from perfbench.result import Environment

FOLDER = "confirm"
SERVER_S = 6.0  # one block: both servers import torch


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Both sides of every confirmed cell; null where nothing was measured. ``reason``: why cells are missing from it."""

    base: Run | None
    candidate: Run | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ground:
    """Where and with what the pairs are measured; ``repository`` holds the candidate's code and knows the base's commit."""

    fit: TargetFit
    capability: Capability
    environment: Environment
    repository: Path
    progress: Progress
    say: Callable[[str], None]


def confirm(run: Run, folder: Path, commits: Mapping[str, str | None], task: Task, ground: Ground) -> Confirmation:
    """Measure the cells of ``commits`` (cell -> the commit that its baseline was measured at) interleaved with that commit.

    ``task.only`` is replaced by those cells. Never raises for a base that cannot be built: its cells are missing from the
    result, with the reason. INTERRUPTED after Ctrl-C, INTERNAL where a side did not run its own code.
    """
    done: list[Pair] = []
    reasons: list[str] = []
    for commit, cells in _by_commit(commits).items():
        if commit is None:
            reasons.append(
                f"the baseline knows no commit of {', '.join(cells)}, or one with uncommitted changes; promote a run of a clean checkout"
            )
            continue
        ground.say(announcement(run, cells, commit, task.blocks))
        injections = [text for text in task.injections if text.partition("@")[2] in cells]
        one = replace(task, only=[f"cell={cell_id}" for cell_id in cells], injections=injections)
        try:
            done.append(_measure(run, folder / FOLDER / commit[:12], commit, one, ground))
        except PerfbenchError as error:
            if error.exit_code is Exit.INTERRUPTED:
                again = shlex.join([*without_resume(task.argv), "--resume", str(folder)])
                raise PerfbenchError(Exit.INTERRUPTED, f"interrupted while confirming; finished pairs are kept. Next: {again}") from None
            if error.exit_code in (Exit.INTERNAL, Exit.ENVIRONMENT) and not isinstance(error, checkout.CannotBuild):
                raise  # a GPU that became busy says nothing about the base
            reasons.append(f"the base {commit[:12]} cannot be measured: {error}")
    return _joined(done, "; ".join(reasons))


def stored(folder: Path) -> Confirmation | None:
    """What an earlier `check` confirmed in this run's folder; None where it did not."""
    found = [pairs.read(one) for one in sorted((folder / FOLDER).glob("*")) if pairs.is_pair(one)]
    return _joined(found, "") if found else None


def announcement(run: Run, cells: Sequence[str], commit: str, blocks: int) -> str:
    """What happens next and about how long it takes, from this run's own replicates."""
    each_s = sum(median([row.wall_s for row in run.of_cell(cell_id) if row.status is Status.OK] or [0.0]) for cell_id in cells)
    minutes = blocks * (2 * each_s + SERVER_S) / 60
    shown = ", ".join(cells[:3]) + (f" and {len(cells) - 3} more" if len(cells) > 3 else "")
    counted = f"{len(cells)} cell{'s are' if len(cells) > 1 else ' is'} not proved as fast as the baseline ({shown})"
    return f"{counted}: confirming against {commit[:12]} in {blocks} interleaved pairs each, about {max(minutes, 0.1):.1f} minutes"


def _by_commit(commits: Mapping[str, str | None]) -> dict[str | None, list[str]]:
    found: dict[str | None, list[str]] = {}
    for cell_id in sorted(commits):
        found.setdefault(commits[cell_id], []).append(cell_id)
    return found


def _measure(run: Run, home: Path, commit: str, task: Task, ground: Ground) -> Pair:
    resume = pairs.is_pair(home)
    if not resume:
        shutil.rmtree(home, ignore_errors=True)  # killed before its first row
    with checkout.side(commit, ground.repository) as base, checkout.own_side(ground.repository, run.manifest.source) as candidate:
        sides = (base, candidate)
        plans = tuple(sideplan.plan_of(one, task.matrix, task.only, ground.capability) for one in sides)
        with ab.prepared(ground.fit, sides) as executors:
            return ab.interleave(
                task,
                sides,
                (plans[0], plans[1]),
                executors,
                folder=home,
                environment=ground.environment,
                progress=ground.progress,
                resume=resume,
            )


def _joined(found: Sequence[Pair], reason: str) -> Confirmation:
    """One run a side. Pairs of several commits keep the manifest of the first; each cell is in one pair only."""
    if not found:
        return Confirmation(None, None, reason)
    return Confirmation(_one_run([one.base for one in found]), _one_run([one.candidate for one in found]), reason)


def _one_run(runs: Sequence[Run]) -> Run:
    cells = [cell for run in runs for cell in run.manifest.cells]
    only = [term for run in runs for term in run.manifest.only]
    manifest = runs[0].manifest.model_copy(update={"cells": cells, "only": only})
    return runs[0].model_copy(update={"manifest": manifest, "replicates": [row for run in runs for row in run.replicates]})
