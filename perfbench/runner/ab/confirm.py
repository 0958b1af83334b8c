"""The second stage of `check`: what the screen found is measured again, in turns with the commit of
the baseline.

A stored baseline was measured in another session, so it makes no cell REGRESSED. What cannot be
confirmed stays SUSPECT, or WATCH where the screen does not reject it, with the reason. The
pairs lie in the run's folder under ``confirm/``, where `gate` and `report` find them again; they
count only against the baseline whose commit they were measured at.
"""

from __future__ import annotations

import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import MeasuredPairs, has_fresh_servers, next_looks
from perfbench.matrix import Policies
from perfbench.matrix import policies as matrix_policies
from perfbench.records import Baseline, BaselineProblem, Run, Status, without_resume
from perfbench.runner.ab.checkout import CannotBuild, checked_out, is_commit, own_checkout
from perfbench.runner.ab.pair import Pair, PairSpec, is_pair, read_pair
from perfbench.runner.ab.schedule import SERVER_S, measure_pair
from perfbench.runner.context import MeasuringContext

CONFIRM_FOLDER = "confirm"
LEAST_COMMIT_CHARS = 7  # git's own abbreviation
UNKNOWN = (
    "the baseline knows no commit of this cell, or one with uncommitted changes; promote a run of a"
    " clean checkout"
)
SPENT = "the budget is spent; `check --resume` with a larger --budget continues"
UNFINISHED = (
    "the others were not measured, the card throttled, or an interruption came between their rows;"
    " `check --resume` continues"
)
Commits = Mapping[str, str | None]  # cell -> the commit that its baseline was measured at


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What was measured of the cells that had to be confirmed.

    ``reasons``: cell -> why some or all of its pairs are missing.
    """

    measured: Sequence[MeasuredPairs] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Each reason once, with its cells."""
        by_reason: dict[str, list[str]] = {}
        for cell_id, reason in self.reasons.items():
            by_reason.setdefault(reason, []).append(cell_id)
        return "; ".join(f"{_shown(cells)}: {reason}" for reason, cells in by_reason.items())


@dataclass(frozen=True, slots=True)
class _Place:
    """Where cells are measured, and the pair that has them already."""

    home: Path
    cells: list[str]
    pair: Pair | None = None

    def open_cells(self, policies: Policies) -> list[str]:
        """Those that want more pairs."""
        return self.cells if self.pair is None else _open_cells(self.pair, self.cells, policies)


def base_commits(
    cells: Iterable[str], found: Baseline | BaselineProblem, policy: Policies
) -> dict[str, str | None]:
    """Which commit the baseline of each cell was measured at, under its former name where it was
    renamed; None: nobody knows, or the file names no commit.
    """
    known = {} if isinstance(found, BaselineProblem) else dict(found.cells)
    former = {alias.cell_id: old for old, alias in policy.aliases.items()}
    names = {
        cell_id: cell_id if cell_id in known else former.get(cell_id, cell_id) for cell_id in cells
    }
    # A run of uncommitted changes is not its commit: against that one nothing would be confirmed.
    dirty = (
        None
        if isinstance(found, BaselineProblem) or found.source.dirty_sha256 is None
        else found.run_id
    )
    clean = {
        name: cell.commit for name, cell in known.items() if dirty is None or cell.run_id != dirty
    }
    commits = {cell_id: clean.get(name) for cell_id, name in names.items()}
    return {cell_id: commit if is_commit(commit) else None for cell_id, commit in commits.items()}


