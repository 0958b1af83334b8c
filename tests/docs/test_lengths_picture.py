"""docs/lengths.png shows what the committed run holds: read again here from its raw samples."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from PIL import Image

from tools.studies import lengths_picture as picture

ROOT = Path(__file__).parents[2]
RUN = ROOT / picture.RUN
Times = dict[tuple[str, int, str, str], list[float]]


@pytest.fixture(scope="module")
def raw() -> Times:
    """(workload, tokens, path, cuda_graph) -> milliseconds a step of each process."""
    plain = RUN / "run.jsonl"
    text = (
        plain.read_bytes()
        if plain.exists()
        else gzip.decompress((RUN / "run.jsonl.gz").read_bytes())
    )
    times: Times = defaultdict(list)
    for line in map(json.loads, text.splitlines()):
        if line["kind"] == "replicate" and line["status"] == "ok":
            axes = line["axes"]
            key = (axes["workload"], axes["seq_len"], axes["path"], axes["cuda_graph"])
            times[key].append(1e3 * median(line["samples_s"]) / line["steps_per_sample"])
    return times


@pytest.fixture(scope="module")
def panels() -> list[picture.Panel]:
    return picture.panels_of(picture.rows_of(RUN))


@pytest.mark.parametrize(("index", "workload"), [(0, "attention_forward"), (1, "attention")])
def test_drawn_curves_are_the_runs(
    index: int, workload: str, raw: Times, panels: list[picture.Panel]
) -> None:
    """Medians, bars and lengths as matplotlib holds them, against the raw samples."""
    axes = picture.draw(panels, "footer").axes[index]
    curves: list[Any] = list(axes.containers)
    for color, paths in (
        (picture.BLUE, ["triton"]),
        (picture.ORANGE, ["dense_cudnn", "dense_flash"]),
    ):
        best = {
            tokens: min(
                (
                    times
                    for (work, length, path, _), times in raw.items()
                    if work == workload and length == tokens and path in paths
                ),
                key=median,
            )
            for tokens in (2048, 8192, 16384, 32768, 65536, 131072)
        }
        line, _, (bars,) = next(one.lines for one in curves if one.lines[0].get_color() == color)
        x, y = line.get_data()
        assert list(x) == list(best)
        assert list(y) == pytest.approx([median(times) for times in best.values()], rel=1e-6)
        for segment, times in zip(bars.get_segments(), best.values(), strict=True):
            assert [segment[0][1], segment[1][1]] == pytest.approx(
                [min(times), max(times)], rel=1e-6
            )


def fastest(raw: Times, workload: str, tokens: int, *paths: str) -> float:
    return min(
        median(times)
        for (work, length, path, _), times in raw.items()
        if (work, length) == (workload, tokens) and path in paths
    )


def test_crossover_lies_where_the_raw_times_change_order(
    raw: Times, panels: list[picture.Panel]
) -> None:
    """Between the last measured length where dense is faster and the first where NSA is."""
    for panel, workload in zip(panels, ("attention_forward", "attention"), strict=True):
        wins = {
            tokens: fastest(raw, workload, tokens, "triton")
            < fastest(raw, workload, tokens, "dense_cudnn", "dense_flash")
            for tokens in (8192, 16384)
        }
        assert wins == {8192: False, 16384: True}
        assert panel.crossover is not None and 8192 < panel.crossover < 16384
        assert f"crossover {picture.thousands(panel.crossover)}" in _texts(panels)


def test_title_says_what_is_drawn(panels: list[picture.Panel]) -> None:
    both = panels[-1]
    ratio = both.dense[-1].ms / both.nsa[-1].ms
    assert both.crossover is not None
    title = picture.title_of(panels)
    assert f"{ratio:.1f}x" in title and f"{both.crossover / 1000:.0f}k tokens" in title


def test_pages_state_the_pictures_numbers(panels: list[picture.Panel]) -> None:
    """README's first sentence, and the table of docs/kernels.md."""
    both = panels[-1]
    end = f"{both.nsa[-1].ms:.3g} ms instead of {both.dense[-1].ms:.3g} "
    assert end in (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d,]+)[^|]*\| ([\d.]+) ms \| ([\d.]+) ms \| ([\d.]+) x", page, re.M)
    assert [int(row[0].replace(",", "")) for row in rows] == [p.tokens for p in both.nsa[1:]]
    for row, nsa, dense in zip(rows, both.nsa[1:], both.dense[1:], strict=True):
        for shown, value in zip(row[1:], (nsa.ms, dense.ms, dense.ms / nsa.ms), strict=True):
            digits = len(shown.partition(".")[2])
            assert float(shown) == round(value, digits), row


def test_committed_picture_is_of_this_run(panels: list[picture.Panel]) -> None:
    file = ROOT / picture.OUT
    with Image.open(file) as image:
        assert image.text[picture.FINGERPRINT] == picture.fingerprint(  # type: ignore[attr-defined]
            panels, picture.footer_of(RUN)
        ), f"python -m {picture.__name__} draws it again"
    assert file.stat().st_size <= 80_000


def test_picture_is_written_again(tmp_path: Path, panels: list[picture.Panel]) -> None:
    out = tmp_path / "lengths.png"
    assert picture.main([str(RUN), "--out", str(out)]) == 0
    with Image.open(out) as image, Image.open(ROOT / picture.OUT) as committed:
        assert image.size == committed.size


def curve(*times: float) -> list[picture.Point]:
    return [
        picture.Point(2**index * 1024, ms, ms, ms, "triton", False)
        for index, ms in enumerate(times)
    ]


@pytest.mark.parametrize(
    ("nsa", "dense", "expected"),
    [
        ([4, 4], [2, 8], 1024 * math.sqrt(2)),
        ([4, 4, 4], [2, 8, 2], None),  # slower again at the end
        ([1, 1], [2, 2], None),  # never slower
        ([4, 1, 4, 4], [2, 2, 2, 8], 4096 * math.sqrt(2)),  # the last change counts
    ],
)
def test_crossover_of_curves(nsa: list[float], dense: list[float], expected: float | None) -> None:
    got = picture.crossover(curve(*nsa), curve(*dense))
    assert got == (None if expected is None else pytest.approx(expected))


def test_a_run_without_dense_is_refused() -> None:
    rows = [row for row in picture.rows_of(RUN) if row.path == "triton"]
    with pytest.raises(ValueError, match="share 0 lengths"):
        picture.panels_of(rows)


def _texts(panels: list[picture.Panel]) -> list[str]:
    return [text.get_text() for axes in picture.draw(panels, "").axes for text in axes.texts]
