"""Pictures that are readable at GitHub's width: no empty panel, no cut marker, no endless height.

Row of the faults: pictures and tables.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from matplotlib.collections import LineCollection
from PIL import Image

from perfbench import report
from perfbench.gate.judging import judge
from perfbench.matrix.policy import GatePolicy
from perfbench.records.cells import Cell
from perfbench.records.rows import Run, Status
from perfbench.report import changes, files, plots, speeds, utilisation
from perfbench.report.rows import Row, rows_of
from tests.perfbench import builders as b

POLICY = GatePolicy()
MAX_PIXELS, MAX_BYTES = 2_000, 1_000_000
# As a training set has it: one series of lengths, and single shapes, captured or not.
TRAINING = [
    Cell("train", length, path, "on" if path == "v2" else "n/a", batch, cuda_graph=graph)
    for batch, length, graph in (
        (1, 2048, "off"),
        (1, 8192, "off"),
        (1, 2048, "on"),
        (8, 2048, "off"),
        (8, 2048, "on"),
    )
    for path in ("v2", "dense")
]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures, instead of files."""
    found: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, target: found.append(figure))
    return found


def rows_in(run: Run) -> list[Row]:
    return rows_of(run, judge(run, None, POLICY))


def run_with(cells: list[Cell], tok_per_s: dict[int, float] | None = None) -> Run:
    """``tok_per_s`` of the cells by their place."""
    run = b.make_run([b.planned_cell(cell) for cell in cells])
    for place, speed in (tok_per_s or {}).items():
        run = b.replace_rows(run, run.manifest.cells[place].cell_id, tok_per_s=speed)
    return run


def texts(axes: Any) -> list[str]:
    return [one.get_text() for one in axes.texts]


def test_shapes_of_one_length_share_a_panel_of_bars(drawn: list[Any], tmp_path: Path) -> None:
    """The training picture was six panels of two dots."""
    rows = rows_in(run_with(TRAINING, {4: 100_000.0, 5: 400_000.0}))
    assert speeds.draw(rows, tmp_path / "x.png", "") == speeds.Drawn(10, 10)
    lines, bars = drawn[0].axes
    assert lines.get_title(loc="left") == "train, batch=1"
    names = [one.get_text() for one in bars.get_yticklabels()]
    assert names == ["1 x 2,048, captured", "8 x 2,048", "8 x 2,048, captured"]
    assert len(bars.patches) == 6, "one bar a path"
    assert "100,000   0.25 x dense" in texts(bars) and "400,000" in texts(bars)
    legend = [one.get_text() for one in drawn[0].legends[0].get_texts()]
    assert legend == ["v2", "dense"], "FA-2 does not vary"


def test_no_panel_has_one_point(drawn: list[Any], tmp_path: Path) -> None:
    """Two of our own: single cells of several workloads, and a path that has one length alone."""
    single = [Cell(workload, 512, "v2", "on") for workload in ("train", "forward", "decode")]
    speeds.draw(rows_in(run_with(single)), tmp_path / "x.png", "")
    assert [len(axes.lines) for axes in drawn[0].axes] == [0, 0, 0]
    assert [len(axes.patches) for axes in drawn[0].axes] == [1, 1, 1]
    kinds = [Cell("train", n, "v2", "on", batch) for n in (512, 1024) for batch in (1, 2, 4)]
    speeds.draw(rows_in(run_with(kinds)), tmp_path / "x.png", "")
    (axes,) = drawn.pop().axes
    assert len(axes.patches) == 6, "nor three panels of one line of two points"
    apart = [Cell("train", 128, "reference", "off"), Cell("train", 512, "v2", "on")]
    speeds.draw(rows_in(run_with(apart)), tmp_path / "x.png", "")
    (axes,) = drawn[1].axes
    names = [one.get_text() for one in axes.get_yticklabels()]
    assert names == ["1 x 128", "1 x 512"] and not axes.lines


def test_a_crossover_with_dense_is_marked_with_its_length(drawn: list[Any], tmp_path: Path) -> None:
    """Half as fast at 1,024 and twice as fast at 4,096: even at 2,048 on logarithms."""
    cells = [
        Cell("train", length, path, "on" if path == "v2" else "n/a")
        for length in (1024, 4096)
        for path in ("v2", "dense")
    ]
    rows = rows_in(run_with(cells, {0: 50.0, 1: 100.0, 2: 100.0, 3: 50.0}))
    (found,) = speeds.crossovers(rows)
    assert found.series == ("v2", "on") and found.length == pytest.approx(2048.0)
    speeds.draw(rows, tmp_path / "x.png", "")
    assert " v2 = dense at about 2,000" in texts(drawn[0].axes[0])
    never = rows_in(run_with(cells, {0: 50.0, 1: 100.0, 2: 50.0, 3: 100.0}))
    assert speeds.crossovers(never) == []