def confirm_cells(
    run: Run,
    folder: Path,
    commits: Commits,
    spec: PairSpec,
    context: MeasuringContext,
    now: Callable[[], float] = time.monotonic,
) -> Confirmation:
    """Measure the cells of ``commits`` interleaved with that commit, as ``spec.plan`` and
    ``spec.policies`` say; what an earlier invocation measured stays and is completed by its own
    plan.

    ``spec.only`` and ``spec.pair_s`` are replaced by those cells'; ``spec.budget_s`` is for all of
    them together, in seconds of ``now``. Never raises for a base that cannot be built: its cells
    are missing from the result, with the reason. INTERRUPTED after Ctrl-C, INTERNAL where a side
    did not run its own code, USAGE where what an earlier invocation left is damaged.
    """
    assert spec.plan is not None
    plan, policies = spec.plan, spec.policies or matrix_policies(spec.matrix)
    deadline = None if spec.budget_s is None else now() + spec.budget_s
    measured: list[MeasuredPairs] = []
    reasons: dict[str, str] = {}
    for commit, cells in _by_commit(commits).items():
        if commit is None:
            reasons |= dict.fromkeys(cells, UNKNOWN)
            continue
        places = _places(folder / CONFIRM_FOLDER, commit, cells)
        due = [cell_id for place in places for cell_id in place.open_cells(policies)]
        if due and (deadline is None or now() < deadline):
            context.say(announcement(run, due, commit, plan.looks))
        for place in places:
            left_s = None if deadline is None else deadline - now()
            found, why = _finish(
                place, run, folder, commit, replace(spec, budget_s=left_s), context
            )
            if found is not None:
                measured.append(MeasuredPairs(found.base, found.candidate, place.cells))
                reasons |= _unfinished(found, place.cells, policies)
            reasons |= dict.fromkeys(place.cells, why) if why else {}
    return Confirmation(measured, reasons)


def stored_confirmation(folder: Path, commits: Commits, policies: Policies) -> Confirmation | None:
    """What an earlier `check` confirmed in this run's folder against these commits; None where it
    measured no pair at all.

    USAGE where a pair is damaged.
    """
    found = _pairs_in(folder / CONFIRM_FOLDER)
    if not found:
        return None
    measured: list[MeasuredPairs] = []
    reasons: dict[str, str] = {}
    left = sorted(commits)
    for pair in found:
        here = [cell_id for cell_id in left if _holds(pair, cell_id, commits[cell_id])]
        left = [cell_id for cell_id in left if cell_id not in here]
        measured.append(MeasuredPairs(pair.base, pair.candidate, here))
        reasons |= _unfinished(pair, here, policies)
    known = ", ".join(
        dict.fromkeys((pair.base.manifest.source.commit or "unknown code")[:12] for pair in found)
    )
    for cell_id in left:
        wanted = f"the baseline's commit is {(commits[cell_id] or 'not known')[:12]}"
        reasons[cell_id] = (
            f"it has no pair against its baseline here (got pairs against {known}, {wanted});"
            " `check --resume` measures it"
        )
    return Confirmation(measured, reasons)


def announcement(run: Run, cells: Sequence[str], commit: str, looks: Sequence[int]) -> str:
    """What happens next and about how long it takes, from this run's own replicates."""
    each_s = sum(_pair_s(run, cells).values())

    def minutes(pairs: int) -> float:
        starts = sum(has_fresh_servers(pair) for pair in range(pairs))
        return max((each_s * pairs + SERVER_S * starts) / 60, 0.1)

    counted = (
        f"{len(cells)} cell{'s are' if len(cells) > 1 else ' is'} not proved as fast as the"
        f" baseline ({_shown(cells)})"
    )
    return (
        f"{counted}: confirming against {commit[:12]} in interleaved pairs, {looks[0]} of each"
        f" (about {minutes(looks[0]):.1f} minutes), then more of those that are not"
        f" settled, {looks[-1]} at most ({minutes(looks[-1]):.1f} minutes)"
    )


def _pair_s(run: Run, cells: Sequence[str]) -> dict[str, float]:
    """About how long one pair of each cell takes, from the run's own replicates."""
    walls = {
        cell_id: [row.wall_s for row in run.of_cell(cell_id) if row.status is Status.OK]
        for cell_id in cells
    }
    return {cell_id: 2 * median(wall_s or [0.0]) for cell_id, wall_s in walls.items()}


def _shown(cells: Sequence[str]) -> str:
    return ", ".join(cells[:3]) + (f" and {len(cells) - 3} more" if len(cells) > 3 else "")


def _by_commit(commits: Commits) -> dict[str | None, list[str]]:
    found: dict[str | None, list[str]] = {}
    for cell_id in sorted(commits):
        found.setdefault(commits[cell_id], []).append(cell_id)
    return found


def _pairs_in(confirmed: Path) -> list[Pair]:
    """Those that have begun, by name."""
    found = []
    for home in sorted(one for one in confirmed.glob("*") if is_pair(one)):
        try:
            found.append(read_pair(home))
        except PerfbenchError as error:
            problem = f"what was confirmed cannot be read: {error}"
            raise PerfbenchError(
                error.exit_code,
                f"{problem}. Next: or remove {home}, and `check --resume` measures it again",
            ) from None
    return found


