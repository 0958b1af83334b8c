"""A rank's log: lines of JSON, and on rank 0 a table and TensorBoard.

A line is one write at the end of the file, so a kill tears the last line at most. Numbers that are
not finite become null, and ``not_finite`` names them: JSON has no NaN, and absence is not one.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.installing import pip_install
from nsa.train.errors import TrainError, TrainExit
from nsa.train.event_files import keep_up_to
from nsa.train.records import StepRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

STEP_KIND = "step"
COLUMNS = tuple(one.name for one in fields(StepRecord))
_TAIL_BYTES = 65_536


def log_path(out: Path, rank: int) -> Path:
    return out / "log" / f"rank{rank}.jsonl"


def read_log(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a log, oldest first; a torn last line is left out.

    A record's line has kind "step". ValueError for a line in the middle that is no JSON object.
    """
    *whole, _torn = path.read_bytes().split(b"\n")
    lines = []
    for number, line in enumerate(whole, start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ValueError(
                f"{path}:{number} is {line[:60]!r}; wanted a JSON object; another program wrote"
                " into the log, so remove that line"
            )
        lines.append(value)
    return lines


class RunLog:
    """Appends to ``out``/log/rank{rank}.jsonl; rank 0 to ``out``/log/training.csv as well, and with
    ``tensorboard`` to ``out``/log/tensorboard.

    In a folder that has a log it goes on behind the last whole line, after an event "resumed". A
    TrainError MISSING without the package tensorboard; USAGE where training.csv has other columns.
    ``config_sha256`` is in every event; a record has its own.
    """

    def __init__(
        self, out: Path, rank: int, *, tensorboard: bool, config_sha256: str | None = None
    ) -> None:
        self._always = {} if config_sha256 is None else {"config_sha256": config_sha256}
        folder = out / "log"
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = _Appending(log_path(out, rank))
        self._table = _Appending(folder / "training.csv") if rank == 0 else None
        self._board = _Board(folder / "tensorboard") if tensorboard and rank == 0 else None
        if self._table is not None:
            _begin_table(self._table)
        if self._lines.size:
            self.event("resumed", rank=rank, torn_bytes=self._lines.torn_bytes)

    def write(self, record: StepRecord) -> None:
        """One line of ``record``; OSError where the disk takes none."""
        values = record.to_mapping()
        self._lines.write(_json_line({"kind": STEP_KIND, **values}))
        if self._table is not None:
            self._table.write(_csv_line([_cell(values[name]) for name in COLUMNS]))
        if self._board is not None:
            self._board.write(record.step, _numbers(values))

    def event(self, kind: str, **values: Any) -> None:
        """One line {"kind": kind, "time_utc": now, **values}; ValueError for kind "step"."""
        if kind == STEP_KIND:
            raise ValueError(f"event kind {kind!r} marks records; name the event otherwise")
        values = {"time_utc": utc_now(), **self._always, **values}
        self._lines.write(_json_line({"kind": kind, **values}))

    def go_on_after(self, step: int) -> None:
        """Cut later steps off training.csv, which the run that goes on after ``step`` trains again,
        and off TensorBoard's files.

        The lines of JSON keep both, and an event between them.
        """
        if self._table is not None:
            self._table.cut(_bytes_up_to(step, self._table.read()))
        if self._board is not None:
            self._board.go_on_after(step)

    def close(self) -> None:
        self._lines.close()
        if self._table is not None:
            self._table.close()
        if self._board is not None:
            self._board.close()


class _Appending:
    """A file of lines that grows at its end; a torn last line is cut off when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        end = os.fstat(self._descriptor).st_size
        self.size = self._last_newline(end)
        self.torn_bytes = end - self.size
        if self.torn_bytes:
            os.ftruncate(self._descriptor, self.size)

    def write(self, line: bytes) -> None:
        """In one call, but for a disk that takes a part."""
        while line:
            line = line[os.write(self._descriptor, line) :]

    def read(self) -> bytes:
        return self.path.read_bytes()

    def cut(self, end: int) -> None:
        """Keep the first ``end`` bytes."""
        os.ftruncate(self._descriptor, end)

    def first_line(self) -> bytes:
        return os.pread(self._descriptor, _TAIL_BYTES, 0).partition(b"\n")[0]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _last_newline(self, end: int) -> int:
        """Bytes up to the last newline, which is among them; 0 without one."""
        while end > 0:
            start = max(0, end - _TAIL_BYTES)
            at = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if at >= 0:
                return start + at + 1
            end = start
        return 0


class _Board:
    """TensorBoard's files in ``folder``: a new one each time that a run starts, made with the first
    record.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._class = _summary_writer()
        self._writer: SummaryWriter | None = None

    def go_on_after(self, step: int) -> None:
        """Before the first record: later steps leave the older files."""
        assert self._writer is None
        keep_up_to(step, self._folder)

    def write(self, step: int, numbers: list[tuple[str, float]]) -> None:
        if self._writer is None:
            self._writer = self._class(str(self._folder))
        for name, number in numbers:
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _begin_table(table: _Appending) -> None:
    header = _csv_line(COLUMNS)
    if not table.size:
        table.write(header)
    elif (found := table.first_line()) != header.rstrip(b"\n"):
        raise TrainError(
            TrainExit.USAGE,
            f"{table.path} begins with {found[:60]!r}; wanted the columns {','.join(COLUMNS[:4])}"
            ",...; another version wrote it, so move it away",
        )


def _bytes_up_to(step: int, table: bytes) -> int:
    """Of the rows up to the last one of ``step`` or an earlier one."""
    at = COLUMNS.index("step")
    rows = table.splitlines(keepends=True)
    while len(rows) > 1:
        cell = b"".join(rows[-1].split(b",", at + 1)[at : at + 1])
        if not cell.isdigit() or int(cell) <= step:
            break
        rows.pop()
    return sum(map(len, rows))


def _json_line(values: Mapping[str, Any]) -> bytes:
    not_finite: list[str] = []
    plain = _finite(values, "", not_finite)
    if not_finite:
        plain["not_finite"] = not_finite
    return json.dumps(plain, allow_nan=False).encode() + b"\n"


def _finite(value: Any, name: str, found: list[str]) -> Any:
    """``value`` with null for numbers that are not finite, whose dotted names go to ``found``."""
    if isinstance(value, Mapping):
        inner = f"{name}." if name else ""
        return {key: _finite(one, f"{inner}{key}", found) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one, f"{name}[{at}]", found) for at, one in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        found.append(name)
        return None
    return value


def _csv_line(cells: list[str] | tuple[str, ...]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _cell(value: Any) -> str:
    """Empty for None, JSON for what is nested, nan and inf as Python spells them."""
    if value is None:
        return ""
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(_finite(value, "", []))
    return str(value)


def _numbers(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Every number with its dotted name; rank and step are TensorBoard's own axes."""
    found = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and name not in ("rank", "step"):
            found.append((f"{prefix}{name}", float(value)))
    return found


def _summary_writer() -> type[SummaryWriter]:
    try:
        # torch's own message does not name the package
        importlib.import_module("tensorboard")
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TrainError(
            TrainExit.MISSING,
            f"the package tensorboard is missing ({error}), which log.tensorboard=true needs;"
            f" {pip_install('train-all')}",
        ) from error
    return SummaryWriter
