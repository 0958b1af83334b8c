"""criterion: the folders that `cargo bench` leaves in target/criterion, and the messages of
`cargo criterion --message-format=json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any

from perfbench.history.exchange.assembling import RunHead, StatedValue, assemble
from perfbench.history.exchange.source import Imported, SourceFile, Stated, refuse
from perfbench.history.exchange.strict_json import (
    WRONG_FORMAT,
    Schema,
    checked,
    parse,
    parse_text,
    text_of,
)
from perfbench.history.exchange.units import metric_of
from perfbench.history.nouns import Better

ORIGIN = "criterion"
ESTIMATES, BENCHMARK = "estimates.json", "benchmark.json"


class _CriterionInterval(Schema):
    lower_bound: float | None
    upper_bound: float | None


class _Estimate(Schema):
    point_estimate: float | None
    confidence_interval: _CriterionInterval


class _Estimates(Schema):
    mean: _Estimate
    slope: _Estimate | None = None


class _CriterionName(Schema):
    group_id: str
    function_id: str | None = None
    value_str: str | None = None
    full_id: str


class _Typical(Schema):
    estimate: float | None
    lower_bound: float | None = None
    upper_bound: float | None = None
    unit: str


class _Complete(Schema):
    id: str
    typical: _Typical
    measured_values: list[float] = []  # noqa: RUF012  pydantic copies it


def read(sources: Sequence[SourceFile], stated: Stated) -> Imported:
    """One run of all pairs of new/estimates.json and new/benchmark.json, and one of each file of
    messages: criterion's own typical value (the slope, or the mean where there is none) with its
    interval of 95 %.
    """
    folders = [one for one in sources if _name(one) in (ESTIMATES, BENCHMARK)]
    runs, notes = [], []
    if folders:
        newest = max((one.modified_utc for one in folders if one.modified_utc), default=None)
        first = SourceFile(folders[0].name, b"", newest)
        values = list(_of_folders(folders))
        run, more = assemble(RunHead(ORIGIN, suite=ORIGIN), values, first, stated)
        runs.append(run)
        notes += more
    for source in sources:
        if source not in folders:
            head = RunHead(ORIGIN, suite=ORIGIN)
            run, more = assemble(head, list(_of_messages(source)), source, stated)
            runs.append(run)
            notes += more
    return Imported(tuple(runs), tuple(notes))


def _of_folders(sources: Sequence[SourceFile]) -> Iterator[StatedValue]:
    def folder_of(source: SourceFile) -> str:
        return PurePosixPath(source.name).parent.as_posix()

    for folder, group in groupby(sorted(sources, key=folder_of), key=folder_of):
        files = {_name(one): one for one in group}
        for wanted in (BENCHMARK, ESTIMATES):
            if wanted not in files:
                refuse(folder, f"wanted {wanted} next to {min(files)}", "name both files")
        named, estimated = files[BENCHMARK], files[ESTIMATES]
        name = checked(_CriterionName, parse(named), named.name)
        found = checked(_Estimates, parse(estimated), estimated.name)
        typical = found.slope or found.mean
        interval = typical.confidence_interval
        yield StatedValue(
            name.full_id,
            metric_of("typical", "ns", Better.LOWER, "typical time of an iteration"),
            typical.point_estimate,
            _axes(name),
            interval.lower_bound,
            interval.upper_bound,
        )


def _axes(name: _CriterionName) -> dict[str, str | int]:
    found = {"group": name.group_id, "function": name.function_id, "value": name.value_str}
    return {key: value for key, value in found.items() if value is not None}


def _of_messages(source: SourceFile) -> Iterator[StatedValue]:
    for number, line in enumerate(text_of(source).split("\n"), 1):
        if not line.strip():
            continue
        message: Any = parse_text(line, source.name, number)
        place = f"{source.name}:{number}"
        if not isinstance(message, dict) or not isinstance(message.get("reason"), str):
            refuse(place, "wanted a message with a reason", WRONG_FORMAT)
        if message["reason"] != "benchmark-complete":
            continue
        found = checked(_Complete, message, place)
        typical = found.typical
        yield StatedValue(
            found.id,
            metric_of("typical", typical.unit, Better.LOWER, "typical time of an iteration"),
            typical.estimate,
            {"benchmark": found.id},
            typical.lower_bound,
            typical.upper_bound,
            max(1, len(found.measured_values)),
        )


def _name(source: SourceFile) -> str:
    return PurePosixPath(source.name.replace("\\", "/")).name
