"""Cells that a run's own noise makes BLIND: no drop of theirs shows by it as baseline. Pure."""

from __future__ import annotations

import math

from perfbench.gate import stats
from perfbench.gate.evidence import WALL
from perfbench.gate.judgement import CellVerdict
from perfbench.gate.judging import judge
from perfbench.gate.strictness import joint_rules
from perfbench.matrix import GatePolicy, JudgeRules, Policies
from perfbench.records import Baseline, Run, Verdict

MAX_SHOWN = 20  # cells that the warning names


def blind_cells(run: Run, baseline: Baseline, rules: JudgeRules | None = None) -> list[str]:
    """A warning in lines: a headline and each cell with its MDE; empty where every cell of ``run``
    can be gated by ``baseline``, which was made of it.

    ``rules``: what the run's matrix demands; the default policy where nobody knows it.
    """
    policies = Policies(GatePolicy())
    if rules is not None:
        policies = joint_rules(rules, rules, policies, baseline.cells).policies
    judged = judge(run, baseline, policies).cells
    found = [one for one in judged if _is_blind(one, policies.of(one.cell_id))]
    if not found:
        return []
    found.sort(key=lambda one: (-(one.mde_pct or float("inf")), one.cell_id))
    head = (
        f"warning: {len(found)} of {len(judged)} cells {'is' if len(found) == 1 else 'are'} too"
        " noisy to gate (BLIND): a later drop of these sizes or less would pass. Next: measure"
        " again on a quiet machine, or raise measure.processes"
    )
    lines = [f"  {one.cell_id}: MDE {_mde(one)}" for one in found[:MAX_SHOWN]]
    more = len(found) - MAX_SHOWN
    return [head, *lines, *([f"  and {more} more"] if more > 0 else [])]


def _is_blind(cell: CellVerdict, policy: GatePolicy) -> bool:
    """A host-bound cell is BLIND by tok/s, and its device time, the first evidence, may gate it."""
    if cell.verdict is not Verdict.BLIND:
        return False
    gating = cell.evidence[0]
    pair_sd = gating.moderated_sd * math.sqrt(2)
    return gating.metric == WALL or stats.is_blind(pair_sd, policy)


def _mde(cell: CellVerdict) -> str:
    if cell.mde_pct is None:
        return "none: no drop at all would show"
    return f"{cell.mde_pct:,.1f} %"
