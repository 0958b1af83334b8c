"""The gate's statistics: what a speed changed by, how sure that is, and the two-stage rule.

Pure; no torch, no clock.

Every sample is the natural logarithm of a speed (`logs`), one a process, so a difference is the ln
of a ratio: below zero is slower. Variances are those of these logarithms. scipy.special is imported
where it is called: the gate starts at once.

The rule. **Screen** against the stored baseline: a cell is left alone only where a drop of
min_effect is refuted, at the level of a quarter of the misses that the policy allows, or it is
tested slower at alpha_screen. **Confirm** on pairs of the same session: slower at alpha_confirm
over all confirmed cells, and by more than the tolerance (`sequential`; Holm where the number of
pairs is fixed, as in `ab`). The screen so bounds what is missed, the confirmation
what is called wrongly; testing for slower alone would miss most 3 % drops behind a
between-session sd of 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfbench.matrix import GatePolicy

# sd 0.001 %: no event timer resolves more, and identical samples must not prove anything
VARIANCE_FLOOR = 1e-10
# a variance less likely than this under the prior is of another family: it is not shrunk
HYPERVARIABLE_P = 0.05
# of ln speed between sessions, where no history gives it; too large only costs confirmations
ASSUMED_BETWEEN_SESSION_SD = 0.01
MAX_PAIRS = 40  # that a cell is worth; one that needs more for min_effect is BLIND
NORMAL_DF = 1e4  # from here on the t distribution is the normal one, to four digits


@dataclass(frozen=True, slots=True)
class Prior:
    """What the family of cells says about a variance: its value, worth so many degrees of freedom
    (inf: all are equal).
    """

    variance: float
    df: float


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """``estimate``: mean ln(candidate / base), negative is slower; ``p_slower`` is one-sided.

    ``lower`` and ``upper`` are one-sided bounds at the alpha that was passed. ``mde``: the drop,
    positive, that a test at this alpha finds with this power, given this standard error (noncentral
    t). With nothing to estimate a variance from, standard_error, mde and the bounds are infinite,
    df is 0 and p_slower 0.5.
    """

    estimate: float
    standard_error: float
    df: float
    p_slower: float
    lower: float
    upper: float
    mde: float
    n_base: int
    n_candidate: int


def logs(speeds: Sequence[float]) -> list[float]:
    """ln of each speed; ValueError for one that is not positive and finite."""
    if bad := [speed for speed in speeds if not (speed > 0 and math.isfinite(speed))]:
        raise ValueError(
            f"speed {bad[0]} is not above zero and finite; leave failed replicates out"
        )
    return [math.log(speed) for speed in speeds]


def variance_of(samples: Sequence[float]) -> float:
    """Unbiased variance; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    mean = math.fsum(samples) / len(samples)
    return math.fsum((x - mean) ** 2 for x in samples) / (len(samples) - 1)


def pooled(base: Sequence[float], candidate: Sequence[float]) -> tuple[float, float]:
    """(variance within the sides, its degrees of freedom): what `prior_of` takes from an unpaired
    cell.
    """
    df = len(base) + len(candidate) - 2
    if df < 1:
        return 0.0, 0.0
    return (
        variance_of(base) * (len(base) - 1) + variance_of(candidate) * (len(candidate) - 1)
    ) / df, float(df)


def differences(base: Sequence[float], candidate: Sequence[float]) -> list[float]:
    """candidate - base by place; ValueError for sides of different length."""
    if len(base) != len(candidate):
        raise ValueError(
            f"{len(base)} base and {len(candidate)} candidate samples; pairs need the same"
            " replicate numbers on both sides"
        )
    return [ours - theirs for theirs, ours in zip(base, candidate, strict=True)]


