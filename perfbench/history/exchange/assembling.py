"""From the numbers that a file states to a HistoryRun: nothing is lost in silence, nothing made
up.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from statistics import median

from perfbench.history.exchange.source import (
    COMMIT,
    SourceFile,
    Stated,
    is_commit,
    refuse,
    short,
)
from perfbench.history.exchange.units import digest, slug
from perfbench.history.nouns import (
    METRICS,
    HistoryCell,
    HistoryRun,
    MeasuredValue,
    Metric,
    RunInfo,
)
from perfbench.records import Verdict
from perfbench.text import counted, visible

UNKNOWN_CARD = "unknown"
MAX_COUNT = 2**31 - 1  # PostgreSQL's integer
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class StatedValue:
    """One number of one benchmark as a file states it.

    ``value`` may be null, NaN or infinite: then the cell has null, with ``reason`` or that word.
    ``is_skipped``: the tool left it out on purpose, so that null is no failure.
    """

    name: str
    metric: Metric
    value: float | None
    axes: Mapping[str, str | int] = field(default_factory=dict)
    low: float | None = None
    high: float | None = None
    count: int = 1
    reason: str = ""
    is_skipped: bool = False


@dataclass(frozen=True, slots=True)
class RunHead:
    """What a file states of a run. ``identity`` sets it apart from others of its tool, suite,
    machine, commit and time; ``measured_utc`` is null where the format has no date.
    """

    origin: str
    suite: str
    card: str = UNKNOWN_CARD
    measured_utc: datetime | None = None
    commit: str | None = None
    segment: Mapping[str, str] = field(default_factory=dict)
    commit_utc: datetime | None = None
    branch: str | None = None
    is_dirty: bool | None = None
    injections: tuple[str, ...] = ()
    identity: tuple[str, ...] = ()


def assemble(
    head: RunHead, values: Iterable[StatedValue], source: SourceFile, stated: Stated
) -> tuple[HistoryRun, list[str]]:
    """The run, and remarks about names that stand several times and about a commit that is none.
    USAGE: an empty name, no benchmark at all, no date, or another commit than the user states.
    """
    notes = []
    if head.commit and not is_commit(head.commit):
        problem = f"commit {short(head.commit)!r} is left out, wanted {COMMIT}"
        notes.append(f"{source.name}: {problem}")
        head = dataclasses.replace(head, commit=None, identity=(*head.identity, head.commit))
    by_cell: dict[str, dict[str, list[StatedValue]]] = {}
    for one in values:
        if not one.name:
            refuse(source.name, "got a benchmark with an empty name", "name it in the tool")
        by_cell.setdefault(visible(one.name), {}).setdefault(one.metric.name, []).append(one)
    if not by_cell:
        refuse(source.name, "got a run without any benchmark", "check that the tool ran some")
    cells = tuple(_cell(name, found) for name, found in sorted(by_cell.items()))
    metrics = {
        one.metric.name: one.metric
        for found in by_cell.values()
        for same in found.values()
        for one in same
        if one.metric.name not in METRICS
    }
    info = _info(head, (cells, metrics), source, stated)
    return HistoryRun(info, cells, metrics), notes + _doubled(by_cell, source.name)


def milliseconds_utc(value: float, place: str) -> datetime:
    """The time ``value`` milliseconds after 1970; USAGE beyond the years that a date has."""
    try:
        return _EPOCH + timedelta(milliseconds=value)
    except (OverflowError, ValueError):
        refuse(place, f"got {value}, wanted milliseconds since 1970", "correct the date")


def iso_utc(text: str, place: str) -> datetime:
    """An ISO date and time; UTC where it names no zone. USAGE for other text."""
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        refuse(place, f"got {text!r}, wanted a date like 2026-01-31T12:00:00Z", "correct the date")


def axis_value(value: object) -> str | int:
    """A parameter as an axis keeps it: whole numbers and text as they are, the rest as JSON."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return json.dumps(value)


