"""Pictures: tok/s against seq_len for each path, and GPU utilisation for each cell.

Figures are built without pyplot's globals.

A band is the 95 % confidence of a cell's speed, as in the tables.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfbench.machine import without_variables
from perfbench.records import whole_file
from perfbench.report.rows import PATH_ORDER, Row, unmarked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

DPI = 120
NUM_COLOURS = 128  # the series' colours, their blends with white, and greys
# Okabe and Ito's colours: distinguished by colour-blind readers, and by marker in black and white.
COLOURS = {
    "reference": "#999999",
    "v1": "#E69F00",
    "v2": "#0072B2",
    "masked": "#D55E00",
    "triton": "#009E73",
    "auto": "#CC79A7",
}
OTHER_COLOUR = "#56B4E9"
MARKERS = {"reference": "v", "v1": "s", "v2": "o", "masked": "^", "triton": "D", "auto": "P"}
# a panel of one length shows no lines
DENSE_MARKERS = {"dense": ".", "dense_flash": "<", "dense_cudnn": ">"}
DENSE_LINES = {"dense": "--", "dense_flash": "-.", "dense_cudnn": (0, (3, 1, 1, 1, 1, 1))}
FA2_LINES = {"on": "-", "off": ":", "auto": "-"}
INK, GRID = "#333333", "#e4e4e4"
# factor between the series of a panel that has one length only, which would hide one another
ASIDE = 1.04
MAX_BARS = 80  # a taller picture is no longer looked at; the table has all of them
AMBIENT = ("MPLBACKEND", "MATPLOTLIBRC")  # of whoever started this process, e.g. a notebook
# What a missing or foreign library, font or settings file raises, e.g. one that is not UTF-8.
NO_PICTURE = (ImportError, OSError, RuntimeError, ValueError)
Series = tuple[str, str]  # path, fa2


def throughput(rows: Sequence[Row], target: Path, title: str) -> bool:
    """Write tok/s against seq_len, one panel for each workload and variant of it; False where no
    cell has a speed.
    """
    panels = _panels(rows)
    if not any(row.tok_per_s is not None for row in rows):
        return False
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    drawn = figure(6.6 * columns, 4.7 * lines + 1.2)
    grid = drawn.subplots(lines, columns, squeeze=False)
    handles: dict[Series, Any] = {}
    failed = False
    for axes, (name, members) in zip(grid.flat, panels.items(), strict=False):
        failed |= _panel(axes, name, members, handles)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    _one_scale(dict(zip(panels, grid.flat, strict=False)))
    ordered = sorted(handles, key=_series_order)
    labels, artists = (
        [_series_name(*series) for series in ordered],
        [handles[series] for series in ordered],
    )
    if failed:
        labels, artists = [*labels, "no number (see the table)"], [*artists, _cross()]
    drawn.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK, fontweight="bold")
    drawn.legend(
        artists,
        labels,
        loc="outside lower center",
        ncols=min(5, len(labels)),
        frameon=False,
        fontsize=9,
    )
    save(drawn, target)
    return True


def utilisation(rows: Sequence[Row], target: Path, title: str) -> int:
    """Write one bar for each measured cell; return how many, 0 (and no file) where no cell has a
    utilisation.
    """
    shown = [row for row in rows if row.utilisation_pct is not None][:MAX_BARS]
    if not shown:
        return 0
    several = varying(rows)
    drawn = figure(8.4, 1.5 + 0.215 * len(shown))
    axes = drawn.subplots()
    places = range(len(shown))
    axes.barh(
        places,
        [row.utilisation_pct or 0.0 for row in shown],
        height=0.7,
        color=[_colour(row) for row in shown],
    )
    busy = [
        (place, row.busy_pct)
        for place, row in zip(places, shown, strict=True)
        if row.busy_pct is not None
    ]
    if busy:
        name = "GPU busy fraction of the profiled step"
        ys, xs = [place for place, _ in busy], [min(value, 100.0) for _, value in busy]
        axes.plot(
            xs,
            ys,
            linestyle="none",
            marker="D",
            markersize=4.5,
            markerfacecolor="white",
            markeredgecolor=INK,
            label=name,
        )
        drawn.legend(loc="outside lower center", frameon=False, fontsize=9)
    for place, row in zip(places, shown, strict=True):
        text = f"{row.utilisation_pct:.0f} %" + ("  host bound" if row.bound == "host" else "")
        axes.text(
            101.5,
            place,
            text,
            va="center",
            fontsize=8,
            color="#b00020" if row.bound == "host" else INK,
        )
    axes.set_yticks(list(places), [literal(label(row, several)) for row in shown], fontsize=8)
    axes.set_xlim(0, 100)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel("GPU utilisation while timing (NVML), %", color=INK)
    clean(axes, "x")
    drawn.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK, fontweight="bold")
    save(drawn, target)
    return len(shown)


@contextmanager
def as_shipped() -> Iterator[None]:
    """matplotlib with its own defaults: neither a notebook's MPLBACKEND nor a matplotlibrc of the
    user counts; CannotDraw where it cannot be imported.
    """
    try:
        with without_variables(*AMBIENT):
            import matplotlib
        import PIL.Image  # noqa: F401  # what saves a picture
    except NO_PICTURE as error:
        raise CannotDraw(error) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


class CannotDraw(Exception):
    """No picture can be drawn here; the report stands without."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")


