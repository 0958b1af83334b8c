"""Where numbers change: steps by penalised likelihood, each tested; what creeps is one drift.

n: points. Numbers are on a scale where noise adds, logarithms for speeds. Pure: no clock, no file.

What decided about the engine. ruptures finds the candidates: its KernelCPD (exact PELT in C, 0.2 ms
for 365 points) divides a series as well as possible, many steps at once, where binary segmentation
errs, and its Python classes take 40 to 2,000 times as long. It has no test, no drift and no idea of
correlated noise, outliers or a second mode: those are here. Apache Otava (E-divisive means and a t
test) is not the engine: of silent series of 200 points it alarms in one of five with its defaults,
reports a drift as steps, and pins a numpy that PyTorch's users do not have. It is what the study
measures against: reports/detect.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perfbench.history.detection.noise import Floats, Noise, clipped, noise_of, weekly
from perfbench.history.nouns import ChangeKind

MIN_POINTS = 6  # that a segment must have before anything is found in it
NEAR = 30  # points around a change whose own noise counts where it is larger
STRICTNESS = 7.5  # z of a change is at least sqrt(2 ln n + this): calibrated, reports/detect.md
PROPOSED = 0.5  # of that z is enough to estimate the noise again, where there are few points
SURE = 200  # points from which on all of it is wanted
WEAK = 0.6  # of that, squared, is the penalty of a candidate
LEAST_DF = 10.0  # of the noise of 18 points or more; the correlation itself is known so little
MIN_DRIFT = 10  # points that a drift takes at least; what is quicker is a step
CONFIDENCE = 0.95
NEIGHBOURS = 3  # points within which two places are one


@dataclass(frozen=True, slots=True)
class Shift:
    """A change in numbers: ``before`` and ``place`` are the indexes of the last point of the old
    level and the first of the new one (of a drift: its first and its last point).

    ``size``, ``low`` and ``high``: of the new level minus the old one, with its 95 % interval.
    ``z``: the size over its standard error, signed, as a normal quantile. ``slack``: how many
    points more data may still move the place.
    """

    kind: ChangeKind
    before: int
    place: int
    old_level: float
    size: float
    low: float
    high: float
    z: float
    slack: int


def find_shifts(
    values: Floats, days: NDArray[np.int64] | None = None, *, strictness: float = STRICTNESS
) -> list[Shift]:
    """The changes of ``values`` [n], all finite, oldest first.

    ``days`` [n]: the day of each point, where a weekly pattern is to be taken out.
    """
    if len(values) < MIN_POINTS or float(np.ptp(values)) == 0:
        return []
    least_z = math.sqrt(2 * math.log(len(values)) + strictness)
    without = clipped(values if days is None else values - weekly(values, days))
    level, least = without.values, without.least
    noise = noise_of(level)
    places = _places(level, noise, _proposed(len(level)) * least_z, least)
    if places:  # once more, with the noise of what remains
        noise = noise_of(level - _fit(level, places))
        places = _places(level, noise, least_z, least)
    if not places:  # each step of a ramp may fail its test, where the ramp does not
        drift = _drift(level, [], noise)
        if drift is not None:
            drift = _drift(level, [], noise_of(level - _line(drift, len(level))))
        return [] if drift is None or abs(drift.z) < least_z else [drift]
    steps = [_step(level, places, at, noise) for at in range(len(places))]
    return _with_drifts(level, steps, noise, least_z)


def _proposed(n: int) -> float:
    """The share of the bound on z from which a place is one around which the noise is estimated
    again: small for few points, whose first estimate of a correlation is poor.
    """
    return PROPOSED + (1 - PROPOSED) * min(n / SURE, 1.0)


def _places(level: Floats, noise: Noise, least_z: float, least: int) -> list[int]:
    """The first index of each new level: the best candidates, less those that fail their test."""
    import ruptures

    if len(level) < 2 * least:
        return []
    scale = noise.sd * math.sqrt(noise.inflation(NEAR))
    engine = ruptures.KernelCPD(kernel="linear", min_size=least)
    found = engine.fit((level - float(np.median(level))) / scale).predict(pen=WEAK * least_z**2)
    places = [int(place) for place in found[:-1]]
    for _ in range(2):
        places = _kept(level, places, noise, least_z)
        places = _moved(level, places, least)
    return _kept(level, places, noise, least_z)


def _kept(level: Floats, places: list[int], noise: Noise, least_z: float) -> list[int]:
    """Without those that differ least from chance, one after the other."""
    places = list(places)
    tests = [abs(_z(level, places, at, noise)) for at in range(len(places))]
    while places:
        weakest = int(np.argmin(tests))
        if tests[weakest] >= least_z:
            break
        del places[weakest], tests[weakest]
        for at in (weakest - 1, weakest):
            if 0 <= at < len(places):
                tests[at] = abs(_z(level, places, at, noise))
    return places


def _moved(level: Floats, places: list[int], least: int) -> list[int]:
    """Each place where it divides the points between its neighbours best."""
    moved = list(places)
    for at in range(len(moved)):
        start = moved[at - 1] if at else 0
        end = moved[at + 1] if at + 1 < len(moved) else len(level)
        part = level[start:end]
        counts = np.arange(least, len(part) - least + 1)
        sums = np.cumsum(part - part.mean())[counts - 1]
        gain = sums**2 / (counts * (len(part) - counts))
        moved[at] = start + int(counts[int(np.argmax(gain))])
    return moved


def _around(places: Sequence[int], at: int, n: int) -> tuple[int, int, int]:
    """(start of the old level, the place, end of the new level)."""
    return (
        places[at - 1] if at else 0,
        places[at],
        places[at + 1] if at + 1 < len(places) else n,
    )


def _fit(level: Floats, places: Sequence[int]) -> Floats:
    """The mean of its level, for each point."""
    parts = np.split(level, list(places))
    return np.concatenate([np.full(len(part), part.mean()) for part in parts])


def _local(level: Floats, start: int, place: int, end: int, noise: Noise) -> Noise:
    """The noise, or that of the points near ``place`` where they are noisier."""
    old, new = level[max(start, place - NEAR) : place], level[place : min(end, place + NEAR)]
    df = len(old) + len(new) - 2
    total = float(np.sum((old - old.mean()) ** 2) + np.sum((new - new.mean()) ** 2))
    here = math.sqrt(total / df) if df > NEAR // 2 else 0.0
    return replace(noise, sd=max(noise.sd, here))


def _test(level: Floats, places: Sequence[int], at: int, noise: Noise) -> tuple[float, float]:
    """(new level minus old, its standard error)."""
    start, place, end = _around(places, at, len(level))
    here = _local(level, start, place, end, noise)
    size = float(level[place:end].mean() - level[start:place].mean())
    return size, math.sqrt(here.mean_variance(place - start) + here.mean_variance(end - place))


def _df(n: int, levels: int, noise: Noise) -> float:
    """Of a variance from the differences of n points: two thirds of so many, fewer where they are
    correlated.
    """
    return max(2 * n / (3 * noise.inflation(n)) - levels, min(n / 2, LEAST_DF))


def _z(level: Floats, places: Sequence[int], at: int, noise: Noise) -> float:
    """The t statistic of a change as the normal quantile of the same probability."""
    size, error = _test(level, places, at, noise)
    return normal_quantile(size / error, _df(len(level), len(places) + 1, noise))


def normal_quantile(t: float, df: float) -> float:
    """z with the tail probability of Student's t; far out, where both underflow, by their
    logarithms (Wallace 1959).
    """
    return math.copysign(math.sqrt(df * math.log1p(t * t / df)) * (8 * df + 1) / (8 * df + 3), t)


def _step(level: Floats, places: Sequence[int], at: int, noise: Noise) -> Shift:
    from scipy.special import stdtrit

    start, place, _ = _around(places, at, len(level))
    size, error = _test(level, places, at, noise)
    df = _df(len(level), len(places) + 1, noise)
    far = float(stdtrit(df, (1 + CONFIDENCE) / 2)) * error
    ratio = (size / noise.sd) ** 2 / noise.inflation(NEAR)
    return Shift(
        ChangeKind.STEP,
        place - 1,
        place,
        float(level[start:place].mean()),
        size,
        size - far,
        size + far,
        normal_quantile(size / error, df),
        max(NEIGHBOURS, math.ceil(min(11 / ratio, len(level)))),
    )


def _with_drifts(level: Floats, steps: list[Shift], noise: Noise, least_z: float) -> list[Shift]:
    """Neighbouring steps of one direction that a ramp explains better are one drift."""
    found: list[Shift] = []
    at = 0
    while at < len(steps):
        last = at
        while last + 1 < len(steps) and steps[last + 1].size * steps[at].size > 0:
            last += 1
        start = steps[at - 1].place if at else 0
        end = steps[last + 1].place if last + 1 < len(steps) else len(level)
        drift = _drift(level[start:end], [one.place - start for one in steps[at : last + 1]], noise)
        if drift is None or abs(drift.z) < least_z:
            found += steps[at : last + 1]
        else:
            before, place = drift.before + start, drift.place + start
            found.append(replace(drift, before=before, place=place))
        at = last + 1
    return found


def _line(drift: Shift, n: int) -> Floats:
    """[n] what a drift adds to the level."""
    return drift.size * np.clip((np.arange(n) - drift.before) / (drift.place - drift.before), 0, 1)


def _drift(level: Floats, places: list[int], noise: Noise) -> Shift | None:
    """The ramp between two flat parts that fits [n] points better than steps at ``places`` do.

    Better: by the Bayesian information criterion, with a margin, in units of the noise.
    """
    from scipy.special import stdtrit

    n = len(level)
    if n < MIN_DRIFT + 2:
        return None
    corners = np.unique(np.linspace(0, n - 1, min(n, 33)).round().astype(int))
    firsts, lasts = np.meshgrid(corners, corners, indexing="ij")
    wide = lasts - firsts >= MIN_DRIFT
    firsts, lasts = firsts[wide], lasts[wide]
    ramps = np.clip((np.arange(n) - firsts[:, None]) / (lasts - firsts)[:, None], 0, 1)
    ramps -= ramps.mean(axis=1, keepdims=True)
    centred = level - level.mean()
    squares = np.sum(ramps**2, axis=1)
    slopes = ramps @ centred / squares
    gains = slopes**2 * squares
    best = int(np.argmax(gains))
    left = float(np.sum(centred**2))
    unit = noise.sd**2 * noise.inflation(NEAR)
    of_steps = float(np.sum((level - _fit(level, places)) ** 2))
    more = 1.5 if len(places) < 2 else -2.0 * (len(places) - 1)
    if (of_steps - (left - float(gains[best]))) / unit < more * math.log(n):
        return None
    size, error = float(slopes[best]), math.sqrt(unit / float(squares[best]))
    df = _df(n, 4, noise)
    far = float(stdtrit(df, (1 + CONFIDENCE) / 2)) * error
    first, last = int(firsts[best]), int(lasts[best])
    return Shift(
        ChangeKind.DRIFT,
        first,
        last,
        float(level.mean() + slopes[best] * ramps[best][0]),
        size,
        size - far,
        size + far,
        normal_quantile(size / error, df),
        last - first,
    )
