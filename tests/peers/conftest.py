"""Comparisons with other people's NSA: run only where they are named (`pytest tests/peers`, `nox -s
peers`), and then they must run.
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    started_in = config.invocation_params.dir
    named = any(
        (started_in / argument.split("::")[0]).resolve().is_relative_to(HERE)
        for argument in config.args
    )
    return None if named or not collection_path.is_relative_to(HERE) else True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of differences, of which each row has just been shown by its test."""
    shown = [
        dict(report.user_properties)
        for report in terminalreporter.stats.get("passed", ())
        if report.when == "call"
    ]
    rows = [row["difference"] for row in shown if "difference" in row]
    if not rows:
        return
    table = Table("", "here", "fla-core", "why", show_lines=True)
    for row in rows:
        table.add_row(*row)
    text = StringIO()
    Console(file=text, width=140).print(table)
    terminalreporter.section("where fla-core differs")
    terminalreporter.write(text.getvalue())