def save(drawn: Figure, target: Path) -> None:
    """Without a version stamp: the same data, the same bytes.

    Lines and text need few colours: with 128 of them a picture takes a quarter of the space.
    """
    import PIL.Image

    rendered = io.BytesIO()
    try:
        drawn.savefig(rendered, format="png", dpi=DPI, metadata={"Software": None})
    except NO_PICTURE as error:  # fonts and libraries of this machine
        raise CannotDraw(error) from error
    with PIL.Image.open(rendered) as picture:
        save_small(picture, target)


def save_small(picture: Image, target: Path) -> None:
    """Write ``picture`` as a PNG of at most ``NUM_COLOURS`` colours.

    Chosen to cover all that occur (at most 15 of 255 off in 60 reports): by median cut, which goes
    by frequency, a thin line takes the colour of another series.
    """
    from PIL.Image import Dither, Quantize

    few = picture.convert("RGB").quantize(
        NUM_COLOURS, method=Quantize.MAXCOVERAGE, dither=Dither.NONE
    )
    with whole_file(target) as partial:
        few.save(partial, format="png", optimize=True)


def varying(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row.cell.axes.named)
    order = ("workload", "batch", "dtype", "seq_len", "path", "fa2")
    several = [name for name in names if len({row.cell.axes.value(name) for row in rows}) > 1]
    return sorted(
        several, key=lambda name: (order.index(name) if name in order else len(order), name)
    )


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by workload, and by whatever else varies besides path, FA-2 and length."""
    names = [name for name in varying(rows) if name not in ("path", "fa2", "seq_len")]
    panels: dict[str, list[Row]] = {}
    for row in rows:
        parts = [row.cell.axes.workload]
        parts += [
            f"{name}={row.cell.axes.value(name)}"
            for name in names
            if name != "workload" and not unmarked(row.cell.axes, name)
        ]
        panels.setdefault(", ".join(parts), []).append(row)
    return panels


def _panel(axes: Axes, name: str, rows: list[Row], handles: dict[Series, Any]) -> bool:
    series: dict[Series, list[Row]] = {}
    for row in rows:
        series.setdefault((row.cell.axes.path, row.cell.axes.fa2), []).append(row)
    lost = []
    lengths = sorted({row.cell.axes.seq_len for row in rows})
    for place, ((path, fa2), members) in enumerate(
        sorted(series.items(), key=lambda item: _series_order(item[0]))
    ):
        points = sorted(
            (row for row in members if row.tok_per_s is not None),
            key=lambda row: row.cell.axes.seq_len,
        )
        lost += [row for row in members if row.tok_per_s is None]
        if points:
            aside = ASIDE ** (place - (len(series) - 1) / 2) if len(lengths) == 1 else None
            handles[path, fa2] = _draw(
                axes, path, fa2, points, [row.cell.axes.seq_len for row in members], aside
            )
    _scales(axes, lengths, any(row.tok_per_s is not None for row in rows))
    for row in lost:
        axes.plot(
            row.cell.axes.seq_len,
            0.025,
            transform=axes.get_xaxis_transform(),
            marker="x",
            color=_colour(row),
            markersize=8,
            mew=2,
        )
    axes.set_xlabel("tokens in the cache" if _decodes(rows) else "seq_len (tokens)", color=INK)
    axes.set_title(literal(name), loc="left", fontsize=11, color=INK)
    clean(axes, "both")
    return bool(lost)


def _decodes(rows: list[Row]) -> bool:
    return all(row.cell.axes.workload == "decode" for row in rows)


def _draw(
    axes: Axes, path: str, fa2: str, points: list[Row], lengths: list[int], aside: float | None
) -> Any:
    """Draw one series, its lengths times ``aside``; one without a number breaks the line: nothing
    is interpolated over it.
    """
    known = {row.cell.axes.seq_len: row for row in points}
    gap = float("nan")
    ys = [known[x].tok_per_s or gap if x in known else gap for x in sorted(lengths)]
    low = [known[x].low or gap if x in known else gap for x in sorted(lengths)]
    high = [known[x].high or gap if x in known else gap for x in sorted(lengths)]
    xs = [x * (aside or 1.0) for x in sorted(lengths)]
    colour = _colour(points[0])
    if aside is not None:
        axes.annotate(f"  {ys[0]:,.0f}", (xs[0], ys[0]), va="center", fontsize=8, color=colour)
    dense = path.startswith("dense")
    style: Any = DENSE_LINES.get(path, "--") if dense else FA2_LINES.get(fa2, "-")
    fill = "white" if fa2 == "off" or dense else colour
    if len(points) > 1:
        axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0)
    else:
        axes.vlines(xs, low, high, color=colour, alpha=0.3, linewidth=5)
    marker = (DENSE_MARKERS if dense else MARKERS).get(path, "X")
    (line,) = axes.plot(
        xs,
        ys,
        linestyle=style,
        color=colour,
        marker=marker,
        markersize=6.5,
        markerfacecolor=fill,
        linewidth=1.8,
    )
    return line


def _scales(axes: Axes, lengths: list[int], numbers: bool) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(
        [f"{length:,}" for length in lengths], fontsize=9, rotation=30 if len(lengths) > 7 else 0
    )
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    axes.set_ylabel("tok/s", color=INK)
    if not numbers:
        axes.set_yticks([])
        return
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    _limit(axes, low / 1.6, high * 1.15)  # room below for the crosses of cells without a number


def _one_scale(panels: Mapping[str, Axes]) -> None:
    """Variants of one workload on one scale, so that their heights compare."""
    drawn = {name: axes for name, axes in panels.items() if axes.get_yscale() == "log"}
    for workload in {name.split(",")[0] for name in drawn}:
        alike = [axes for name, axes in drawn.items() if name.split(",")[0] == workload]
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


def _cross() -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], linestyle="none", marker="x", color=INK, markersize=8, mew=2)


def clean(axes: Axes, grid: Any) -> None:
    axes.grid(True, axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side in ("left", "bottom"))
        axes.spines[side].set_color("#999999")


def _colour(row: Row) -> str:
    return "black" if row.is_dense else COLOURS.get(row.cell.axes.path, OTHER_COLOUR)


def _series_order(series: Series) -> tuple[int, str, str]:
    path, fa2 = series
    rank = PATH_ORDER.index(path) if path in PATH_ORDER else len(PATH_ORDER)
    return rank, path, {"on": "0", "off": "1"}.get(fa2, fa2)


def _series_name(path: str, fa2: str) -> str:
    return literal(path if path.startswith("dense") else f"{path}, FA-2 {fa2}")


def label(row: Row, several: list[str]) -> str:
    """A cell by the axes in which the cells of this report differ."""
    parts = []
    for name in several:
        value = row.cell.axes.value(name)
        if value is None or value == "n/a" or unmarked(row.cell.axes, name):
            continue
        if name == "seq_len" and isinstance(value, int):
            parts.append(f"{value:,}")
        elif name in ("workload", "path", "dtype"):
            parts.append(str(value))
        else:
            parts.append(f"{'FA-2' if name == 'fa2' else name} {value}")
    return "  ".join(parts) or row.cell.cell_id


def literal(text: str) -> str:
    """Text as it stands: matplotlib reads dollars as formulas."""
    return text.replace("$", r"\$")
