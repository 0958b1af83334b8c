"""asv: the files of a results folder, version 1 and 2: a run for each commit and environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import product
from pathlib import PurePosixPath
from typing import Any, TypeVar

from perfbench.history.exchange.assembling import (
    UNKNOWN_CARD,
    RunHead,
    StatedValue,
    assemble,
    milliseconds_utc,
)
from perfbench.history.exchange.source import Imported, SourceFile, Stated, refuse, short
from perfbench.history.exchange.strict_json import (
    WRONG_FORMAT,
    Schema,
    checked,
    parse,
    unknown_shape,
)
from perfbench.history.exchange.units import metric_of
from perfbench.history.nouns import Better, HistoryRun, Metric

ORIGIN = "asv"
Number = TypeVar("Number", int, float)
BENCHMARKS, MACHINE = "benchmarks.json", "machine.json"
VERSIONS = (1, 2)
MAX_COMBINATIONS = 100_000
_SKIPPED = "NaN, asv's word for skipped"
_FAILED = "null, asv's word for failed"
# The first word of a benchmark's last name, where benchmarks.json does not say.
_TYPES = {"time": "time", "timeraw": "time", "mem": "memory", "peakmem": "peakmemory"}
_METRICS = {
    "time": metric_of("time", "s", Better.LOWER, "time"),
    "memory": metric_of("object", "bytes", Better.LOWER, "size of an object"),
    "peakmemory": metric_of("peakmem", "bytes", Better.LOWER, "peak memory"),
}


class _AsvBenchmark(Schema):
    """An entry of benchmarks.json."""

    type: str = ""
    unit: str = ""
    param_names: list[str] = []  # noqa: RUF012  pydantic copies it
    version: str | None = None


class _AsvFile(Schema):
    commit_hash: str
    date: int | float
    env_name: str = ""
    params: dict[str, Any] = {}  # noqa: RUF012
    results: dict[str, Any]
    result_columns: list[str] = []  # noqa: RUF012
    benchmark_version: dict[str, str] = {}  # noqa: RUF012
    version: int


class _AsvResult(Schema):
    """One benchmark's columns; of each list an item a combination of parameters."""

    result: list[float | None] | None
    params: list[list[str]] | None = None
    version: str | None = None
    stats_ci_99_a: list[float | None] | None = None
    stats_ci_99_b: list[float | None] | None = None
    stats_repeat: list[int | None] | None = None


def read(sources: Sequence[SourceFile], stated: Stated) -> Imported:
    """Runs in the order of the files. benchmarks.json, where it is among them, names types, units,
    parameters and versions of every benchmark; without it they follow from the names.
    """
    known: dict[str, _AsvBenchmark] = {}
    for source in sources:
        if _name(source) == BENCHMARKS:
            known |= _benchmarks(source)
    runs: list[HistoryRun] = []
    notes: list[str] = []
    for source in sources:
        if _name(source) not in (BENCHMARKS, MACHINE):
            file = checked(_AsvFile, parse(source), source.name)
            head = _head(file, source.name, stated)
            values = _values(file, known, source.name)
            run, more = assemble(head, values, source, replace(stated, suite=None))
            runs.append(run)
            notes += more
    if not runs:
        refuse(
            sources[0].name if sources else ORIGIN,
            "wanted results of a commit",
            "name RESULTS/MACHINE/*.json too, or the folder of results",
        )
    return Imported(tuple(runs), tuple(notes))


def _benchmarks(source: SourceFile) -> dict[str, _AsvBenchmark]:
    whole = parse(source)
    if not isinstance(whole, dict):
        unknown_shape(source.name, "an object of benchmarks")
    return {
        name: checked(_AsvBenchmark, one, f"{source.name}: {short(name)}")
        for name, one in whole.items()
        if isinstance(one, dict)
    }


def _head(file: _AsvFile, name: str, stated: Stated) -> RunHead:
    """An environment is a suite: versions that asv measures in turns are no steps of a series.

    asv measures old commits later, so the commit's date orders a series.
    """
    if file.version not in VERSIONS:
        refuse(f"{name}: version", f"got {file.version}, wanted 1 or 2", "run `asv update`")
    when: datetime = milliseconds_utc(file.date, f"{name}: date")
    machine = file.params.get("machine")
    segment = {key: file.params.get(key) for key in ("arch", "cpu", "num_cpu", "os", "ram")}
    return RunHead(
        ORIGIN,
        suite=" ".join(part for part in (stated.suite or ORIGIN, file.env_name) if part),
        card=machine if isinstance(machine, str) and machine else UNKNOWN_CARD,
        measured_utc=when,
        commit=file.commit_hash,
        segment={key: value for key, value in segment.items() if isinstance(value, str) and value},
        commit_utc=when,
    )


