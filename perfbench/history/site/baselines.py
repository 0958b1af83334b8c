"""The baselines in git as levels of the charts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from perfbench.errors import PerfbenchError
from perfbench.records import BaselineCell, BaselineProblem, Verdict, baseline_path, read_baseline

LevelOf = Mapping[tuple[str, str], float]  # (cell id, metric) -> level


def read_levels(
    folder: Path, suites: Iterable[tuple[str, str]]
) -> tuple[dict[tuple[str, str], LevelOf], list[str]]:
    """The levels of each (suite, card) that ``folder`` has a baseline of, and what is wrong with
    those that cannot be read.
    """
    levels, problems = dict[tuple[str, str], LevelOf](), []
    for suite, card in suites:
        try:
            path = baseline_path(folder, card, suite)
        except PerfbenchError:  # another tool's name, which no file can have
            continue
        found = read_baseline(path)
        if not isinstance(found, BaselineProblem):
            levels[suite, card] = levels_of(found.cells)
        elif found.verdict != Verdict.NO_BASELINE:
            problems.append(found.message)
    return levels, problems


def levels_of(cells: Mapping[str, BaselineCell]) -> LevelOf:
    levels: dict[tuple[str, str], float] = {}
    for cell_id, cell in cells.items():
        levels[cell_id, "tok_per_s"] = cell.speed
        for name, seconds in (("device_ms", cell.device_time_s), ("host_ms", cell.host_time_s)):
            if seconds:
                levels[cell_id, name] = 1000 * _geometric_mean(seconds)
        for name, count in (("launches", cell.kernel_count), ("host_syncs", cell.host_syncs)):
            if count is not None:
                levels[cell_id, name] = float(count)
    return levels


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
