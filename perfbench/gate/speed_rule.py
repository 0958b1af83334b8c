"""The two-stage rule on one cell's rows: screen against stored speeds, confirm on pairs.

Pure numbers in, verdicts out.

A host-bound cell's wall speed follows the CPU: it is reported and never called SAME (BLIND). Such a
cell is judged by device time, by host time (with the tolerance of its noise), by launches and by
host syncs, of which an increase is no noise. Two exceptions keep a new Python loop visible: a cell
that was not host bound before, and a wall drop beyond what any host's noise was seen to explain. A
gain of wall time that pairs prove is FASTER, whatever was launched for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from perfbench.gate import stats
from perfbench.gate.cell_sides import CellSides
from perfbench.gate.evidence import DEVICE, HOST, WALL, Evidence
from perfbench.gate.sequential import Look, decide_at
from perfbench.matrix import GatePolicy
from perfbench.records import Verdict

# range of a host-bound cell's wall time between processes on one idle H100; a larger drop is no
# noise
HOST_NOISE_PCT = 50.0
# so many times as fast as was stored is not believed without pairs: the stored number may be wrong
FAR_FACTOR = 10.0
Family = tuple[str, bool]  # metric, host bound: cells whose noise is alike
Priors = Mapping[Family, stats.Prior | None]


@dataclass(frozen=True, slots=True)
class SpeedVerdict:
    """A verdict on speed; ``evidence`` begins with the metric that decided."""

    verdict: Verdict
    reason: str
    evidence: tuple[Evidence, ...] = ()
    screened: bool = False
    work: tuple[str, ...] = ()  # launches and host syncs that rose, where they decided

    @property
    def metric(self) -> str:
        return self.evidence[0].metric if self.evidence else WALL


def priors_of(cells: Sequence[CellSides], *, paired: bool) -> dict[Family, stats.Prior | None]:
    """What each family of cells says about its noise; the order of the cells does not matter."""
    seen: dict[Family, list[tuple[float, float]]] = {}
    for sides in sorted(cells, key=lambda one: one.cell_id):
        for metric in sides.metrics:
            seen.setdefault((metric, sides.host_bound), []).append(
                _own_variance(sides, metric, paired)
            )
    return {
        family: stats.prior_of([v for v, _ in found], [df for _, df in found])
        for family, found in seen.items()
    }


def screen(sides: CellSides, priors: Priors) -> SpeedVerdict:
    """Stage 1: what is proved the same, what is blind, and what must be confirmed.

    Nothing is FASTER here: where sessions are off by 3 %, 12 to 14 % of unchanged cells look so.
    """
    policy = sides.policy
    if too_few := sides.too_few():
        return SpeedVerdict(Verdict.WATCH, f"too few to judge ({too_few}): {sides.speeds()}")
    wall = _unpaired(sides, WALL, priors)
    if is_far_faster(wall):
        return SpeedVerdict(
            Verdict.WATCH,
            f"more than {FAR_FACTOR:g} times as fast as was stored, to be confirmed:"
            f" {sides.speeds()}: {wall}",
            (wall,),
            screened=True,
        )
    if sides.host_bound:
        return _screen_host_bound(sides, wall, priors)
    slower = wall.comparison.p_slower < policy.alpha_screen
    if sides.candidate.bimodal and not slower:
        return SpeedVerdict(
            Verdict.UNSTABLE, f"{sides.candidate.bimodal}: {sides.speeds()}: {wall}", (wall,)
        )
    if not stats.screened(wall.comparison, policy):
        text = f"{sides.speeds()}: {wall}, above -{policy.min_effect_pct:g} % for certain"
        if wall.is_gain_beyond_tolerance:
            text += f"; looks faster ({wall.change_pct:+.1f} %), not confirmed"
        return SpeedVerdict(Verdict.SAME, text, (wall,))
    if not slower and _blind(sides, wall):
        text = (
            f"{stats.MAX_PAIRS} pairs would not show a drop of {policy.min_effect_pct:g} % in such"
            " noise, and none shows"
        )
        return SpeedVerdict(Verdict.BLIND, f"{sides.speeds()}: {wall}; {text}", (wall,))
    why = "slower" if slower else _not_ruled_out(policy)
    return SpeedVerdict(
        Verdict.WATCH, f"{why}, to be confirmed: {sides.speeds()}: {wall}", (wall,), screened=True
    )


def is_far_faster(evidence: Evidence) -> bool:
    """Whether a gain of tok/s beyond `FAR_FACTOR` is proved at this alpha."""
    return evidence.metric == WALL and evidence.comparison.lower > math.log(FAR_FACTOR)


def confirm(cells: Sequence[CellSides]) -> dict[str, SpeedVerdict]:
    """Stage 2 where the number of pairs was fixed before the first (`ab`): every cell's verdict,
    Holm over all their tests; ``base[i]`` and ``candidate[i]`` are a pair.
    """
    ready = sorted((one for one in cells if not one.too_few()), key=lambda one: one.cell_id)
    priors = priors_of(ready, paired=True)
    tests = [(one.cell_id, _paired(one, metric, priors)) for one in ready for metric in one.metrics]
    adjusted = stats.holm([evidence.comparison.p_slower for _, evidence in tests])
    found: dict[str, list[Evidence]] = {}
    for (cell_id, evidence), p in zip(tests, adjusted, strict=True):
        found.setdefault(cell_id, []).append(replace(evidence, adjusted_p=p))
    outcomes = {one.cell_id: _outcome_of(one, tuple(found[one.cell_id])) for one in ready}
    for one in cells:
        if few := one.too_few():
            outcomes[one.cell_id] = SpeedVerdict(
                Verdict.WATCH,
                f"not confirmed: too few pairs ({few}): {one.speeds()}",
                screened=True,
            )
    return outcomes


def confirm_at(sides: CellSides, look: Look) -> SpeedVerdict:
    """Stage 2 at one look of a sequential plan: the verdict by this cell's pairs alone."""
    if few := sides.too_few():
        return SpeedVerdict(
            Verdict.WATCH,
            f"not confirmed: too few pairs ({few}): {sides.speeds()}",
            screened=True,
        )
    count = len(sides.metrics)
    evidence = tuple(_looked_at(sides, metric, look, count) for metric in sides.metrics)
    return _outcome_of(sides, evidence)