def test_nothing_crosses_over_a_lost_length() -> None:
    cells = [
        Cell("train", length, path, "on" if path == "v2" else "n/a")
        for length in (1024, 2048, 4096)
        for path in ("v2", "dense")
    ]
    run = run_with(cells, {0: 50.0, 1: 100.0, 2: 70.0, 3: 70.5, 4: 100.0, 5: 50.0})
    assert [found.below for found in speeds.crossovers(rows_in(run))] == [2048]
    lost = run.manifest.cells[2]
    run = b.change_rows(
        run,
        lost.cell_id,
        lambda row: b.replicate(lost, row.replicate, status="oom", tok_per_s=None),
    )
    assert speeds.crossovers(rows_in(run)) == []


def test_a_crossover_between_far_lengths_is_no_length(drawn: list[Any], tmp_path: Path) -> None:
    """Two points 16 times apart do not tell where between them the lines meet."""
    cells = [
        Cell("train", length, path, "on" if path == "v2" else "n/a")
        for length in (1024, 16384)
        for path in ("v2", "dense")
    ]
    rows = rows_in(run_with(cells, {0: 50.0, 1: 100.0, 2: 100.0, 3: 50.0}))
    speeds.draw(rows, tmp_path / "x.png", "")
    assert " v2 passes dense between 1,024 and 16,384" in texts(drawn[0].axes[0])


def with_speeds(run: Run, place: int, *speeds_: float, host_bound: bool = False) -> Run:
    """The cell at ``place`` with a process of each of these tok/s."""
    cell = run.manifest.cells[place]
    return b.change_rows(
        run,
        cell.cell_id,
        lambda row: b.replicate(
            cell, row.replicate, tok_per_s=speeds_[row.replicate], host_bound=host_bound
        ),
    )


def whiskers(axes: Any) -> list[list[list[float]]]:
    """The ends of each line that is drawn from one point to another."""
    return [
        segment.tolist()
        for one in axes.collections
        if isinstance(one, LineCollection)
        for segment in one.get_segments()
    ]


def arrowheads(axes: Any) -> dict[str, list[float]]:
    """Of each marker, where it is."""
    found = {line.get_marker(): line.get_xydata()[0].tolist() for line in axes.lines}
    return {marker: at for marker, at in found.items() if marker in ("<", ">", "^", "v")}


def legend(figure: Any) -> list[str]:
    return [one.get_text() for one in figure.legends[0].get_texts()]


BEYOND = "95 % interval beyond the axis"


def test_a_whisker_that_goes_on_beyond_the_axis_has_an_arrowhead(
    drawn: list[Any], tmp_path: Path
) -> None:
    """A bar of ± 276 % had no error bar, and its number was not there either."""
    (row,) = rows_in(with_speeds(run_with([Cell("forward", 512, "v2", "on")]), 0, 1e3, 1e4, 1e5))
    assert row.half_pct is not None and row.half_pct > 276
    speeds.draw([row], tmp_path / "x.png", "")
    (axes,) = drawn[0].axes
    assert f"too noisy (± {row.half_pct:,.0f} %)" in " ".join(texts(axes))
    (((low, _), (end, _)),) = whiskers(axes)
    assert row.tok_per_s is not None and row.high is not None
    assert low == row.low and row.tok_per_s < end < axes.get_xlim()[1] < row.high
    assert arrowheads(axes) == {">": [end, 0.0]}
    (said,) = axes.texts
    assert said.get_position()[0] > end and BEYOND in legend(drawn[0])


def test_a_whisker_of_a_decade_that_fits_the_axis_is_whole(
    drawn: list[Any], tmp_path: Path
) -> None:
    cells = [Cell("forward", 512, "v2", "on", batch) for batch in (1, 8)]
    rows = rows_in(with_speeds(run_with(cells, {1: 1e8}), 0, 1e3, 1e4, 1e5))
    assert speeds.too_wide(rows[0]) and not speeds.too_wide(rows[1])
    speeds.draw(rows, tmp_path / "x.png", "")
    (axes,) = drawn[0].axes
    ends = [[low[0], high[0]] for low, high in whiskers(axes)]
    assert ends == [[row.low, row.high] for row in rows]
    assert arrowheads(axes) == {} and BEYOND not in legend(drawn[0])


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "1 of 2 cells is host bound: its wall time follows"),
        (2, "2 of 2 cells are host bound: their wall time follows"),
    ],
)
def test_how_many_cells_are_host_bound_is_a_sentence(count: int, said: str) -> None:
    run = run_with([Cell("forward", length, "v2", "on") for length in (512, 1024)])
    for place, cell in enumerate(run.manifest.cells):
        run = b.replace_rows(run, cell.cell_id, host_bound=place < count)
    assert said in files._host_bound(rows_in(run))


