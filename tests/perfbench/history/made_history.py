"""A history that was never measured: `cells` cells of two suites over `runs` runs, with what a page
must show planted in it: a step, a drift, a failure, a gap, a new driver, an accepted level.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from random import Random

from perfbench.history.nouns import (
    METRICS,
    ChangeKind,
    ChangePoint,
    HistoryCell,
    HistoryRun,
    MeasuredValue,
    RunInfo,
    Series,
    SeriesKey,
    SeriesPoint,
    Triage,
    TriageKind,
)

BEGIN = datetime(2026, 1, 3, 2, 17, tzinfo=UTC)
PATHS = ("triton", "v2", "masked", "auto", "dense")
MEASURED = ("tok_per_s", "device_ms", "launches", "peak_memory_bytes")
STEP_PCT, DRIFT_PCT = -6.4, -5.2
REPORT = """# 🔴 REGRESSED, exit 3: 1 of {cells} cells is slower

| | |
| --- | --- |
| **What ran?** | {cells} cells x 3 processes |

![tok/s against seq_len](throughput.png)

See [the trace](trace.json) and [the method](https://example.org/method).

| cell | tok/s |
| --- | ---: |
| path=triton | 120,000 |

<details><summary>Why, in full</summary>

`path=triton`: -6.4 %

</details>
"""


@dataclass
class MadeHistory:
    """Answers what `perfbench.history.store.History` does, from lists."""

    every: list[HistoryRun] = field(default_factory=list)
    found: list[ChangePoint] = field(default_factory=list)
    triaged: list[Triage] = field(default_factory=list)
    series: dict[SeriesKey, Series] = field(default_factory=dict)

    def runs(self, *, since: datetime | None = None) -> list[RunInfo]:
        chosen = [one.info for one in self.every if since is None or one.info.measured_utc >= since]
        newest = sorted(chosen, key=lambda one: (one.measured_utc, one.run_id), reverse=True)
        return [replace(one, report="") for one in newest]

    def run(self, run_id: str) -> HistoryRun:
        return next(one for one in self.every if one.info.run_id == run_id)

    def keys(self, *, suite: str | None = None, card: str | None = None) -> list[SeriesKey]:
        found = self._every_series()
        return [key for key in found if suite in (None, key.suite) and card in (None, key.card)]

    def every_series(
        self,
        *,
        suite: str | None = None,
        card: str | None = None,
        metric: str | None = None,
        since: datetime | None = None,
    ) -> Iterator[Series]:
        for key, one in self._every_series().items():
            if (suite, card) != (key.suite, key.card) or metric not in (None, key.metric):
                continue
            yield (
                one
                if since is None
                else replace(one, points=tuple(p for p in one.points if p.measured_utc >= since))
            )

    def _every_series(self) -> dict[SeriesKey, Series]:
        if self.series:
            return self.series
        points: dict[SeriesKey, list[SeriesPoint]] = {}
        axes = {}
        for run in sorted(self.every, key=lambda one: one.info.measured_utc):
            for cell in run.cells:
                for name, one in cell.measured.items():
                    key = SeriesKey(run.info.suite, run.info.card, cell.cell_id, name)
                    axes[key] = cell.axes
                    points.setdefault(key, []).append(_point(run.info, cell, one))
        for key in sorted(points):
            self.series[key] = Series(key, METRICS[key.metric], axes[key], tuple(points[key]))
        return self.series

    def change_points(self) -> list[ChangePoint]:
        return sorted(self.found, key=lambda one: one.measured_utc, reverse=True)

    def decisions(self) -> list[Triage]:
        return self.triaged


def _point(info: RunInfo, cell: HistoryCell, one: MeasuredValue) -> SeriesPoint:
    return SeriesPoint(
        info.run_id,
        info.measured_utc,
        info.commit,
        one.value,
        one.low,
        one.high,
        one.count,
        cell.verdict,
        one.reason or cell.reason,
        info.segment,
    )


def commit_of(index: int) -> str:
    return hashlib.sha1(str(index).encode()).hexdigest()


def axes_of(place: int) -> dict[str, str | int]:
    workload = ("forward", "train", "decode")[place // len(PATHS) % 3]
    length = 512 * 2 ** (place // (3 * len(PATHS)) % 6)
    batch = 1 + place // (18 * len(PATHS))
    return {
        "workload": workload,
        "seq_len": length,
        "path": PATHS[place % len(PATHS)],
        "batch": batch,
    }


def cell_id_of(axes: dict[str, str | int]) -> str:
    return ",".join(f"{name}={axes[name]}" for name in sorted(axes))


def info_of(index: int, suite: str = "nightly-gate", card: str = "h200", **given) -> RunInfo:
    when = BEGIN + timedelta(days=index)
    driver = "570.86" if index < 40 else "580.159"
    commit = commit_of(index // 2)
    known = {
        "run_id": f"{when:%Y%m%dT%H%M%SZ}-{card}-{commit[:8]}-{suite}",
        "content_sha256": hashlib.sha256(f"{suite}{index}".encode()).hexdigest(),
        "origin": "perfbench",
        "suite": suite,
        "card": card,
        "measured_utc": when,
        "commit": commit,
        "segment": {"driver": driver, "torch": "2.11.0", "method": "7"},
        "commit_utc": when - timedelta(hours=6 + index % 2 * 24),
        "branch": "main",
        "is_dirty": False,
        "command": f"perfbench check matrices/{suite}-{card}.yaml --budget 45m",
        "headline": "MEASURED, exit 0: as planned",
        "exit_code": 0,
    }
    return RunInfo(**(known | given))


def value_of(name: str, place: int, index: int, runs: int, random: Random) -> float:
    """Cell 0 steps at two thirds of the runs; cell 1 drifts over the last third."""
    speed = 40_000 * (1 + place % 7) * math.exp(random.gauss(0, 0.006))
    if place == 0 and index >= 2 * runs // 3:
        speed *= 1 + STEP_PCT / 100
    if place == 1 and index >= 2 * runs // 3:
        speed *= 1 + DRIFT_PCT / 100 * (index - 2 * runs // 3) / max(1, runs - 2 * runs // 3 - 1)
    return {
        "tok_per_s": speed,
        "device_ms": 4_096_000 / speed,
        "launches": float(180 + place % 5),
        "peak_memory_bytes": 3.2e9 + 1e7 * (place % 40),
    }[name]


def made_run(index: int, runs: int, places: range, suite: str, card: str) -> HistoryRun:
    random = Random(f"{suite}{index}")
    cells = []
    for place in places:
        axes = axes_of(place)
        verdict, reason = "SAME", "within 1 %"
        if place == 0 and index >= 2 * runs // 3:
            verdict, reason = "REGRESSED", f"{STEP_PCT} % against the baseline"
        elif place % 11 == 3:
            verdict, reason = "BLIND", "the interval is wider than the limit"
        elif place % 13 == 5:
            verdict, reason = "FASTER", "+2.1 %"
        failed = place == 2 and index % 9 == 4
        if failed:
            verdict, reason = "FAILED", "exit -11: SIGSEGV in the second step"
        measured = {}
        for name in MEASURED:
            value = value_of(name, place, index, runs, random)
            width = 0.0 if name in ("launches", "peak_memory_bytes") else 0.008
            measured[name] = (
                MeasuredValue(None, reason=reason)
                if failed
                else MeasuredValue(value, value * (1 - width), value * (1 + width), 3)
            )
        command = f"perfbench run matrices/{suite}-{card}.yaml --only cell={cell_id_of(axes)}"
        cells.append(HistoryCell(cell_id_of(axes), axes, verdict, reason, command, measured))
    red = sum(cell.verdict in ("REGRESSED", "FAILED") for cell in cells)
    info = info_of(index, suite, card, report=REPORT.format(cells=len(cells)))
    if red:
        headline = f"REGRESSED, exit 3: {red} of {len(cells)} cells"
        info = replace(info, headline=headline, exit_code=3)
    return HistoryRun(info, tuple(cells))


def made_history(cells: int = 30, runs: int = 60) -> MadeHistory:
    """Two thirds of the cells are of nightly-gate on h200, the others of nightly-train on h100."""
    split = max(3, cells * 2 // 3)
    suites = [("nightly-gate", "h200", range(split))]
    if cells > split:
        suites.append(("nightly-train", "h100-80gb-hbm3", range(split, cells)))
    every = [
        made_run(index, runs, places, suite, card)
        for suite, card, places in suites
        for index in range(runs)
    ]
    infos = [run.info for run in every if run.info.suite == "nightly-gate"]
    at = 2 * runs // 3
    gate = [cell_id_of(axes_of(place)) for place in range(2)]

    def change(cell_id: str, kind: ChangeKind, begin: int, end: int, pct: float) -> ChangePoint:
        key = SeriesKey("nightly-gate", "h200", cell_id, "tok_per_s")
        old, new = infos[begin], infos[end]
        return ChangePoint(
            key,
            kind,
            old.run_id,
            new.run_id,
            old.commit,
            new.commit,
            new.measured_utc,
            pct,
            pct - 0.6,
            pct + 0.6,
            is_worse=True,
            p=1e-6,
        )

    found = [
        change(gate[0], ChangeKind.STEP, at - 1, at, STEP_PCT),
        change(gate[1], ChangeKind.DRIFT, at, runs - 1, DRIFT_PCT),
    ]
    slower = SeriesKey("nightly-gate", "h200", gate[0], "device_ms")
    found.append(replace(found[0], key=slower, size_pct=6.8, low_pct=6.2, high_pct=7.4))
    accepted = Triage(
        TriageKind.ACCEPTED,
        infos[runs // 3].run_id,
        "the new allocator is wanted",
        "ada",
        infos[runs // 3].measured_utc,
        "nightly-gate",
        "h200",
        gate[0],
    )
    return MadeHistory(every, found, [accepted])