def is_settled(outcome: SpeedVerdict, policy: GatePolicy) -> bool:
    """Whether no more pairs are wanted: slower for certain, or every metric refutes min_effect and
    none looks slower beyond its tolerance: such a drop, though smaller, may be certain at the end.
    """
    if outcome.verdict is Verdict.REGRESSED:
        return True
    return bool(outcome.evidence) and all(
        one.refutes(policy.min_effect_pct) and not one.looks_slower(policy.alpha_screen)
        for one in outcome.evidence
    )


def _outcome_of(sides: CellSides, evidence: tuple[Evidence, ...]) -> SpeedVerdict:
    policy, wall = sides.policy, evidence[-1]
    reds = [
        e
        for e in evidence
        if stats.regressed(e.comparison, e.adjusted_p or 0.0, _at(policy, e.tolerance_pct))
    ]
    counted = sides.more_work()
    faster = wall.comparison.lower > math.log1p(policy.tolerance_pct / 100)
    # a launch more is a cost only where it costs time
    gained = faster and not any(_slower(e, policy) for e in evidence)
    if reds or (counted and not gained):
        first = reds[:1] or list(evidence[:1])
        rest = [e for e in evidence if e not in first]
        why = "; ".join([*counted, *(f"slower beyond {e.tolerance_pct:g} %: {e}" for e in reds)])
        return SpeedVerdict(
            Verdict.REGRESSED,
            f"confirmed on interleaved pairs: {why}; {sides.speeds()}",
            (*first, *rest),
            work=tuple(counted),
        )
    numbers = f"{sides.speeds()}: {'; '.join(str(e) for e in evidence)}"
    if sides.host_bound and gained:
        notes = "".join(f"; note: {text}" for text in counted)
        return SpeedVerdict(
            Verdict.FASTER,
            f"host bound, on interleaved pairs: {numbers}{notes}",
            (wall, *evidence[:-1]),
        )
    if sides.host_bound:
        return SpeedVerdict(
            Verdict.BLIND,
            f"host bound, nothing confirmed slower: {sides.work()}; {numbers}",
            evidence,
        )
    if sides.candidate.bimodal:
        return SpeedVerdict(
            Verdict.UNSTABLE,
            f"{sides.candidate.bimodal}; on interleaved pairs: {numbers}",
            evidence,
        )
    if faster:
        return SpeedVerdict(Verdict.FASTER, f"on interleaved pairs: {numbers}", evidence)
    if stats.proved_same(wall.comparison, policy):
        return SpeedVerdict(
            Verdict.SAME,
            f"on interleaved pairs: {numbers}, above -{policy.min_effect_pct:g} % for certain",
            evidence,
        )
    if _blind(sides, wall):
        return SpeedVerdict(
            Verdict.BLIND,
            f"on interleaved pairs, too noisy to see {policy.min_effect_pct:g} %: {numbers}",
            evidence,
        )
    return SpeedVerdict(
        Verdict.WATCH,
        f"on interleaved pairs neither proved the same nor confirmed slower: {numbers}",
        evidence,
    )


