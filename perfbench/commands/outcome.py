"""A judged run and how a command ends with it: report, table or JSON, and the exit code."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, NoReturn, Self

import typer

import nsa
from perfbench.commands.baseline_source import BASELINES
from perfbench.commands.console import is_terminal, print_commands, print_text, say
from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import Matrix, Policies, policies, stored_matrix
from perfbench.records import Baseline, BaselineProblem, Run, baseline_path

if TYPE_CHECKING:
    from perfbench.gate import Judgement
    from perfbench.report import ReportContext
    from perfbench.runner import Confirmation

CHECKOUT = Path(nsa.__file__).parents[1]  # the measured code


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run, its judgement, the folder it lies in, and what it was judged by: a baseline, or the
    base's own run.
    """

    run: Run
    judgement: Judgement
    folder: Path
    baseline: Baseline | BaselineProblem | None = None
    base_run: Run | None = None
    policies: Policies | None = None  # the stricter of the run's own and the baseline's
    pairs: tuple[Run, ...] = ()  # both sides of each pair that confirmed it

    def confirmed(self, found: Confirmation) -> Self:
        """Judged by its pairs, too."""
        from perfbench.gate import confirm_all

        judgement = confirm_all(self.judgement, found.measured, self.policy, found.reasons)
        pairs = tuple(side for one in found.measured for side in (one.base, one.candidate))
        return replace(self, judgement=judgement, pairs=pairs)

    @property
    def policy(self) -> Policies:
        """What the run is judged by."""
        return policy_of(self.run) if self.policies is None else self.policies

    def write_report(self, out: Path | None = None) -> list[Path]:
        """The report, its pictures, and for machines verdict.json, junit.xml and the badge;
        PerfbenchError, with the command that writes them later, where they cannot be written.
        """
        from perfbench.report import render, write_ci

        to = out or self.folder
        try:
            small = write_ci(self.run, self.judgement, to)  # where pictures no longer fit, it does
            return render(self.run, self.judgement, to, self._report_context()) + small
        except PerfbenchError as error:
            later = shlex.join(["perfbench", "report", str(self.folder), "--out", "DIR"])
            text = f"{error}, or name another place: `{later}` writes it later; the run is kept"
            raise PerfbenchError(error.exit_code, text) from error

    def report(self) -> str:
        """The report's Markdown, without its pictures."""
        from perfbench.report import report_text

        return report_text(self.run, self.judgement, self._report_context())

    def _report_context(self) -> ReportContext:
        from perfbench.report import ReportContext
        from perfbench.runner import are_paired
        from perfbench.tracing import stored_traces, traces_markdown

        return ReportContext.of(
            self.baseline,
            self.policy,
            base_run=self.base_run,
            paired=self.base_run is not None and are_paired(self.base_run, self.run),
            traces=traces_markdown(stored_traces(self.folder)),
            pairs=self.pairs,
        )

    def write_for_machines(self) -> None:
        """verdict.json, junit.xml and the badge next to the run."""
        from perfbench.report import write_ci

        write_ci(self.run, self.judgement, self.folder)

    def verdict_text(self) -> str:
        """The content of verdict.json."""
        from perfbench.report import verdict_text

        return verdict_text(self.run, self.judgement)

    def table(self) -> str:
        """For the terminal that stdout is, if it is one."""
        from perfbench.machine import no_color
        from perfbench.report import terminal_table

        colour = is_terminal() and not no_color()
        width = get_terminal_size((120, 24)).columns
        return terminal_table(self.run, self.judgement, width=width, colour=colour)

    def to_json(self) -> str:
        from perfbench.report import to_json

        content = {"run_dir": str(self.folder), **to_json(self.judgement, self.run)}
        return json.dumps(content, indent=2)


def finish(
    outcome: Outcome | None,
    as_json: bool,
    out: Path | None = None,
    write: bool = True,
    keep: Callable[[Outcome], None] | None = None,
) -> NoReturn:
    """Print the verdict, write the report, ``keep`` the run and exit with the verdict's code; None
    is a machine that the matrix skips.

    A full disk loses no verdict: it is printed first, and where it is red its code stays; a green
    one whose report or table cannot be written is USAGE.
    """
    if outcome is None:
        raise typer.Exit(Exit.OK)
    from perfbench.report import announce

    code, files = outcome.judgement.exit_code, list[Path]()
    try:
        print_text(outcome.to_json() if as_json else outcome.table())
    except PerfbenchError as error:
        say(f"{error}. The verdict: {outcome.judgement.headline}")
        code = code or error.exit_code
    try:
        files = outcome.write_report(out) if write else []
    except PerfbenchError as error:
        say(str(error))
        if code is Exit.OK:
            code = error.exit_code
            say(f"exit {int(code)}: the verdict is exit 0, and its report could not be written")
    for file in files:
        say(f"wrote {file}")
    markdown = next((file for file in files if file.name == "report.md"), None)
    print_commands(announce(outcome.judgement, markdown))
    if keep is not None:
        keep(outcome)
    raise typer.Exit(code)


def matrix_of(run: Run) -> Matrix:
    """The matrix that the run was made with, as its manifest keeps it."""
    return stored_matrix(run.manifest)


def policy_of(run: Run) -> Policies:
    """What the run's own matrix demands of its cells."""
    return policies(matrix_of(run))


def default_baseline(run: Run) -> Path:
    """The baseline file of the run's GPU and matrix."""
    manifest = run.manifest
    return baseline_path(BASELINES, manifest.environment.gpu_slug, manifest.matrix_name)


def folder_of(run_path: Path) -> Path:
    return run_path if run_path.is_dir() else run_path.parent
