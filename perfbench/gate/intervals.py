"""The 95 % interval of what was measured of a cell within one session."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from perfbench.gate import stats
from perfbench.gate.coverage import usable
from perfbench.records import Replicate

CONFIDENCE = 0.95  # of a band, two-sided
WIDEST = 7.0  # half a band, in logarithms: a thousandfold says what more would, and is a number
Band = tuple[float, float]


def _speed(row: Replicate) -> float | None:
    return row.tok_per_s


def bands(
    by_cell: Mapping[str, Sequence[Replicate]],
    value: Callable[[Replicate], float | None] = _speed,
) -> dict[str, Band]:
    """(low, high) of the geometric mean of ``value``, two-sided 95 %, for every cell whose noise is
    known. ``value`` is tok/s by default, and above 0; null in a row that does not have it.

    The interval is of the processes of one session; the variance between sessions comes on top.
    Variances of its logarithm are moderated within their family (host bound or not), as in the
    gate; one process alone has its family's.
    """
    logs: dict[str, list[float]] = {}
    family: dict[str, bool | None] = {}
    for cell_id in sorted(by_cell):
        good = usable(by_cell[cell_id])
        if values := [one for row in good if (one := value(row)) is not None]:
            logs[cell_id] = stats.logs(values)
            known = [row.host_bound for row in good if row.host_bound is not None]
            family[cell_id] = any(known) if known else None
    own = {cell_id: (stats.variance_of(lns), len(lns) - 1.0) for cell_id, lns in logs.items()}
    priors = {
        kind: _prior_of([own[cell_id] for cell_id in own if family[cell_id] is kind])
        for kind in (True, False, None)
    }
    found = {}
    for cell_id, lns in logs.items():
        variance, df = stats.moderated(*own[cell_id], priors[family[cell_id]])
        if df > 0:
            half = stats.t_quantile((1 + CONFIDENCE) / 2, df) * math.sqrt(variance / len(lns))
            middle = math.fsum(lns) / len(lns)
            half = min(half, WIDEST)
            found[cell_id] = (math.exp(middle - half), math.exp(middle + half))
    return found


def _prior_of(own: list[tuple[float, float]]) -> stats.Prior | None:
    return stats.prior_of([variance for variance, _ in own], [df for _, df in own])