def _holds(pair: Pair, cell_id: str, commit: str | None) -> bool:
    """Whether the pair has the cell against ``commit``, which may be abbreviated (written by hand),
    yet not to a few letters.
    """
    base = pair.base.manifest
    if (
        commit is None
        or len(commit) < LEAST_COMMIT_CHARS
        or not (base.source.commit or "").startswith(commit.lower())
    ):
        return False
    return any(cell.cell_id == cell_id for cell in base.cells)


def _places(confirmed: Path, commit: str, cells: Sequence[str]) -> list[_Place]:
    """The pair that has a cell is resumed; all cells that no pair has go into one new folder, since
    a pair's plan is fixed.
    """
    found, left = [], list(cells)
    for pair in _pairs_in(confirmed):
        if here := [cell_id for cell_id in left if _holds(pair, cell_id, commit)]:
            found.append(_Place(pair.folder, here, pair))
            left = [cell_id for cell_id in left if cell_id not in here]
    if not left:
        return found
    # The commit is escaped: a baseline is a file that anybody may have written.
    name, number = re.sub(r"[^0-9A-Za-z_-]", "_", commit[:12]), 1
    while is_pair(home := confirmed / (name if number == 1 else f"{name}-{number}")):
        number += 1
    return [*found, _Place(home, left)]


def _finish(
    place: _Place, run: Run, folder: Path, commit: str, spec: PairSpec, context: MeasuringContext
) -> tuple[Pair | None, str]:
    """The pair of a place, as far as it could be measured, and the reason where that is not
    all.
    """
    assert spec.plan is not None
    if not place.open_cells(spec.policies or matrix_policies(spec.matrix)):
        return place.pair, ""
    if spec.budget_s is not None and spec.budget_s <= 0:
        return place.pair, SPENT
    injections = [text for text in spec.injections if text.partition("@")[2] in place.cells]
    only = [f"cell={cell_id}" for cell_id in place.cells]
    try:
        name = f"{run.manifest.run_id}-{place.home.name}"
        order = [cell_id for cell_id in spec.plan.cells if cell_id in place.cells]
        plan = spec.plan.model_copy(update={"cells": order})
        return (
            _measure(
                run,
                place,
                commit,
                replace(
                    spec,
                    only=only,
                    injections=injections,
                    name=name,
                    plan=plan,
                    pair_s=_pair_s(run, place.cells),
                ),
                context,
            ),
            "",
        )
    except PerfbenchError as error:
        if error.exit_code is Exit.INTERRUPTED:
            command = shlex.join([*without_resume(spec.argv), "--resume", str(folder)])
            raise PerfbenchError(
                Exit.INTERRUPTED,
                f"interrupted while confirming; finished pairs are kept. Next: {command}",
            ) from None
        if error.exit_code in (Exit.INTERNAL, Exit.ENVIRONMENT) and not isinstance(
            error, CannotBuild
        ):
            raise  # a GPU that became busy says nothing about the base
        return place.pair, f"the base {commit[:12]} cannot be measured: {error}"


def _measure(
    run: Run, place: _Place, commit: str, spec: PairSpec, context: MeasuringContext
) -> Pair:
    if place.pair is None:
        shutil.rmtree(place.home, ignore_errors=True)  # killed before its first row
    with (
        checked_out(commit, context.repository) as base,
        own_checkout(context.repository, run.manifest.source) as candidate,
    ):
        return measure_pair(
            spec, (base, candidate), context, place.home, resume=place.pair is not None
        )


def _unfinished(pair: Pair, cells: Sequence[str], policies: Policies) -> dict[str, str]:
    return dict.fromkeys(_open_cells(pair, cells, policies), UNFINISHED)


def _open_cells(pair: Pair, cells: Sequence[str], policies: Policies) -> list[str]:
    if pair.base.manifest.confirmation is None:  # an older one, of as many pairs for every cell
        missing = {cell_id for cell_id, _ in pair.missing}
        return [cell_id for cell_id in cells if cell_id in missing]
    return [*next_looks(MeasuredPairs(pair.base, pair.candidate, cells), policies)]
