"""pytest-benchmark: what `pytest --benchmark-json FILE` and its storage write, a run a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from perfbench.history.exchange.assembling import (
    UNKNOWN_CARD,
    RunHead,
    StatedValue,
    assemble,
    axis_value,
    iso_utc,
)
from perfbench.history.exchange.source import Imported, SourceFile, Stated
from perfbench.history.exchange.strict_json import Schema, checked, parse
from perfbench.history.exchange.units import digest_of_bytes, metric_of
from perfbench.history.nouns import Better, HistoryRun

ORIGIN = "pytest-benchmark"
MEDIAN = metric_of("median", "s", Better.LOWER, "median of the rounds")
_NO_COMMIT = ("", "unknown", "unversioned")


class _PytestStats(Schema):
    median: float | None
    rounds: int = Field(ge=0)


class _PytestEntry(Schema):
    fullname: str
    param: str | None = None  # what its brackets hold
    params: dict[str, Any] | None = None
    stats: _PytestStats | None


class _PytestCommit(Schema):
    id: str | None = None
    time: str | None = None
    dirty: bool | None = None
    project: str | None = None
    branch: str | None = None


class _PytestFile(Schema):
    machine_info: dict[str, Any] = Field(default_factory=dict)
    commit_info: _PytestCommit = Field(default_factory=_PytestCommit)
    benchmarks: list[_PytestEntry]
    datetime: str
    version: str = ""


def read(sources: Sequence[SourceFile], stated: Stated) -> Imported:
    """A run a file: the median of each benchmark's rounds, in seconds."""
    runs: list[HistoryRun] = []
    notes: list[str] = []
    for source in sources:
        file = checked(_PytestFile, parse(source), source.name)
        run, more = assemble(_head(file, source), _values(file), source, stated)
        runs.append(run)
        notes += more
    return Imported(tuple(runs), tuple(notes))


def _values(file: _PytestFile) -> Iterator[StatedValue]:
    for one in file.benchmarks:
        axes: dict[str, str | int] = {
            "benchmark": one.fullname.removesuffix(f"[{one.param or ''}]")
        }
        axes |= {key: axis_value(value) for key, value in (one.params or {}).items()}
        if one.stats is None:
            yield StatedValue(
                one.fullname, MEDIAN, None, axes, reason="the file has no stats of it"
            )
        else:
            stats = one.stats
            yield StatedValue(one.fullname, MEDIAN, stats.median, axes, count=stats.rounds)


def _head(file: _PytestFile, source: SourceFile) -> RunHead:
    name = source.name
    commit = file.commit_info
    branch = commit.branch
    return RunHead(
        ORIGIN,
        suite=commit.project or ORIGIN,
        card=_text(file.machine_info, "node") or UNKNOWN_CARD,
        measured_utc=iso_utc(file.datetime, f"{name}: datetime"),
        commit=None if (commit.id or "") in _NO_COMMIT else commit.id,
        segment=_segment(file),
        commit_utc=iso_utc(commit.time, f"{name}: commit_info.time") if commit.time else None,
        branch=None if not branch or branch.startswith("(") else branch,  # '(unknown)'
        is_dirty=commit.dirty,
        identity=(digest_of_bytes(source.data),),
    )


def _segment(file: _PytestFile) -> dict[str, str]:
    cpu = file.machine_info.get("cpu")
    found = {
        "machine": _text(file.machine_info, "machine"),
        "system": _text(file.machine_info, "system"),
        "python": _text(file.machine_info, "python_version"),
        "implementation": _text(file.machine_info, "python_implementation"),
        "cpu": _text(cpu, "brand_raw") or _text(cpu, "brand") if isinstance(cpu, dict) else "",
        "pytest-benchmark": file.version,
    }
    return {key: value for key, value in found.items() if value}


def _text(values: Mapping[str, Any], key: str) -> str:
    found = values.get(key)
    return found if isinstance(found, str) else ""
