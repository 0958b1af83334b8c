"""What `perfbench trace` does: one cell of a run that exists, traced again with the code that its
manifest names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nsa.config import nearest_name
from perfbench.commands import session
from perfbench.errors import Exit, PerfbenchError

if TYPE_CHECKING:
    from perfbench.records import Run, Source
    from perfbench.runner import Ground, Side
    from perfbench.tracing import Version

Which = Literal["a", "b", "both"]


def trace(
    run_path: Path,
    cell_id: str,
    *,
    out: Path | None = None,
    side: Which | None = None,
    baseline: Path | None = None,
    as_json: bool = False,
) -> tuple[str, Exit]:
    """The text to print, and FAILED where a side that was asked for could not be traced.

    By default every side that there is.

    Side b is the run itself, or the candidate of a pair; side a the base of a pair, or what `check`
    confirmed beside the commit of ``baseline``, by default that of the run's GPU and matrix;
    BASELINE where the named one cannot be read. Files go to ``out``, by default the run's
    ``traces``.
    """
    from perfbench.tracing import TRACE_FOLDER, TraceDiff, Tracing, trace_side

    if baseline is not None:
        _readable(baseline)
    runs = _runs(run_path, cell_id, baseline)
    wanted = _wanted(side, runs, run_path)
    run = runs["b"] if "b" in runs else runs["a"]
    ground = _ground(run)
    folder = out or session.folder_of(run_path) / TRACE_FOLDER
    sitting = Tracing(
        session.matrix_of(run), ground, run.manifest.seed, folder, folder, run.manifest.injections
    )
    found = {
        name: trace_side(_version(name, runs[name].manifest.source, ground), [cell_id], sitting)[
            cell_id
        ]
        for name in wanted
    }
    if sitting.stopped:
        raise PerfbenchError(
            Exit.INTERRUPTED, "interrupted. Next: run it again; a trace takes one step"
        )
    diff = TraceDiff(cell_id=cell_id, base=found.get("a"), candidate=found.get("b"))
    text = json.dumps(diff.model_dump(mode="json"), indent=2) if as_json else diff.to_markdown()
    return text, Exit.FAILED if diff.problems else Exit.OK


def _readable(baseline: Path) -> None:
    """BASELINE where the file that the user named is none; without a name there need not be one."""
    from perfbench.records import BaselineProblem, read_baseline

    found = read_baseline(baseline)
    if isinstance(found, BaselineProblem):
        raise PerfbenchError(
            Exit.BASELINE,
            f"--baseline: {found.message}. Next: name a baseline file, or leave --baseline away",
        )


def _runs(run_path: Path, cell_id: str, baseline: Path | None) -> dict[str, Run]:
    """Which runs hold the cell, by side; USAGE where none does."""
    from perfbench.records import read_run
    from perfbench.runner import is_pair, read_pair

    folder = session.folder_of(run_path)
    if is_pair(folder):
        found = read_pair(folder)
        runs = {"a": found.base, "b": found.candidate}
    else:
        run = read_run(run_path)
        base = _confirmed_base(run, folder, cell_id, baseline)
        runs = {"b": run, **({"a": base} if base is not None else {})}
    known = sorted({one for run in runs.values() for one in _cells(run)})
    if cell_id not in known:
        raise PerfbenchError(
            Exit.USAGE,
            f"got cell {cell_id!r}, which {run_path} does not have{nearest_name(cell_id, known)}",
        )
    return {name: run for name, run in runs.items() if cell_id in _cells(run)}


def _confirmed_base(run: Run, folder: Path, cell_id: str, baseline: Path | None) -> Run | None:
    """The base of the pair that judges the cell: a run that met several baselines has a pair beside
    each one's commit.

    Where no baseline tells the commit, the base that all pairs of the cell agree on; a warning
    where they do not.
    """
    from perfbench.records import read_baseline
    from perfbench.runner import base_commits, stored_confirmation

    commits = base_commits(
        [cell_id], read_baseline(baseline or session.default_baseline(run)), session.policy_of(run)
    )
    found = stored_confirmation(folder, commits)
    if found is None:
        return None
    held = [one.base for one in found.measured if cell_id in one.cell_ids]
    with_cell = [one.base for one in found.measured if cell_id in _cells(one.base)]
    if (
        not held
        and commits[cell_id] is None
        and len({base.manifest.source.commit for base in with_cell}) == 1
    ):
        held = with_cell
    if with_cell and not held:
        session.warn(
            f"no side a: {found.reasons[cell_id]}, or name the baseline that it was confirmed"
            " beside with --baseline"
        )
    return held[0] if held else None


def _cells(run: Run) -> set[str]:
    return {cell.cell_id for cell in run.manifest.cells}


def _wanted(side: Which | None, runs: dict[str, Run], run_path: Path) -> Sequence[str]:
    wanted = sorted(runs) if side is None else ("a", "b") if side == "both" else (side,)
    if missing := [name for name in wanted if name not in runs]:
        has = f"{run_path} holds side {' and '.join(sorted(runs))} of this cell"
        step = (
            "leave --side away, or name the folder of a `perfbench ab` or of a `check` that"
            " confirmed"
        )
        raise PerfbenchError(
            Exit.USAGE,
            f"got --side {side}, wanted one that is there, and {has}, not {missing[0]}. Next:"
            f" {step}",
        )
    return wanted


def _ground(run: Run) -> Ground:
    from perfbench.machine import check_target, collect_environment
    from perfbench.runner import Ground, SilentProgress

    fit = check_target(session.matrix_of(run).target)
    if fit.warning:
        session.warn(fit.warning)
    if fit.skip:
        raise PerfbenchError(
            Exit.ENVIRONMENT,
            "the run's matrix skips this machine. Next: trace where it was measured",
        )
    here = collect_environment(fit.device)
    return Ground(
        fit, session.capability_here(fit), here, session.CHECKOUT, SilentProgress(), session.say
    )


def _version(side: str, wanted: Source, ground: Ground) -> Version:
    """The code that a manifest names: this checkout where git says so, else a checkout of its
    commit.
    """
    from perfbench.machine import source_of
    from perfbench.runner import own_side
    from perfbench.tracing import Version

    repository, here = ground.repository, source_of(ground.repository)
    if here.commit is not None and (here.commit, here.dirty_sha256) == (
        wanted.commit,
        wanted.dirty_sha256,
    ):
        return Version(side, "this checkout", lambda: own_side(repository, here))
    if here.commit is None and side == "b":
        session.warn(
            f"the run's code is taken to be this checkout, which git cannot prove: {here.reason}"
        )
        return Version(side, "this checkout, not proved", lambda: own_side(repository, wanted))
    return Version(
        side, (wanted.commit or "unknown code")[:12], lambda: _committed(wanted, repository)
    )


def _committed(wanted: Source, repository: Path) -> AbstractContextManager[Side]:
    from perfbench.runner import CannotBuild, checked_out_side

    if wanted.commit is None or wanted.dirty_sha256 is not None:
        got = "changes that were never committed" if wanted.commit else "a run of unknown code"
        raise CannotBuild(
            f"got {got}, wanted a commit that can be checked out. Next: commit, and measure again"
        )
    return checked_out_side(wanted.commit, repository)
