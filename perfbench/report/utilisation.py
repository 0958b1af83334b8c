"""The picture of utilisation: a bar for each measured cell, by shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfbench.report import plots
from perfbench.report.plots import INK
from perfbench.report.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW_IN = 0.19
HEADING = 1.2  # rows that the name of a group takes
HOST = "#b00020"
DIAMOND: dict[str, Any] = {
    "linestyle": "none",
    "marker": "D",
    "markersize": 4.5,
    "markerfacecolor": "white",
    "markeredgecolor": INK,
    "clip_on": False,
    "zorder": 3,
}
BUSY = "GPU busy fraction of the profiled step"


def draw(rows: Sequence[Row], target: Path, title: str) -> int:
    """Write one bar for each measured cell, at most `plots.MAX_BARS`, in groups of one shape;
    return how many, 0 (and no file) where no cell has a utilisation.
    """
    shown = [row for row in rows if row.utilisation_pct is not None][: plots.MAX_BARS]
    if not shown:
        return 0
    several = plots.varying(rows)
    fa2_varies = "fa2" in several and plots.fa2_varies(rows)
    groups: dict[str, list[Row]] = {}
    for row in shown:
        workload = f"{row.cell.axes.workload}  " if "workload" in several else ""
        groups.setdefault(workload + plots.shape(row, several), []).append(row)
    height = len(shown) + HEADING * len(groups)
    each = min(ROW_IN, (plots.MAX_HEIGHT_IN - 1.6) / height)
    drawn = plots.figure(plots.WIDTH_IN, 1.6 + each * height)
    axes = drawn.subplots()
    place, ticks, names = -HEADING + 0.2, list[float](), list[str]()
    for name, members in groups.items():
        place += HEADING
        axes.text(0, place - 0.75, f" {name}", va="center", fontsize=8.5, fontweight="bold")
        axes.texts[-1].set_color(INK)
        for row in members:
            _bar(axes, place, row)
            ticks.append(place)
            names.append(plots.series_name(row.cell.axes.path, row.cell.axes.fa2, fa2_varies))
            place += 1
    axes.set_yticks(ticks, names, fontsize=8)
    axes.set_xlim(0, 100)
    axes.set_ylim(place - 0.4, -1.1)
    axes.set_xlabel("GPU utilisation while timing (NVML), %", color=INK)
    plots.clean(axes, "x")
    if any(row.busy_pct is not None for row in shown):
        drawn.legend([_diamond()], [BUSY], loc="outside lower center", frameon=False, fontsize=9)
    drawn.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK, fontweight="bold")
    plots.save(drawn, target)
    return len(shown)


def _bar(axes: Axes, place: float, row: Row) -> None:
    used = row.utilisation_pct or 0.0
    axes.barh(place, used, height=0.75, color=plots.colour(row))
    if row.busy_pct is not None:  # a whole marker at 100 %
        axes.plot(min(row.busy_pct, 100.0), place, **DIAMOND)
    host = row.bound == "host"
    text = f"{used:.0f} %" + ("  host bound" if host else "")
    axes.text(102, place, text, va="center", fontsize=8, color=HOST if host else INK)


def _diamond() -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], **DIAMOND)
