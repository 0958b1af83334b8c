"""What a series does while nothing changes: outliers, noise, its correlation, the day of the week.

Every estimate is made of differences between neighbours, which a step touches once and a drift
hardly: nothing must be found before its noise is known. n: points of the series.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MAD_TO_SD = 1.4826  # of a normal distribution
LEAST_POINTS, MOST_POINTS = 3, 10  # of a level, as the share of outliers asks
CLUSTER = 0.005  # chance at most that a whole series has so many outliers together
MODE = 0.1  # share of outliers that makes them a second mode
EVEN = 0.25  # share of a second mode from which means of a few points are nearly normal
FAR = 4.0  # noise sd from that level: what lies farther counts as so far
JUMP = 2.5  # sd of a difference, beyond which one may cross a step
MAX_CORRELATION = 0.8  # beyond it, noise and drift are the same thing
DOUBT = 0.5  # of its standard error, about 1/sqrt(n), that is added to a correlation
FEW = 20  # points of which a correlation of a half is believed at most
STEPS = 0.05  # of the differences may cross one
SHRUNK = 7.0  # over n: the correlation of which half is believed
SLOPE_LAG = 5  # points between two that show a slope
SLOPE_REACH = 15  # points to each side whose slopes give one
DAYS = 7
MIN_WEEKS = 4  # of points, before a weekly pattern is looked for
SEASON_F = 6.0  # F statistic of the days; 4.0 is its 0.1 % point for 200 points


@dataclass(frozen=True, slots=True)
class Noise:
    """``sd``: of one point. ``correlation``: of neighbours, at least 0; it decays geometrically."""

    sd: float
    correlation: float = 0.0

    def mean_variance(self, count: int) -> float:
        """Of the mean of ``count`` neighbours, of a first-order autoregression."""
        return self.sd**2 * self.inflation(count) / count

    def inflation(self, count: float) -> float:
        """By how much correlation multiplies the variance of a mean of ``count`` points."""
        r = self.correlation
        return float((1 + r) / (1 - r) - 2 * r * (1 - r**count) / (count * (1 - r) ** 2))


@dataclass(frozen=True, slots=True)
class Clipped:
    """``values`` [n] without outliers; ``least``: points that a level must have to be one."""

    values: Floats
    least: int


def clipped(values: Floats) -> Clipped:
    """Outliers moved to FAR noise sd from the median of their neighbourhood.

    The more outliers there are, the more of them meet by chance, and the more points that agree
    are wanted. From MODE on they are no outliers but a second mode: they stay, and are noise.
    """
    n = len(values)
    found = _clip(values, LEAST_POINTS - 1, _spread(values))
    share = float(np.mean(found != values))
    if share <= MODE:
        chance = (math.comb(2 * m - 1, m) * share**m * n for m in range(LEAST_POINTS, MOST_POINTS))
    else:
        found = values
        rare = share if share <= EVEN else 0.0
        chance = (rare**m * n for m in range(LEAST_POINTS, MOST_POINTS))
    least = next((m for m, one in enumerate(chance, LEAST_POINTS) if one < CLUSTER), MOST_POINTS)
    if share <= MODE and least > LEAST_POINTS:
        found = _clip(values, least - 1, _spread(values))
    return Clipped(found, least)


def running_median(values: Floats, reach: int) -> Floats:
    """The median of each point and of the ``reach`` points to each side, fewer at the ends."""
    n = len(values)
    if n <= 2 * reach:
        return np.array([_middle(values[max(0, at - reach) : at + reach + 1]) for at in range(n)])
    windows = np.lib.stride_tricks.sliding_window_view(values, 2 * reach + 1)
    first = [_middle(values[: at + reach + 1]) for at in range(reach)]
    last = [_middle(values[at - reach :]) for at in range(n - reach, n)]
    inner = np.partition(windows, reach, axis=1)[:, reach]
    return np.concatenate([first, inner, last])


def _middle(values: Floats) -> float:
    """The median of a few."""
    return float(median(values.tolist()))


def noise_of(values: Floats) -> Noise:
    """Of [n] points without outliers, n >= 4.

    E (x[t+k] - x[t])^2 = 2 sd^2 (1 - r^k) of an autoregression, so that lags 1 and 2 give both. A
    slope would add its square to the one and four times that to the other, which looks like
    correlation: it is taken out first. So would a step: differences across one are left out.
    """
    slope = _slope(values)
    once = np.diff(values) - slope
    twice = values[2:] - values[:-2] - slope[1:] - slope[:-1]
    jumps = _jumps(values, once, slope)
    first = _mean_square(once[~jumps])
    second = _mean_square(twice[~(jumps[1:] | jumps[:-1])])
    least = _rounding(values)
    if first <= least**2:
        return Noise(least)
    correlation = _believed(second / first - 1, len(values))
    return Noise(max(math.sqrt(first / (2 * (1 - correlation))), least), correlation)


def _believed(correlation: float, n: int) -> float:
    """A correlation as n points show it: shrunk towards 0 where it is small for so few points, then
    with some of its standard error added, and at most what so few points can show.
    """
    correlation = max(correlation, 0.0)
    shrunk = correlation**3 / (correlation**2 + (SHRUNK / n) ** 2)
    return min(shrunk + DOUBT / math.sqrt(n), n / (n + FEW), MAX_CORRELATION)


def _jumps(values: Floats, differences: Floats, slope: Floats) -> NDArray[np.bool_]:
    """[n - 1] which differences cross a step: far out, between medians of LEAST_POINTS to each side
    that lie as far apart. Of many there is none: they are a second mode.
    """
    n, m = len(values), LEAST_POINTS
    found = np.zeros(n - 1, dtype=bool)
    if n < 2 * m:
        return found
    far = JUMP * MAD_TO_SD * float(np.median(np.abs(differences)))
    middles = np.median(np.lib.stride_tricks.sliding_window_view(values, m), axis=1)
    apart = middles[m:] - middles[:-m] - m * slope[m - 1 : n - m]
    inner = differences[m - 1 : n - m]
    found[m - 1 : n - m] = (np.abs(inner) > far) & (np.abs(apart) > far) & (inner * apart > 0)
    if int(np.sum(found)) > max(1.0, STEPS * n):
        found[:] = False
    return found


def _slope(values: Floats) -> Floats:
    """[n - 1] how much each point differs from the last because the level moves; a step is none.

    The running median of differences SLOPE_LAG apart, of which a step touches so many: none is
    known of fewer than four times as many points.
    """
    if len(values) < 4 * SLOPE_LAG:
        return np.zeros(len(values) - 1)
    slope = running_median((values[SLOPE_LAG:] - values[:-SLOPE_LAG]) / SLOPE_LAG, SLOPE_REACH)
    lost = SLOPE_LAG - 1
    return np.pad(slope, (lost // 2, lost - lost // 2), mode="edge")


def _mean_square(differences: Floats) -> float:
    """Of [n] differences, less the few that are far out."""
    if not len(differences):
        return 0.0
    far = FAR * MAD_TO_SD * float(np.median(np.abs(differences)))
    is_far = np.abs(differences) > far
    if float(np.mean(is_far)) <= MODE:
        differences = np.clip(differences, -far, far)
    return float(np.mean(differences**2))


def weekly(values: Floats, days: NDArray[np.int64]) -> Floats:
    """What the day of the week adds to each point [n]; zeros where it adds nothing for certain.

    ``days`` [n]: the day's number since any Monday. A day's part is the median of how far its
    points lie from the median of the week around them; whether there is any is an F test.
    """
    nothing = np.zeros(len(values))
    weekday = days % DAYS
    found = np.unique(weekday)
    if len(values) < MIN_WEEKS * DAYS or len(found) < 2 or days[-1] - days[0] < MIN_WEEKS * DAYS:
        return nothing
    padded = np.pad(values, DAYS // 2, mode="reflect")
    level = np.lib.stride_tricks.sliding_window_view(padded, DAYS).mean(axis=1)
    apart = clipped_residuals(values - level)
    groups = [apart[weekday == day] for day in found]
    if min(len(group) for group in groups) < 2:
        return nothing
    total = float(np.mean(apart))
    between = sum(len(group) * (float(np.mean(group)) - total) ** 2 for group in groups)
    within = sum(float(np.sum((group - np.mean(group)) ** 2)) for group in groups)
    dfs = len(found) - 1, len(values) - len(found)
    if between * dfs[1] <= SEASON_F * within * dfs[0]:
        return nothing
    effect = dict(zip(found.tolist(), (float(np.median(group)) for group in groups), strict=True))
    part = np.array([effect[day] for day in weekday.tolist()])
    return part - float(np.mean(part))


def clipped_residuals(residuals: Floats) -> Floats:
    """[n] residuals around 0, at most FAR of their spread away."""
    middle = float(np.median(residuals))
    spread = MAD_TO_SD * float(np.median(np.abs(residuals - middle)))
    if spread == 0:
        return residuals
    return np.clip(residuals, middle - FAR * spread, middle + FAR * spread)


def _clip(values: Floats, reach: int, spread: float) -> Floats:
    level = running_median(values, reach)
    return np.clip(values, level - FAR * spread, level + FAR * spread)


def _spread(values: Floats) -> float:
    """The noise sd, robustly; 0 where most neighbours are equal."""
    return MAD_TO_SD * float(np.median(np.abs(np.diff(values)))) / math.sqrt(2)


def _rounding(values: Floats) -> float:
    """The least noise that floating point lets believe."""
    return 1e-9 * max(float(np.max(np.abs(values))), 1e-3)
