"""One step of `bisect`: whether a commit is slower than the good one by more than half of the drop
that is looked for.

Pure. A step looks at its pairs after 4, 8, 16, 28 and 40, as a confirmation does, and is decided at
the first look whose one-sided bound lies on one side of the threshold. All steps of a bisect
together answer wrongly in at most 1 - power of the cases, given the drop between both ends:
the planned steps and all later ones divide that (`StepShares`), and the looks of a step divide its
share equally.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from perfbench.gate import stats
from perfbench.gate.cell_sides import CellSides
from perfbench.gate.evidence import SPEED_WORDS, WALL, Evidence, pct, shown
from perfbench.gate.judgement import CellVerdict
from perfbench.gate.pair_rows import MeasuredPairs, NoPairs, PairRows
from perfbench.gate.sequential import LOOKS
from perfbench.matrix import GatePolicy, Policies
from perfbench.records import Verdict

INTERVAL_ALPHA = 0.025  # at each end: 95 %


class StepTurn(StrEnum):
    """What a step says of its commit."""

    GOOD = "good"
    BAD = "bad"
    SKIPPED = "skipped"
    OPEN = "open"  # the budget ended before its next look


@dataclass(frozen=True, slots=True)
class SoughtDrop:
    """The drop that the steps look for, of ln speed in ``metric`` against the good commit.

    ``good_ln`` and ``bad_ln``: the two levels between which it lies, and ``good_se`` and ``bad_se``
    the standard errors of those that a step moved. ``alpha``: of one bound at one
    look. ``least_ln``: a smaller difference of levels is no drop. ``by_work``: launches or host
    syncs rose instead, which is no noise and needs one look.
    """

    metric: str
    bad_ln: float
    alpha: float
    least_ln: float
    good_ln: float = 0.0
    good_se: float = 0.0
    bad_se: float = 0.0
    by_work: bool = False

    @property
    def ln_drop(self) -> float:
        """Positive."""
        return self.good_ln - self.bad_ln

    @property
    def threshold(self) -> float:
        """Half of the drop down: the middle of both levels."""
        return (self.good_ln + self.bad_ln) / 2

    def with_share(self, share: float) -> Self:
        """For another step, whose looks divide ``share``."""
        return replace(self, alpha=share / len(LOOKS))

    def after(self, found: StepFound) -> Self:
        """What is looked for after a step: a commit whose interval excludes the level of its side
        has one of its own, as between the parts of a drop that two commits made.
        """
        change = found.change
        if change is None or found.turn in (StepTurn.SKIPPED, StepTurn.OPEN):
            return self
        good = found.turn is StepTurn.GOOD
        if not found.is_part and change.includes(self.good_ln if good else self.bad_ln):
            return self
        moved = (
            replace(self, good_ln=change.ln_change, good_se=change.se_ln)
            if good
            else replace(self, bad_ln=change.ln_change, bad_se=change.se_ln)
        )
        return moved if moved.ln_drop >= self.least_ln else self


@dataclass(frozen=True, slots=True)
class SpeedInterval:
    """A change of speed by so many pairs; per cent, with its 95 % interval, null where nothing
    bounds it. ``se_ln``: the standard error of ``ln_change``.
    """

    ln_change: float
    change_pct: float | None
    low_pct: float | None
    high_pct: float | None
    pairs: int
    metric: str = WALL
    se_ln: float = 0.0

    def includes(self, ln_change: float) -> bool:
        """Whether the interval does."""
        change = pct(ln_change)
        if change is None or self.low_pct is None or self.high_pct is None:
            return True
        return self.low_pct <= change <= self.high_pct

    def __str__(self) -> str:
        what = SPEED_WORDS[self.metric]
        return (
            f"{what}{shown(self.change_pct)} (95 %: {shown(self.low_pct)} to"
            f" {shown(self.high_pct)}), {self.pairs} pairs"
        )


@dataclass(frozen=True, slots=True)
class StepFound:
    """``wanted``: the pairs of the next look, where the step is open. ``is_part``: certainly slower
    than the one level, and certainly faster than the other. ``not_candidate``: it is skipped for a
    fault of the machine or of the good commit.
    """

    turn: StepTurn
    reason: str
    change: SpeedInterval | None = None
    wanted: int | None = None
    is_part: bool = False
    not_candidate: bool = False


@dataclass(frozen=True, slots=True)
class PairFound:
    """What the gate's own rule says of one cell of one pair of commits.

    ``pair_sd``: of the differences of ln speed. ``work``: launches and host syncs that rose, where
    they decided. ``is_open``: pairs are missing. ``pair_s``: about the seconds that a pair takes.
    """

    verdict: Verdict | None
    reason: str
    change: SpeedInterval | None = None
    pair_sd: float = 0.0
    work: tuple[str, ...] = ()
    is_open: bool = False
    pair_s: float = 0.0

    @property
    def is_slower(self) -> bool:
        return self.verdict is Verdict.REGRESSED


@dataclass(frozen=True, slots=True)
class StepShares:
    """Shares of ``total`` for any number of steps: equal ones for the ``planned`` and one more,
    which all steps past the plan divide: half of what is left to each.
    """

    total: float
    planned: int

    def of(self, step: int) -> float:
        """Of step 0, 1, ...; never more than ``total`` together."""
        share = self.total / (self.planned + 1)
        return share if step < self.planned else share / 2 ** (step - self.planned + 1)


def step_shares(policy: GatePolicy, planned: int) -> StepShares:
    """Of the probability that any step of a bisect turns wrongly."""
    return StepShares(1 - policy.power, planned)


def sought(found: PairFound, policy: GatePolicy, share: float) -> SoughtDrop:
    """What a step looks for, after ``found`` was confirmed slower; ``share``: of a wrong turn."""
    assert found.change is not None
    tolerance = -math.log1p(-policy.tolerance_pct / 100)
    by_work = bool(found.work) and -found.change.ln_change < tolerance
    return SoughtDrop(
        metric=found.change.metric,
        bad_ln=min(found.change.ln_change, -tolerance),
        alpha=share / len(LOOKS),
        least_ln=tolerance,
        by_work=by_work,
    )


def pairs_of_step(pair_sd: float, drop: SoughtDrop, policy: GatePolicy) -> int | None:
    """The look at which a step is decided with the policy's power, whichever way it goes; None
    where not even the last look has that power.
    """
    if drop.by_work:
        return LOOKS[0]
    sd = max(pair_sd, math.sqrt(stats.VARIANCE_FLOOR))
    least = stats.pairs_for(
        sd, drop=drop.ln_drop / 2, alpha=drop.alpha, power=policy.power, most=LOOKS[-1]
    )
    return None if least is None else next(look for look in LOOKS if look >= least)


def decide_step(
    differences: Sequence[float], drop: SoughtDrop, *, is_last: bool
) -> StepFound | None:
    """One look at ``differences`` of ln speed, candidate - good, a pair each; None where the next
    look is wanted. The last one decides by the levels themselves where the threshold cannot.
    """
    change = interval(differences, drop.metric)
    far = _far(differences, drop.alpha)
    lower, upper = change.ln_change - far, change.ln_change + far
    half = shown(pct(drop.threshold))
    if upper < drop.threshold:
        return StepFound(StepTurn.BAD, f"below {half} for certain: {change}", change)
    if lower > drop.threshold:
        return StepFound(StepTurn.GOOD, f"above {half} for certain: {change}", change)
    if not is_last:
        return None
    # a level that a step moved was measured in as few pairs: its error counts, too
    quantile = stats.t_quantile(1 - drop.alpha, max(len(differences) - 1, 1))
    from_good, from_bad = (
        quantile * math.hypot(change.se_ln, se) for se in (drop.good_se, drop.bad_se)
    )
    is_slower = change.ln_change + from_good < drop.good_ln
    is_faster = change.ln_change - from_bad > drop.bad_ln
    if not (is_slower or is_faster):
        return StepFound(StepTurn.SKIPPED, f"undecided at the last look: {change}", change)
    both = is_slower and is_faster
    turn = StepTurn.BAD if change.ln_change < drop.threshold else StepTurn.GOOD
    if not both:
        turn = StepTurn.BAD if is_slower else StepTurn.GOOD
    why = "a part of the drop" if both else "not the whole drop" if is_faster else "not none"
    return StepFound(turn, f"{why} for certain: {change}", change, is_part=both)


def interval(differences: Sequence[float], metric: str = WALL) -> SpeedInterval:
    """The mean of ``differences`` with its 95 % interval (Student's t)."""
    mean = math.fsum(differences) / len(differences)
    far, count = _far(differences, INTERVAL_ALPHA), len(differences)
    se = math.sqrt(_variance(differences) / count) if count > 1 else math.inf
    return SpeedInterval(mean, pct(mean), pct(mean - far), pct(mean + far), count, metric, se)


def _far(differences: Sequence[float], alpha: float) -> float:
    """How far a one-sided bound at ``alpha`` lies from the mean; infinite for a single pair."""
    count = len(differences)
    if count < 2:
        return math.inf
    return stats.t_quantile(1 - alpha, count - 1) * math.sqrt(_variance(differences) / count)


def _variance(differences: Sequence[float]) -> float:
    return max(stats.variance_of(differences), stats.VARIANCE_FLOOR)


def judge_step(
    measured: MeasuredPairs, policy: GatePolicy | Policies, drop: SoughtDrop
) -> StepFound:
    """A step by the pairs that there are, look by look; ``measured`` holds one cell."""
    (cell_id,) = measured.cell_ids
    assert measured.plan is not None
    looks = measured.plan.looks
    rows = PairRows(measured, Policies.over(policy))
    why = "no pair counts"
    for look in looks:
        sides = rows.of(cell_id, look)
        if isinstance(sides, NoPairs) and not sides.more_may_help:
            skipped = StepFound(StepTurn.SKIPPED, sides.reason)
            return replace(skipped, not_candidate=sides.not_candidate)
        if (count := rows.count(cell_id, look)) < look:
            why = f"{count} of {look} pairs were measured"
            return StepFound(StepTurn.OPEN, why, wanted=look)
        if isinstance(sides, NoPairs):
            why = sides.reason
            continue
        found = _look(sides, drop, is_last=look == looks[-1])
        if found is not None:
            return found
    return StepFound(StepTurn.SKIPPED, why)


def _look(sides: CellSides, drop: SoughtDrop, *, is_last: bool) -> StepFound | None:
    base, candidate = sides.logs(drop.metric)
    few = sides.too_few() or ("" if len(base) > 1 else f"no {drop.metric} of both sides")
    if few:
        return StepFound(StepTurn.SKIPPED, few) if is_last else None
    differences = stats.differences(base, candidate)
    if not drop.by_work:
        return decide_step(differences, drop, is_last=is_last)
    change, more = interval(differences, drop.metric), sides.more_work()
    if more:
        return StepFound(StepTurn.BAD, "; ".join(more), change)
    return StepFound(StepTurn.GOOD, f"no more work than the good commit: {sides.work()}", change)


def pair_found(cell: CellVerdict, *, is_open: bool, pair_s: float) -> PairFound:
    """The verdict of the gate's own rule, with the interval of the metric that decided."""
    change, sd = None, 0.0
    if cell.evidence:
        change, sd = _interval_of(cell.evidence[0]), cell.evidence[0].sd
    return PairFound(cell.verdict, cell.reason, change, sd, cell.work, is_open, pair_s)


def _interval_of(one: Evidence) -> SpeedInterval:
    sign = 1 if one.metric == WALL else -1
    base, candidate = ([sign * x for x in stats.logs(side)] for side in (one.base, one.candidate))
    return interval(stats.differences(base, candidate), one.metric)
