"""Stage 2: base and candidate, measured interleaved in one session, decide what the screen
suspected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean

from perfbench.gate.cell_sides import CellSides
from perfbench.gate.judgement import CellVerdict, Judgement, resummarise
from perfbench.gate.pair_rows import MeasuredPairs, NoPairs, PairRows
from perfbench.gate.sequential import LOOKS, looks_of
from perfbench.gate.speed_rule import SpeedVerdict, confirm, confirm_at, is_settled
from perfbench.gate.suspicion import far_from_stored, suspect, suspect_unless_cleared
from perfbench.matrix import GatePolicy, Policies
from perfbench.records import ConfirmationPlan, Run, Verdict


def confirm_all(
    judgement: Judgement,
    measured: Sequence[MeasuredPairs],
    policy: GatePolicy | Policies,
    reasons: Mapping[str, str],
) -> Judgement:
    """Judge every screened cell by its pairs; only here a cell becomes REGRESSED.

    Each cell is judged by its own two runs, their plan and the proofs in them. A cell that no run
    of ``measured`` has stays WATCH or SUSPECT; ``reasons``: cell -> why its pairs are missing.
    """
    asked = set(judgement.to_confirm)
    here = [replace(one, cell_ids=asked & set(one.cell_ids)) for one in measured]
    without = asked.difference(*(one.cell_ids for one in here))
    cells = [
        unconfirmed(cell, reasons.get(cell.cell_id, "")) if cell.cell_id in without else cell
        for cell in judgement.cells
    ]
    return _judge_all(resummarise(judgement, cells), here, Policies.over(policy), reasons)


def plan_confirmation(judgement: Judgement) -> ConfirmationPlan:
    """How the screened cells are to be confirmed, the worst first: those that the screen rejects,
    by their p.
    """
    asked = set(judgement.to_confirm)

    def worst(cell: CellVerdict) -> tuple[bool, float, str]:
        p = min((one.comparison.p_slower for one in cell.evidence), default=0.0)
        return not cell.suspicion, p, cell.cell_id

    order = sorted((cell for cell in judgement.cells if cell.cell_id in asked), key=worst)
    return ConfirmationPlan(
        tests=len(order), looks=list(LOOKS), cells=[cell.cell_id for cell in order]
    )


def next_looks(measured: MeasuredPairs, policy: GatePolicy | Policies) -> dict[str, int]:
    """Cell -> the pairs that it must have at its next look, the worst first, of the cells that are
    not settled.

    A pair without a plan has one look, after all its pairs.
    """
    policies = Policies.over(policy)
    rows = PairRows(measured, policies)
    found = {}
    for cell_id in _plan_of(measured, rows).cells:
        if cell_id in measured.cell_ids:
            wanted = _look_at(cell_id, rows, _plan_of(measured, rows), policies).wanted
            if wanted is not None:
                found[cell_id] = wanted
    return found


def judge_pairs(
    judgement: Judgement,
    base_run: Run,
    candidate_run: Run,
    policies: Policies,
    cell_ids: Collection[str],
    resume_command: str = "",
) -> Judgement:
    """Judge ``cell_ids`` by the pairs of both runs; the other cells stay as they are.

    ``resume_command``: the command that measures the planned pairs that are missing, named where an
    interruption cut them short.
    """
    measured = MeasuredPairs(base_run, candidate_run, cell_ids)
    reasons: dict[str, str] = {}
    if resume_command:
        rows = PairRows(measured, policies)
        if measured.plan is None:
            cut = [one for one in cell_ids if rows.cut_short(one, rows.planned)]
        else:
            cut = [*next_looks(measured, policies)]
        reasons = dict.fromkeys(cut, f"`{resume_command}` resumes it")
    return _judge_all(judgement, [measured], policies, reasons)


@dataclass(frozen=True, slots=True)
class _Looked:
    """A cell at the last look that its pairs reach. ``wanted``: the pairs of the next look; None
    where it is settled, or at its end. ``sides`` None: ``none`` says why.
    """

    sides: CellSides | None = None
    outcome: SpeedVerdict | None = None
    none: NoPairs | None = None
    wanted: int | None = None
    pairs: int = 0


def _plan_of(measured: MeasuredPairs, rows: PairRows) -> ConfirmationPlan:
    cells = sorted(measured.cell_ids)
    return measured.plan or ConfirmationPlan(tests=len(cells), looks=[rows.planned], cells=cells)


def _look_at(cell_id: str, rows: PairRows, plan: ConfirmationPlan, policies: Policies) -> _Looked:
    """Look after look, each at its own pairs alone, so that the same rows say the same whenever
    they are read.
    """
    policy = policies.of(cell_id)
    found = _Looked()
    for look in looks_of(plan.looks, plan.tests, policy):
        sides = rows.of(cell_id, look.pairs)
        if isinstance(sides, NoPairs) and not sides.more_may_help:
            return _Looked(none=sides)
        if rows.count(cell_id, look.pairs) < look.pairs:
            return replace(found, wanted=look.pairs)
        if isinstance(sides, NoPairs):
            found = _Looked(none=sides, pairs=look.pairs)
            continue
        found = _Looked(sides, confirm_at(sides, look), pairs=look.pairs)
        assert found.outcome is not None
        if is_settled(found.outcome, policy):
            return found
    return found


def _judge_all(
    judgement: Judgement,
    measured: Sequence[MeasuredPairs],
    policies: Policies,
    reasons: Mapping[str, str],
) -> Judgement:
    judged = _judge_fixed(
        judgement, [one for one in measured if one.plan is None], policies, reasons
    )
    for one in measured:
        if one.plan is not None:
            judged |= _judge_in_looks(judgement, one, policies, reasons)
    cells = [judged.get(cell.cell_id, cell) for cell in judgement.cells]
    return _mark_cut_short_in_headline(resummarise(judgement, cells))


def _judge_in_looks(
    judgement: Judgement,
    measured: MeasuredPairs,
    policies: Policies,
    reasons: Mapping[str, str],
) -> dict[str, CellVerdict]:
    """The verdicts of the cells whose pairs have a sequential plan."""
    rows = PairRows(measured, policies)
    plan = _plan_of(measured, rows)
    judged = {}
    for cell in judgement.cells:
        if cell.cell_id not in measured.cell_ids:
            continue
        policy, why = policies.of(cell.cell_id), reasons.get(cell.cell_id, "")
        found = _look_at(cell.cell_id, rows, plan, policies)
        cut = "" if found.wanted is None else rows.cut_short(cell.cell_id, plan.looks[-1])
        if found.outcome is None or found.sides is None:
            none = found.none or NoPairs(f"cut short: {cut}" if cut else "no pair was measured")
            judged[cell.cell_id] = _without_pairs(cell, none, why)
            continue
        one = verdict_with(cell, found.sides, found.outcome, confirmed=bool(found.outcome.evidence))
        count = len(found.sides.base.tok_per_s)
        if count < found.pairs:
            one = _with_reason(one, f"{count} of {found.pairs} pairs count")
        if cut:
            one = replace(
                one,
                verdict=Verdict.WATCH,
                reason=f"cut short: {cut}; not settled by the look after {found.pairs};"
                f" {one.reason}",
                cut_short=cut,
            )
            one = _with_reason(one, why)
        one = suspect_unless_cleared(cell, one, policy)
        judged[cell.cell_id] = _with_base_held(cell, one, found.sides, policy)
    return judged


def _judge_fixed(
    judgement: Judgement,
    measured: Sequence[MeasuredPairs],
    policies: Policies,
    reasons: Mapping[str, str],
) -> dict[str, CellVerdict]:
    """The verdicts of the cells that are judged once, after all pairs; Holm over all of them.

    Where the pairs were cut short, a stop was possible after each: Bonferroni over as many looks as
    pairs were planned. With the whole plan's own test at alpha, where the others are measured after
    all, false alarms stay below 2 alpha.
    """
    rows = {
        cell_id: found
        for one in measured
        for found in [PairRows(one, policies)]
        for cell_id in one.cell_ids
    }

    def at_its_level(cell_id: str, sides: CellSides) -> CellSides:
        own, pairs = policies.of(cell_id), rows[cell_id]
        if not pairs.cut_short(cell_id, pairs.planned):
            return sides
        level = own.alpha_confirm / pairs.planned
        return replace(sides, policy=own.model_copy(update={"alpha_confirm": level}))

    read = {cell_id: found.of(cell_id) for cell_id, found in rows.items()}
    sides_of = {
        cell_id: at_its_level(cell_id, sides)
        for cell_id, sides in read.items()
        if isinstance(sides, CellSides)
    }
    outcomes = confirm(list(sides_of.values()))
    judged = {}
    for cell in judgement.cells:
        if cell.cell_id not in rows:
            continue
        found, why = read[cell.cell_id], reasons.get(cell.cell_id, "")
        if isinstance(found, NoPairs):
            judged[cell.cell_id] = _without_pairs(cell, found, why)
            continue
        pairs, sides = rows[cell.cell_id], sides_of[cell.cell_id]
        outcome = outcomes[cell.cell_id]
        one = verdict_with(cell, sides, outcome, confirmed=bool(outcome.evidence))
        if (count := len(sides.base.tok_per_s)) < pairs.planned:
            one = _with_reason(one, f"{count} of {pairs.planned} pairs count", why)
        policy = policies.of(cell.cell_id)
        if cut := pairs.cut_short(cell.cell_id, pairs.planned):
            one = _mark_cut_short(one, cut, policy, pairs.planned)
        one = suspect_unless_cleared(cell, one, policy)
        judged[cell.cell_id] = _with_base_held(cell, one, sides, policy)
    return judged


def _without_pairs(cell: CellVerdict, none: NoPairs, why: str) -> CellVerdict:
    """A cell whose pairs compare nothing: red where the candidate's own rows are, else open."""
    if none.verdict is None:
        return _with_reason(unconfirmed(cell, none.reason), why)
    return replace(
        cell,
        verdict=none.verdict,
        reason=none.reason,
        cand_tok_per_s=None,
        change_pct=None,
        evidence=(),
        screened=False,
    )