def _screen_host_bound(sides: CellSides, wall: Evidence, priors: Priors) -> SpeedVerdict:
    """BLIND, unless work was added, device time is not proved the same, or wall time is not where
    the base was not host bound.
    """
    policy = sides.policy
    device = _unpaired(sides, DEVICE, priors) if sides.gates_device else None
    host = _unpaired(sides, HOST, priors) if HOST in sides.metrics else None
    suspects, first = sides.more_work(), []
    if device is not None and (why := _suspicion(sides, device)):
        suspects.append(f"{why} on the device: {device}")
        first.append(device)
    if host is not None and _slower(host, policy):
        suspects.append(f"slower on the host, and no noise explains {HOST_NOISE_PCT:g} %: {host}")
    if sides.base.host_bound and _slower(wall, policy):
        suspects.append(
            f"slower on the wall clock, and no host's noise explains {HOST_NOISE_PCT:g} %"
        )
    # even too noisy: the new noise may be the loss
    elif not sides.base.host_bound and stats.screened(wall.comparison, policy):
        slower = (
            "slower" if wall.comparison.p_slower < policy.alpha_screen else _not_ruled_out(policy)
        )
        suspects.append(f"{slower} on the wall clock, and the base was not host bound")
        first.append(wall)
    # the pairs are planned for the first
    rest = (e for e in (device, host, wall) if e is not None and e not in first)
    evidence = (*first, *rest)
    numbers = f"{sides.speeds()}: wall {wall}"
    if suspects:
        return SpeedVerdict(
            Verdict.WATCH,
            f"host bound; to be confirmed: {'; '.join(suspects)}; {numbers}",
            evidence,
            screened=True,
            work=tuple(sides.more_work()),
        )
    judged = f"{device}" if device is not None else sides.no_device()
    judged += f"; {host}" if host is not None else ""
    return SpeedVerdict(
        Verdict.BLIND,
        f"host bound: wall tok/s is not gated, it follows the CPU; {sides.work()}; {judged};"
        f" {numbers}",
        evidence,
    )


def _suspicion(sides: CellSides, evidence: Evidence) -> str:
    """Why a comparison of two sessions must be confirmed; empty where it is proved the same, or no
    number of pairs would show a drop.
    """
    if evidence.comparison.p_slower < sides.policy.alpha_screen:
        return "slower"
    return (
        _not_ruled_out(sides.policy)
        if stats.screened(evidence.comparison, sides.policy) and not _blind(sides, evidence)
        else ""
    )


def _not_ruled_out(policy: GatePolicy) -> str:
    return f"a drop of {policy.min_effect_pct:g} % is not ruled out"


