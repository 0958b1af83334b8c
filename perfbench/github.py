"""What a command says to GitHub where it runs there: annotations, and the report as the step's
summary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from perfbench import environment

if TYPE_CHECKING:
    from perfbench.judgement import Judgement


def announce(judgement: Judgement, page: Path | None) -> Iterator[str]:
    """Lines to print: one annotation a finding.

    ``page`` (report.md) is appended to the step's summary. Nothing elsewhere.
    """
    if environment.variable("GITHUB_ACTIONS") != "true":
        return
    from perfbench import report

    yield from report.github_commands(judgement)
    summary = environment.step_summary()
    if (
        page is not None
        and summary is not None
        and (problem := report.append_summary(summary, page.read_text(encoding="utf-8")))
    ):
        yield f"perfbench: warning: {problem}"
