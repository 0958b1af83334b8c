"""The picture of speeds: tok/s against the length where a series has several, else a bar for each
path of a shape, with its ratio to dense.

A band is the 95 % confidence of a cell's speed, as in the tables. One of a decade or more is a
whisker, with an arrowhead where it goes on beyond the axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfbench.records import kind_of
from perfbench.report import plots
from perfbench.report.plots import INK, Series
from perfbench.report.rows import Row, is_twin, is_window, unmarked
from perfbench.text import ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANELS = 12
FAR_APART = 4  # times the next length: a crossover between two such has no length of its own
MAX_WIDE = 10.0  # a band of a decade says nothing of a speed but that it is not known
CUT = 1.08  # of the longest bar: where a whisker that goes on ends
ARROW_PT = 5
LINES_IN, MANY_LINES_IN, LEAST_LINES_IN = 3.3, 2.6, 2.3  # height of a panel, of one of many
BAR_IN, AROUND_BARS_IN = 0.2, 0.75
ALARM, GREY = "#b00020", "#999999"
Panels = dict[str, list[Row]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """How many cells the picture shows, of how many with a speed or a failure; 0 where no file was
    written.
    """

    shown: int
    cells: int


def draw(rows: Sequence[Row], target: Path, title: str) -> Drawn:
    """Write the picture; where no cell has a speed, nothing.

    At most ``MAX_PANELS`` panels and ``plots.MAX_BARS`` bars, below `plots.MAX_HEIGHT_IN`.
    """
    if not any(row.tok_per_s is not None for row in rows):
        return Drawn(0, len(rows))
    lines, bars = _fitting(*panels_of(rows))
    shown = sum(map(len, (*lines.values(), *bars.values())))
    left = len(rows) - shown
    if left:
        title += f"\n{left} of {len(rows)} cells are not drawn: the table has them"
    drawn, grid, wide = _axes(lines, bars)
    fa2_varies = plots.fa2_varies(rows)
    handles: dict[Series, Any] = {}
    failed = False
    for axes, (name, members) in zip(grid, lines.items(), strict=True):
        failed |= _lines(axes, name, members, handles)
    _one_scale(dict(zip(lines, grid, strict=True)))
    beyond = False
    for axes, members in zip(grid, lines.values(), strict=True):  # once the scales are known
        for row in members:
            beyond |= bool(too_wide(row)) and _tall_whisker(axes, row)
    for axes, (name, members) in zip(wide, bars.items(), strict=True):
        beyond |= _bars(axes, name, members, plots.varying(rows), handles)
    ordered = sorted(handles, key=plots.series_order)
    labels = [plots.series_name(*series, fa2_varies) for series in ordered]
    artists = [handles[series] for series in ordered]
    if failed:
        labels, artists = [*labels, "no number (see the table)"], [*artists, _cross()]
    if beyond:
        labels, artists = [*labels, "95 % interval beyond the axis"], [*artists, _arrow()]
    drawn.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK, fontweight="bold")
    drawn.legend(
        artists,
        labels,
        loc="outside lower center",
        ncols=min(5, len(labels)),
        frameon=False,
        fontsize=9,
    )
    plots.save(drawn, target)
    return Drawn(shown, len(rows))


def panels_of(rows: Sequence[Row]) -> tuple[Panels, Panels]:
    """(of lines, of bars): rows by workload and by whatever else varies besides path, FA-2 and
    length. What one line of two points would show, or less, shares a panel of bars of its workload.
    """
    names = [name for name in plots.varying(rows) if name not in ("path", "fa2", "seq_len")]
    groups: Panels = {}
    for row in rows:
        parts = [row.cell.axes.workload]
        parts += [
            f"{name}={row.cell.axes.value(name)}"
            for name in names
            if name != "workload" and not unmarked(row.cell.axes, name)
        ]
        groups.setdefault(", ".join(parts), []).append(row)
    lines: Panels = {}
    bars: Panels = {}
    for name, members in groups.items():
        counts = [len(_measured(one)) for one in _series(members).values()]
        if max(counts, default=0) > 2 or sum(count > 1 for count in counts) > 1:
            lines[name] = members
        else:
            bars.setdefault(members[0].cell.axes.workload, []).extend(members)
    return lines, bars


def _fitting(lines: Panels, bars: Panels) -> tuple[Panels, Panels]:
    """The first panels and bars that the picture has room for."""
    lines = dict(list(lines.items())[:MAX_PANELS])
    room = plots.MAX_HEIGHT_IN - 1.5 - LEAST_LINES_IN * _rows_of(lines)
    kept: Panels = {}
    for name, members in list(bars.items())[: MAX_PANELS - len(lines)]:
        most = int((room - AROUND_BARS_IN) / (1.6 * BAR_IN))  # a gap a shape, of one bar at least
        if most < 1:
            break
        kept[name] = members[: min(most, plots.MAX_BARS - sum(map(len, kept.values())))]
        room -= _height_of(kept[name])
    return lines, {name: members for name, members in kept.items() if members}


def _rows_of(lines: Panels) -> int:
    return -(-len(lines) // 2)


def _height_of(bars: Sequence[Row]) -> float:
    return AROUND_BARS_IN + 1.6 * BAR_IN * len(bars)


def _axes(lines: Panels, bars: Panels) -> tuple[Figure, list[Axes], list[Axes]]:
    """Two panels of lines a row, then panels of bars over the whole width."""
    heights = [_height_of(members) for members in bars.values()]
    rows = _rows_of(lines)
    room = plots.MAX_HEIGHT_IN - 1.3 - sum(heights)
    wanted = LINES_IN if rows < 3 else MANY_LINES_IN
    each = min(wanted, room / rows) if rows else wanted
    drawn = plots.figure(plots.WIDTH_IN, 1.2 + each * rows + sum(heights))
    spec = drawn.add_gridspec(rows + len(bars), 2, height_ratios=[*[each] * rows, *heights])
    alone = len(lines) == 1
    grid = [
        drawn.add_subplot(spec[place // 2, :] if alone else spec[place // 2, place % 2])
        for place in range(len(lines))
    ]
    wide = [drawn.add_subplot(spec[rows + place, :]) for place in range(len(bars))]
    return drawn, grid, wide


def _series(rows: Iterable[Row]) -> dict[Series, list[Row]]:
    """By path and FA-2, in their order, each by length."""
    found: dict[Series, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.cell.axes.seq_len):
        found.setdefault((row.cell.axes.path, row.cell.axes.fa2), []).append(row)
    return {series: found[series] for series in sorted(found, key=plots.series_order)}


def _measured(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.tok_per_s is not None]


def too_wide(row: Row) -> str:
    """Why a cell's speed is not known; empty where its band is narrow enough to say something."""
    if row.low is None or row.high is None or row.high < MAX_WIDE * row.low:
        return ""
    return "host bound" if row.bound == "host" else "too noisy"


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where ``series`` overtakes the fastest dense twin: between two neighbouring lengths that
    both have; ``length`` lies straight between them on logarithms.
    """

    series: Series
    below: int
    above: int
    length: float

    @property
    def text(self) -> str:
        """A length in two digits; where the measured ones lie too far apart to tell, those."""
        path = self.series[0]
        if self.above > FAR_APART * self.below:
            return f"{path} passes dense between {self.below:,} and {self.above:,}"
        digits = 10 ** (math.floor(math.log10(self.length)) - 1)
        return f"{path} = dense at about {round(self.length / digits) * digits:,.0f}"


def crossovers(rows: Sequence[Row]) -> list[Crossover]:
    """Every path of NSA that overtakes the fastest dense twin, in the order of the series."""
    dense: dict[int, float] = {}
    for row in _measured(rows):
        if is_twin(row.cell.axes):
            length = row.cell.axes.seq_len
            dense[length] = max(dense.get(length, 0.0), row.tok_per_s or 0.0)
    found = []
    sparse = (row for row in rows if not row.is_dense and not is_window(row.cell.axes))
    for series, members in _series(sparse).items():
        gains = sorted((row.cell.axes.seq_len, _gain(row, dense)) for row in members)
        for (below, before), (above, after) in pairwise(gains):
            if before < 0 <= after:
                length = below * (above / below) ** (-before / (after - before))
                found.append(Crossover(series, below, above, length))
    return found


def _gain(row: Row, dense: Mapping[int, float]) -> float:
    """Logarithm of the speed over dense's; NaN where one is not known, and over such a length
    nothing is interpolated.
    """
    twin = dense.get(row.cell.axes.seq_len)
    if row.tok_per_s is None or twin is None or too_wide(row):
        return math.nan
    return math.log(row.tok_per_s / twin)


def _lines(axes: Axes, name: str, rows: list[Row], handles: dict[Series, Any]) -> bool:
    lost = [row for row in rows if row.tok_per_s is None]
    lengths = sorted({row.cell.axes.seq_len for row in rows})
    for series, members in _series(rows).items():
        if _measured(members):
            handles[series] = _line(axes, series, members)
    _scales(axes, lengths)
    for row in lost:
        axes.plot(
            row.cell.axes.seq_len,
            0.025,
            transform=axes.get_xaxis_transform(),
            marker="x",
            color=plots.colour(row),
            markersize=8,
            mew=2,
            clip_on=False,
        )
    for place, crossover in enumerate(crossovers(rows)[:3]):
        _mark(axes, crossover, place)
    decodes = all(row.cell.axes.workload == "decode" for row in rows)
    axes.set_xlabel("tokens in the cache" if decodes else "seq_len (tokens)", color=INK)
    axes.set_title(plots.literal(name), loc="left", fontsize=10, color=INK)
    plots.clean(axes, "both")
    return bool(lost)


def _line(axes: Axes, series: Series, rows: list[Row]) -> Any:
    """One series; a length without a number breaks the line: nothing is interpolated over it."""
    path, fa2 = series
    gap = float("nan")
    xs = [row.cell.axes.seq_len for row in rows]
    ys = [row.tok_per_s or gap for row in rows]
    banded = [row if not too_wide(row) else None for row in rows]
    low, high = (
        [gap if row is None else getattr(row, end) or gap for row in banded]
        for end in ("low", "high")
    )
    colour = plots.colour(rows[0])
    dense = kind_of(path) == "dense"
    style: Any = plots.DENSE_LINES.get(path, "--") if dense else plots.FA2_LINES.get(fa2, "-")
    axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.vlines(xs, low, high, color=colour, alpha=0.3, linewidth=2)
    for row in rows:
        if row.tok_per_s is not None and (why := too_wide(row)):
            axes.annotate(
                why,
                (row.cell.axes.seq_len, row.tok_per_s),
                xytext=(6, 5),
                textcoords="offset points",
                fontsize=7,
                color=ALARM,
            )
    (line,) = axes.plot(
        xs,
        ys,
        linestyle=style,
        color=colour,
        marker=(plots.DENSE_MARKERS if dense else plots.MARKERS).get(path, "X"),
        markersize=6,
        markerfacecolor="white" if fa2 == "off" or dense else colour,
        linewidth=1.7,
        clip_on=False,
        zorder=3,
    )
    return line


def _tall_whisker(axes: Axes, row: Row) -> bool:
    """The whole interval of a cell; whether the axis cuts it off."""
    x, bottom, top = row.cell.axes.seq_len, *axes.get_ylim()
    low, high = row.low or bottom, row.high or top
    axes.vlines(x, max(low, bottom), min(high, top), color=plots.colour(row), linewidth=1)
    if low < bottom:
        _head(axes, x, bottom, "v", plots.colour(row))
    if high > top:
        _head(axes, x, top, "^", plots.colour(row))
    return low < bottom or high > top


def _head(axes: Axes, x: float, y: float, marker: str, colour: str) -> None:
    style: Any = {"linestyle": "none", "clip_on": False, "zorder": 4}
    axes.plot([x], [y], marker=marker, markersize=ARROW_PT, color=colour, **style)


def _mark(axes: Axes, crossover: Crossover, place: int) -> None:
    length = crossover.length
    colour = plots.COLOURS.get(crossover.series[0], plots.OTHER_COLOUR)
    axes.axvline(length, color=colour, linewidth=1, linestyle=(0, (2, 2)))
    axes.annotate(
        f" {crossover.text}",
        (length, 0.03 + 0.07 * place),
        xycoords=axes.get_xaxis_transform(),
        fontsize=8,
        color=colour,
        va="bottom",
        ha="left" if length**2 < math.prod(axes.get_xlim()) else "right",
    )


def _scales(axes: Axes, lengths: list[int]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(
        [f"{length:,}" for length in lengths], fontsize=8, rotation=30 if len(lengths) > 5 else 0
    )
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    axes.set_ylabel("tok/s", color=INK)
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    _limit(axes, low / 1.6, high * 1.15)  # room below for the crosses of cells without a number


def _one_scale(panels: Mapping[str, Axes]) -> None:
    """Variants of one workload on one scale, so that their heights compare."""
    for workload in {name.split(",")[0] for name in panels}:
        alike = [axes for name, axes in panels.items() if name.split(",")[0] == workload]
        limits = [axes.get_ylim() for axes in alike]
        for axes in alike:
            _limit(axes, min(low for low, _ in limits), max(high for _, high in limits))


def _limit(axes: Axes, low: float, high: float) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_ylim(low, high)
    decades = high / low
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if decades < 2000 else (1,)))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())


def _bars(
    axes: Axes, name: str, rows: list[Row], several: Sequence[str], handles: dict[Series, Any]
) -> bool:
    """One bar for each path, by shape, with what it says: speed, ratio to dense, host bound;
    whether an interval is cut off.
    """
    from matplotlib.ticker import EngFormatter

    shapes: Panels = {}
    for row in rows:
        shapes.setdefault(plots.shape(row, several), []).append(row)
    ends = [row.high if row.high and not too_wide(row) else row.tok_per_s for row in rows]
    most = max((end for end in ends if end is not None), default=1.0)
    place, ticks, beyond = 0.0, [], False
    for members in shapes.values():
        first = place
        for series, (row,) in _series_of_one(members):
            handles.setdefault(series, _patch(row))
            beyond |= _bar(axes, place, row, most)
            place += 1
        ticks.append((first + place - 1) / 2)
        place += 0.6
    axes.set_yticks(ticks, list(shapes), fontsize=9)
    axes.set_ylim(place - 0.9, -0.7)
    axes.set_xlim(0, 1.3 * most)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("tok/s", color=INK)
    axes.set_title(f"{plots.literal(name)}, batch x seq_len", loc="left", fontsize=10, color=INK)
    plots.clean(axes, "x")
    return beyond


def _series_of_one(rows: list[Row]) -> list[tuple[Series, list[Row]]]:
    return [(series, [row]) for series, members in _series(rows).items() for row in members]


def _bar(axes: Axes, place: float, row: Row, most: float) -> bool:
    """One bar with its whisker; whether that goes on beyond ``CUT`` times ``most``."""
    if row.tok_per_s is None:
        axes.text(0.006 * most, place, "no number (see the table)", va="center", fontsize=8)
        axes.texts[-1].set_color(ALARM)
        return False
    axes.barh(
        place,
        row.tok_per_s,
        height=0.8,
        facecolor=_face(row),
        edgecolor=plots.colour(row),
        linewidth=1.2,
    )
    why, end, beyond = too_wide(row), row.tok_per_s, False
    if row.low is not None and row.high is not None:
        colour, beyond = GREY if row.is_dense else INK, row.high > CUT * most
        end = max(end, min(row.high, CUT * most))
        axes.hlines(place, row.low, end, color=colour, linewidth=1.4)
        if beyond:
            _head(axes, end, place, ">", colour)
    dense = "" if row.is_dense or row.x_dense is None else f"   {ratio(row.x_dense)} x dense"
    caveat = "   host bound" if row.bound == "host" else ""
    caveat += "   too noisy" if why == "too noisy" else ""
    caveat += f" (± {row.half_pct:,.0f} %)" if why and row.half_pct is not None else ""
    end += (0.02 if beyond else 0.008) * most
    axes.text(end, place, f"{row.tok_per_s:,.0f}{dense}{caveat}", va="center")
    axes.texts[-1].set(fontsize=8, color=ALARM if caveat else INK)
    return beyond


def _face(row: Row) -> str:
    return "white" if row.cell.axes.fa2 == "off" and not row.is_dense else plots.colour(row)


def _patch(row: Row) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=_face(row), edgecolor=plots.colour(row), linewidth=1.2)


def _cross() -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], linestyle="none", marker="x", color=INK, markersize=8, mew=2)


def _arrow() -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=INK, linewidth=1.4, marker=">", markersize=ARROW_PT)
