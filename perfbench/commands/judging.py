"""Stored runs, read and judged: alone, by a baseline, or by another run."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from perfbench.commands.baseline_source import judged_by
from perfbench.commands.console import warn
from perfbench.commands.outcome import Outcome, folder_of, matrix_of, policy_of
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import compare as compare_runs
from perfbench.gate import joint_rules, judge, judge_by_baseline
from perfbench.matrix import JudgeRules, check_configs, policies
from perfbench.records import (
    METHOD_VERSION,
    PROMOTE,
    Baseline,
    BaselineProblem,
    read_run,
    revisions_to_type,
)

if TYPE_CHECKING:
    from perfbench.records import Run


def judge_alone(run_path: Path) -> Outcome:
    """By the hard gates, without any baseline."""
    run = read_checked(run_path)
    return Outcome(run, judge(run, None, policy_of(run)), folder_of(run_path))


def screen(run_path: Path, baseline_path: Path | None, strict: bool) -> Outcome:
    """The first stage alone: by the stored baseline of the run's GPU and matrix, or the one that
    is named, and by the stricter of its rules and the run's own.
    """
    run = read_checked(run_path)
    matrix, manifest = matrix_of(run), run.manifest
    by = judged_by(matrix, manifest.environment.gpu_slug, baseline_path, manifest.source.commit)
    if isinstance(by.found, BaselineProblem):  # what is missing is said with the run that has it
        named = f"{PROMOTE.removesuffix('RUN')}{shlex.quote(str(folder_of(run_path)))}"
        message = by.found.message.replace(PROMOTE, named)
        by = replace(by, found=replace(by.found, message=message))
    joint = None
    if by.rules is not None and isinstance(by.found, Baseline):
        joint = joint_rules(JudgeRules.of(matrix), by.rules, policies(matrix), by.found.cells)
    judgement = judge_by_baseline(run, by.found, matrix, joint=joint, strict=strict)
    judgement = replace(judgement, notes=(*by.notes, *judgement.notes))
    used = None if joint is None else joint.policies
    return Outcome(run, judgement, folder_of(run_path), by.found, policies=used)


def judge_stored(run_path: Path, baseline_path: Path | None, strict: bool) -> Outcome:
    """Both stages: `screen`, and what an earlier `check` confirmed of this run."""
    outcome = screen(run_path, baseline_path, strict)
    known = outcome.baseline.cells if isinstance(outcome.baseline, Baseline) else {}
    own = {cell_id for cell_id, cell in known.items() if cell.run_id == outcome.run.manifest.run_id}
    return _named_as_own(_with_pairs(outcome), own)


def _with_pairs(outcome: Outcome) -> Outcome:
    cells, policy = outcome.judgement.to_confirm, outcome.policy
    if not cells:
        return outcome
    from perfbench.runner import base_commits, stored_confirmation

    assert outcome.baseline is not None  # the screen judged by it
    commits = base_commits(cells, outcome.baseline, policy)
    found = stored_confirmation(outcome.folder, commits, policy)
    return outcome if found is None else outcome.confirmed(found)


def _named_as_own(outcome: Outcome, own: Collection[str]) -> Outcome:
    """With a headline that says so where cells are compared with themselves; ``own``: the base's
    cells that are of this very run.
    """
    judgement = outcome.judgement
    compared = [cell.cell_id for cell in judgement.cells if cell.compared]
    count = sum(cell_id in own for cell_id in compared)
    if not count:
        return outcome
    warning = (
        f"compared with itself: the base of {count} of {len(compared)} cells is this very run, so"
        " their changes mean nothing"
    )
    headline = f"{warning}: {judgement.headline}"
    return replace(outcome, judgement=replace(judgement, headline=headline))


def judge_as_made(run_path: Path) -> Outcome:
    """By what the run's own command judged it: a run of `check` by its baseline and its pairs, as
    strictly; every other one by the hard gates alone. A baseline that is missing is
    the verdict, since without it a red run would turn green.
    """
    from perfbench.runner import CONFIRM_FOLDER

    run = read_run(run_path)
    commands = [run.manifest.argv, *(one.argv for one in run.resumed)]
    checks = [argv[2:] for argv in commands if argv[1:2] == ["check"]]
    if not checks and not (folder_of(run_path) / CONFIRM_FOLDER).is_dir():
        return judge_alone(run_path)
    last = checks[-1] if checks else []
    named = option_of(last, "--baseline")
    return judge_stored(run_path, None if named is None else Path(named), "--strict" in last)


def check_known_verdict(outcome: Outcome, next_step: str) -> None:
    """USAGE where nothing but the hard gates judged the run here, and the verdict.json that lies
    with it has another exit code.
    """
    known = outcome.folder / "verdict.json"
    if isinstance(outcome.baseline, Baseline) or not known.is_file():
        return
    try:
        before = json.loads(known.read_bytes()).get("exit_code")
    except (ValueError, AttributeError, RecursionError):
        return
    if before != outcome.judgement.exit_code:
        text = (
            f"{known} says exit {before}, and without a baseline this run is exit"
            f" {int(outcome.judgement.exit_code)}"
        )
        raise PerfbenchError(Exit.USAGE, f"{text}. Next: {next_step}")


def option_of(argv: Sequence[str], name: str) -> str | None:
    """The value of an option as it was typed: ``name VALUE`` or ``name=VALUE``, the last one."""
    found = [two[1] for two in itertools.pairwise(argv) if two[0] == name]
    found += [one.partition("=")[2] for one in argv if one.startswith(f"{name}=")]
    return found[-1] if found else None


def judge_pair(base: Run, candidate: Run, folder: Path, strict: bool) -> Outcome:
    """One run by another, by the stricter of both matrices; pairs of rows count only between the
    two sides of one `ab`.
    """
    from perfbench.runner import are_paired, is_pair

    paired = are_paired(base, candidate)
    home = folder if is_pair(folder) else folder.parent
    matrix = matrix_of(candidate)
    joint = joint_rules(
        JudgeRules.of(matrix),
        JudgeRules.of(matrix_of(base)),
        policies(matrix),
        [cell.cell_id for cell in base.manifest.cells],
    )
    judgement = compare_runs(
        base,
        candidate,
        joint.policies,
        paired=paired,
        strict=strict,
        resume_command=_resume_command(base, candidate, home) if paired else "",
    )
    looser = tuple(f"looser than the base, which judges: {one}" for one in joint.loosened)
    judgement = replace(judgement, notes=(*judgement.notes, *looser))
    outcome = Outcome(candidate, judgement, folder, base_run=base, policies=joint.policies)
    is_same = base.manifest.run_id == candidate.manifest.run_id
    return _named_as_own(outcome, {row.cell_id for row in base.replicates} if is_same else ())


def judge_pair_folder(folder: Path, strict: bool = False) -> Outcome:
    """Both sides of one `ab` folder."""
    from perfbench.runner import read_pair

    found = read_pair(folder)
    return judge_pair(found.base, found.candidate, folder, strict)


def pair_outcome(path: Path, baseline_path: Path | None) -> Outcome | None:
    """Both sides of the `ab` folder that ``path`` is, judged; None for a run."""
    from perfbench.runner import is_pair

    if not is_pair(path):
        return None
    if baseline_path is not None:
        text = f"got --baseline with {path}, which holds both sides of an A/B, wanted one run"
        raise PerfbenchError(Exit.USAGE, f"{text}. Next: omit --baseline, or name {path / 'b'}")
    return judge_pair_folder(path)


def read_checked(run_path: Path) -> Run:
    """A run that does not contradict itself; a warning where the file's last line was cut off, so
    that a replicate may be missing.
    """
    run = _consistent(read_run(run_path), run_path)
    if run.torn:
        warn(
            f"the last line of run {run.manifest.run_id} was cut off and is left out; `perfbench"
            " run --resume` repairs the file"
        )
    return run


def _consistent(run: Run, path: Path) -> Run:
    """``run``, whose cells are those of its own matrix; BASELINE (corrupt) where they are not."""
    if run.manifest.method_version == METHOD_VERSION:
        check_configs(matrix_of(run), run.manifest.cells, str(path))
    return run


def _resume_command(base: Run, candidate: Run, folder: Path) -> str:
    """The command that measures the pairs which are left; the pair keeps its own cells, blocks,
    seed and faults.
    """
    from perfbench.runner import CONFIRM_FOLDER

    matrix = candidate.manifest.matrix_path
    if folder.parent.name == CONFIRM_FOLDER:  # `check` measured it against a baseline's commit
        return shlex.join(["perfbench", "check", matrix, "--resume", str(folder.parent.parent)])
    return shlex.join(
        ["perfbench", "ab", *revisions_to_type(base, candidate), matrix, "--resume", str(folder)]
    )