def prior_of(variances: Sequence[float], dfs: Sequence[float]) -> Prior | None:
    """The scaled inverse chi-squared prior of a family's variances, by the moments of their
    logarithms (Smyth 2004, 6.2).

    A variance of zero counts as the smallest believable one. The prior is never worth more degrees
    of freedom than the other cells of the family have together. None for fewer than two variances
    with df > 0.
    """
    from scipy.special import digamma, polygamma

    usable = [
        (s2, df) for s2, df in zip(variances, dfs, strict=True) if df > 0 and math.isfinite(s2)
    ]
    if len(usable) < 2:
        return None
    middle = sorted(s2 for s2, _ in usable)[len(usable) // 2]
    floor = max(VARIANCE_FLOOR, 1e-5 * middle)
    e = [math.log(max(s2, floor)) - float(digamma(df / 2)) + math.log(df / 2) for s2, df in usable]
    mean = math.fsum(e) / len(e)
    total_df = math.fsum(df for _, df in usable)
    spread = variance_of(e) - math.fsum(float(polygamma(1, df / 2)) for _, df in usable) / len(e)
    cap = total_df * (1 - 1 / len(usable))
    if spread <= 0:  # no more spread than chance gives: one variance for all
        return Prior(max(math.fsum(s2 * df for s2, df in usable) / total_df, floor), cap)
    d0 = 2 * trigamma_inverse(spread)
    return Prior(math.exp(mean + float(digamma(d0 / 2)) - math.log(d0 / 2)), min(d0, cap))


def trigamma_inverse(x: float) -> float:
    """y > 0 with trigamma(y) = x, for x > 0: Newton on 1 / trigamma, which is nearly linear (Smyth
    2004, appendix).
    """
    from scipy.special import polygamma

    if x > 1e7:
        return 1 / math.sqrt(x)
    if x < 1e-6:
        return 1 / x
    y = 0.5 + 1 / x
    for _ in range(50):
        value = float(polygamma(1, y))
        step = value * (1 - value / x) / float(polygamma(2, y))
        y += step
        if -step / y < 1e-9:
            break
    return y


def moderated(variance: float, df: float, prior: Prior | None) -> tuple[float, float]:
    """(variance, df) after shrinking towards the family; (0, 0) where nothing is known.

    A cell much noisier than its family keeps its own variance: shrinking it would cause false
    alarms.
    """
    from scipy.special import chdtrc, fdtrc

    own = max(variance, VARIANCE_FLOOR)
    if prior is None:
        return (own, df) if df > 0 else (0.0, 0.0)
    if df <= 0:
        return prior.variance, prior.df
    ratio = own / prior.variance
    p = float(chdtrc(df, df * ratio)) if math.isinf(prior.df) else float(fdtrc(df, prior.df, ratio))
    if p < HYPERVARIABLE_P:
        return own, df
    if math.isinf(prior.df):
        return prior.variance, math.inf
    return (prior.df * prior.variance + df * own) / (prior.df + df), prior.df + df


def unpaired(
    base: Sequence[float],
    candidate: Sequence[float],
    *,
    prior: Prior | None,
    between_session_variance: float = 0.0,
    alpha: float,
    power: float,
) -> SpeedChange:
    """The screen: two sessions, so the variance within a session is moderated, and the variance
    between sessions counts twice.

    ``between_session_variance`` is taken as known (ln speed squared; infinite: nothing about
    the change is known). Degrees of freedom by Satterthwaite. ValueError for a side without
    samples.
    """
    _some(base, candidate)
    variance, df = moderated(*pooled(base, candidate), prior)
    within = variance * (1 / len(base) + 1 / len(candidate))
    total = within + 2 * between_session_variance
    if df > 0 and within > 0 and math.isfinite(total):
        df *= (total / within) ** 2
    estimate = _mean(candidate) - _mean(base)
    return _compared(estimate, total, df, alpha, power, len(base), len(candidate))


def paired(
    base: Sequence[float],
    candidate: Sequence[float],
    *,
    prior: Prior | None,
    alpha: float,
    power: float,
    test_alpha: float | None = None,
) -> SpeedChange:
    """The confirmation: one difference a pair of neighbours in time, whose variance is moderated.

    The prior is of the variances of such differences. ``test_alpha``: of the test whose MDE is
    wanted, where that is not the level of the bounds. ValueError for no pairs, or sides of
    different length.
    """
    _some(base, candidate)
    d = differences(base, candidate)
    variance, df = moderated(variance_of(d), len(d) - 1, prior)
    return _compared(
        _mean(d), variance / len(d), df, alpha, power, len(d), len(d), test_alpha=test_alpha
    )


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: compare each with the family's alpha."""
    order = sorted(range(len(p)), key=lambda place: p[place])
    adjusted, worst = [0.0] * len(p), 0.0
    for rank, place in enumerate(order):
        worst = max(worst, min(1.0, (len(p) - rank) * p[place]))
        adjusted[place] = worst
    return adjusted


def screen_alpha(policy: GatePolicy) -> float:
    """The alpha of the screen's bounds: a quarter of the misses allowed, 1 - power; the
    confirmation plans with a half.
    """
    return (1 - policy.power) / 4


def confirm_power(policy: GatePolicy) -> float:
    """The power that the confirmation is planned with: it may miss half of what the policy
    allows.
    """
    return (1 + policy.power) / 2


def proved_same(comparison: SpeedChange, policy: GatePolicy) -> bool:
    """A drop of min_effect is refuted at the comparison's alpha."""
    return comparison.lower > math.log1p(-policy.min_effect_pct / 100)


def screened(comparison: SpeedChange, policy: GatePolicy) -> bool:
    """The cell must be confirmed.

    ``comparison`` is `unpaired` at ``alpha=screen_alpha(policy)``.
    """
    return not proved_same(comparison, policy) or comparison.p_slower < policy.alpha_screen


def regressed(comparison: SpeedChange, adjusted_p: float, policy: GatePolicy) -> bool:
    """Slower for certain, and by more than the tolerance.

    ``comparison`` is `paired`, ``adjusted_p`` from `holm`.
    """
    return adjusted_p < policy.alpha_confirm and comparison.estimate < math.log1p(
        -policy.tolerance_pct / 100
    )


def pairs_for(
    sd: float, *, drop: float, alpha: float, power: float, prior_df: float = 0.0, most: int = 10_000
) -> int | None:
    """The fewest pairs whose one-sided t test at ``alpha`` finds ``drop`` (ln, positive) with
    ``power``; None: above ``most``.

    ``sd`` is of the paired difference (sqrt(2) times that between processes). ``prior_df``: what
    moderation adds to df.
    """
    # were sd known
    least = max(
        2,
        math.floor(
            ((t_quantile(1 - alpha, math.inf) + t_quantile(power, math.inf)) * sd / drop) ** 2
        ),
    )
    return next(
        (
            n
            for n in range(least, most + 1)
            if _power(math.sqrt(n) * drop / sd, n - 1 + prior_df, alpha) >= power
        ),
        None,
    )


def is_blind(pair_sd: float, policy: GatePolicy) -> bool:
    """Whether MAX_PAIRS pairs whose differences have this sd would not show min_effect."""
    drop = -math.log1p(-policy.min_effect_pct / 100)
    power, alpha = confirm_power(policy), policy.alpha_confirm
    sd = max(pair_sd, math.sqrt(VARIANCE_FLOOR))
    known_sd = ((t_quantile(1 - alpha, math.inf) + t_quantile(power, math.inf)) * sd / drop) ** 2
    # an unknown sd costs less than four times as many; spares the search for most cells
    if known_sd < MAX_PAIRS / 4:
        return False
    return pairs_for(sd, drop=drop, alpha=alpha, power=power, most=MAX_PAIRS) is None


def p_below(comparison: SpeedChange, ln_change: float) -> float:
    """One-sided p of the hypothesis that the change is not below ``ln_change``; 0.5 where nothing
    estimates a variance.
    """
    if comparison.df <= 0 or not math.isfinite(comparison.standard_error):
        return 0.5
    return t_below((comparison.estimate - ln_change) / comparison.standard_error, comparison.df)


def _some(base: Sequence[float], candidate: Sequence[float]) -> None:
    if not base or not candidate:
        raise ValueError(
            f"{len(base)} base and {len(candidate)} candidate samples; each side needs at least one"
        )


def _mean(samples: Sequence[float]) -> float:
    return math.fsum(samples) / len(samples)


def _compared(
    estimate: float,
    variance: float,
    df: float,
    alpha: float,
    power: float,
    n_base: int,
    n_candidate: int,
    *,
    test_alpha: float | None = None,
) -> SpeedChange:
    if df <= 0 or not math.isfinite(variance):
        return SpeedChange(
            estimate, math.inf, 0.0, 0.5, -math.inf, math.inf, math.inf, n_base, n_candidate
        )
    error = math.sqrt(variance)
    far = t_quantile(1 - alpha, df) * error
    mde = noncentrality(df, test_alpha or alpha, power) * error
    return SpeedChange(
        estimate,
        error,
        df,
        t_below(estimate / error, df),
        estimate - far,
        estimate + far,
        mde,
        n_base,
        n_candidate,
    )


def t_below(t: float, df: float) -> float:
    """P(T <= t) of Student's t; the normal distribution for many degrees of freedom."""
    from scipy.special import ndtr, stdtr

    return float(ndtr(t)) if df > NORMAL_DF else float(stdtr(df, t))


def t_quantile(p: float, df: float) -> float:
    """The inverse of `t_below`."""
    from scipy.special import ndtri, stdtrit

    return float(ndtri(p)) if df > NORMAL_DF else float(stdtrit(df, p))


def _power(noncentrality: float, df: float, alpha: float) -> float:
    from scipy.special import nctdtr, ndtr

    far = t_quantile(1 - alpha, df)
    return (
        float(ndtr(noncentrality - far))
        if df > NORMAL_DF
        else 1 - float(nctdtr(df, noncentrality, far))
    )


def noncentrality(df: float, alpha: float, power: float) -> float:
    """How many standard errors a drop must measure to be found: 1 - power is left of the test's
    bound.
    """
    from scipy.special import nctdtrinc

    far = t_quantile(1 - alpha, df)
    if df > NORMAL_DF:
        return far + t_quantile(power, df)
    return float(nctdtrinc(df, 1 - power, far))
