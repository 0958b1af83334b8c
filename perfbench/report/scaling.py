"""How a step's time grows with its length: the fitted exponent, next to that of the closed form.

A path that copies more than it needs, or that looks at every key, shows here before it shows
anywhere else: its time grows faster than its work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nsa.config import ModelConfig
from perfbench.gate import CONFIDENCE, stats
from perfbench.records import Cell, Run
from perfbench.report.rows import Row, is_window, without
from perfbench.report.workloads import Table, model_of
from perfbench.roofline import step_flops, step_min_bytes
from perfbench.text import NULL, escape

MIN_LENGTHS = 3  # fewer leave nothing to estimate the exponent's error from
# Exponents above the closed form's by less than this are caches and tiles, not another algorithm.
SLACK = 0.15
TITLE = "Growth with the length"


@dataclass(frozen=True, slots=True)
class Growth:
    """Time ~ S ** exponent over the lengths of one series, which is a cell without its length.

    ``low`` and ``high``: two-sided 95 % of the exponent, by the scatter about the line (n - 2
    degrees of freedom). ``last``: the exponent between the two longest lengths, ``last_low`` its
    least value within the 95 % bands of both; None where a band is unknown. ``closed_form`` and
    ``closed_form_last``: the same two exponents of max(FLOPs / their first, bytes / their first);
    None where the run's matrix cannot be read.
    """

    like: Cell
    lengths: tuple[int, ...]
    exponent: float
    low: float
    high: float
    last: float
    last_low: float | None
    closed_form: float | None
    closed_form_last: float | None

    @property
    def is_superlinear(self) -> bool:
        """Whether time surely grows faster than the closed form, over all lengths or from the last
        but one to the last, by more than SLACK.
        """
        if self.closed_form is None or self.closed_form_last is None:
            return False
        over_all = self.low > self.closed_form + SLACK
        at_the_end = self.last_low is not None and self.last_low > self.closed_form_last + SLACK
        return over_all or at_the_end


def growths(run: Run, rows: Sequence[Row]) -> list[Growth]:
    """One for each series with at least MIN_LENGTHS measured lengths, in the order of ``rows``."""
    model = model_of(run)
    series: dict[object, list[Row]] = {}
    for row in rows:
        if row.step_s is not None:
            series.setdefault(without(row.cell.axes, "seq_len"), []).append(row)
    found = []
    for same in series.values():
        same.sort(key=lambda row: row.cell.axes.seq_len)
        if len({row.cell.axes.seq_len for row in same}) >= MIN_LENGTHS:
            axes = same[0].cell.axes
            is_known = not (is_window(axes) or axes.is_own_step)
            found.append(_growth(same, model if is_known else None))
    return found


def table(found: Sequence[Growth]) -> Table | None:
    """None where no series is long enough."""
    if not found:
        return None
    head = [
        "cells",
        "lengths",
        "exponent (95 %)",
        "closed form",
        "last step",
        "closed form",
        "sign",
    ]
    lines = [
        [
            escape(_name(one.like)),
            f"{one.lengths[0]:,} to {one.lengths[-1]:,} ({len(one.lengths)})",
            f"{one.exponent:.2f} ({one.low:.2f} to {one.high:.2f})",
            _exponent(one.closed_form),
            _exponent(one.last),
            _exponent(one.closed_form_last),
            "**superlinear**" if one.is_superlinear else NULL,
        ]
        for one in found
    ]
    note = (
        "Milliseconds a step ~ seq_len^exponent, by least squares on logarithms. Last step is"
        " the exponent between the two longest lengths. The closed form counts multiply-adds or"
        " bytes, whichever grows faster. Superlinear: the 95 % bound of one of the two lies above"
        f" its closed form by more than {SLACK:g}. A smaller exponent means that short steps pay"
        " for launches."
    )
    return Table(TITLE, head, lines, note, left=2)


def notes(found: Sequence[Growth]) -> list[str]:
    """A sentence for each superlinear series, Markdown already."""
    return [
        (
            f"time grows faster than the work: {escape(_name(one.like))}, exponent"
            f" {one.exponent:.2f} (last step {one.last:.2f}), closed form"
            f" {_exponent(one.closed_form)} (last step {_exponent(one.closed_form_last)})"
        )
        for one in found
        if one.is_superlinear
    ]


def _exponent(value: float | None) -> str:
    return NULL if value is None else f"{value:.2f}"


def _name(like: Cell) -> str:
    parts = (part for part in like.cell_id.split(",") if not part.startswith("seq_len="))
    return ", ".join(parts)


def _growth(rows: Sequence[Row], model: ModelConfig | None) -> Growth:
    lengths = [row.cell.axes.seq_len for row in rows]
    times_s = [row.step_s or 0.0 for row in rows]
    exponent, low, high = fit(lengths, times_s)
    before, after = rows[-2], rows[-1]
    step = math.log(lengths[-1] / lengths[-2])
    last_low = None
    # the largest speed is the least time
    if before.low and after.high and before.tokens_per_step and after.tokens_per_step:
        slowest_before = before.tokens_per_step / before.low
        fastest_after = after.tokens_per_step / after.high
        last_low = math.log(fastest_after / slowest_before) / step
    work: list[tuple[float, ...]] = []  # of multiply-adds, and of bytes, over the lengths
    if model is not None:
        work = list(zip(*(_work(model, row.cell.axes) for row in rows), strict=True))
    return Growth(
        like=rows[0].cell.axes,
        lengths=tuple(lengths),
        exponent=exponent,
        low=low,
        high=high,
        last=math.log(times_s[-1] / times_s[-2]) / step,
        last_low=last_low,
        closed_form=max((_slope(lengths, w) for w in work), default=None),
        closed_form_last=max((math.log(w[-1] / w[-2]) / step for w in work), default=None),
    )


def fit(lengths: Sequence[int], times_s: Sequence[float]) -> tuple[float, float, float]:
    """(exponent, low, high) of time ~ length ** exponent: the least-squares slope of ln time over
    ln length, with its two-sided 95 % interval (Student's t, n - 2 degrees of freedom).

    At least three different lengths, all times above 0.
    """
    x, y = [math.log(n) for n in lengths], [math.log(t) for t in times_s]
    slope, n = _slope(lengths, times_s), len(x)
    mean_x, mean_y = math.fsum(x) / n, math.fsum(y) / n
    residual = math.fsum(
        (b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True)
    )
    spread = math.fsum((a - mean_x) ** 2 for a in x)
    half = stats.t_quantile((1 + CONFIDENCE) / 2, n - 2) * math.sqrt(residual / (n - 2) / spread)
    return slope, slope - half, slope + half


def _slope(lengths: Sequence[int], values: Sequence[float]) -> float:
    x, y = [math.log(n) for n in lengths], [math.log(v) for v in values]
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    spread = math.fsum((a - mean_x) ** 2 for a in x)
    return math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread


def _work(model: ModelConfig, cell: Cell) -> tuple[float, float]:
    """(multiply-adds, least bytes) of a step."""
    flops = step_flops(
        model,
        workload=cell.workload,
        batch=cell.batch,
        tokens=cell.seq_len,
        dense=cell.is_dense,
    )
    least_bytes = step_min_bytes(
        model,
        workload=cell.workload,
        batch=cell.batch,
        tokens=cell.seq_len,
        dtype=cell.dtype,
        dense=cell.is_dense,
    )
    return flops, least_bytes
