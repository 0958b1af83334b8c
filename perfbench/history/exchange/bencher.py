"""Bencher Metric Format: {benchmark: {measure: {value, lower_value, upper_value}}}, both ways."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfbench.history.exchange.assembling import RunHead, StatedValue, assemble
from perfbench.history.exchange.source import Exported, Imported, SourceFile, Stated, refuse, short
from perfbench.history.exchange.strict_json import Schema, checked, parse, unknown_shape
from perfbench.history.nouns import METRICS, Better, HistoryRun, Metric
from perfbench.text import visible

ORIGIN = "bencher"
# Bencher's own measures; of others the format states neither unit nor direction.
_MEASURES = {
    "latency": Metric("latency", "latency", "ns", Better.LOWER),
    "throughput": Metric("throughput", "throughput", "ops/s", Better.HIGHER),
    "build-time": Metric("build-time", "build time", "s", Better.LOWER),
    "file-size": Metric("file-size", "file size", "bytes", Better.LOWER),
}


class _BencherMetric(Schema):
    value: float | None
    lower_value: float | None = None
    upper_value: float | None = None


def read(sources: Sequence[SourceFile], stated: Stated) -> Imported:
    """A run a file; a measure is the metric of that name. The format has no commit and no date."""
    runs: list[HistoryRun] = []
    notes: list[str] = []
    for source in sources:
        whole = parse(source)
        if not isinstance(whole, dict):
            unknown_shape(source.name, "an object of benchmarks")
        values = list(_values(whole, source.name))
        run, more = assemble(RunHead(ORIGIN, suite=ORIGIN), values, source, stated)
        runs.append(run)
        notes += more
    return Imported(tuple(runs), tuple(notes))


def write(run: HistoryRun) -> Exported:
    """One run, without the numbers that are missing, which the notes count."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    missing = 0
    for cell in run.cells:
        for name, one in cell.measured.items():
            if one.value is None:
                missing += 1
                continue
            ends = {"lower_value": one.low, "upper_value": one.high}
            known = {key: value for key, value in ends.items() if value is not None}
            found.setdefault(cell.cell_id, {})[name] = {"value": one.value, **known}
    notes = (f"{missing} numbers are missing and left out",) if missing else ()
    return Exported(json.dumps(found, indent=2) + "\n", notes)


def _values(whole: Mapping[str, Any], name: str) -> Iterator[StatedValue]:
    for bench, measures in whole.items():
        place = f"{name}: {short(bench)}"
        if not isinstance(measures, dict):
            unknown_shape(place, "an object of measures")
        for measure, value in measures.items():
            if not measure:
                refuse(place, "got a measure with an empty name", "name it in the tool")
            found = checked(_BencherMetric, value, f"{place}.{short(measure)}")
            metric = METRICS.get(measure) or _MEASURES.get(measure)
            yield StatedValue(
                bench,
                metric or Metric(visible(measure), visible(measure), "", Better.NEITHER),
                found.value,
                {"benchmark": bench},
                found.lower_value,
                found.upper_value,
            )
