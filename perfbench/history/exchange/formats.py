"""The formats by name, and which of them a file is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any

from perfbench.errors import PerfbenchError
from perfbench.history.exchange import (
    asv,
    bencher,
    criterion,
    github_action,
    google_benchmark,
    pytest_benchmark,
)
from perfbench.history.exchange.source import Imported, SourceFile, Stated, refuse
from perfbench.history.exchange.strict_json import parse_text, text_of

Read = Callable[[Sequence[SourceFile], Stated], Imported]


class ImportFormat(StrEnum):
    """What `perfbench import` reads, by the name of the tool that writes it."""

    PYTEST_BENCHMARK = "pytest-benchmark"
    ASV = "asv"
    GITHUB_ACTION = "github-action-benchmark"
    BIGGER = "customBiggerIsBetter"
    SMALLER = "customSmallerIsBetter"
    GOOGLE_BENCHMARK = "google-benchmark"
    CRITERION = "criterion"
    BENCHER = "bencher"


READERS: Mapping[ImportFormat, Read] = MappingProxyType(
    {
        ImportFormat.PYTEST_BENCHMARK: pytest_benchmark.read,
        ImportFormat.ASV: asv.read,
        ImportFormat.GITHUB_ACTION: github_action.read,
        ImportFormat.BIGGER: partial(github_action.read_custom, github_action.BIGGER),
        ImportFormat.SMALLER: partial(github_action.read_custom, github_action.SMALLER),
        ImportFormat.GOOGLE_BENCHMARK: google_benchmark.read,
        ImportFormat.CRITERION: criterion.read,
        ImportFormat.BENCHER: bencher.read,
    }
)
NAME_IT = f"name FORMAT: {', '.join(ImportFormat)}"


def detect(sources: Sequence[SourceFile]) -> ImportFormat:
    """The one format of all files. USAGE: a file of none, files of several, or a list of benchmarks
    that does not say whether more is better.
    """
    found = {source.name: _format_of(source) for source in sources}
    kinds = sorted(set(found.values()))
    if len(kinds) != 1:
        first, *_ = (name for name, kind in found.items() if kind == kinds[-1])
        refuse(first, f"got files of {' and '.join(kinds)}", "import one format at a time")
    return kinds[0]


def _format_of(source: SourceFile) -> ImportFormat:
    text = text_of(source)
    if text.partition("=")[0].strip() == github_action.SCRIPT:
        return ImportFormat.GITHUB_ACTION
    lines = text.split("\n")
    try:
        whole = parse_text(text, source.name)
    except PerfbenchError:
        first = next((line for line in lines if line.strip()), "")
        if len(lines) > 1 and _is_message(parse_text(first, source.name)):
            return ImportFormat.CRITERION
        raise
    return _shape_of(whole, source.name)


def _shape_of(whole: Any, name: str) -> ImportFormat:
    kinds = [kind for kind, is_one in _SHAPES if isinstance(whole, dict) and is_one(whole)]
    if isinstance(whole, list):
        problem = "got a list, which does not say whether more is better"
        refuse(name, problem, f"name FORMAT: {ImportFormat.BIGGER} or {ImportFormat.SMALLER}")
    if not kinds:
        refuse(name, "got JSON of no format that is known here", NAME_IT)
    return kinds[0]


def _is_message(whole: Any) -> bool:
    return isinstance(whole, dict) and isinstance(whole.get("reason"), str)


def _is_asv(whole: dict[str, Any]) -> bool:
    if {"commit_hash", "results"} <= set(whole) or {"machine", "version"} <= set(whole):
        return True
    benchmarks = [one for one in whole.values() if isinstance(one, dict)]
    return bool(benchmarks) and all({"code", "type"} <= set(one) for one in benchmarks)


def _is_bencher(whole: dict[str, Any]) -> bool:
    return bool(whole) and all(
        isinstance(bench, dict)
        and bench
        and all(isinstance(one, dict) and "value" in one for one in bench.values())
        for bench in whole.values()
    )


_SHAPES: tuple[tuple[ImportFormat, Callable[[dict[str, Any]], bool]], ...] = (
    (ImportFormat.PYTEST_BENCHMARK, lambda one: {"benchmarks", "machine_info"} <= set(one)),
    (ImportFormat.GOOGLE_BENCHMARK, lambda one: {"benchmarks", "context"} <= set(one)),
    (ImportFormat.GITHUB_ACTION, lambda one: {"entries", "lastUpdate"} <= set(one)),
    (ImportFormat.ASV, _is_asv),
    (ImportFormat.CRITERION, lambda one: {"mean", "median", "std_dev"} <= set(one)),
    (ImportFormat.CRITERION, lambda one: {"group_id", "full_id"} <= set(one)),
    (ImportFormat.CRITERION, _is_message),
    (ImportFormat.BENCHER, _is_bencher),
)
