"""What `ab` and `compare` do: two versions of the code, measured in turns, or two runs that are
there already.
"""

from __future__ import annotations

import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perfbench.commands import session
from perfbench.commands.session import Outcome, RunOptions
from perfbench.errors import Exit, PerfbenchError

if TYPE_CHECKING:
    from perfbench.records import Run


@dataclass(frozen=True, slots=True)
class Versions:
    """What `ab` is asked to compare: two revisions or folders; ``blocks`` None is the policy's own
    number.
    """

    base: str
    candidate: str
    blocks: int | None = None


def ab(path: Path, versions: Versions, options: RunOptions, strict: bool) -> Outcome | None:
    """Measure both versions in turns and judge the second by the first; None where the matrix skips
    this machine.

    The outcome's run is that of side b; its folder holds ``a/``, ``b/`` and the report.
    """
    from perfbench.machine import check_target, collect_environment, no_color
    from perfbench.matrix import load_matrix
    from perfbench.runner import (
        Ground,
        Task,
        checked_out_side,
        interleave,
        new_pair_folder,
        plan_of_version,
        prepared_pair,
        progress_for,
        read_pair,
    )
    from perfbench.tracing import TracedSides, trace_on_red

    matrix = load_matrix(path)
    fit = check_target(matrix.target)
    if fit.warning:
        session.warn(fit.warning)
    if fit.skip:
        return None
    only = options.only
    if options.resume is not None:
        if options.inject:
            raise PerfbenchError(
                Exit.USAGE, "--inject cannot join a pair that has begun. Next: leave --resume away"
            )
        only = only or read_pair(options.resume).candidate.manifest.only
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    blocks = versions.blocks or matrix.gate.confirm_blocks
    task = Task(matrix, only, blocks, seed, options.argv, options.inject, options.budget_s)
    here, capability = collect_environment(fit.device), session.capability_here(fit)
    with (
        checked_out_side(versions.base, session.CHECKOUT) as a,
        checked_out_side(versions.candidate, session.CHECKOUT) as b,
    ):
        plans = (
            plan_of_version(a, matrix, only, capability),
            plan_of_version(b, matrix, only, capability),
        )
        folder = options.resume or new_pair_folder(options.out, here, b.source.commit)
        with prepared_pair(fit, (a, b)) as executors:
            found = interleave(
                task,
                (a, b),
                plans,
                executors,
                folder=folder,
                environment=here,
                progress=progress_for(no_color=no_color()),
                resume=options.resume is not None,
            )
    outcome = _judged(found.base, found.candidate, found.folder, strict)
    ground = Ground(
        fit,
        capability,
        here,
        session.CHECKOUT,
        progress_for(no_color=no_color()),
        session.say,
    )
    bases = dict.fromkeys((cell.cell_id for cell in outcome.judgement.cells), versions.base)
    trace_on_red(
        outcome.judgement,
        TracedSides(found.candidate, matrix, ground, bases, versions.candidate),
        found.folder,
    )
    return outcome


def compare(base: Path, candidate: Path | None, strict: bool) -> Outcome:
    """Judge one run by another, or both sides of one `ab` folder; pairs count only between the two
    sides of one `ab`.
    """
    from perfbench.records import read_run
    from perfbench.runner import is_pair, read_pair

    if candidate is None:
        if not is_pair(base):
            raise PerfbenchError(
                Exit.USAGE,
                f"got one run, {base}, and wanted two, or the folder of a `perfbench ab`. Next:"
                " name CAND too",
            )
        found = read_pair(base)
        return _judged(found.base, found.candidate, base, strict)
    for one in (base, candidate):
        if one.is_dir() and is_pair(one):
            raise PerfbenchError(
                Exit.USAGE,
                f"got {one}, which holds two runs, beside another. Next: name {one / 'a'} or"
                f" {one / 'b'}",
            )
    return _judged(read_run(base), read_run(candidate), session.folder_of(candidate), strict)


def _judged(base: Run, candidate: Run, folder: Path, strict: bool) -> Outcome:
    from perfbench.gate import compare as judge
    from perfbench.runner import are_paired, is_pair

    policy = session.policy_of(candidate)
    paired = are_paired(base, candidate)
    home = folder if is_pair(folder) else folder.parent
    judgement = judge(
        base,
        candidate,
        policy,
        paired=paired,
        strict=strict,
        resume_command=_go_on(base, candidate, home) if paired else "",
    )
    return Outcome(candidate, judgement, folder, base_run=base)


def _go_on(base: Run, candidate: Run, folder: Path) -> str:
    """The command that measures the pairs which are left; the pair keeps its own cells, blocks,
    seed and faults.
    """
    from perfbench.records import revisions_to_type
    from perfbench.runner import CONFIRM_FOLDER

    matrix = candidate.manifest.matrix_path
    if folder.parent.name == CONFIRM_FOLDER:  # `check` measured it beside a baseline's commit
        return shlex.join(["perfbench", "check", matrix, "--resume", str(folder.parent.parent)])
    return shlex.join(
        ["perfbench", "ab", *revisions_to_type(base, candidate), matrix, "--resume", str(folder)]
    )
