"""SUSPECT: what the screen rejects, adjusted over the cells, until pairs confirm or clear it.

The screen's noise includes that between sessions. A rejection is no proof of slower code, so it is
not REGRESSED; nothing to confirm it with is no proof of the contrary, so it fails.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from statistics import geometric_mean

from perfbench.gate import stats
from perfbench.gate.cell_sides import CellSides
from perfbench.gate.evidence import Evidence
from perfbench.gate.judgement import CellVerdict
from perfbench.gate.speed_rule import FAR_FACTOR, HOST_NOISE_PCT, is_far_faster
from perfbench.matrix import GatePolicy, Policies
from perfbench.records import Run, Verdict

# Of a step outside of it both sides of a pair run the file of today, and clear any drop of its own.
IN_REPOSITORY = ", if the step's file lies in the repository; else keep it there first"
# A base that runs this many times min_effect, or session sds, away from its stored speed was not
# measured alike: sessions that are off by 3 % reach 15 % once in 2,500 cells.
FAR_IN_EFFECTS = 5.0
FAR_IN_SESSION_SDS = 6.0


def mark_suspects(
    cells: Iterable[CellVerdict],
    policies: Policies,
    more_work: Collection[str],
    settle: Mapping[str, str],
) -> list[CellVerdict]:
    """``cells`` of a screen, those that it rejects as SUSPECT: slower at alpha_screen after Holm
    over all its tests, and by more than the tolerance.

    So is what is far faster than was stored. ``more_work``: cells whose launches or host syncs
    rose, which is no noise. ``settle``: cell -> the command that confirms or clears it.
    """
    cells = list(cells)
    tests = [
        (cell.cell_id, one)
        for cell in sorted(cells, key=lambda one: one.cell_id)
        for one in cell.evidence
        if not one.paired
    ]
    adjusted = stats.holm([one.comparison.p_slower for _, one in tests])
    smallest: dict[str, float] = {}
    for (cell_id, one), p in zip(tests, adjusted, strict=True):
        if one.is_beyond_tolerance and p < policies.of(cell_id).alpha_screen:
            smallest[cell_id] = min(p, smallest.get(cell_id, 1.0))

    def marked(cell: CellVerdict) -> CellVerdict:
        if not cell.screened:
            return cell
        policy = policies.of(cell.cell_id)
        if cell.cell_id in smallest:
            why = f"p {smallest[cell.cell_id]:.2g} after Holm over {len(tests)} tests"
            why += f", alpha {policy.alpha_screen:g}"
        elif any(is_far_faster(one) for one in cell.evidence):
            why = f"{FAR_FACTOR:g} times as fast as was stored: the code, or the baseline's number"
        elif cell.cell_id in more_work:
            why = "more work a step is no noise"
        else:
            return cell
        then = settle.get(cell.cell_id, "")
        where = IN_REPOSITORY if cell.axes.is_own_step else ""
        next_ = (
            f"`{then}` settles it{where}"
            if then
            else "promote a run of a clean checkout, whose commit `perfbench check` can measure"
        )
        text = f"the screen rejects it ({why}). Next: {next_}"
        return suspect(replace(cell, suspicion=text))

    return [marked(cell) for cell in cells]


def suspect(cell: CellVerdict, why: str = "") -> CellVerdict:
    """``cell`` as SUSPECT, with its suspicion, or ``why`` where pairs themselves raise it."""
    return replace(cell, verdict=Verdict.SUSPECT, reason=f"{cell.reason}; {why or cell.suspicion}")


def without_suspicion(cell: CellVerdict) -> CellVerdict:
    """A cell that the screen rejects as WATCH, for a comparison that has no screen."""
    if cell.verdict is not Verdict.SUSPECT:
        return cell
    reason = cell.reason.removesuffix(f"; {cell.suspicion}")
    return replace(cell, verdict=Verdict.WATCH, reason=reason, suspicion="")


def suspect_unless_cleared(
    before: CellVerdict, judged: CellVerdict, policy: GatePolicy
) -> CellVerdict:
    """``judged`` by pairs; SUSPECT where the screen rejected the cell and they neither confirmed
    nor cleared it.
    """
    judged = replace(judged, suspicion=before.suspicion)
    open_ = judged.verdict in (Verdict.WATCH, Verdict.BLIND, Verdict.UNSTABLE)
    if not before.suspicion or not open_ or _is_cleared(before, judged, policy):
        return judged
    return suspect(judged)


def far_from_stored(stored: CellVerdict, sides: CellSides, policy: GatePolicy) -> str:
    """Why the base of a confirmation did not run as it was stored; empty where it did.

    ``stored``: the cell as screened, with the baseline's speed.
    """
    if stored.base_tok_per_s is None or not sides.base.tok_per_s:
        return ""
    tonight = geometric_mean(sides.base.tok_per_s)
    session_sd = max((one.between_session_sd for one in stored.evidence), default=0.0)
    far = max(
        FAR_IN_EFFECTS * -math.log1p(-policy.min_effect_pct / 100),
        FAR_IN_SESSION_SDS * math.sqrt(2) * session_sd,
        math.log(100 / HOST_NOISE_PCT) if sides.host_bound else 0.0,
    )
    off = math.log(tonight / stored.base_tok_per_s)
    if abs(off) <= min(far, math.log(FAR_FACTOR)):
        return ""
    times = math.exp(abs(off))
    return (
        f"the base ran at {tonight:,.1f} tok/s in this session and is stored with"
        f" {stored.base_tok_per_s:,.1f}, {times:.3g} times {'more' if off < 0 else 'less'}: the"
        " session, or the baseline, is not what it seems. Next: measure again on an idle machine,"
        " or promote a new baseline"
    )


def settle_command(run: Run, cell_id: str, base_commit: str | None) -> str:
    """The A/B of one cell; empty where the base's commit is not known."""
    if base_commit is None:
        return ""
    words = ["perfbench", "ab", base_commit[:12], ".", run.manifest.matrix_path]
    return shlex.join([*words, "--only", f"cell={cell_id}"])


def _is_cleared(before: CellVerdict, judged: CellVerdict, policy: GatePolicy) -> bool:
    """Whether the pairs refute, in every metric that the screen rejected, a drop of min_effect; or
    the drop that the screen saw, and show none themselves. More work that they do not show is
    cleared, too.
    """
    tested = {one.metric: one for one in before.evidence if one.is_beyond_tolerance}
    pairs = {one.metric: one for one in judged.evidence if one.paired}

    def is_cleared(metric: str, screened: Evidence) -> bool:
        one = pairs.get(metric)
        if one is None:
            return False
        seen_pct = -(screened.change_pct or 0.0)
        return one.refutes(policy.min_effect_pct) or (
            not one.looks_slower(policy.alpha_screen) and one.refutes(seen_pct)
        )

    return all(is_cleared(metric, screened) for metric, screened in tested.items())
