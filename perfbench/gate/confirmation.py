"""Stage 2: base and candidate, measured interleaved in one session, decide what the screen
suspected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean

from perfbench.gate import stats
from perfbench.gate.cell_sides import CellSides, side_of_rows
from perfbench.gate.comparable import comparability_key, environment_differences
from perfbench.gate.coverage import interrupted_between, paired_rows, rows_by_cell
from perfbench.gate.hard_rules import ProofIndex, cell_findings
from perfbench.gate.judgement import CellVerdict, Finding, Judgement, resummarise
from perfbench.gate.speed_rule import SpeedVerdict, confirm
from perfbench.gate.suspicion import far_from_stored, suspect, suspect_unless_cleared
from perfbench.matrix import GatePolicy, Policies
from perfbench.records import PlannedCell, Replicate, Run, Verdict


@dataclass(frozen=True, slots=True)
class MeasuredPairs:
    """``cell_ids`` are judged by the pairs of these two runs: replicate r of both was measured one
    after the other.
    """

    base: Run
    candidate: Run
    cell_ids: Collection[str]


def confirm_all(
    judgement: Judgement,
    measured: Sequence[MeasuredPairs],
    policy: GatePolicy | Policies,
    reasons: Mapping[str, str],
) -> Judgement:
    """Judge every screened cell by its pairs; only here a cell becomes REGRESSED.

    Each cell is judged by its own two runs and by the proofs in them; Holm goes over all of them.
    A cell that no run of ``measured`` has stays WATCH or SUSPECT; ``reasons``: cell -> why its
    pairs are missing.
    """
    asked = set(judgement.to_confirm)
    here = [replace(one, cell_ids=asked & set(one.cell_ids)) for one in measured]
    without = asked.difference(*(one.cell_ids for one in here))
    cells = [
        unconfirmed(cell, reasons.get(cell.cell_id, "")) if cell.cell_id in without else cell
        for cell in judgement.cells
    ]
    return _judge_all(resummarise(judgement, cells), here, Policies.over(policy), reasons)


def pairs_for(judgement: Judgement, policy: GatePolicy | Policies) -> int:
    """How many pairs of each screened cell to measure, for the cell and metric that need most; to
    be decided before the first pair.

    Wall time asks for none where base and candidate are both host bound: it is not gated, and its
    noise would ask for all.
    """
    policies, asked = Policies.over(policy), set(judgement.to_confirm)
    wanted = [
        policies.whole.confirm_blocks,
        *(policies.of(cell_id).min_replicates for cell_id in asked),
    ]
    for cell in (cell for cell in judgement.cells if cell.cell_id in asked):
        own = policies.of(cell.cell_id)
        for one in cell.evidence:
            if one.tolerance_pct > own.tolerance_pct:  # both are host bound
                continue
            sides = [stats.logs(values) for values in (one.base, one.candidate)]
            planned = stats.planned_blocks(*sides, prior=one.prior, cells=len(asked), policy=own)
            wanted.append(stats.MAX_BLOCKS if planned is None else planned)
    return max(wanted)


def judge_pairs(
    judgement: Judgement,
    base_run: Run,
    candidate_run: Run,
    policies: Policies,
    cell_ids: Collection[str],
    resume_command: str = "",
) -> Judgement:
    """Judge ``cell_ids`` by the pairs of both runs, Holm over all of them; the other cells stay as
    they are.

    ``resume_command``: the command that measures the planned pairs that are missing, named where an
    interruption cut them short.
    """
    measured = MeasuredPairs(base_run, candidate_run, cell_ids)
    pairs = _Pairs(measured, policies)
    cut = [cell_id for cell_id in cell_ids if pairs.cut_short(cell_id)] if resume_command else []
    return _judge_all(
        judgement, [measured], policies, dict.fromkeys(cut, f"`{resume_command}` resumes it")
    )


def _judge_all(
    judgement: Judgement,
    measured: Sequence[MeasuredPairs],
    policies: Policies,
    reasons: Mapping[str, str],
) -> Judgement:
    pairs = {
        cell_id: found
        for one in measured
        for found in [_Pairs(one, policies)]
        for cell_id in one.cell_ids
    }
    read = {
        cell.cell_id: pairs[cell.cell_id].of(cell)
        for cell in judgement.cells
        if cell.cell_id in pairs
    }
    outcomes = confirm([found for found in read.values() if isinstance(found, CellSides)])
    cells = []
    for cell in judgement.cells:
        found, why = read.get(cell.cell_id), reasons.get(cell.cell_id, "")
        if isinstance(found, CellVerdict):
            unsettled = found.verdict in (Verdict.WATCH, Verdict.SUSPECT)
            cells.append(_with_reason(found, why) if unsettled else found)
        elif isinstance(found, CellSides):
            outcome = outcomes[cell.cell_id]
            judged = verdict_with(cell, found, outcome, confirmed=bool(outcome.evidence))
            few = pairs[cell.cell_id].shortfall(len(found.base.tok_per_s))
            judged = _with_reason(judged, few, why) if few else judged
            cut = pairs[cell.cell_id].cut_short(cell.cell_id)
            policy = policies.of(cell.cell_id)
            if cut:
                judged = _mark_cut_short(judged, cut, policy, pairs[cell.cell_id].planned)
            judged = suspect_unless_cleared(cell, judged, policy)
            cells.append(_with_base_held(cell, judged, found, policy))
        else:
            cells.append(cell)
    return _mark_cut_short_in_headline(resummarise(judgement, cells))


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
    )


def range_over_mean_pct(speeds: tuple[float, ...]) -> float | None:
    return None if len(speeds) < 2 else 100 * (max(speeds) - min(speeds)) / geometric_mean(speeds)


class _Pairs:
    """The rows of both runs by cell, each side with its own hard gates."""

    def __init__(self, measured: MeasuredPairs, policies: Policies) -> None:
        self._policies = policies
        self._runs = (measured.base, measured.candidate)
        self._changed = environment_differences(
            comparability_key(measured.candidate.manifest),
            comparability_key(measured.base.manifest),
        )
        self._planned = tuple(
            {cell.cell_id: cell for cell in run.manifest.cells} for run in self._runs
        )
        self._rows = tuple(rows_by_cell(run) for run in self._runs)
        self._proofs = tuple(ProofIndex.of(run) for run in self._runs)
        self.planned = min(run.manifest.replicates for run in self._runs)

    def of(self, cell: CellVerdict) -> CellSides | CellVerdict:
        """Both sides of a cell, pair by pair; or its verdict where a side cannot be believed or
        compared.
        """
        if self._changed:
            return unconfirmed(
                cell,
                f"base and candidate were not measured alike (base -> candidate): {self._changed}",
            )
        base, candidate = (planned.get(cell.cell_id) for planned in self._planned)
        base_rows, rows = (found.get(cell.cell_id, []) for found in self._rows)
        if base is None or candidate is None:
            return unconfirmed(
                cell, f"the {'base' if base is None else 'candidate'} has no such cell"
            )
        if hard := self._hard(1, candidate, rows):
            if hard.verdict is Verdict.MISSING:
                return unconfirmed(cell, "the confirmation has no row of the candidate")
            reason = f"while confirming: {hard.reason}"
            return replace(
                cell,
                verdict=hard.verdict,
                reason=reason,
                cand_tok_per_s=None,
                change_pct=None,
                evidence=(),
                screened=False,
            )
        if hard := self._hard(0, base, base_rows):
            return unconfirmed(
                cell,
                f"the base gave no speed to compare with ({hard.verdict.value}: {hard.reason})",
            )
        if base.config_sha256 != candidate.config_sha256:
            return unconfirmed(
                cell,
                f"another config in the base ({base.config_sha256[:12]}, here"
                f" {candidate.config_sha256[:12]})",
            )
        both = list(paired_rows(*self._runs, base_rows, rows).values())
        if not both:
            return unconfirmed(
                cell,
                f"no pair is left of {len(base_rows)} base and {len(rows)} candidate rows"
                " (throttled, or interrupted between?)",
            )
        left = side_of_rows(base, [theirs for theirs, _ in both])
        right = side_of_rows(candidate, [ours for _, ours in both])
        profiled = [pair for pair in both if _device_time_s(pair[0]) and _device_time_s(pair[1])]
        left = replace(left, device_time_s=tuple(_device_time_s(theirs) for theirs, _ in profiled))
        right = replace(right, device_time_s=tuple(_device_time_s(ours) for _, ours in profiled))
        return CellSides(cell.cell_id, self._policy(cell.cell_id), left, right)

    def shortfall(self, count: int) -> str:
        """'5 of 8 pairs count' where fewer than planned do; else empty."""
        return f"{count} of {self.planned} pairs count" if count < self.planned else ""

    def cut_short(self, cell_id: str) -> str:
        """'3 of 6 planned pairs' where the others were never measured, or were interrupted
        between; empty where all were measured, throttled or not.

        A run file does not distinguish Ctrl-C from a budget that ended, and after both somebody
        could look before resuming.
        """
        # the last one counts
        theirs, ours = (
            {row.replicate: row for row in found.get(cell_id, [])} for found in self._rows
        )
        resumed = [one.resumed_utc for run in self._runs for one in run.resumed]
        both = set(theirs) & set(ours) & set(range(self.planned))
        measured = sum(
            not interrupted_between(theirs[number], ours[number], resumed) for number in both
        )
        return f"{measured} of {self.planned} planned pairs" if measured < self.planned else ""

    def _policy(self, cell_id: str) -> GatePolicy:
        """The number of pairs is fixed before the first, so that no result decides when to stop.

        Where it was not reached, a stop was possible after each pair: Bonferroni over as many looks
        as pairs were planned. With the whole plan's own test at alpha, where the others are
        measured after all, false alarms stay below 2 alpha.
        """
        own = self._policies.of(cell_id)
        return (
            own.model_copy(update={"alpha_confirm": own.alpha_confirm / self.planned})
            if self.cut_short(cell_id)
            else own
        )

    def _hard(self, side: int, planned: PlannedCell, rows: list[Replicate]) -> Finding | None:
        found = cell_findings(planned, rows, None, self._proofs[side])
        return found[0] if found else None


def _device_time_s(row: Replicate) -> float:
    return 0.0 if row.profile is None else row.profile.device_time_s


def unconfirmed(cell: CellVerdict, why: str) -> CellVerdict:
    """The screened cell as WATCH, or SUSPECT where the screen rejects it, with the reason why
    nothing confirms or clears it.
    """
    why = (why or "no confirmation was run").removeprefix("not confirmed: ")
    verdict = Verdict.SUSPECT if cell.suspicion else Verdict.WATCH
    return replace(cell, verdict=verdict, reason=f"not confirmed: {why}; {cell.reason}")


def _with_reason(cell: CellVerdict, *why: str) -> CellVerdict:
    return replace(cell, reason="; ".join([cell.reason, *filter(None, why)]))
