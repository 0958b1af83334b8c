"""What the doctor reports: one line for each thing looked at, how bad it is, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from perfbench.errors import Exit
from perfbench.text import plain


class Level(StrEnum):
    """GOOD as it should be; INFO neither good nor bad here; WARN costs speed or repeatability; BAD
    stops or spoils a run.
    """

    GOOD = "good"
    INFO = "info"
    WARN = "warn"
    BAD = "bad"


_MARKS = {Level.GOOD: "ok", Level.INFO: "--", Level.WARN: "warn", Level.BAD: "BAD"}


@dataclass(frozen=True, slots=True)
class DoctorLine:
    """``what`` was looked at, the ``value`` found, and in ``advice`` what it means and the next
    step; empty where none is needed.
    """

    level: Level
    what: str
    value: str
    advice: str = ""


def exit_code(lines: Iterable[DoctorLine]) -> Exit:
    """ENVIRONMENT where any line is bad; a warning is none."""
    return Exit.ENVIRONMENT if any(line.level is Level.BAD for line in lines) else Exit.OK


def render_text(lines: list[DoctorLine]) -> str:
    """For a terminal: a mark, what, value, and below it what to do; whatever bytes a log or a
    variable holds, one line each.
    """
    width = max(len(line.what) for line in lines)
    rows = []
    for line in lines:
        rows.append(f"{_MARKS[line.level]:<6}{line.what:<{width}}  {plain(line.value)}")
        if line.advice:
            rows.append(f"{'':<{width + 6}}  -> {plain(line.advice)}")
    return "\n".join(rows) + "\n"
