"""The 95 % interval of what was measured of a cell within one session."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from perfbench.gate import stats
from perfbench.gate.coverage import usable
from perfbench.records import Replicate

if TYPE_CHECKING:
    from perfbench.records import Baseline

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
    found = {}
    for cell_id, half in _halves(logs, family).items():
        middle = math.fsum(logs[cell_id]) / len(logs[cell_id])
        found[cell_id] = (math.exp(middle - half), math.exp(middle + half))
    return found


def prior_half_pct(baseline: Baseline) -> dict[str, float]:
    """Half the 95 % interval of each stored cell, in %: how unsure a cell is before anything of
    tonight is measured. A cell whose noise is not known is not in it.
    """
    logs = {cell_id: stats.logs(cell.tok_per_s) for cell_id, cell in baseline.cells.items()}
    family = {cell_id: cell.host_bound for cell_id, cell in baseline.cells.items()}
    halves = _halves(logs, family)
    return {cell_id: round(100 * math.expm1(half), 6) for cell_id, half in halves.items()}


def least_sure_first(
    cell_ids: Iterable[str], half_pct: Mapping[str, float], groups: int = 4
) -> list[list[str]]:
    """Cells in groups of about one size by ``half_pct``, the widest interval first; one that nobody
    knows is the least sure. Within a group the order says nothing.
    """
    ordered = sorted(cell_ids, key=lambda one: (-half_pct.get(one, math.inf), one))
    count = min(groups, len(ordered))
    bounds = [len(ordered) * place // count for place in range(count + 1)] if count else []
    return [ordered[begin:end] for begin, end in pairwise(bounds)]


def _halves(
    logs: Mapping[str, Sequence[float]], family: Mapping[str, bool | None]
) -> dict[str, float]:
    """Half the interval of each cell's mean logarithm, where its noise is known."""
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
            found[cell_id] = min(half, WIDEST)
    return found


def _prior_of(own: list[tuple[float, float]]) -> stats.Prior | None:
    return stats.prior_of([variance for variance, _ in own], [df for _, df in own])
