"""Series whose changes are known: noise of real kinds, steps, drifts. The noise sd is 1 %, unless a
drift asks for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
LEVEL, SD = 10_000.0, 0.01
DRIFT, DRIFT_POINTS = 0.05, 50


def normal(rng: Generator, n: int) -> Numbers:
    return rng.normal(size=n)


def heavy(rng: Generator, n: int) -> Numbers:
    """Student's t of 3 degrees of freedom, of variance 1."""
    return rng.standard_t(3, size=n) / np.sqrt(3)


def correlated(rng: Generator, n: int, correlation: float = 0.4) -> Numbers:
    """A first-order autoregression of variance 1."""
    found = np.empty(n)
    last = rng.normal()
    for at, shock in enumerate(rng.normal(size=n) * np.sqrt(1 - correlation**2)):
        last = found[at] = correlation * last + shock
    return found


def outliers(rng: Generator, n: int) -> Numbers:
    """Every twentieth point or so is 10 sd off, to either side, more or less."""
    off = rng.random(n) < 0.05
    return rng.normal(size=n) + off * rng.normal(size=n) * 10


def two_modes(rng: Generator, n: int) -> Numbers:
    """Three of ten runs in a second mode, 6 sd of the first away; together of variance 1."""
    found = rng.normal(size=n) + 6 * (rng.random(n) < 0.3)
    return (found - 1.8) / np.sqrt(1 + 36 * 0.21)


def rare_mode(rng: Generator, n: int) -> Numbers:
    """15 in a hundred runs in a second mode, 60 sd of the first away; together of variance 1."""
    found = rng.normal(size=n) + 60 * (rng.random(n) < 0.15)
    return (found - 9) / np.sqrt(1 + 3600 * 0.1275)


def growing(rng: Generator, n: int) -> Numbers:
    """The sd grows from 0.5 to 2."""
    return rng.normal(size=n) * np.linspace(0.5, 2, n)


def weekly(rng: Generator, n: int) -> Numbers:
    """Saturday and Sunday are 3 sd higher; day 0 is a Monday."""
    return rng.normal(size=n) + 3 * (np.arange(n) % 7 >= 5)


def rounded(rng: Generator, n: int) -> Numbers:
    """Whole numbers, two of three equal."""
    return np.round(rng.normal(size=n) * 0.5)


NOISES: Mapping[str, Callable[[Generator, int], Numbers]] = MappingProxyType(
    {
        "normal": normal,
        "heavy-tailed": heavy,
        "correlated 0.4": correlated,
        "outliers": outliers,
        "two modes": two_modes,
        "a rare mode": rare_mode,
        "growing variance": growing,
        "weekly": weekly,
        "whole numbers": rounded,
        "gaps": normal,
    }
)


@dataclass(frozen=True, slots=True)
class Planted:
    """A made series: its values [n], the days they are of, and where its changes are."""

    values: Numbers
    days: NDArray[np.int64]
    places: tuple[int, ...] = ()
    sizes: tuple[float, ...] = ()  # of ln(value)


def silent(rng: Generator, noise: str, n: int, sd: float = SD) -> Planted:
    """Of one level; of ``gaps``, every fifth day has no point, at random."""
    days = np.arange(n, dtype=np.int64)
    if noise == "gaps":
        days = np.sort(rng.choice(n + n // 4, size=n, replace=False)).astype(np.int64)
    return Planted(LEVEL * np.exp(sd * NOISES[noise](rng, n)), days)


def with_steps(
    rng: Generator, noise: str, n: int, places: tuple[int, ...], sizes: tuple[float, ...]
) -> Planted:
    """``sizes`` are of ln(value): the level from each place on."""
    found = silent(rng, noise, n)
    shift = sum(
        (size * (np.arange(n) >= place) for place, size in zip(places, sizes, strict=True)),
        np.zeros(n),
    )
    return Planted(found.values * np.exp(shift), found.days, places, sizes)


def with_drift(
    rng: Generator,
    noise: str,
    n: int,
    start: int,
    size: float = DRIFT,
    points: int = DRIFT_POINTS,
    sd: float = SD,
) -> Planted:
    """A straight line from ``start`` on, in ln(value), then flat where n lies behind its end."""
    found = silent(rng, noise, n, sd)
    shift = size * np.clip((np.arange(n) - start) / points, 0, 1)
    return Planted(found.values * np.exp(shift), found.days, (start, start + points), (size,))
