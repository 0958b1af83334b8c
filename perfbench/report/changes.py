"""The picture of changes: every compared cell with its bounds, the worst on top, so that a drop is
seen before it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfbench.gate import DEVICE, HOST, Evidence, severity
from perfbench.records import Verdict
from perfbench.report import plots
from perfbench.report.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    Verdict.REGRESSED: "#b00020",
    Verdict.SUSPECT: "#D55E00",
    Verdict.WATCH: "#E69F00",
    Verdict.BLIND: "#999999",
    Verdict.UNSTABLE: "#CC79A7",
    Verdict.SAME: "#009E73",
    Verdict.FASTER: "#0072B2",
}
LEAST_PCT, MOST_PCT = (
    6.0,
    40.0,
    # of the axis either way; bounds beyond it end in an arrow; a BLIND cell is drawn within the
    # least
)


def draw(rows: Sequence[Row], target: Path, title: str, *, min_effect_pct: float) -> int:
    """Write one line for each compared cell, at most `plots.MAX_BARS`; return how many, 0 (and no
    file) where none was.
    """
    compared = [row for row in rows if row.cell.evidence and row.cell.verdict in COLOURS]
    shown = [
        row for row in compared if row.cell.verdict is not Verdict.BLIND or _ends(row) <= LEAST_PCT
    ]
    if left := len(compared) - len(shown):
        title += f"\n{left} BLIND cells are not drawn: their bounds say nothing"
    shown = sorted(shown, key=_worst_first)[: plots.MAX_BARS]
    if not shown:
        return 0
    several = plots.varying(rows)
    figure = plots.figure(8.4, 1.7 + 0.215 * len(shown))
    axes = figure.subplots()
    reach = _reach(shown)
    for place, row in enumerate(shown):
        _line(axes, place, row, reach)
    axes.axvline(0, color=plots.INK, linewidth=1)
    axes.axvline(-min_effect_pct, color=plots.INK, linewidth=1, linestyle=":")
    names = [plots.literal(plots.label(row, several)) for row in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.set_xlim(-reach, reach)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel(
        f"change of speed in %, with the bounds of its test (dotted: -{min_effect_pct:g} %)",
        color=plots.INK,
    )
    plots.clean(axes, "x")
    figure.legend(
        *_legend({row.cell.verdict for row in shown}),
        loc="outside lower center",
        ncols=6,
        frameon=False,
        fontsize=9,
        handletextpad=0.6,
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=plots.INK, fontweight="bold")
    plots.save(figure, target)
    return len(shown)


def _worst_first(row: Row) -> tuple[tuple[int, int], float, str]:
    assert row.cell.verdict is not None
    return severity(row.cell.verdict), row.cell.evidence[0].change_pct or 0.0, row.cell.cell_id


def _reach(rows: Sequence[Row]) -> float:
    """Half of the axis: every estimate lies on it, and the bounds as far as ``MOST_PCT``."""
    estimates = max(abs(row.cell.evidence[0].change_pct or 0.0) for row in rows)
    return max(
        1.15 * estimates, min(MOST_PCT, max([LEAST_PCT, *(1.1 * _ends(row) for row in rows)]))
    )


def _ends(row: Row) -> float:
    """How far from zero the bounds of a cell reach, in per cent."""
    one = row.cell.evidence[0]
    if one.lower_pct is None or one.upper_pct is None:
        return float("inf")
    return max(abs(one.lower_pct), abs(one.upper_pct))


def _line(axes: Axes, place: int, row: Row, reach: float) -> None:
    one: Evidence = row.cell.evidence[0]
    assert row.cell.verdict is not None
    colour = COLOURS[row.cell.verdict]
    low, high = (
        end if end is not None else sign * 10 * reach
        for end, sign in ((one.lower_pct, -1), (one.upper_pct, 1))
    )
    axes.plot(
        [low, high], [place, place], color=colour, linewidth=2.2, solid_capstyle="butt", alpha=0.75
    )
    if one.change_pct is not None:
        axes.plot(
            [one.change_pct],
            [place],
            marker="o" if row.cell.confirmed else "D",
            markersize=5.5,
            color=colour,
            linestyle="none",
        )
    for end, marker, edge in ((low, "<", -reach), (high, ">", reach)):
        if abs(end) > reach:
            axes.plot(
                [edge],
                [place],
                marker=marker,
                markersize=5,
                color=colour,
                linestyle="none",
                clip_on=False,
            )
    text = (
        "-" if one.change_pct is None else f"{round(one.change_pct, 1) + 0.0:+.1f} %"
    ) + f"  {row.verdict}"
    text += {DEVICE: " (device time)", HOST: " (host time)"}.get(one.metric, "")
    axes.text(1.015 * reach, place, text, va="center", fontsize=8, color=colour)


def _legend(verdicts: set[Verdict | None]) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    handles: list[Any] = [
        Line2D([], [], color=colour, linewidth=3)
        for verdict, colour in COLOURS.items()
        if verdict in verdicts
    ]
    names = [verdict.value for verdict in COLOURS if verdict in verdicts]
    handles += [
        Line2D([], [], color=plots.INK, marker=marker, linestyle="none", markersize=5)
        for marker in ("o", "D")
    ]
    return handles, [*names, "pairs", "two sessions"]