@pytest.mark.parametrize(("bound", "why"), [(True, "host bound"), (False, "too noisy")])
def test_a_band_that_says_nothing_is_a_whisker(
    drawn: list[Any], tmp_path: Path, bound: bool, why: str
) -> None:
    run = run_with([Cell("forward", length, "v2", "on") for length in (512, 1024, 2048)])
    run = with_speeds(run, 0, 1e3, 1e4, 1e5, host_bound=bound)
    for cell in run.manifest.cells[1:]:  # the noise of a family is shared
        run = b.replace_rows(run, cell.cell_id, host_bound=not bound)
    rows = rows_in(run)
    assert rows[0].high is not None and rows[0].low is not None
    assert rows[0].high / rows[0].low > 100, "two decades"
    assert speeds.too_wide(rows[0]) == why
    speeds.draw(rows, tmp_path / "x.png", "")
    (axes,) = drawn[0].axes
    assert why in texts(axes)
    low, high = axes.get_ylim()
    assert high < rows[0].high and low > rows[0].low
    assert whiskers(axes)[-1] == [[512, low], [512, high]]
    assert arrowheads(axes) == {"v": [512, low], "^": [512, high]}
    assert BEYOND in legend(drawn[0])


def test_a_marker_at_100_per_cent_is_whole(drawn: list[Any], tmp_path: Path) -> None:
    """Of utilisation, and of a speed at the top of its panel."""
    run = run_with([Cell("train", n, "v2", "on") for n in (512, 1024, 2048)])
    for cell in run.manifest.cells:
        run = b.replace_rows(run, cell.cell_id, profile=b.profile(busy_fraction=1.0))
    rows = rows_in(run)
    assert utilisation.draw(rows, tmp_path / "x.png", "") == 3
    speeds.draw(rows, tmp_path / "y.png", "")
    for figure in drawn:
        (axes,) = figure.axes
        marked = [line for line in axes.lines if line.get_marker() not in ("None", None, "")]
        assert marked and not any(line.get_clip_on() for line in marked)
    assert [line.get_xdata()[0] for line in drawn[0].axes[0].lines] == [100.0] * 3


def test_bars_of_utilisation_are_grouped_by_shape(drawn: list[Any], tmp_path: Path) -> None:
    """57 bars with long labels were unreadable: the shape is said once a group."""
    rows = rows_in(b.make_run(b.h100_cells()))
    assert utilisation.draw(rows, tmp_path / "x.png", "") == 60 == len(drawn[0].axes[0].patches)
    names = {one.get_text() for one in drawn[0].axes[0].get_yticklabels()}
    assert "v2, FA-2 on" in names and not any("512" in name for name in names)
    assert " train  1 x 512" in texts(drawn[0].axes[0])


@pytest.mark.parametrize("lengths", [(2048,), (2048, 4096, 8192)])
def test_a_picture_is_capped_and_the_report_says_so(
    tmp_path: Path, lengths: tuple[int, ...]
) -> None:
    """300 panels were 771 MB and 84,744 pixels; here 70 shapes, of bars or lines."""
    cells = [
        Cell("train", length, "v2", fa2, batch)
        for batch, fa2, length in itertools.product(
            range(1, 1 + 70 // len(lengths)), ("on",), lengths
        )
    ]
    run = run_with(cells)
    lost = run.manifest.cells[0]
    run = b.change_rows(
        run, lost.cell_id, lambda row: b.failed(lost, Status.OOM, row.replicate, "oom")
    )
    text = report.render(run, judge(run, None, POLICY), tmp_path)[0].read_text(encoding="utf-8")
    for name in ("throughput.png", "utilisation.png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.height <= MAX_PIXELS and picture.width <= 1_300
        assert (tmp_path / name).stat().st_size < MAX_BYTES
    assert f" of {len(cells)} cells, the table has the others" in text
    table = text.split("## Every cell")[1]
    assert table.count("\n| `") == len(cells), "the table"


def test_many_bars_beside_many_panels_fit(drawn: list[Any], tmp_path: Path) -> None:
    cells = [
        Cell("train", length, "v2", "on", n) for n in range(1, 11) for length in (256, 512, 1024)
    ]
    cells += [Cell("forward", 512, "v2", "on", n) for n in range(1, 61)]
    found = speeds.draw(rows_in(run_with(cells)), tmp_path / "x.png", "")
    assert 30 < found.shown < found.cells == 90
    assert drawn[0].get_size_inches()[1] * plots.DPI <= MAX_PIXELS
    assert len(drawn[0].axes) == 11


def test_the_picture_of_changes_is_capped_too(drawn: list[Any], tmp_path: Path) -> None:
    """Eighty compared cells were 2,268 pixels."""
    run = run_with([Cell("train", 512, "v2", "on", batch) for batch in range(1, 81)])
    rows = rows_of(run, judge(run, b.baseline_of(run), POLICY))
    assert changes.draw(rows, tmp_path / "x.png", "a\nb\nc", min_effect_pct=3) == plots.MAX_BARS
    assert drawn[0].get_size_inches()[1] * plots.DPI <= MAX_PIXELS
