"""Whether the samples of one process have two modes: a machine that changes state while it is
measured.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

LEAST_SAMPLES = 5
LEAST_SHARE = 0.2  # of the samples in the smaller mode: fewer are outliers
LEAST_GAP = 0.01  # ln: closer modes change no verdict
# Samples -> how many within-mode sd the best split of ONE mode reaches by chance: above the 99.5 %
# quantiles of the normal, uniform, exponential, lognormal and Student distributions. Fewer than 12
# samples show two modes only by chance.
_CHANCE = (
    (5, 24.0),
    (6, 17.0),
    (7, 15.0),
    (8, 14.0),
    (10, 13.5),
    (12, 9.0),
    (15, 8.8),
    (20, 7.5),
    (30, 6.2),
    (50, 5.6),
    (100, 4.9),
    (300, 4.4),
    (1000, 4.1),
)


@dataclass(frozen=True, slots=True)
class Modes:
    """Two levels of the samples (their unit), how far apart they are (ln), and the share of the
    samples in the upper one.
    """

    low: float
    high: float
    gap: float
    share_high: float


def modes(samples: Sequence[float]) -> Modes | None:
    """The two modes of positive samples; None where one mode explains them, or fewer than 5 are
    there.

    The sorted logarithms are split where the sum of squares within the two sides is least; the
    distance of the sides' means, in standard deviations within them, must exceed what chance makes
    of one mode. ValueError for samples that are not positive.
    """
    if any(not (x > 0 and math.isfinite(x)) for x in samples):
        raise ValueError("samples must be positive and finite; leave failed ones out")
    n = len(samples)
    if n < LEAST_SAMPLES:
        return None
    ordered = sorted(math.log(x) for x in samples)
    centre = math.fsum(ordered) / n
    x = [value - centre for value in ordered]  # centred, or the squares would cancel
    total, squares = list(accumulate(x)), math.fsum(value * value for value in x)
    least = max(2, math.ceil(LEAST_SHARE * n))
    between = {
        k: total[k - 1] ** 2 / k + (total[-1] - total[k - 1]) ** 2 / (n - k)
        for k in range(least, n - least + 1)
    }
    split = max(between, key=lambda k: between[k])
    low, high = total[split - 1] / split, (total[-1] - total[split - 1]) / (n - split)
    sd = math.sqrt(max(squares - between[split], 0.0) / (n - 2))
    if high - low < max(LEAST_GAP, _chance(n) * sd):
        return None
    return Modes(math.exp(centre + low), math.exp(centre + high), high - low, (n - split) / n)


def _chance(n: int) -> float:
    """The table at ``n``, linear in ln n between its rows; constant beyond them."""
    at = bisect_right([row[0] for row in _CHANCE], n)
    if at == len(_CHANCE):
        return _CHANCE[-1][1]
    (n0, y0), (n1, y1) = _CHANCE[at - 1], _CHANCE[at]
    return y0 + (y1 - y0) * math.log(n / n0) / math.log(n1 / n0)
