"""`perfbench.run` and `perfbench.check`: the commands as functions, with their very code, that
print nothing and leave no process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING

from perfbench.commands import names
from perfbench.commands import options as opt
from perfbench.commands.check import JudgedAs, check_and_judge
from perfbench.commands.console import collected
from perfbench.commands.keeping import keep
from perfbench.commands.notifying import check_address, notify
from perfbench.commands.run import run_and_judge
from perfbench.errors import Exit, PerfbenchError

if TYPE_CHECKING:
    import pandas as pd

    from perfbench.commands.outcome import Outcome


Words = str | Iterable[str] | None
WIDTH = 100  # columns of `RunResult.text`


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell, judged. ``verdict`` is None where nothing was compared and nothing is wrong; a
    speed that does not exist is None, never 0. Speeds in tokens a second, the change in percent.
    """

    cell_id: str
    verdict: str | None
    reason: str
    tok_per_s: float | None
    base_tok_per_s: float | None
    change_pct: float | None


@dataclass(frozen=True, slots=True)
class RunResult:
    """What `perfbench.run` and `perfbench.check` found.

    ``exit_code``: that of the command line. ``folder``: the run's folder with report.md; None where
    the matrix skips this machine. ``verdicts``: one a cell. ``findings``: what concerns the run as
    a whole. ``text``: headline, reasons and table, as the command prints them. ``messages``: the
    warnings that it prints.
    """

    exit_code: Exit
    headline: str
    folder: Path | None
    verdicts: tuple[CellResult, ...]
    findings: tuple[str, ...]
    text: str
    messages: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the command line would exit 0."""
        return self.exit_code == Exit.OK

    @property
    def rows(self) -> pd.DataFrame:
        """The run as `perfbench.load` reads it; PerfbenchError where nothing was measured."""
        from perfbench.report import load

        if self.folder is None:
            raise PerfbenchError(Exit.USAGE, f"got no run, {self.headline}; wanted its rows")
        return load(self.folder)


def run(
    matrix: str | PathLike[str],
    *,
    only: Words = None,
    resume: str | PathLike[str] | None = None,
    budget: str | float | None = None,
    seed: int | None = None,
    out: str | PathLike[str] = opt.RUNS,
    source_commit: str | None = None,
    inject: Words = None,
    executor: str = "local",
    cards: int | None = None,
    executor_option: Words = None,
    history: str | PathLike[str] | None = None,
) -> RunResult:
    """`perfbench run`: measure ``matrix``, judge it by the hard gates, and write its report.

    The arguments are the command's options: ``only`` and ``inject`` one text or several, ``budget``
    in seconds or as `30m`. Raises PerfbenchError, with the command's message and ``exit_code``,
    where the command would stop with one; a red verdict is no error but the result's exit_code.
    After Ctrl-C it is a KeyboardInterrupt that says how to resume.
    """
    options = _typed(only, resume, budget, seed, out, source_commit, inject)
    options = _with_fleet(options, executor, cards, executor_option)
    measured = partial(run_and_judge, silent=True)
    return _result(["run", str(matrix)], options, measured, history)


def check(
    matrix: str | PathLike[str],
    *,
    only: Words = None,
    baseline: str | PathLike[str] | None = None,
    strict: bool = False,
    resume: str | PathLike[str] | None = None,
    budget: str | float | None = None,
    seed: int | None = None,
    out: str | PathLike[str] = opt.RUNS,
    source_commit: str | None = None,
    inject: Words = None,
    no_confirm: bool = False,
    executor: str = "local",
    cards: int | None = None,
    executor_option: Words = None,
    history: str | PathLike[str] | None = None,
    webhook: str | None = None,
) -> RunResult:
    """`perfbench check`: measure ``matrix``, judge it by its baseline, measure what looks slower
    again next to the baseline's commit, and write the report.

    The arguments are the command's options; what they take and what is raised: as for `run`.
    """
    check_address(webhook)
    options = _typed(only, resume, budget, seed, out, source_commit, inject)
    options = _with_fleet(options, executor, cards, executor_option)
    by = JudgedAs(None if baseline is None else Path(baseline), bool(strict), bool(no_confirm))
    words = ["check", str(matrix)]
    words += [] if by.baseline is None else ["--baseline", str(by.baseline)]
    words += [*(["--strict"] if strict else []), *(["--no-confirm"] if no_confirm else [])]
    judged = partial(check_and_judge, by=by, silent=True)
    return _result(words, options, judged, history, partial(notify, url=webhook))


def _result(
    words: list[str],
    typed: opt.TypedOptions,
    measured: Callable[..., Outcome | None],
    history: str | PathLike[str] | None,
    then: Callable[[Outcome], None] | None = None,
) -> RunResult:
    """What ``measured`` made of the matrix that ``words``, the command's first ones, name. The
    manifest holds the whole command line, so that reports say what to type.
    """
    from perfbench.matrix import load_matrix

    with collected() as messages:
        try:
            loaded = load_matrix(words[1])
            argv = ["perfbench", *words, *_as_typed(typed)]
            outcome = measured(loaded, opt.RunOptions.parsed(loaded, argv, typed))
            if outcome is not None:
                _write_report(outcome, messages)
                keep(outcome, None if history is None else fspath(history), silent=True)
                if then is not None:
                    then(outcome)
        except PerfbenchError as error:
            for message in messages:
                error.add_note(message)
            if error.exit_code == Exit.INTERRUPTED:  # a caller's loop must not go on after Ctrl-C
                raise KeyboardInterrupt(str(error)) from error
            raise
        return _found(outcome, tuple(messages))


def _write_report(outcome: Outcome, messages: list[str]) -> None:
    """A red verdict is not lost where its report cannot be written, e.g. on a full disk."""
    try:
        outcome.write_report()
    except PerfbenchError as error:
        if outcome.judgement.exit_code == Exit.OK:
            raise
        messages.append(str(error))


def _found(outcome: Outcome | None, messages: tuple[str, ...]) -> RunResult:
    if outcome is None:
        headline = "the matrix skips this machine"
        return RunResult(Exit.OK, headline, None, (), (), headline, messages)
    from perfbench.report import terminal_table

    judgement = outcome.judgement
    cells = tuple(
        CellResult(
            cell.cell_id,
            None if cell.verdict is None else cell.verdict.value,
            cell.reason,
            cell.cand_tok_per_s,
            cell.base_tok_per_s,
            cell.change_pct,
        )
        for cell in judgement.cells
    )
    findings = tuple(f"{one.verdict.value}: {one.reason}" for one in judgement.findings)
    text = terminal_table(outcome.run, judgement, width=WIDTH)
    headline = judgement.headline
    return RunResult(judgement.exit_code, headline, outcome.folder, cells, findings, text, messages)


def _typed(
    only: Words,
    resume: str | PathLike[str] | None,
    budget: str | float | None,
    seed: int | None,
    out: str | PathLike[str],
    source_commit: str | None,
    inject: Words,
) -> opt.TypedOptions:
    """As the command line would have parsed them; USAGE where it would refuse."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise PerfbenchError(
            Exit.USAGE,
            f"got seed={seed!r}, wanted a whole number from 0. Next: omit it for a random one",
        )
    return opt.TypedOptions(
        _words("only", only),
        names.newest_run(None if resume is None else Path(resume)),
        None if budget is None else str(budget),
        seed,
        Path(out),
        source_commit,
        _words("inject", inject),
    )


