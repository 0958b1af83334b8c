"""The nouns of a history: runs and their cells, series of points, and their changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Self


class Better(StrEnum):
    """Which direction of a metric is an improvement."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True)
class Metric:
    """What a series counts. ``name`` ends with its unit; ``title`` is for people."""

    name: str
    title: str
    unit: str  # 'tok/s', 'ms', 'bytes', ...; '' for a count
    better: Better


# What `perfbench history add` keeps of each cell of a run, in the order of the pages. An imported
# series brings a Metric of its own.
METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        one.name: one
        for one in (
            Metric("tok_per_s", "speed", "tok/s", Better.HIGHER),
            Metric("step_ms", "wall time of a step", "ms", Better.LOWER),
            Metric("device_ms", "device time of a step", "ms", Better.LOWER),
            Metric("host_ms", "host time of a step", "ms", Better.LOWER),
            Metric("launches", "kernel launches of a step", "", Better.LOWER),
            Metric("host_syncs", "host syncs of a step", "", Better.LOWER),
            Metric("peak_memory_bytes", "peak memory", "bytes", Better.LOWER),
            Metric("cold_start_s", "first step, compile time included", "s", Better.LOWER),
            Metric("wall_s", "whole process of a replicate", "s", Better.LOWER),
            Metric("energy_j_per_token", "energy", "J/token", Better.LOWER),
            Metric("floor_fraction", "share of the hardware's limit", "", Better.HIGHER),
            Metric("utilisation_pct", "GPU utilisation", "%", Better.NEITHER),
            Metric("sm_clock_mhz", "SM clock", "MHz", Better.NEITHER),
        )
    }
)


@dataclass(frozen=True, slots=True)
class MeasuredValue:
    """One metric of one cell in one run.

    ``value``: the geometric mean over ``count`` processes (the median where a value may be 0); null
    with its ``reason``. ``low`` and ``high``: the 95 % interval, null where it is not known.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    count: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class HistoryCell:
    """A cell of a run: its verdict, and what was measured, by metric.

    ``verdict``: a value of perfbench.records.Verdict; null where nothing was compared and nothing
    is wrong. A cell that failed, ran on a wrong path or did not fit has its verdict, its reason,
    and `MeasuredValue` with null.
    """

    cell_id: str
    axes: Mapping[str, str | int]
    verdict: str | None
    reason: str
    reproduce: str  # the command that measures it again; '' where nobody knows
    measured: Mapping[str, MeasuredValue]
    config_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run of a matrix, or an import of another tool's results, without its cells.

    ``card``: the GPU's slug, 'cpu', or what another tool calls its machine. ``segment``: what must
    agree before two of its points may be compared: driver, CUDA, torch, Triton, ..., method.
    """

    run_id: str
    content_sha256: str  # of what it was made from: the same bytes are the same run
    origin: str  # 'perfbench', 'pytest-benchmark', 'asv', ...
    suite: str  # the matrix's name
    card: str
    measured_utc: datetime
    commit: str | None
    segment: Mapping[str, str]
    commit_utc: datetime | None = None
    branch: str | None = None
    is_dirty: bool | None = None
    command: str = ""  # as it was typed
    headline: str = ""
    exit_code: int | None = None
    injections: tuple[str, ...] = ()  # a demonstration, which no series shows unless asked
    folder: str = ""  # where the run lay when it was added
    report: str = ""  # Markdown


@dataclass(frozen=True, slots=True)
class HistoryRun:
    """A run as it is added: `RunInfo`, the cells, and the metrics that are not in METRICS."""

    info: RunInfo
    cells: tuple[HistoryCell, ...]
    metrics: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, order=True)
class SeriesKey:
    """Names one series: a metric of a cell of a suite on a kind of card."""

    suite: str
    card: str
    cell_id: str
    metric: str


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """One run's place in a series. ``segment`` is equal between points that may be compared."""

    run_id: str
    measured_utc: datetime
    commit: str | None
    value: float | None
    low: float | None
    high: float | None
    count: int
    verdict: str | None
    reason: str
    segment: Mapping[str, str]
    is_dirty: bool | None = None  # of the run: measured with uncommitted changes


@dataclass(frozen=True, slots=True)
class Series:
    """The points of one key, oldest first."""

    key: SeriesKey
    metric: Metric
    axes: Mapping[str, str | int]
    points: tuple[SeriesPoint, ...]

    def without_gaps(self) -> Self:
        """The points that have a value."""
        points = tuple(point for point in self.points if point.value is not None)
        return type(self)(self.key, self.metric, self.axes, points)


GROWN = 1.5  # times its reported size: a change of so much is news again


class ChangeKind(StrEnum):
    STEP = "step"
    DRIFT = "drift"


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """A change point of a series.

    A step lies between two runs: ``before_run_id`` is the last of the old level, ``run_id`` the
    first of the new one. A drift goes on from the first to the second. ``size_pct``: of the value,
    positive where it rose, with its 95 % interval ``low_pct`` to ``high_pct``.
    """

    key: SeriesKey
    kind: ChangeKind
    before_run_id: str
    run_id: str
    before_commit: str | None
    commit: str | None
    measured_utc: datetime  # of ``run_id``
    size_pct: float
    low_pct: float
    high_pct: float
    is_worse: bool | None  # null where neither direction is better
    p: float | None = None

    def has_outgrown(self, known: ChangePoint) -> bool:
        """Whether it is so much larger than it was when it was reported that it is news again: by
        GROWN, in logarithms since no fall is larger than 100 %, and beyond the reported interval.
        """
        if known.low_pct <= self.size_pct <= known.high_pct:
            return False
        mine, theirs = (
            abs(math.log1p(pct / 100)) if pct > -100 else math.inf
            for pct in (self.size_pct, known.size_pct)
        )
        return mine >= GROWN * theirs


class TriageKind(StrEnum):
    ACCEPTED = "accepted"  # the new level is the level
    NOISE = "noise"  # nothing changed: do not report it again
    NOTE = "note"  # a remark that changes nothing


@dataclass(frozen=True, slots=True)
class Triage:
    """What somebody decided about a series from ``run_id`` on.

    Fields of ``suite``, ``card``, ``cell_id`` and ``metric`` that are null match every value.
    """

    kind: TriageKind
    run_id: str
    note: str
    author: str
    created_utc: datetime
    suite: str | None = None
    card: str | None = None
    cell_id: str | None = None
    metric: str | None = None

    def matches(self, key: SeriesKey) -> bool:
        """Whether it is about this series."""
        mine = (self.suite, self.card, self.cell_id, self.metric)
        theirs = (key.suite, key.card, key.cell_id, key.metric)
        return all(one is None or one == other for one, other in zip(mine, theirs, strict=True))
