"""How a cell's speed moves between machine starts: estimated from A/A runs, and read back for the
baseline that the gate reads.

All processes of a start share its deviation, so no number of replicates shows it: only other starts
do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfbench.gate import stats

CONFIDENCE = 0.95  # of the upper bound, one-sided
Starts = Mapping[Any, Sequence[float]]  # start -> ln speed of its processes


@dataclass(frozen=True, slots=True)
class StartVariance:
    """The sd of ln speed between ``starts`` machine starts, without the part between processes.

    ``own_variance``: of this cell's starts alone, below zero by chance. ``sd``: shrunk to its
    family where that is larger.
    ``upper``: its bound, nominally at 95 %, with ``df`` degrees of freedom. ``gate_sd``: what the
    gate takes, see `gate_sd`.
    """

    starts: int
    own_variance: float
    sd: float
    upper: float
    df: float
    gate_sd: float


def gate_sd(sd: float, upper: float) -> float:
    """The bound, or what is assumed without any start where that is less; never less than the
    estimate.

    Too small a value costs missed drops, too large a one only confirmations; and few starts, whose
    bound is far, must not make the gate worse than none. Simulated with three starts: an
    sd of 0.3 % halves the confirmations and no 3 % drop of 1,000 is missed; one of 1 % that all
    cells share lets 2 % of such drops pass the screen.
    """
    return max(sd, min(upper, stats.ASSUMED_BETWEEN_SESSION_SD))


def estimate(family: Mapping[str, Starts]) -> dict[str, StartVariance]:
    """Every cell of a family of like noise that was seen in two starts or more; cells of fewer are
    left out.

    Analysis of variance of the unweighted means of the starts: their variance is that between
    starts plus that between processes over their number. Both variances are moderated (Smyth 2004);
    that between starts is never shrunk below the cell's own. Cells of one start share some of its
    deviation, so they are worth less than as many independent ones: see
    `independence`. In simulated families of four cells and two to five starts the bound holds for
    90 to 98 % where the cells are alike, and for 82 % of cells at worst where half are three times
    as variable as the rest.
    """
    from scipy.special import chdtri

    cells = {cell_id: starts for cell_id, starts in sorted(family.items()) if len(starts) > 1}
    means = {
        cell_id: {start: math.fsum(one) / len(one) for start, one in starts.items()}
        for cell_id, starts in cells.items()
    }
    within = _moderated({cell_id: variance_within(starts) for cell_id, starts in cells.items()})
    between = {
        cell_id: (stats.variance_of(list(found.values())), len(found) - 1.0)
        for cell_id, found in means.items()
    }
    shrunk = _moderated(between)
    share = independence(
        [means[cell_id] for cell_id in cells], [math.sqrt(shrunk[cell_id][0]) for cell_id in cells]
    )
    variances = {}
    for cell_id, starts in cells.items():
        noise = (
            within[cell_id][0] * math.fsum(1 / len(one) for one in starts.values()) / len(starts)
        )
        variance, df = max(shrunk[cell_id][0], between[cell_id][0]), shrunk[cell_id][1]
        df = max(len(starts) - 1.0, share * df)
        sd = math.sqrt(max(0.0, variance - noise))
        # means closer than their processes explain are chance, and bound nothing
        least = max(variance, noise)
        upper = math.sqrt(max(0.0, least * df / float(chdtri(df, CONFIDENCE)) - noise))
        variances[cell_id] = StartVariance(
            len(starts), between[cell_id][0] - noise, sd, upper, df, gate_sd(sd, upper)
        )
    return variances


def independence(means: Sequence[Mapping[Any, float]], sds: Sequence[float]) -> float:
    """The part of the cells' degrees of freedom that is independent: 1 where each varies by itself,
    1 / cells where all share it.

    ``means`` by start, in units of ``sds``, in two ways, start and cell: the variance of a cell is
    a sum of two mean squares, whose degrees of freedom are Satterthwaite's. 1 / cells too where
    fewer than two cells or common starts say nothing.
    """
    cells = len(means)
    common = sorted(set.intersection(*(set(found) for found in means))) if means else []
    k = len(common)
    if cells < 2 or k < 2:
        return 1 / max(cells, 1)
    centre = [math.fsum(found[start] for start in common) / k for found in means]
    z = [
        [(found[start] - mid) / sd for start in common]
        for found, mid, sd in zip(means, centre, sds, strict=True)
    ]
    shared = [math.fsum(row[at] for row in z) / cells for at in range(k)]
    # mean square of the starts, over the number of cells
    start_part = math.fsum(x * x for x in shared) / (k - 1)
    own_part = math.fsum((row[at] - shared[at]) ** 2 for row in z for at in range(k)) / (
        cells * (k - 1)
    )
    if start_part + own_part <= 0:
        return 1 / cells
    df = (start_part + own_part) ** 2 / (
        start_part**2 / (k - 1) + own_part**2 / ((cells - 1) * (k - 1))
    )
    return df / (cells * (k - 1))


def pooled_sd(variances: Mapping[str, StartVariance]) -> float | None:
    """One sd for a family, from the mean of its variances; None where no cell has two starts."""
    if not variances:
        return None
    return math.sqrt(
        max(0.0, math.fsum(one.own_variance for one in variances.values()) / len(variances))
    )


def variance_within(starts: Starts) -> tuple[float, float]:
    """(variance between the processes of a start, its degrees of freedom)."""
    df = sum(len(one) - 1 for one in starts.values())
    return (
        math.fsum(stats.variance_of(one) * (len(one) - 1) for one in starts.values()) / df
        if df
        else 0.0
    ), float(df)


def _moderated(found: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    prior = stats.prior_of(
        [variance for variance, _ in found.values()], [df for _, df in found.values()]
    )
    return {
        cell_id: stats.moderated(variance, df, prior) for cell_id, (variance, df) in found.items()
    }
