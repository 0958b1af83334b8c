"""A judged run as the history keeps it: each metric of each cell, or why there is none.

A number goes into a series only with its proof: where the verdict withholds the speed, every metric
of the cell is null. Reads no file and no clock.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from statistics import geometric_mean, median
from types import MappingProxyType

from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import (
    Band,
    CellVerdict,
    Judgement,
    bands,
    boundaries,
    comparability_key,
    rows_by_cell,
    usable,
)
from perfbench.history.nouns import METRICS, HistoryCell, HistoryRun, MeasuredValue, RunInfo
from perfbench.records import AXES, MEASURED, Cell, Manifest, Replicate, Run, Status, Verdict
from perfbench.text import shorten

ORIGIN = "perfbench"
REASON_CHARS = 300
# Verdicts under which no number of a cell counts, although a speed may have been compared.
WITHHELD = (Verdict.PARITY, Verdict.IMPOSSIBLE, Verdict.WRONG_PATH)
# What is wrong with a run as a whole so that a change of its speeds is none of the code: its cells
# mix two machines, its clock is wrong, or its machine is not as fast as the baseline's.
UNLIKE = ("resumed", "sentinel clock", "sentinel moved")
# Whole numbers of a step, and what may be 0: the median. All else: the geometric mean.
MEDIANS = ("launches", "host_syncs", "peak_memory_bytes", "utilisation_pct", "sm_clock_mhz")
Value = Callable[[Replicate], float | None]
_ON_CPU: Mapping[str, str] = MappingProxyType(
    {
        "device_ms": "a CPU has no device",
        "host_ms": "a CPU has no device to enqueue for",
        "launches": "a CPU has no device",
        "host_syncs": "a CPU has no device to wait for",
        "peak_memory_bytes": "a CPU run records no device memory",
    }
)


@dataclass(frozen=True, slots=True)
class RunPlace:
    """What a run file does not say about itself: where it lies, and when its commit was made."""

    folder: str = ""
    commit_utc: datetime | None = None


def history_run(
    run: Run, judgement: Judgement, report: str = "", place: RunPlace | None = None
) -> HistoryRun:
    """``run`` as it is added. ``report``: its Markdown.

    USAGE where the run names no time, or is one side of a confirmation: that is part of the run
    that it confirmed.
    """
    manifest, source = run.manifest, run.manifest.source
    if manifest.confirmation is not None:
        raise PerfbenchError(
            Exit.USAGE,
            f"got run {manifest.run_id}, one side of a confirmation, whose verdict is in the run"
            " that it confirmed. Next: name that run's folder",
        )
    place = place or RunPlace()
    cells = tuple(_cells(run, judgement))
    info = RunInfo(
        run_id=manifest.run_id,
        content_sha256=_content_sha256(run, judgement, cells),
        origin=ORIGIN,
        suite=manifest.matrix_name,
        card=manifest.environment.gpu_slug,
        measured_utc=_moment(manifest),
        commit=source.commit,
        segment=segment_of(manifest),
        commit_utc=place.commit_utc,
        branch=source.branch,
        is_dirty=None if source.reason is not None else source.dirty_sha256 is not None,
        command=shlex.join(manifest.argv),
        headline=judgement.headline,
        exit_code=int(judgement.exit_code),
        injections=tuple(manifest.injections),
        folder=place.folder,
        report=report,
    )
    return HistoryRun(info, cells)


def segment_of(manifest: Manifest) -> dict[str, str]:
    """What the gate wants to agree before it compares two speeds: the environment's fingerprint,
    the method, and variables that change speed. What is null, or was not recorded, has no key.
    """
    wanted = {**comparability_key(manifest), **(manifest.environment.settings() or {})}
    return {name: str(value) for name, value in wanted.items() if value is not None}


def _cells(run: Run, judgement: Judgement) -> Iterable[HistoryCell]:
    rows = rows_by_cell(run)
    unlike = next((one.reason for one in judgement.findings if one.rule in UNLIKE), "")
    read = {name: partial(_value, name) for name in METRICS}
    known = {name: bands(rows, read[name]) for name in METRICS if name not in MEDIANS}
    configs = {cell.cell_id: cell.config_sha256 for cell in run.manifest.cells}
    on_cpu = run.manifest.environment.gpu_slug == "cpu"
    for cell in judgement.cells:
        good = usable(rows.get(cell.cell_id, ()))
        if why := _withheld(cell, good, unlike):
            measured = dict.fromkeys(METRICS, MeasuredValue(None, reason=why))
        else:
            measured = {
                name: _measured(name, good, known.get(name, {}).get(cell.cell_id), on_cpu)
                for name in METRICS
            }
        verdict = None if cell.verdict is None else cell.verdict.value
        yield HistoryCell(
            cell.cell_id,
            _axes(cell.axes),
            verdict,
            _reason(cell),
            cell.reproduce,
            measured,
            configs.get(cell.cell_id),
        )
    yield from _beyond(run, rows, {cell.cell_id for cell in judgement.cells})


def _reason(cell: CellVerdict) -> str:
    """With what is proved of a user's own step, and what is not."""
    if cell.own is None:
        return cell.reason
    open_, proved = (
        "; ".join(words) or "nothing" for words in (cell.own.not_proved, cell.own.proved)
    )
    return f"{cell.reason}; not proved: {open_}; proved: {proved}"


