"""What all pictures share: their size, colours and names; and how they are saved.

Figures are built without pyplot's globals.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfbench.machine import without_variables
from perfbench.records import AXES, NOT_APPLICABLE, whole_file
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
DENSE_MARKERS = {
    "dense": ".",
    "dense_flash": "<",
    "dense_cudnn": ">",
    "dense_fa3": "1",
    "dense_fa4": "*",
    "flex": "p",
}
DENSE_LINES = {
    "dense": "--",
    "dense_flash": "-.",
    "dense_cudnn": (0, (3, 1, 1, 1, 1, 1)),
    "dense_fa3": ":",
    "dense_fa4": "-",
    "flex": (0, (5, 1)),
}
FA2_LINES = {"on": "-", "off": ":", "auto": "-"}
INK, GRID = "#333333", "#e4e4e4"
# GitHub shows a page's pictures about 900 pixels wide: text of 9 points is then 11 pixels high.
WIDTH_IN = 10.0
MAX_HEIGHT_IN = 16.5  # below 2,000 pixels; what is taller is no longer looked at
MAX_BARS = 60  # the table has all of them
AMBIENT = ("MPLBACKEND", "MATPLOTLIBRC")  # of whoever started this process, e.g. a notebook
# What a missing or foreign library, font or settings file raises, e.g. one that is not UTF-8.
NO_PICTURE = (ImportError, OSError, RuntimeError, ValueError)
Series = tuple[str, str]  # path, fa2


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
    # a file names some axes only where a cell turns them
    named = dict.fromkeys(name for row in rows for name in row.cell.axes.named)
    names = dict.fromkeys([*named, *AXES])
    order = ("workload", "batch", "dtype", "seq_len", "path", "fa2")
    several = [name for name in names if len({row.cell.axes.value(name) for row in rows}) > 1]
    return sorted(
        several, key=lambda name: (order.index(name) if name in order else len(order), name)
    )


def clean(axes: Axes, grid: Any) -> None:
    axes.grid(True, axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side in ("left", "bottom"))
        axes.spines[side].set_color("#999999")


def colour(row: Row) -> str:
    return "black" if row.is_dense else COLOURS.get(row.cell.axes.path, OTHER_COLOUR)


def series_order(series: Series) -> tuple[int, str, str]:
    path, fa2 = series
    rank = PATH_ORDER.index(path) if path in PATH_ORDER else len(PATH_ORDER)
    return rank, path, {"on": "0", "off": "1"}.get(fa2, fa2)


def fa2_varies(rows: Sequence[Row]) -> bool:
    """Whether cells that may take FA-2 differ in it."""
    return len({row.cell.axes.fa2 for row in rows} - {NOT_APPLICABLE}) > 1


def series_name(path: str, fa2: str, fa2_varies: bool) -> str:
    """FA-2 is named where it differs between the cells of a report."""
    named = fa2_varies and fa2 != NOT_APPLICABLE
    return literal(f"{path}, FA-2 {fa2}" if named else path)


def shape(row: Row, several: Sequence[str]) -> str:
    """'8 x 2,048, captured': batch by length, then what else differs between cells."""
    axes = row.cell.axes
    words = {"cuda_graph": {"on": "captured"}, "compile": {"on": "compiled"}}
    parts = [f"{axes.batch:,} x {axes.seq_len:,}"]
    for name in several:
        value = axes.value(name)
        if name in ("workload", "batch", "seq_len", "path", "fa2") or value in (None, "n/a"):
            continue
        if not unmarked(axes, name):
            parts.append(words.get(name, {}).get(str(value), f"{name} {value}"))
    return literal(", ".join(parts))


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