def _values(file: _AsvFile, known: Mapping[str, _AsvBenchmark], name: str) -> Iterator[StatedValue]:
    for bench, value in file.results.items():
        place = f"{name}: results.{short(bench)}"
        result = _result(file, bench, value, place)
        entry = known.get(bench, _AsvBenchmark())
        combinations = _combinations(result.params or [], place)
        values = result.result if result.result is not None else [None] * len(combinations)
        if len(values) != len(combinations):
            problem = f"got {len(values)} values, wanted {len(combinations)}, one a combination"
            refuse(place, problem, WRONG_FORMAT)
        outdated = None not in (entry.version, result.version) and entry.version != result.version
        for number, (combination, one) in enumerate(zip(combinations, values, strict=True)):
            is_nan = one is not None and one != one
            reason = _FAILED if one is None else _SKIPPED if is_nan else ""
            if outdated:
                reason = "of another version of the benchmark than benchmarks.json has"
            yield StatedValue(
                f"{bench}({', '.join(combination)})" if combination else bench,
                _metric(bench, entry),
                one,
                _axes(bench, entry.param_names, combination),
                _at(result.stats_ci_99_a, number),
                _at(result.stats_ci_99_b, number),
                max(1, _at(result.stats_repeat, number) or 1),
                reason,
                is_skipped=is_nan or outdated,
            )


def _result(file: _AsvFile, bench: str, value: Any, place: str) -> _AsvResult:
    """Version 2 has a list of columns, version 1 an object, a number or null."""
    if file.version == 2:
        if not isinstance(value, list) or len(value) > len(file.result_columns):
            problem = f"got {short(value)}, wanted a list of at most"
            refuse(place, f"{problem} {len(file.result_columns)} columns", WRONG_FORMAT)
        columns = dict(zip(file.result_columns, value, strict=False))
        return checked(_AsvResult, columns, place)
    whole = value if isinstance(value, dict) else {"result": value}
    result, stats = whole.get("result"), whole.get("stats")
    one = result is None or isinstance(result, list)
    stats = stats if isinstance(stats, list) else [stats]
    intervals = [_interval(found) for found in stats]
    return checked(
        _AsvResult,
        {
            "result": result if one else [result],
            "params": whole.get("params"),
            "version": file.benchmark_version.get(bench),
            "stats_ci_99_a": [low for low, _, _ in intervals],
            "stats_ci_99_b": [high for _, high, _ in intervals],
            "stats_repeat": [repeat for _, _, repeat in intervals],
        },
        place,
    )


def _interval(stats: Any) -> tuple[Any, Any, Any]:
    if not isinstance(stats, dict):
        return None, None, None
    ends = stats.get("ci_99")
    low, high = ends if isinstance(ends, list) and len(ends) == 2 else (None, None)
    return low, high, stats.get("repeat", stats.get("n"))


def _combinations(params: list[list[str]], place: str) -> list[tuple[str, ...]]:
    count = 1
    for values in params:
        count *= len(values)
    if count > MAX_COMBINATIONS:
        problem = f"got {count} combinations of parameters, wanted at most {MAX_COMBINATIONS}"
        refuse(place, problem, "split the benchmark")
    return list(product(*params))


def _metric(bench: str, entry: _AsvBenchmark) -> Metric:
    """asv takes every rise for a regression; of what `track_` counts nobody knows, so neither."""
    kind = entry.type or _TYPES.get(bench.rpartition(".")[2].partition("_")[0], "track")
    return _METRICS.get(kind) or metric_of("track", entry.unit, Better.NEITHER, "tracked value")


def _axes(bench: str, names: list[str], values: tuple[str, ...]) -> dict[str, str | int]:
    axes: dict[str, str | int] = {"benchmark": bench}
    for number, value in enumerate(values):
        name = names[number] if number < len(names) and names[number] else f"param{number + 1}"
        axes[name] = int(value) if _is_whole(value) else value
    return axes


def _is_whole(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) <= 18 and str(int(text)) == text


def _at(values: list[Number | None] | None, number: int) -> Number | None:
    return values[number] if values is not None and number < len(values) else None


def _name(source: SourceFile) -> str:
    return PurePosixPath(source.name.replace("\\", "/")).name
