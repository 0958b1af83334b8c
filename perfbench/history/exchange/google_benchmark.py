"""Google Benchmark: what `--benchmark_out_format=json` writes, a run a file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import ConfigDict

from perfbench.history.exchange.assembling import (
    UNKNOWN_CARD,
    RunHead,
    StatedValue,
    assemble,
    iso_utc,
)
from perfbench.history.exchange.source import Imported, SourceFile, Stated, refuse, short
from perfbench.history.exchange.strict_json import WRONG_FORMAT, Schema, checked, parse
from perfbench.history.exchange.units import digest, digest_of_bytes, metric_of, slug
from perfbench.history.nouns import Better, HistoryRun, Metric

ORIGIN = "google-benchmark"
NANOSECONDS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
TIMES = {
    "real_time": metric_of("real_time", "ns", Better.LOWER, "wall time of an iteration"),
    "cpu_time": metric_of("cpu_time", "ns", Better.LOWER, "CPU time of an iteration"),
}
RATES = {
    "items_per_second": Metric("items_per_s", "items a second", "items/s", Better.HIGHER),
    "bytes_per_second": Metric("bytes_per_s", "bytes a second", "bytes/s", Better.HIGHER),
}
_SUMMARIES = ("mean", "median", "stddev", "cv")
_NOT_COUNTERS = frozenset({"label", "repetitions", "threads", "iterations", "time_unit"}) | {
    *("family_index", "per_family_instance_index", "repetition_index", "aggregate_unit"),
    *("total_iterations", "allocs_per_iter", "max_bytes_used", "total_allocated_bytes"),
    *("net_heap_growth", "complexity_n", "skipped", "skip_message"),
}
_OLD_DATE = re.compile(r"(\d{4})[/-](\d\d)[/-](\d\d)[ -](\d\d):(\d\d):(\d\d)")


class _GoogleContext(Schema):
    date: str | None = None
    host_name: str | None = None
    executable: str = ""
    num_cpus: int | None = None
    mhz_per_cpu: int | None = None
    library_version: str = ""
    library_build_type: str = ""


class _GoogleRow(Schema):
    """``model_extra`` holds the counters, which stand among the other keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=True)

    name: str
    run_name: str = ""
    run_type: str = "iteration"
    aggregate_name: str = ""
    time_unit: str = "ns"
    real_time: float | None = None
    cpu_time: float | None = None
    error_occurred: bool = False
    error_message: str = ""
    skipped: bool | str = False
    skip_message: str = ""


class _GoogleFile(Schema):
    context: _GoogleContext
    benchmarks: list[_GoogleRow]


def read(sources: Sequence[SourceFile], stated: Stated) -> Imported:
    """A run a file: wall and CPU time in ns, and every counter. Of repetitions the median: the
    tool's own where only aggregates are in the file.
    """
    runs: list[HistoryRun] = []
    notes: list[str] = []
    for source in sources:
        file = checked(_GoogleFile, parse(source), source.name)
        values = list(_values(file, source.name, notes))
        run, _ = assemble(_head(file, source), values, source, stated)
        runs.append(run)
    return Imported(tuple(runs), tuple(notes))


def _head(file: _GoogleFile, source: SourceFile) -> RunHead:
    context = file.context
    program = re.split(r"[/\\]", context.executable)[-1]
    segment = {
        "num_cpus": "" if context.num_cpus is None else str(context.num_cpus),
        "library": context.library_version,
        "build": context.library_build_type,
    }
    return RunHead(
        ORIGIN,
        suite=program or ORIGIN,
        card=context.host_name or UNKNOWN_CARD,
        measured_utc=_date(context.date, f"{source.name}: context.date") if context.date else None,
        segment={key: value for key, value in segment.items() if value},
        identity=(digest_of_bytes(source.data),),
    )