def _mark_cut_short(cell: CellVerdict, cut: str, policy: GatePolicy, planned: int) -> CellVerdict:
    """What was judged at the corrected level of ``_Pairs`` stands where it is a proof; all else
    waits for the other pairs.
    """
    proved = cell.verdict in (Verdict.REGRESSED, Verdict.SAME, Verdict.FASTER)
    verdict = Verdict.WATCH if cell.verdict is Verdict.BLIND else cell.verdict
    level = f"alpha {policy.alpha_confirm:g} / {planned}, for the looks that were possible"
    text = (
        f"cut short: {cut}; {'it holds' if proved else 'nothing is decided'} at {level};"
        f" {cell.reason}"
    )
    return replace(cell, verdict=verdict, reason=text, cut_short=cut)


def _with_base_held(
    before: CellVerdict, judged: CellVerdict, sides: CellSides, policy: GatePolicy
) -> CellVerdict:
    """``judged``, with the base of its pairs held against its own stored speed: SUSPECT where it is
    far off, unless the pairs confirmed a drop.
    """
    compared_with_stored = any(not one.paired for one in before.evidence)
    why = far_from_stored(before, sides, policy) if compared_with_stored else ""
    if not why:
        return judged
    return (
        _with_reason(judged, why) if judged.verdict is Verdict.REGRESSED else suspect(judged, why)
    )


