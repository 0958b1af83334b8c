"""Everything that is printed, rendered from a run and its judgement: Markdown, pictures, JSON,
JUnit, GitHub, terminal.

No clock, no torch; only `render`, `write_ci` and `append_summary` touch files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfbench.judgement import Judgement
from perfbench.result import Run

if TYPE_CHECKING:
    from perfbench.report.beside import Beside

__all__ = [
    "append_summary",
    "github_commands",
    "render",
    "terminal_table",
    "to_json",
    "verdict_schema",
    "write_ci",
]


def render(
    run: Run, judgement: Judgement, out_dir: Path, beside: Beside | None = None
) -> list[Path]:
    """Write report.md and its pictures into ``out_dir``; PerfbenchError(Exit.USAGE) where it cannot
    be written.
    """
    from perfbench.report.files import write

    return write(run, judgement, out_dir, beside)


def write_ci(run: Run, judgement: Judgement, out_dir: Path) -> list[Path]:
    """Write verdict.json and junit.xml into ``out_dir``; PerfbenchError(Exit.USAGE) where they
    cannot be written.
    """
    from perfbench.report.files import write_ci

    return write_ci(run, judgement, out_dir)


def github_commands(judgement: Judgement) -> list[str]:
    """GitHub's workflow commands for what is red or open, one a line, for stderr (stdout carries
    data).
    """
    from perfbench.report.github import commands

    return commands(judgement)


def append_summary(path: Path, report: str) -> str:
    """Append report.md's text to GitHub's step summary; return why it could not be done, or an
    empty text.
    """
    from perfbench.report.github import append_summary

    return append_summary(path, report)


def verdict_schema() -> dict[str, Any]:
    """JSON Schema of verdict.json."""
    from perfbench.report.verdictfile import verdict_schema

    return verdict_schema()


def terminal_table(
    run: Run, judgement: Judgement, *, width: int = 120, colour: bool = False
) -> str:
    """The verdict, every red and the table of cells as text of at most ``width`` columns; ANSI only
    with ``colour``.
    """
    from perfbench.report.terminal import table

    return table(run, judgement, width=width, colour=colour)


def to_json(judgement: Judgement, run: Run | None = None) -> dict[str, Any]:
    """The judgement as plain JSON values, as in verdict.json; null where nothing was compared."""
    from perfbench.report.verdictfile import data

    return data(judgement, run)