def _slower(evidence: Evidence, policy: GatePolicy) -> bool:
    beyond = evidence.comparison.estimate < math.log1p(-evidence.tolerance_pct / 100)
    return beyond and evidence.comparison.p_slower < policy.alpha_screen


def _tolerance_pct(sides: CellSides, metric: str) -> float:
    """The drop that is never called a regression, in this metric."""
    policy = sides.policy
    if metric == HOST or (metric == WALL and sides.host_bound and sides.base.host_bound):
        return max(policy.tolerance_pct, HOST_NOISE_PCT)
    return policy.tolerance_pct


def _at(policy: GatePolicy, tolerance_pct: float) -> GatePolicy:
    return (
        policy
        if tolerance_pct == policy.tolerance_pct
        else policy.model_copy(update={"tolerance_pct": tolerance_pct})
    )


def _blind(sides: CellSides, evidence: Evidence) -> bool:
    """Whether even the most pairs that a cell is worth would not show a drop of min_effect."""
    if evidence.paired and evidence.comparison.n_base >= stats.MAX_PAIRS:  # these are they
        return evidence.comparison.mde > -math.log1p(-sides.policy.min_effect_pct / 100)
    pair_sd = evidence.moderated_sd * (1 if evidence.paired else math.sqrt(2))
    return stats.is_blind(pair_sd, sides.policy)


def _own_variance(sides: CellSides, metric: str, paired: bool) -> tuple[float, float]:
    base, candidate = sides.logs(metric)
    if not paired:
        return stats.pooled(base, candidate)
    d = stats.differences(base, candidate)
    return stats.variance_of(d), float(len(d) - 1)


def _unpaired(sides: CellSides, metric: str, priors: Priors) -> Evidence:
    alpha, power = stats.screen_alpha(sides.policy), sides.policy.power
    base, candidate = sides.logs(metric)
    prior = priors.get((metric, sides.host_bound))
    session_sd = sides.between_session_sd_of(metric)
    found = stats.unpaired(
        base,
        candidate,
        prior=prior,
        between_session_variance=session_sd**2,
        alpha=alpha,
        power=power,
    )
    return _evidence(
        sides, metric, found, prior, alpha, paired=False, between_session_sd=session_sd
    )


def _paired(sides: CellSides, metric: str, priors: Priors) -> Evidence:
    alpha, power = sides.policy.alpha_confirm, stats.confirm_power(sides.policy)
    base, candidate = sides.logs(metric)
    prior = priors.get((metric, sides.host_bound))
    found = stats.paired(base, candidate, prior=prior, alpha=alpha, power=power)
    return _evidence(sides, metric, found, prior, alpha, paired=True, between_session_sd=0.0)


def _looked_at(sides: CellSides, metric: str, look: Look, metrics: int) -> Evidence:
    tolerance_pct = _tolerance_pct(sides, metric)
    found = decide_at(
        *sides.logs(metric), look, sides.policy, tolerance_pct=tolerance_pct, metrics=metrics
    )
    evidence = _evidence(
        sides, metric, found.comparison, None, look.alpha_same, paired=True, between_session_sd=0.0
    )
    return replace(evidence, adjusted_p=found.adjusted_p)


def _evidence(
    sides: CellSides,
    metric: str,
    found: stats.SpeedChange,
    prior: stats.Prior | None,
    alpha: float,
    *,
    paired: bool,
    between_session_sd: float,
) -> Evidence:
    variance, df = _own_variance(sides, metric, paired)
    moderated, moderated_df = stats.moderated(variance, df, prior)
    base, candidate = sides.values(metric)
    return Evidence(
        metric=metric,
        paired=paired,
        comparison=found,
        alpha=alpha,
        tolerance_pct=_tolerance_pct(sides, metric),
        sd=math.sqrt(variance),
        sd_df=df,
        prior=prior,
        moderated_sd=math.sqrt(moderated),
        moderated_df=moderated_df,
        between_session_sd=between_session_sd,
        base=base,
        candidate=candidate,
    )
