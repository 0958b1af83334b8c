"""The 95 % interval of a cell's speed within one session."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from perfbench.gate import stats
from perfbench.gate.coverage import usable
from perfbench.records import Replicate

CONFIDENCE = 0.95  # of a band, two-sided
WIDEST = 7.0  # half a band, in logarithms: a thousandfold says what more would, and is a number
Band = tuple[float, float]


def bands(by_cell: Mapping[str, Sequence[Replicate]]) -> dict[str, Band]:
    """(low, high) of the geometric mean of tok/s, two-sided 95 %, for every cell whose noise is
    known.

    The interval is of the processes of one session; the variance between sessions comes on top.
    Variances of ln tok/s are moderated within their family (host bound or not), as in the gate;
    one process alone has its family's.
    """
    logs: dict[str, list[float]] = {}
    family: dict[str, bool | None] = {}
    for cell_id in sorted(by_cell):
        if good := usable(by_cell[cell_id]):
            logs[cell_id] = stats.logs([row.tok_per_s for row in good if row.tok_per_s is not None])
            known = [row.host_bound for row in good if row.host_bound is not None]
            family[cell_id] = any(known) if known else None
    own = {
        cell_id: (stats.variance_of(values), len(values) - 1.0) for cell_id, values in logs.items()
    }
    priors = {
        kind: _prior_of([own[cell_id] for cell_id in own if family[cell_id] is kind])
        for kind in (True, False, None)
    }
    found = {}
    for cell_id, values in logs.items():
        variance, df = stats.moderated(*own[cell_id], priors[family[cell_id]])
        if df > 0:
            half = stats.t_quantile((1 + CONFIDENCE) / 2, df) * math.sqrt(variance / len(values))
            middle = math.fsum(values) / len(values)
            half = min(half, WIDEST)
            found[cell_id] = (math.exp(middle - half), math.exp(middle + half))
    return found


def _prior_of(own: list[tuple[float, float]]) -> stats.Prior | None:
    return stats.prior_of([variance for variance, _ in own], [df for _, df in own])
