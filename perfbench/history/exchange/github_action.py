"""github-action-benchmark: data.js of its page, and the JSON of its two custom tools."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from perfbench.history.exchange.assembling import (
    RunHead,
    StatedValue,
    assemble,
    iso_utc,
    milliseconds_utc,
)
from perfbench.history.exchange.source import Imported, SourceFile, Stated, refuse, short
from perfbench.history.exchange.strict_json import (
    Schema,
    checked,
    parse,
    parse_text,
    text_of,
    unknown_shape,
)
from perfbench.history.exchange.units import metric_of
from perfbench.history.nouns import METRICS, Better, HistoryRun, Metric
from perfbench.text import visible

ORIGIN = "github-action-benchmark"
BIGGER, SMALLER = "customBiggerIsBetter", "customSmallerIsBetter"
SCRIPT = "window.BENCHMARK_DATA"
EXPORTED = f"{ORIGIN}: "  # begins the suite of what perfbench exported
# github-action-benchmark decides the direction by the tool.
_HIGHER = frozenset({"pytest", "benchmarkjs", BIGGER})
_LOWER = frozenset({"cargo", "go", "googlecpp", "catch2", "julia", "jmh", SMALLER}) | {
    *("benchmarkluau", "benchmarkdotnet"),
}
_STEMS = {Better.HIGHER: "bigger", Better.LOWER: "smaller", Better.NEITHER: "value"}
_RANGE = re.compile(r"(\S+) \.\. (\S+)")
_COUNT = re.compile(r"count: (\d{1,9})")


class _Bench(Schema):
    name: str
    value: float | None
    unit: str
    range: str | float | None = None
    extra: str | None = None


class _ActionCommit(Schema):
    id: str
    timestamp: str | None = None


class _OurMetric(Schema):
    name: str = Field(min_length=1)
    title: str
    unit: str
    better: Literal["higher", "lower", "neither"]


class _OurRun(Schema):
    """What an export adds to an entry: what the format has no place for. Anybody may write it, so
    that none of it is a proof.
    """

    run_id: str = Field(min_length=1)
    origin: str
    suite: str
    card: str
    branch: str | None
    is_dirty: bool | None
    segment: dict[str, str]
    injections: list[str] = []  # noqa: RUF012  pydantic copies it
    axes: dict[str, dict[str, str | int]]
    metric: _OurMetric
    measured_utc: str
    commit_utc: str | None


class _ActionEntry(Schema):
    commit: _ActionCommit
    date: int | float
    tool: str
    benches: list[_Bench]
    perfbench: _OurRun | None = None


class _ActionPage(Schema):
    entries: dict[str, list[_ActionEntry]]


def read(sources: Sequence[SourceFile], stated: Stated) -> Imported:
    """data.js, or its JSON: a run an entry, its suite the entry's name. Entries that
    `perfbench export` made of one run are one run, of this origin and of a suite of its own: its
    numbers come without their proof, and join no series that was measured here.
    """
    runs: list[HistoryRun] = []
    notes: list[str] = []
    for source in sources:
        page = checked(_ActionPage, _script(source), source.name)
        ours: dict[str, list[tuple[str, _ActionEntry, _OurRun]]] = {}
        for suite, entries in page.entries.items():
            for number, entry in enumerate(entries):
                place = f"{source.name}: entries.{suite}[{number}]"
                if (known := entry.perfbench) is not None:
                    ours.setdefault(known.run_id, []).append((place, entry, known))
                    continue
                head = _head(entry, suite, place)
                better = _better(entry.tool, place, notes)
                values = [_reading(one, better) for one in entry.benches]
                run, more = assemble(head, values, _at(source, place), stated)
                runs.append(run)
                notes += more
        for found in ours.values():
            run, more = _copy(found, source, stated)
            runs.append(run)
            notes += more
    return Imported(tuple(runs), tuple(notes))


def read_custom(tool: str, sources: Sequence[SourceFile], stated: Stated) -> Imported:
    """The list of benchmarks that `customBiggerIsBetter` or `customSmallerIsBetter` takes; it names
    neither commit nor date.
    """
    runs: list[HistoryRun] = []
    notes: list[str] = []
    for source in sources:
        whole = parse(source)
        if not isinstance(whole, list):
            unknown_shape(source.name, "a list of benchmarks")
        benches = [
            checked(_Bench, one, f"{source.name}: [{number}]") for number, one in enumerate(whole)
        ]
        values = [_reading(one, _better(tool, source.name, notes)) for one in benches]
        run, more = assemble(RunHead(ORIGIN, suite=ORIGIN), values, source, stated)
        runs.append(run)
        notes += more
    return Imported(tuple(runs), tuple(notes))


def _script(source: SourceFile) -> Any:
    """The JSON of data.js behind its assignment, or of a file without one."""
    text = text_of(source)
    before, assigned, after = text.partition("=")
    if not assigned or before.strip() != SCRIPT:
        return parse_text(text, source.name)
    return parse_text(after.rstrip().removesuffix(";"), source.name, before.count("\n") + 1)


def _head(entry: _ActionEntry, suite: str, place: str) -> RunHead:
    return RunHead(
        ORIGIN,
        suite=suite,
        measured_utc=milliseconds_utc(entry.date, f"{place}.date"),
        commit=entry.commit.id or None,
        commit_utc=_moment(entry.commit.timestamp, f"{place}.commit.timestamp"),
    )


def _better(tool: str, place: str, notes: list[str]) -> Better:
    if tool in _HIGHER:
        return Better.HIGHER
    if tool in _LOWER:
        return Better.LOWER
    notes.append(f"{short(place)}: whether more is better is not known of tool {short(tool)!r}")
    return Better.NEITHER


def _reading(one: _Bench, better: Better) -> StatedValue:
    metric = metric_of(_STEMS[better], one.unit, better, f"value in {one.unit}".rstrip())
    return StatedValue(one.name, metric, one.value, {"benchmark": one.name}, *_spread(one))


def _spread(one: _Bench) -> tuple[float | None, float | None, int]:
    """The interval and the count as an export writes them. Another tool's range is a deviation,
    which is no interval.
    """
    counted = _COUNT.fullmatch(one.extra or "")
    count = int(counted[1]) if counted else 1
    if isinstance(one.range, str) and (found := _RANGE.fullmatch(one.range)):
        try:
            return float(found[1]), float(found[2]), count
        except ValueError:
            return None, None, count
    return None, None, count


def _copy(
    found: Sequence[tuple[str, _ActionEntry, _OurRun]], source: SourceFile, stated: Stated
) -> tuple[HistoryRun, list[str]]:
    """The run that was exported as these entries, one a metric. USAGE: a metric of perfbench in
    another unit.
    """
    values: list[StatedValue] = []
    for at, entry, each in found:
        kept = each.metric
        if kept.name in METRICS and kept.unit != METRICS[kept.name].unit:
            problem = f"got {kept.name} in {kept.unit!r}, wanted {METRICS[kept.name].unit!r}"
            refuse(f"{at}.perfbench.metric", problem, "export it again")
        metric = METRICS.get(kept.name) or Metric(
            visible(kept.name), visible(kept.title), visible(kept.unit), Better(kept.better)
        )
        values += (
            StatedValue(one.name, metric, one.value, each.axes.get(one.name, {}), *_spread(one))
            for one in entry.benches
        )
    place, first, ours = found[0]
    own = ours.suite.startswith(EXPORTED)
    head = RunHead(
        ORIGIN,
        ours.suite if own else f"{EXPORTED}{ours.suite}",
        ours.card,
        iso_utc(ours.measured_utc, f"{place}.perfbench.measured_utc"),
        first.commit.id or None,
        {"exported_from": ours.origin, **ours.segment},
        _moment(ours.commit_utc, f"{place}.perfbench.commit_utc"),
        ours.branch,
        ours.is_dirty,
        tuple(ours.injections),
        identity=(ours.run_id,),
    )
    return assemble(head, values, source, stated)


def _moment(text: str | None, place: str) -> datetime | None:
    return iso_utc(text, place) if text else None


def _at(source: SourceFile, place: str) -> SourceFile:
    return SourceFile(place, b"", source.modified_utc)