def _beyond(
    run: Run, rows: Mapping[str, Sequence[Replicate]], judged: set[str]
) -> Iterable[HistoryCell]:
    """Cells beyond the memory boundary that the matrix looks for: no failure, and no number."""
    for boundary in boundaries(run.manifest.cells, rows):
        for cell in boundary.beyond:
            if cell.cell_id in judged:
                continue
            last = rows[cell.cell_id][-1]
            what = "not tried" if last.status is Status.SKIPPED else last.status.value
            reason = f"does not fit: {what}: {last.reason or 'no reason was recorded'}"
            nothing = MeasuredValue(None, reason=shorten(reason, REASON_CHARS))
            measured = dict.fromkeys(METRICS, nothing)
            yield HistoryCell(
                cell.cell_id, _axes(cell.axes), None, reason, "", measured, cell.config_sha256
            )


def _withheld(cell: CellVerdict, good: Sequence[Replicate], unlike: str) -> str:
    """Why no number of the cell counts; empty where they do."""
    if cell.cand_tok_per_s is None or not good or cell.verdict in WITHHELD:
        word = "no verdict" if cell.verdict is None else cell.verdict.value
        return shorten(f"{word}: {cell.reason}", REASON_CHARS)
    return shorten(unlike, REASON_CHARS) if unlike else ""


def _measured(
    name: str, good: Sequence[Replicate], band: Band | None, on_cpu: bool
) -> MeasuredValue:
    values = [value for row in good if (value := _value(name, row)) is not None]
    if not values:
        return MeasuredValue(None, reason=shorten(_why_not(name, good, on_cpu), REASON_CHARS))
    if name in MEDIANS:
        return MeasuredValue(float(median(values)), count=len(values))
    low, high = (None, None) if band is None else band
    return MeasuredValue(geometric_mean(values), low, high, len(values))


def _value(name: str, row: Replicate) -> float | None:
    """Of one replicate; null where it has none, and where a mean of logarithms cannot take it."""
    value = MEASURED[name](row)
    value = None if value is None else float(value)
    return value if value is None or value > 0 or name in MEDIANS else None


def _why_not(name: str, good: Sequence[Replicate], on_cpu: bool) -> str:
    if on_cpu and name in _ON_CPU:
        return _ON_CPU[name]
    if name in ("device_ms", "launches", "host_syncs", "host_ms"):
        return "no profiled step saw a kernel"
    if name == "floor_fraction":
        notes = [note for row in good if row.physics for note in row.physics.notes]
        return notes[0] if notes else "no floor was computed"
    absent = [row.absent for row in good]
    absent += [row.telemetry.absent for row in good if row.telemetry is not None]
    return next((found[name] for found in absent if found.get(name)), "not recorded")


def _axes(cell: Cell) -> dict[str, str | int]:
    """Every axis, defaults included, and those of a newer perfbench."""
    return {name: getattr(cell, name) for name in AXES} | dict(cell.unknown)


def _moment(manifest: Manifest) -> datetime:
    try:
        found = datetime.fromisoformat(manifest.created_utc)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise PerfbenchError(
            Exit.USAGE,
            f"run {manifest.run_id}: created_utc is {manifest.created_utc[:40]!r}, wanted a time"
            " with its zone. Next: restore the file",
        )
    return found.astimezone(UTC)


def _content_sha256(run: Run, judgement: Judgement, cells: Iterable[HistoryCell]) -> str:
    """Of the file and of what was made of it: the same run judged otherwise is other content.

    An older file has no digest, so its records are hashed.
    """
    file = run.sha256 or hashlib.sha256(run.model_dump_json().encode()).hexdigest()
    findings = [(one.verdict.value, one.rule) for one in judgement.findings]
    content = [file, int(judgement.exit_code), findings, [asdict(cell) for cell in cells]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