def _date(text: str, place: str) -> datetime:
    """Releases before 1.5 wrote local time without a zone, which is taken for UTC."""
    if old := _OLD_DATE.fullmatch(text.strip()):
        return iso_utc("{}-{}-{}T{}:{}:{}".format(*old.groups()), place).astimezone(UTC)
    return iso_utc(text, place)


def _values(file: _GoogleFile, name: str, notes: list[str]) -> Iterator[StatedValue]:
    measured = {_bench(row) for row in file.benchmarks if row.run_type == "iteration"}
    left: list[str] = []
    for number, row in enumerate(file.benchmarks):
        place = f"{name}: benchmarks[{number}]"
        if row.run_type == "aggregate" and row.aggregate_name not in _SUMMARIES:
            left.append(row.name)
        elif row.run_type == "iteration" or (
            row.aggregate_name == "median" and _bench(row) not in measured
        ):
            yield from _of_row(row, place)
    summarised = {_bench(row) for row in file.benchmarks if row.aggregate_name == "median"}
    for row in file.benchmarks:
        known = _bench(row) in measured | summarised
        if row.aggregate_name in ("mean", "stddev", "cv") and not known:
            left.append(row.name)
    if left:
        notes.append(
            f"{name}: {len(left)} rows are left out, which are neither measurements nor medians:"
            f" {short(', '.join(left))}"
        )


def _of_row(row: _GoogleRow, place: str) -> Iterator[StatedValue]:
    bench, count = _bench(row), _repetitions(row)
    axes = _axes(bench)
    if row.error_occurred or row.skipped:
        reason = row.error_message or row.skip_message or "skipped without a message"
        skipped = bool(row.skipped) and not row.error_occurred
        yield StatedValue(bench, TIMES["real_time"], None, axes, reason=reason, is_skipped=skipped)
        return
    if (scale := NANOSECONDS.get(row.time_unit)) is None:
        problem = f"got the unit {row.time_unit!r}, wanted one of {', '.join(NANOSECONDS)}"
        refuse(f"{place}.time_unit", problem, WRONG_FORMAT)
    for key, time in (("real_time", row.real_time), ("cpu_time", row.cpu_time)):
        value = None if time is None else time * scale
        yield StatedValue(bench, TIMES[key], value, axes, count=count)
    for key, value in _counters(row).items():
        metric = RATES.get(key) or _counter(key)
        yield StatedValue(bench, metric, value, axes, count=count)


def _counter(name: str) -> Metric:
    """A user's counter, whose unit and direction the format does not state."""
    stem = "_".join(part for part in ("counter", slug(name)[:40]) if part)
    if slug(name)[:40] != name:
        stem = f"{stem}_{digest(name)[:6]}"
    return Metric(stem, f"counter {short(name)}", "", Better.NEITHER)


def _counters(row: _GoogleRow) -> Mapping[str, float]:
    return {
        key: float(value)
        for key, value in (row.model_extra or {}).items()
        if key not in _NOT_COUNTERS
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }


def _repetitions(row: _GoogleRow) -> int:
    """1 for a measurement; the number that an aggregate stands on."""
    found: Any = (row.model_extra or {}).get("repetitions")
    return found if row.run_type == "aggregate" and isinstance(found, int) and found > 0 else 1


def _bench(row: _GoogleRow) -> str:
    return row.run_name or row.name


def _axes(bench: str) -> dict[str, str | int]:
    """'BM_x/8/threads:4' is benchmark BM_x with arg0 8 and threads 4; a template's slash is none
    of these.
    """
    axes: dict[str, str | int] = {}
    parts, bare = bench.split("/"), 0
    first = len(parts)
    while first > 1 and re.fullmatch(r"([A-Za-z_]\w*:)?-?\d{1,18}", parts[first - 1]):
        first -= 1
    axes["benchmark"] = "/".join(parts[:first])
    for part in parts[first:]:
        key, colon, value = part.rpartition(":")
        if not colon:
            key, bare = f"arg{bare}", bare + 1
        axes[key] = int(value)
    return axes
