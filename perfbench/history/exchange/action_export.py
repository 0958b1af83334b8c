"""Runs as github-action-benchmark keeps them: data.js, and the JSON of its two custom tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from perfbench.history.exchange.github_action import BIGGER, SMALLER
from perfbench.history.exchange.source import Exported
from perfbench.history.nouns import METRICS, Better, HistoryRun, MeasuredValue, Metric

_TOOLS = {Better.HIGHER: BIGGER, Better.LOWER: SMALLER}


def data_js(runs: Sequence[HistoryRun]) -> Exported:
    """data.js: an entry for each metric of each run, under 'suite | card | metric', oldest first.

    A number that is missing, and a metric without a better direction, has no place in the format:
    the notes count them.
    """
    entries: dict[str, list[dict[str, Any]]] = {}
    left = _Left()
    ordered = sorted(runs, key=lambda run: (run.info.measured_utc, run.info.run_id))
    for run in ordered:
        for metric in _metrics(run):
            if benches := list(_benches(run, metric, left)):
                key = f"{run.info.suite} | {run.info.card} | {metric.name}"
                key += " | INJECTED" if run.info.injections else ""
                entries.setdefault(key, []).append(_entry(run, metric, benches))
    last = _milliseconds(ordered[-1]) if ordered else 0
    page = {"lastUpdate": last, "repoUrl": "", "entries": entries}
    return Exported(f"window.BENCHMARK_DATA = {json.dumps(page, indent=2)}\n", left.notes())


def custom(tool: str, run: HistoryRun) -> Exported:
    """The list of benchmarks of one run that the action's tool ``tool`` takes: the metrics of its
    direction, each named 'cell [metric]'.
    """
    left, benches = _Left(), []
    for metric in _metrics(run):
        if _TOOLS.get(metric.better) == tool:
            for one in _benches(run, metric, left):
                benches.append(one | {"name": f"{one['name']} [{metric.name}]"})
        else:
            left.metrics.append(metric.name)
    return Exported(json.dumps(benches, indent=2) + "\n", left.notes())


class _Left:
    """What the format has no place for."""

    def __init__(self) -> None:
        self.missing = 0
        self.metrics: list[str] = []

    def notes(self) -> tuple[str, ...]:
        found = []
        if self.missing:
            found.append(f"{self.missing} numbers are missing and left out")
        if self.metrics:
            names = ", ".join(sorted(set(self.metrics)))
            found.append(f"left out, since the format takes one direction: {names}")
        return tuple(found)


def _metrics(run: HistoryRun) -> Iterator[Metric]:
    for name in sorted({name for cell in run.cells for name in cell.measured}):
        yield run.metrics.get(name) or METRICS[name]


def _benches(run: HistoryRun, metric: Metric, left: _Left) -> Iterator[dict[str, Any]]:
    if metric.better not in _TOOLS:
        left.metrics.append(metric.name)
        return
    for cell in run.cells:
        found = cell.measured.get(metric.name)
        if found is None:
            continue
        if found.value is None:
            left.missing += 1
            continue
        yield {
            "name": cell.cell_id,
            "value": found.value,
            "unit": metric.unit,
            **_spread(found),
            "extra": f"count: {found.count}",
        }


def _spread(found: MeasuredValue) -> dict[str, str]:
    if found.low is None or found.high is None:
        return {}
    return {"range": f"{found.low!r} .. {found.high!r}"}


def _entry(run: HistoryRun, metric: Metric, benches: list[dict[str, Any]]) -> dict[str, Any]:
    info = run.info
    when = info.commit_utc or info.measured_utc
    nobody = {"name": "", "username": "", "email": ""}
    named = {one["name"] for one in benches}
    return {
        "commit": {
            "author": nobody,
            "committer": nobody,
            "id": info.commit or "",
            "message": info.headline,
            "timestamp": when.isoformat(),
            "url": "",
        },
        "date": _milliseconds(run),
        "tool": _TOOLS[metric.better],
        "benches": benches,
        "perfbench": {
            "run_id": info.run_id,
            "origin": info.origin,
            "suite": info.suite,
            "card": info.card,
            "branch": info.branch,
            "is_dirty": info.is_dirty,
            "segment": dict(info.segment),
            "injections": list(info.injections),
            "axes": {one.cell_id: dict(one.axes) for one in run.cells if one.cell_id in named},
            "metric": {
                "name": metric.name,
                "title": metric.title,
                "unit": metric.unit,
                "better": metric.better,
            },
            "measured_utc": info.measured_utc.isoformat(),
            "commit_utc": info.commit_utc.isoformat() if info.commit_utc else None,
        },
    }


def _milliseconds(run: HistoryRun) -> int:
    return int(run.info.measured_utc.timestamp() * 1000)
