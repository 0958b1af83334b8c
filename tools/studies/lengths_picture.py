"""docs/lengths.png: NSA against the best dense attention over sequence length, from one stored run.

    python -m tools.studies.lengths_picture RUN --out docs/lengths.png

Everything on the picture is computed from the run: the curves, the crossovers and the title.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import perfbench
from perfbench import records

RUN = Path("reports/evidence/nightly-h200/kernels")
OUT = Path("docs/lengths.png")
PANELS = {"attention_forward": "forward", "attention": "forward + backward"}
NSA = ("auto", "triton")
DENSE = {
    "dense_cudnn": "cuDNN",
    "dense_flash": "FlashAttention-2",
    "dense_fa3": "FlashAttention-3",
    "dense_fa4": "FlashAttention-4",
}
FOOTER_WIDTH = 168  # letters that fit a line
FINGERPRINT = "plotted-data"  # the PNG's text chunk
BLUE, ORANGE, GREY = "#0b5fbe", "#c2410c", "#57606a"


@dataclass(frozen=True, slots=True)
class LengthRow:
    """One measured process: milliseconds of a step."""

    workload: str
    tokens: int
    path: str
    cuda_graph: bool
    ms: float


@dataclass(frozen=True, slots=True)
class Point:
    """One length of a curve: the median over processes, the least and the most."""

    tokens: int
    ms: float
    least_ms: float
    most_ms: float
    path: str
    cuda_graph: bool


@dataclass(frozen=True, slots=True)
class Panel:
    """The curves of one workload, each point the fastest of what was measured at its length.

    ``launched`` is NSA launched by the host, where a CUDA graph was measured too.
    ``crossover`` is the length, in tokens, from which NSA is the faster one; None without one.
    """

    name: str
    nsa: tuple[Point, ...]
    dense: tuple[Point, ...]
    launched: tuple[Point, ...]
    crossover: float | None

    def speedup(self, tokens: int) -> float:
        """Dense milliseconds over NSA's: above 1 NSA is faster."""
        nsa, dense = (
            next(point for point in curve if point.tokens == tokens)
            for curve in (self.nsa, self.dense)
        )
        return dense.ms / nsa.ms


def rows_of(run: Path) -> list[LengthRow]:
    """The rows of ``run`` that hold a time."""
    frame = perfbench.load(run)
    timed = frame[(frame.status == "ok") & frame.step_ms.notna()]
    return [
        LengthRow(
            row.workload, int(row.seq_len), row.path, row.cuda_graph == "on", float(row.step_ms)
        )
        for row in timed.itertuples()
    ]


def panels_of(rows: Sequence[LengthRow]) -> list[Panel]:
    """One panel a workload, in the order of `PANELS`.

    ValueError where NSA and dense attention share fewer than two lengths.
    """
    panels = []
    for workload, name in PANELS.items():
        points = _points([row for row in rows if row.workload == workload])
        nsa = _fastest([point for point in points if point.path in NSA])
        dense = _fastest([point for point in points if records.kind_of(point.path) == "dense"])
        shared = {point.tokens for point in nsa} & {point.tokens for point in dense}
        if len(shared) < 2:
            raise ValueError(f"{workload}: NSA and dense share {len(shared)} lengths; wanted 2")
        nsa, dense = (tuple(p for p in curve if p.tokens in shared) for curve in (nsa, dense))
        graphs = {point.tokens for point in points if point.path in NSA and point.cuda_graph}
        launched = [
            point
            for point in points
            if point.path in NSA and not point.cuda_graph and point.tokens in graphs
        ]
        panels.append(Panel(name, nsa, dense, _fastest(launched), crossover(nsa, dense)))
    return panels


