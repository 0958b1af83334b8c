"""What the doctor reads out of a run that was made, or of a training log: slow paths, an idle GPU,
a busy host.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import BinaryIO

from perfbench.errors import Exit, PerfbenchError
from perfbench.machine.doctor.findings import DoctorLine, Level
from perfbench.records import Replicate, Run, Status, has_run, is_compressed_run, read_run
from perfbench.text import counted

LEAST_UTILISATION_PCT = 30.0
# nsa/ops/selected/reference.py says it, as the first implementation did
SLOW_WARNING = "Using slow _sdpa_over_ranges"
SLOW_COUNTERS = ("sel.reference", "sel.v1")
_MAX_LINE_BYTES = 2**16
_SHOWN = 3
_HOST_ADVICE = (
    "the host cannot feed the GPU: compile the model, use CUDA graphs, a larger batch or longer"
    " sequences"
)


def lines(log: Path) -> list[DoctorLine]:
    """The lines of a run folder, the folder of an `ab`, a run.jsonl(.gz), or any text;
    PerfbenchError(USAGE) where it cannot be read.
    """
    folders = [log / side for side in ("a", "b") if has_run(log / side)]
    if folders:
        return [
            line
            for folder in folders
            for line in _run_lines(read_run(folder), f"run {folder.name}")
        ]
    try:
        if log.exists() and not (log.is_dir() or log.is_file()):
            raise OSError(errno.EINVAL, "it is a pipe, a device or a socket")
        if log.is_dir() or is_compressed_run(log) or _is_run(log):
            return list(_run_lines(read_run(log), "run"))
        with log.open("rb") as file:
            return list(_text_lines(_scan(file)))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise PerfbenchError(
            Exit.USAGE,
            f"{str(log)!r} cannot be read ({reason}). Next: name a run folder or a text file",
        ) from None


def _is_run(log: Path) -> bool:
    with log.open("rb") as file:
        return re.match(rb'\s*\{"kind": ?"manifest"', file.read(64)) is not None


def _run_lines(run: Run, what: str) -> Iterator[DoctorLine]:
    rows = run.replicates
    if not rows:
        yield DoctorLine(
            Level.WARN,
            what,
            "no replicate was recorded",
            "it ended before its first cell: resume it with --resume",
        )
        return
    torn = "; its last line was cut off, which --resume repairs" if run.torn else ""
    yield DoctorLine(
        Level.INFO,
        what,
        f"{run.manifest.run_id}: {len(rows)} replicates of {len({row.cell_id for row in rows})}"
        f" cells{torn}",
    )
    bad = [row for row in rows if row.status is not Status.OK]
    ended = ", ".join(sorted({row.status.value for row in bad}))
    yield _cells_line(
        what,
        "endings",
        bad,
        Level.WARN,
        f"ended {ended}",
        "`perfbench report RUN` gives each one's reason",
        "all ok",
    )
    advice = (
        "it was asked for by name, or the route says why: `perfbench plan` shows it; path v2,"
        " masked or auto is faster"
    )
    yield _cells_line(
        what,
        "slow path",
        [row for row in rows if _is_slow(row)],
        Level.WARN,
        "ran a slow path",
        advice,
        "none ran",
    )
    yield _utilisation_line(rows, what)
    host = [row for row in rows if row.host_bound]
    busy = [
        row.profile.busy_fraction
        for row in host
        if row.profile is not None and row.profile.busy_fraction is not None
    ]
    share = f" (GPU busy {100 * median(busy):.0f} % of a step)" if busy else ""
    none = (
        "no cell is"
        if any(row.host_bound is False for row in rows)
        else "not known: no GPU was profiled"
    )
    yield _cells_line(
        what, "CPU bound", host, Level.WARN, f"waited for the host{share}", _HOST_ADVICE, none
    )
    hot = [row for row in rows if row.is_throttled]
    yield _cells_line(
        what,
        "throttling",
        hot,
        Level.WARN,
        "throttled while timed",
        "cool the card or lock its clocks, then measure again",
        "none",
    )


def _is_slow(row: Replicate) -> bool:
    return (
        any(row.engaged.get(name, 0) > 0 for name in SLOW_COUNTERS)
        or SLOW_WARNING in row.stderr_tail
    )


def _utilisation_line(rows: Sequence[Replicate], what: str) -> DoctorLine:
    seen = [
        (row, row.telemetry.utilisation_pct)
        for row in rows
        if row.telemetry is not None and row.telemetry.utilisation_pct is not None
    ]
    if not seen:
        reasons = dict.fromkeys(
            row.telemetry.absent.get("utilisation_pct", "")
            for row in rows
            if row.telemetry is not None
        )
        return DoctorLine(
            Level.INFO, f"{what}: utilisation", "; ".join(filter(None, reasons)) or "not recorded"
        )
    idle = [row for row, pct in seen if pct < LEAST_UTILISATION_PCT]
    value = f"stayed below {LEAST_UTILISATION_PCT:g} % (least {min(pct for _, pct in seen):.0f} %)"
    return _cells_line(
        what,
        "utilisation",
        idle,
        Level.WARN,
        value,
        _HOST_ADVICE,
        f"{median(pct for _, pct in seen):.0f} % in the median",
    )


def _cells_line(
    what: str,
    topic: str,
    rows: Sequence[Replicate],
    level: Level,
    value: str,
    advice: str,
    good: str,
) -> DoctorLine:
    """One line for the cells that ``rows`` are of; the good one where there are none."""
    cells = list(dict.fromkeys(row.cell_id for row in rows))
    if not cells:
        return DoctorLine(Level.GOOD, f"{what}: {topic}", good)
    more = f" and {len(cells) - _SHOWN} more" if len(cells) > _SHOWN else ""
    return DoctorLine(
        level,
        f"{what}: {topic}",
        f"{counted(len(cells), 'cell')} {value}: {'; '.join(cells[:_SHOWN])}{more}",
        advice,
    )


@dataclass(slots=True)
class _Seen:
    """Where a text says something: how often, and the first line (1-based)."""

    count: int = 0
    first: int = 0
    values: list[float] = field(default_factory=list)

    def add(self, number: int, value: float | None = None) -> None:
        self.count, self.first = self.count + 1, self.first or number
        if value is not None:
            self.values.append(value)

    def __str__(self) -> str:
        return f"{self.count} times, first in line {self.first}"


_UTILISATION = re.compile(
    r"util(?:i[sz]ation)?(?:_pct)?[\"']?\s*[:=]?\s*(\d+(?:\.\d+)?)(?:\s*%|(?=[,}\s]|$))",
    re.IGNORECASE,
)
_SAYS = r"[\"']?\s*(?:[:=]|is|are|\b)\s*[\"']?"
_ON = rf"{_SAYS}(?:1|true|on|yes|enabled)\b"
_OFF = (
    rf"{_SAYS}(?:0|false|off|no|disabled|unavailable|missing|not (?:installed|found|available))\b"
)
# Settings that make every step slower, or send it another way, with the value that does.
_FLAGS = (
    r"CUDA_LAUNCH_BLOCKING",
    r"TORCH_SHOW_CPP_STACKTRACES",
    r"NSA_(?:STRICT_ASSERTS|DEBUG_LOG|FORCE_SEL_MASK|FA2_FORCE_DENSE|DEBUG_FA2)",
    r"(?:torch\.autograd\.)?(?:set_)?detect_anomaly",
)
_FLAGS_OFF = (
    r"NSA_(?:SEL_RANGES_V2|USE_SEL_PACK|SEL_VARLEN_V2|PREFILL_BATCHED|TRITON_[A-Z]+)",
    r"(?:allow_tf32|NVIDIA_TF32_OVERRIDE)",
)
_PATTERNS: dict[str, re.Pattern[str]] = {
    "slow": re.compile(re.escape(SLOW_WARNING)),
    "loop": re.compile(r"\b(?:sel\.(?:reference|v1)|path[=:]\s*(?:reference|v1))\b"),
    "utilisation": _UTILISATION,
    "memory": re.compile(r"out of memory", re.IGNORECASE),
    "checkpointing": re.compile(
        rf"(?:gradient[_ -]|activation[_ -])?checkpoint(?:ing|_layers){_ON}", re.IGNORECASE
    ),
    "no_fa2": re.compile(
        rf"(?:\bfa-?2|use_fa2|flash[_ -]?attn|flash[_ -]?attention(?:[_ -]?2)?){_OFF}",
        re.IGNORECASE,
    ),
    "host": re.compile(
        r"\b(?:cpu|host)[ _-]bound(?!\w)(?![\"']?\s*[:=]\s*(?:0|false|none|null|no)\b)"
        r"|\bdata ?loader (?:is )?(?:the )?(?:a )?(?:bottleneck|starv\w+)",
        re.IGNORECASE,
    ),
    "flags": re.compile(
        rf"\b(?:{'|'.join(_FLAGS)})(?:\(True\)|{_ON})|\b(?:{'|'.join(_FLAGS_OFF)}){_OFF}",
        re.IGNORECASE,
    ),
}


def _scan(file: BinaryIO) -> tuple[int, dict[str, _Seen]]:
    """Number of lines, and what each pattern found; any bytes, a line at a time, the rest of an
    endless line ignored.
    """
    seen, number = {name: _Seen() for name in _PATTERNS}, 0
    begins = True
    while raw := file.readline(_MAX_LINE_BYTES):
        if begins:
            number += 1
            text = raw.decode("utf-8", "replace")
            for name, pattern in _PATTERNS.items():
                if found := pattern.search(text):
                    seen[name].add(number, float(found[1]) if pattern.groups else None)
        begins = raw.endswith(b"\n")
    return number, seen


def _text_lines(scanned: tuple[int, dict[str, _Seen]]) -> Iterator[DoctorLine]:
    count, seen = scanned
    yield DoctorLine(
        Level.INFO if count else Level.WARN,
        "log",
        f"{count} lines",
        "" if count else "it is empty: was its output sent elsewhere?",
    )
    slow, loop = seen["slow"], seen["loop"]
    if slow.count or loop.count:
        reported = f"{SLOW_WARNING!r} {slow}" if slow.count else f"a slow path is named {loop}"
        yield DoctorLine(
            Level.WARN,
            "log: slow path",
            reported,
            "selected attention runs row by row: ask for path v2, masked, triton or auto",
        )
    else:
        yield DoctorLine(Level.GOOD, "log: slow path", "no warning")
    yield _idle_line(seen["utilisation"])
    for name, level, topic, advice in _TOPICS:
        if seen[name].count:
            yield DoctorLine(level, f"log: {topic}", str(seen[name]), advice)


def _idle_line(seen: _Seen) -> DoctorLine:
    if not seen.values:
        return DoctorLine(
            Level.INFO,
            "log: utilisation",
            "not in it",
            "`nvidia-smi dmon -s u` shows it while the job runs",
        )
    middle = median(seen.values)
    value = f"{middle:.0f} % in the median of {len(seen.values)} readings"
    if middle < LEAST_UTILISATION_PCT:
        return DoctorLine(
            Level.WARN,
            "log: utilisation",
            f"{value}, below {LEAST_UTILISATION_PCT:g} %",
            _HOST_ADVICE,
        )
    return DoctorLine(Level.GOOD, "log: utilisation", value)


_TOPICS: tuple[tuple[str, Level, str, str], ...] = (
    (
        "memory",
        Level.BAD,
        "out of memory",
        "a smaller batch, checkpointed layers, or a path that copies less than v2",
    ),
    ("host", Level.WARN, "CPU bound", _HOST_ADVICE),
    (
        "flags",
        Level.WARN,
        "flags",
        "a setting makes each step slower or sends it another way: `python -m nsa settings` and"
        " `perfbench doctor` show what is set and what it does",
    ),
    (
        "checkpointing",
        Level.INFO,
        "checkpointing",
        "layers compute their forward twice: turn it off where memory allows",
    ),
    (
        "no_fa2",
        Level.INFO,
        "FA-2 off",
        "the window and path v2 run over SDPA: fa2=auto takes FA-2 where it is there",
    ),
)