def _mark_cut_short_in_headline(judgement: Judgement) -> Judgement:
    """A headline that quotes no cell that was cut short names the first of them."""
    cut = next((cell.cut_short for cell in judgement.cells if cell.cut_short), "")
    if not cut or "cut short" in judgement.headline:
        return judgement
    return replace(judgement, headline=f"{judgement.headline}; cut short: {cut}")


def verdict_with(
    cell: CellVerdict, sides: CellSides, outcome: SpeedVerdict, *, confirmed: bool = False
) -> CellVerdict:
    """``cell`` with the numbers of a comparison of its speed, of wall time unless another metric
    decided.
    """
    wall = next((one for one in outcome.evidence if one.metric == "tok_per_s"), None)
    base, candidate = (geometric_mean(side.tok_per_s) for side in (sides.base, sides.candidate))
    change = wall.change_pct if wall is not None else round(100 * (candidate / base - 1), 9)
    notes = tuple(sides.explained())
    if sides.candidate.bimodal and outcome.verdict is not Verdict.UNSTABLE:
        notes += (sides.candidate.bimodal,)
    return CellVerdict(
        cell_id=cell.cell_id,
        axes=cell.axes,
        verdict=outcome.verdict,
        reason="; ".join([outcome.reason, *notes]),
        base_tok_per_s=base,
        cand_tok_per_s=candidate,
        change_pct=change,
        replicates=len(sides.candidate.tok_per_s),
        spread_pct=range_over_mean_pct(sides.candidate.tok_per_s),
        reproduce=cell.reproduce,
        metric=outcome.metric,
        screened=outcome.screened or cell.screened,
        confirmed=confirmed,
        evidence=outcome.evidence,
        notes=notes,
        work=outcome.work,
        step=cell.step,
        own=cell.own,
    )


def range_over_mean_pct(speeds: tuple[float, ...]) -> float | None:
    return None if len(speeds) < 2 else 100 * (max(speeds) - min(speeds)) / geometric_mean(speeds)


def unconfirmed(cell: CellVerdict, why: str) -> CellVerdict:
    """The screened cell as WATCH, or SUSPECT where the screen rejects it, with the reason why
    nothing confirms or clears it.
    """
    why = (why or "no confirmation was run").removeprefix("not confirmed: ")
    verdict = Verdict.SUSPECT if cell.suspicion else Verdict.WATCH
    return replace(cell, verdict=verdict, reason=f"not confirmed: {why}; {cell.reason}")


def _with_reason(cell: CellVerdict, *why: str) -> CellVerdict:
    return replace(cell, reason="; ".join([cell.reason, *filter(None, why)]))