def crossover(nsa: Sequence[Point], dense: Sequence[Point]) -> float | None:
    """The length after which NSA stays faster; both curves are straight in log-log between points.

    None where NSA is slower at the last length, or faster at every one.
    """
    gaps = [math.log(d.ms / n.ms) for n, d in zip(nsa, dense, strict=True)]  # > 0: NSA is faster
    for index in reversed(range(len(gaps) - 1)):
        if gaps[index + 1] <= 0:
            return None
        if gaps[index] <= 0:
            share = -gaps[index] / (gaps[index + 1] - gaps[index])
            return nsa[index].tokens * (nsa[index + 1].tokens / nsa[index].tokens) ** share
    return None


def title_of(panels: Sequence[Panel]) -> str:
    """The claim, with its numbers."""
    last = panels[-1]
    tokens = last.nsa[-1].tokens
    ahead = f"{last.speedup(tokens):.1f}x as fast at {thousands(tokens)}"
    if last.crossover is None:
        return f"NSA against the best dense attention, {last.name}: {ahead}"
    return (
        f"NSA overtakes the best dense attention at {thousands(last.crossover)} tokens and is"
        f" {ahead}, {last.name}"
    )


def thousands(tokens: float) -> str:
    """'11k', from 11,042; powers of two as '64k'."""
    exact = float(tokens).is_integer() and int(tokens) % 1024 == 0
    return f"{tokens / (1024 if exact else 1000):.0f}k"


def draw(panels: Sequence[Panel], footer: str) -> Figure:
    """Both panels on one scale of milliseconds, the claim above and ``footer`` below."""
    figure = Figure(figsize=(10, 4.7), dpi=110, facecolor="white")
    grid = figure.subplots(1, len(panels), sharey=True)
    for axes, panel in zip(grid, panels, strict=True):
        _draw_panel(axes, panel)
    low, high = grid[0].get_ylim()
    grid[0].set_ylim(low / 2, high * 2.5)  # room for labels
    grid[0].set_ylabel("milliseconds a layer's attention (log)", color=GREY)
    figure.suptitle(title_of(panels), x=0.012, y=0.975, ha="left", weight="bold", fontsize=12)
    figure.text(0.012, 0.012, footer, color=GREY, fontsize=7.6, va="bottom", linespacing=1.45)
    figure.subplots_adjust(left=0.065, right=0.985, top=0.845, bottom=0.235, wspace=0.05)
    return figure


def footer_of(run: Path) -> str:
    """GPU, versions, commit and method of the run, in lines that fit the picture."""
    found = records.read_run(run)
    machine, source = found.manifest.environment, found.manifest.source
    ran = {row.axes.path for row in found.replicates}
    rivals = [name for path, name in DENSE.items() if path in ran]
    text = (
        f"{machine.device_name}, torch {machine.torch}, Triton {machine.triton}; commit"
        f" {(source.commit or 'unknown commit')[:12]}; {found.manifest.matrix_path}: attention"
        " alone, 12 query heads over 2 KV heads of 64, batch 1, bf16, cold L2. Medians of"
        f" {found.manifest.replicates} processes; bars span the fastest and the slowest one. Up to"
        " 16k both sides replay a CUDA graph where that is faster; beyond, the host launches them."
        f" Best dense: the fastest kernel of {' and '.join(rivals)}. Blue and orange factors: dense"
        " time over NSA time. Crossovers are interpolated."
    )
    return textwrap.fill(text, FOOTER_WIDTH)


def fingerprint(panels: Sequence[Panel], footer: str) -> str:
    """What the picture shows, as a hash: the PNG carries it, so that a stale one is found."""
    return hashlib.sha256(repr((panels, footer)).encode()).hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="Draw NSA against dense attention over length.")
    parser.add_argument("run", nargs="?", type=Path, default=RUN, help="a run folder")
    parser.add_argument("--out", type=Path, default=OUT, metavar="PNG")
    options = parser.parse_args(argv)
    panels, footer = panels_of(rows_of(options.run)), footer_of(options.run)
    draw(panels, footer).savefig(options.out)
    _shrink(options.out, fingerprint(panels, footer))
    print(options.out)
    return 0