def _cell(name: str, found: Mapping[str, Sequence[StatedValue]]) -> HistoryCell:
    measured = {metric: _measured(same) for metric, same in sorted(found.items())}
    every = [one for same in found.values() for one in same]
    failed = [one for one in every if _usable(one) is None and not one.is_skipped]
    reasons = [one.reason for one in measured.values() if one.value is None]
    return HistoryCell(
        name,
        {visible(key): axis_value(one) for key, one in sorted(every[0].axes.items())},
        Verdict.FAILED if failed else None,
        reasons[0] if reasons else "",
        "",
        measured,
    )


def _measured(same: Sequence[StatedValue]) -> MeasuredValue:
    """Of several numbers under one name the median; null where one of them is null."""
    missing = [one for one in same if _usable(one) is None]
    if missing:
        return MeasuredValue(None, reason=visible(missing[0].reason) or _word(missing[0].value))
    values = [value for one in same if (value := _usable(one)) is not None]
    if len(values) > 1:
        if (middle := _finite(median(values))) is None:
            return MeasuredValue(None, reason="the median is beyond a number of 64 bits")
        return MeasuredValue(middle, count=min(MAX_COUNT, sum(one.count for one in same)))
    (one,) = same
    low, high = _finite(one.low), _finite(one.high)
    return MeasuredValue(values[0], low, high, min(MAX_COUNT, one.count))


def _usable(one: StatedValue) -> float | None:
    return None if one.reason else _finite(one.value)


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _word(value: float | None) -> str:
    if value is None:
        return "the file has null"
    return "the file has NaN" if math.isnan(value) else "the file has an infinite number"


def _doubled(by_cell: Mapping[str, Mapping[str, Sequence[StatedValue]]], name: str) -> list[str]:
    counts = {
        cell: most
        for cell, found in by_cell.items()
        if (most := max(len(same) for same in found.values())) > 1
    }
    if not counts:
        return []
    cell, most = next(iter(counts.items()))
    return [
        f"{name}: {counted(len(counts), 'name')} stand{'s' * (len(counts) == 1)} several times in"
        " one run, and the median is taken:"
        f" {short(cell)!r} {most} times"
    ]


def _info(
    head: RunHead,
    content: tuple[tuple[HistoryCell, ...], Mapping[str, Metric]],
    source: SourceFile,
    stated: Stated,
) -> RunInfo:
    when = head.measured_utc or stated.measured_utc or source.modified_utc
    if when is None:
        refuse(source.name, "the format has no date", "name one with --date")
    if stated.commit and head.commit and not _same_commit(stated.commit, head.commit):
        refuse(
            source.name,
            f"names commit {head.commit}, got --commit {stated.commit}",
            "leave out --commit, which is for files that name none",
        )
    dated = head.measured_utc or stated.measured_utc
    commit = head.commit or stated.commit
    draft = RunInfo(
        run_id="",
        content_sha256="",
        origin=visible(head.origin),
        suite=visible(stated.suite or head.suite),
        card=visible(stated.card or head.card),
        measured_utc=dated or _EPOCH,
        commit=visible(commit) if commit else None,
        segment={visible(key): visible(value) for key, value in sorted(head.segment.items())},
        commit_utc=head.commit_utc,
        branch=visible(head.branch) if head.branch else None,
        is_dirty=head.is_dirty,
        injections=tuple(visible(one) for one in head.injections),
    )
    # The file's own time is no content: a copy of the file is the same run.
    whole = dataclasses.asdict(HistoryRun(draft, *content))
    content_sha256 = digest(json.dumps(whole, default=str, sort_keys=True))
    parts = (head.origin, draft.suite, draft.card, commit or "", *head.identity)
    identity = digest(*parts, dated.isoformat() if dated else content_sha256)
    stamp = f"{dated.year:04}{dated:%m%dT%H%M%SZ}" if dated else head.origin
    names = (slug(draft.card)[:24] or "card", slug(commit or "")[:7] or "nocommit", identity[:10])
    return dataclasses.replace(
        draft,
        run_id="-".join((stamp, *names)),
        content_sha256=content_sha256,
        measured_utc=when,
        folder=source.name,
    )


def _same_commit(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)