def _with_fleet(
    options: opt.TypedOptions, executor: str, cards: int | None, words: Words
) -> opt.TypedOptions:
    return replace(
        options,
        executor=executor,
        cards=cards,
        executor_option=_words("executor_option", words) or None,
    )


def _words(name: str, given: Words) -> list[str]:
    if given is None or isinstance(given, str):
        return [] if given is None else [given]
    found: list[object] = list(given) if isinstance(given, Iterable) else [given]
    words = [one for one in found if isinstance(one, str)]
    if wrong := [one for one in found if not isinstance(one, str)]:
        raise PerfbenchError(
            Exit.USAGE,
            f"got {name}={wrong[0]!r}, wanted a text as the option --{name} takes, or several."
            " Next: write e.g. only='path=auto'",
        )
    return words


def _as_typed(typed: opt.TypedOptions) -> list[str]:
    """The options as a user would type them; defaults are left out."""
    found = [word for one in typed.only or () for word in ("--only", one)]
    for name in ("resume", "budget", "seed", "source_commit"):
        if (value := getattr(typed, name)) is not None:
            found += [f"--{name.replace('_', '-')}", str(value)]
    if typed.out != opt.RUNS:
        found += ["--out", str(typed.out)]
    if typed.executor != "local":
        found += ["--executor", typed.executor]
    found += [] if typed.cards is None else ["--cards", str(typed.cards)]
    found += [word for one in typed.executor_option or () for word in ("--executor-option", one)]
    return found + [word for one in typed.inject or () for word in ("--inject", one)]
