"""`perfbench trace`: one cell of a stored run, traced with the code that its manifest names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from perfbench.commands import options as opt
from perfbench.commands.console import print_text, warn
from perfbench.errors import Exit, PerfbenchError

if TYPE_CHECKING:
    from perfbench.records import Run, Source
    from perfbench.runner import Checkout, MeasuringContext
    from perfbench.tracing import Version

Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Where the timelines go; the run's traces/ by default.",
        show_default=False,
    ),
]
Side = Annotated[
    Literal["a", "b", "both"] | None,
    typer.Option(
        "--side", help="a: the base, b: the run; all there are by default.", show_default=False
    ),
]


def trace(
    run: opt.TraceArg,
    cell: opt.CellArg,
    out: Out = None,
    side: Side = None,
    baseline: opt.BaselinePath = None,
    as_json: opt.Json = False,
) -> None:
    """Profile one step of one cell, on every side of a run."""
    text, code = trace_cell(run, cell, out=out, side=side, baseline=baseline, as_json=as_json)
    print_text(text)
    raise typer.Exit(code)


def trace_cell(
    run_path: Path,
    cell_id: str,
    *,
    out: Path | None = None,
    side: str | None = None,
    baseline: Path | None = None,
    as_json: bool = False,
) -> tuple[str, Exit]:
    """The text to print, and FAILED where a side could not be traced.

    By default every side that there is. Side b is the run itself, or the candidate of a pair; side
    a the base of a pair, or what `check` confirmed against the commit of ``baseline``, by default
    that of the run's GPU and matrix; BASELINE where the named one cannot be read. Files go to
    ``out``, by default the run's ``traces``.
    """
    from perfbench.commands.outcome import CHECKOUT, folder_of, matrix_of
    from perfbench.commands.own_code import refuse_stored_code
    from perfbench.tracing import TRACE_FOLDER, TraceDiff, Tracing, trace_side

    if baseline is not None:
        _refuse_unreadable(baseline)
    cell_id, runs = _runs(run_path, cell_id, baseline)
    sides = _sides(side, runs, run_path)
    run = runs["b"] if "b" in runs else runs["a"]
    refuse_stored_code(matrix_of(run), [CHECKOUT, Path.cwd()])
    context, manifest = _context(run), run.manifest
    folder = out or folder_of(run_path) / TRACE_FOLDER
    tracing = Tracing(matrix_of(run), context, manifest.seed, folder, folder, manifest.injections)
    found = {}
    for name in sides:
        version = _version(name, runs[name].manifest.source, context)
        found[name] = trace_side(version, [cell_id], tracing)[cell_id]
    if tracing.stopped:
        raise PerfbenchError(
            Exit.INTERRUPTED, "interrupted. Next: run it again; a trace takes one step"
        )
    diff = TraceDiff(cell_id=cell_id, base=found.get("a"), candidate=found.get("b"))
    content = {
        **diff.model_dump(mode="json"),
        "changes": [one.model_dump(mode="json") for one in diff.changes],
    }
    text = json.dumps(content, indent=2) if as_json else diff.to_markdown()
    return text, Exit.FAILED if diff.problems else Exit.OK


def _refuse_unreadable(baseline: Path) -> None:
    """BASELINE where the file that the user named is none; without a name there need not be one."""
    from perfbench.records import BaselineProblem, read_baseline

    found = read_baseline(baseline)
    if isinstance(found, BaselineProblem):
        raise PerfbenchError(
            Exit.BASELINE,
            f"--baseline: {found.message}. Next: name a baseline file, or omit --baseline",
        )


def _runs(run_path: Path, typed: str, baseline: Path | None) -> tuple[str, dict[str, Run]]:
    """The id of the cell, and which runs hold it, by side; USAGE where none does."""
    from perfbench.commands.outcome import folder_of
    from perfbench.records import read_run
    from perfbench.runner import is_pair, read_pair

    folder = folder_of(run_path)
    if is_pair(folder):
        found = read_pair(folder)
        runs = {"a": found.base, "b": found.candidate}
        cell_id = _named(typed, runs.values(), run_path)
    else:
        run = read_run(run_path)
        cell_id = _named(typed, [run], run_path)
        base = _confirmed_base(run, folder, cell_id, baseline)
        runs = {"b": run, **({"a": base} if base is not None else {})}
    return cell_id, {name: run for name, run in runs.items() if cell_id in _cells(run)}


def _named(typed: str, runs: Iterable[Run], run_path: Path) -> str:
    from perfbench.commands.names import named_cell

    cells = (cell.axes for run in runs for cell in run.manifest.cells)
    return named_cell(typed, cells, str(run_path))


def _confirmed_base(run: Run, folder: Path, cell_id: str, baseline: Path | None) -> Run | None:
    """The base of the pair that judges the cell: a run that was judged by several baselines has a
    pair against each one's commit.

    Where no baseline records the commit, the base that all pairs of the cell agree on; a warning
    where they do not.
    """
    from perfbench.commands.outcome import default_baseline, policy_of
    from perfbench.records import read_baseline
    from perfbench.runner import base_commits, stored_confirmation

    policy = policy_of(run)
    commits = base_commits([cell_id], read_baseline(baseline or default_baseline(run)), policy)
    found = stored_confirmation(folder, commits, policy)
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
        warn(
            f"no side a: {found.reasons[cell_id]}, or name with --baseline the baseline that it was"
            " confirmed against"
        )
    return held[0] if held else None


def _cells(run: Run) -> set[str]:
    return {cell.cell_id for cell in run.manifest.cells}


def _sides(side: str | None, runs: dict[str, Run], run_path: Path) -> Sequence[str]:
    wanted = sorted(runs) if side is None else ("a", "b") if side == "both" else (side,)
    if missing := [name for name in wanted if name not in runs]:
        has = f"{run_path} holds side {' and '.join(sorted(runs))} of this cell"
        step = "omit --side, or name the folder of a `perfbench ab` or of a `check` that confirmed"
        raise PerfbenchError(
            Exit.USAGE,
            f"got --side {side}, wanted one that is there, and {has}, not {missing[0]}. Next:"
            f" {step}",
        )
    return wanted


def _context(run: Run) -> MeasuringContext:
    from perfbench.commands.measuring import measuring_context
    from perfbench.commands.outcome import matrix_of

    context = measuring_context(matrix_of(run).target, silent=True)
    if context is None:
        raise PerfbenchError(
            Exit.ENVIRONMENT,
            "the run's matrix skips this machine. Next: trace where it was measured",
        )
    return context


def _version(side: str, wanted: Source, context: MeasuringContext) -> Version:
    """The code that a manifest names: this checkout where git says so, else a checkout of its
    commit.
    """
    from perfbench.machine import source_of
    from perfbench.runner import own_checkout
    from perfbench.tracing import Version

    repository, here = context.repository, source_of(context.repository)
    if here.commit is not None and (here.commit, here.dirty_sha256) == (
        wanted.commit,
        wanted.dirty_sha256,
    ):
        return Version(side, "this checkout", lambda: own_checkout(repository, here))
    if here.commit is None and side == "b":
        warn(f"the run's code is taken to be this checkout, which git cannot prove: {here.reason}")
        return Version(side, "this checkout, not proved", lambda: own_checkout(repository, wanted))
    return Version(
        side, (wanted.commit or "unknown code")[:12], lambda: _committed(wanted, repository)
    )


def _committed(wanted: Source, repository: Path) -> AbstractContextManager[Checkout]:
    from perfbench.runner import CannotBuild, checked_out, is_commit

    if wanted.commit is not None and not is_commit(wanted.commit):
        raise CannotBuild(
            f"got {wanted.commit[:80]!r} in the run's file, wanted the hash of a commit. Next:"
            " restore the file"
        )
    if wanted.commit is None or wanted.dirty_sha256 is not None:
        got = "changes that were never committed" if wanted.commit else "a run of unknown code"
        raise CannotBuild(
            f"got {got}, wanted a commit that can be checked out. Next: commit, and measure again"
        )
    return checked_out(wanted.commit, repository)