def _points(rows: Sequence[LengthRow]) -> list[Point]:
    found: dict[tuple[int, str, bool], list[float]] = defaultdict(list)
    for row in rows:
        found[row.tokens, row.path, row.cuda_graph].append(row.ms)
    return [
        Point(tokens, median(times), min(times), max(times), path, graph)
        for (tokens, path, graph), times in sorted(found.items())
    ]


def _fastest(points: Sequence[Point]) -> tuple[Point, ...]:
    """Of each length the point with the least median, by length."""
    best: dict[int, Point] = {}
    for point in points:
        if point.tokens not in best or point.ms < best[point.tokens].ms:
            best[point.tokens] = point
    return tuple(best[tokens] for tokens in sorted(best))


def _draw_panel(axes: Axes, panel: Panel) -> None:
    lengths = [point.tokens for point in panel.nsa]
    right = lengths[-1] * 2.7  # room for the labels of the ends
    axes.set(xscale="log", yscale="log", xlim=(lengths[0] * 0.8, right))
    if panel.crossover is not None:
        axes.axvspan(panel.crossover, right, color=BLUE, alpha=0.06, lw=0)
        axes.axvline(panel.crossover, color=GREY, lw=1, ls=(0, (4, 3)))
        axes.annotate(
            f"crossover {thousands(panel.crossover)}",
            (panel.crossover, 0.965),
            xycoords=("data", "axes fraction"),
            xytext=(5, 0),
            textcoords="offset points",
            va="top",
            weight="bold",
            fontsize=9.5,
        )
        axes.annotate(
            "dense is faster",
            (panel.crossover, 0.965),
            xycoords=("data", "axes fraction"),
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            va="top",
            color=ORANGE,
            fontsize=9.5,
        )
    if panel.launched:
        times = [point.ms for point in panel.launched]
        tokens = [point.tokens for point in panel.launched]
        axes.plot(tokens, times, color=BLUE, lw=1.1, ls=":", marker="o", ms=3.5, mfc="white")
        axes.annotate(
            "NSA, host-launched",
            (tokens[0], times[0]),
            xytext=(0, 9),
            textcoords="offset points",
            color=BLUE,
            fontsize=8.2,
        )
    for curve, color, marker in ((panel.dense, ORANGE, "s"), (panel.nsa, BLUE, "o")):
        axes.errorbar(
            [point.tokens for point in curve],
            [point.ms for point in curve],
            yerr=[
                [point.ms - point.least_ms for point in curve],
                [point.most_ms - point.ms for point in curve],
            ],
            color=color,
            marker=marker,
            ms=5,
            lw=2.1,
            elinewidth=1.2,
            capsize=3,
        )
    end_nsa, end_dense = panel.nsa[-1], panel.dense[-1]
    for point, text, color in (
        (end_nsa, f"NSA\n{end_nsa.ms:.3g} ms", BLUE),
        (end_dense, f"dense\n{end_dense.ms:.3g} ms", ORANGE),
    ):
        axes.annotate(
            text,
            (point.tokens, point.ms),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=color,
            weight="bold",
            fontsize=9,
        )
    for nsa, dense in zip(panel.nsa, panel.dense, strict=True):
        ratio = panel.speedup(nsa.tokens)
        axes.annotate(
            f"{ratio:.1f}x" if ratio >= 1.2 else f"{ratio:.2f}x",
            (nsa.tokens, min(nsa.ms, dense.ms)),
            xytext=(6, -18),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            weight="bold",
            color=BLUE if ratio >= 1 else ORANGE,
        )
    axes.set_title(panel.name, loc="left", fontsize=11, color="black")
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: thousands(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("sequence length, tokens (log)", color=GREY)
    axes.grid(color="#d8dee4", lw=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY, which="both")


def _shrink(png: Path, data: str) -> None:
    """Write the PNG with a palette of 128 colours, a third of the bytes, and ``data`` as text."""
    text = PngInfo()
    text.add_text(FINGERPRINT, data)
    with Image.open(png) as image:
        small = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(png, optimize=True, pnginfo=text)


if __name__ == "__main__":
    sys.exit(main())
