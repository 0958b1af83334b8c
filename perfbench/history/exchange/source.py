"""What a reader gets and gives: files as bytes, what the user states, runs and remarks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import NoReturn

from perfbench.errors import Exit, PerfbenchError
from perfbench.history.nouns import HistoryRun
from perfbench.text import plain

COMMIT = "4 to 64 hexadecimal digits"
MAX_SHOWN = 200  # characters of a name or value in a message


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of another tool. ``modified_utc`` dates what a format leaves without a date."""

    name: str
    data: bytes
    modified_utc: datetime | None = None


@dataclass(frozen=True, slots=True)
class Stated:
    """What the user states of an import: ``suite`` and ``card`` replace what a file names,
    ``commit`` and ``measured_utc`` fill in what it leaves out.
    """

    suite: str | None = None
    card: str | None = None
    commit: str | None = None
    measured_utc: datetime | None = None


@dataclass(frozen=True, slots=True)
class Imported:
    """The runs of some files in their order, and one line for whatever was not taken as it is."""

    runs: tuple[HistoryRun, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Exported:
    """A file's text, and one line for whatever the format has no place for."""

    text: str
    notes: tuple[str, ...] = ()


def refuse(place: str, problem: str, next_step: str) -> NoReturn:
    """USAGE, one line: the place in a file, what was got and wanted, what to do."""
    shown = plain(problem)
    if len(shown) > 4 * MAX_SHOWN:
        shown = shown[: 4 * MAX_SHOWN] + "..."
    raise PerfbenchError(Exit.USAGE, f"{short(place)}: {shown}. Next: {next_step}")


def short(value: object) -> str:
    """One line of at most MAX_SHOWN characters."""
    text = plain(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def is_commit(text: str) -> bool:
    """Whether git could name a commit so: COMMIT."""
    return re.fullmatch(r"[0-9A-Fa-f]{4,64}", text) is not None
