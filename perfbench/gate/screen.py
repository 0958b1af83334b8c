"""A run judged by the stored baseline of its matrix: the first stage of `check`."""

from __future__ import annotations

from dataclasses import replace

from perfbench.errors import Exit, PerfbenchError
from perfbench.gate.comparable import unplanned_sentinels
from perfbench.gate.judgement import Judgement, resummarise
from perfbench.gate.judging import judge
from perfbench.gate.strictness import JointRules
from perfbench.matrix import Matrix, policies, sentinels_of
from perfbench.records import Baseline, BaselineProblem, Run


def judge_by_baseline(
    run: Run,
    found: Baseline | BaselineProblem,
    matrix: Matrix,
    *,
    joint: JointRules | None = None,
    strict: bool = False,
) -> Judgement:
    """The verdict of ``run``, with a note on the sentinels that ``matrix`` wants and it lacks.

    ``joint``: the stricter of its matrix and of the baseline's rules, which then judge it; what the
    matrix loosens is a finding. USAGE where the baseline is of another matrix.
    """
    check_same_matrix(run, found)
    if joint is None:
        judgement = judge(run, found, policies(matrix), strict=strict)
    else:
        judgement = judge(joint.applied_to(run), found, joint.policies, strict=strict)
        if loosened := joint.findings():
            judgement = resummarise(
                judgement, judgement.cells, findings=[*judgement.findings, *loosened]
            )
    if isinstance(found, BaselineProblem):
        return judgement
    wanted = sentinels_of(matrix, run.manifest.cells)
    unplanned = unplanned_sentinels(run, wanted, found)
    return replace(judgement, notes=(*judgement.notes, *unplanned))


def check_same_matrix(run: Run, found: Baseline | BaselineProblem) -> None:
    """USAGE for the baseline of another matrix that shares no cell with the run: every cell would
    be MISSING.
    """
    if isinstance(found, BaselineProblem) or found.matrix_name == run.manifest.matrix_name:
        return
    if not {cell.cell_id for cell in run.manifest.cells} & {*found.cells}:
        theirs, ours = found.matrix_name, run.manifest.matrix_name
        got = (
            f"got a baseline of matrix {theirs} for a run of matrix {ours}, and they share no cell;"
            f" wanted that of {ours}"
        )
        raise PerfbenchError(
            Exit.USAGE,
            f"{got}. Next: omit --baseline, or name reports/baselines/<gpu>/{ours}.json",
        )
