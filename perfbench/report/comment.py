"""The comment on a pull request: the verdict with its number, the cells that need a reader, and how
to look further. It fits a screen, and nothing in it is markup, a mention or a link of a file's own.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from perfbench.errors import SEVERITY, Exit, worst
from perfbench.gate import severity
from perfbench.records import EXIT_OF, Verdict, short_ids
from perfbench.report.verdict_json import CellLine, RunLine, VerdictFile
from perfbench.text import cell_code, code, counted, number, plain, shorten, unlinked

MAX_BYTES = 60_000  # GitHub takes 65,536 characters
MAX_ROWS = 10  # of a table, before the others are folded: together they fit a screen
MOST_ALIKE = 2
HEADLINE_CHARS, NAME_CHARS, REASON_CHARS, COMMAND_CHARS = 300, 120, 160, 400
QUIET = (None, Verdict.SAME)  # nothing to do about these
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class CommentedRun:
    """A judged run; ``folder`` is what a reader types after `perfbench explain`."""

    verdict: VerdictFile
    folder: str

    @property
    def name(self) -> str:
        return self.verdict.run.matrix_name if self.verdict.run else self.folder

    @property
    def exit_code(self) -> Exit:
        return _exit(self.verdict.exit_code)


@dataclass(frozen=True, slots=True)
class AbsentRun:
    """A run that was expected and is not there: as bad as a cell that was not measured."""

    name: str
    reason: str

    @property
    def exit_code(self) -> Exit:
        return EXIT_OF[Verdict.MISSING]


def marker(key: str) -> str:
    """The comment's first line, which GitHub does not show and by which it is found again.

    ValueError for a ``key`` that could end the line.
    """
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"got key {shorten(key, 80)!r}, wanted 1 to 64 letters, digits, dots, dashes and"
            " underscores"
        )
    return f"<!-- perfbench comment: {key} -->"


def comment_text(
    runs: Sequence[CommentedRun],
    absent: Sequence[AbsentRun] = (),
    *,
    page: str = "",
    key: str = "perfbench",
) -> str:
    """Markdown of at most 60,000 bytes, the worst run first; ``page`` is the address where the
    report, its pictures and the data are.

    ValueError where there is nothing to comment on, or for a ``key`` that `marker` refuses.
    """
    every: list[CommentedRun | AbsentRun] = [*runs, *absent]
    every.sort(key=_worst_first)
    if not every:
        raise ValueError("got no run, wanted one at least")
    first = every[0]
    is_named = len(every) > 1 or isinstance(first, AbsentRun)
    name = f"{code(shorten(first.name, NAME_CHARS))}: " if is_named else ""
    lines = [marker(key), f"### {name}{_headline(first)}", ""]
    if faults := sorted({one for run in runs if run.verdict.run for one in _faults(run)}):
        shown = code(shorten(", ".join(faults), NAME_CHARS))
        lines += [f"**Injected faults, a demonstration:** {shown}", ""]
    lines += _runs_table(every) if len(every) > 1 else []
    end = ["", *_how_to_see(every, page), ""]
    room = MAX_BYTES - sum(len(line.encode()) + 1 for line in [*lines, *end])
    return "\n".join([*lines, *_cells(runs, room, several=len(every) > 1), *end])


def _exit(number: int) -> Exit:
    """Of a file: a number that is no exit code of perfbench is one of its bugs."""
    return Exit(number) if number in {*Exit} else Exit.INTERNAL


def _worst_first(one: CommentedRun | AbsentRun) -> tuple[int, str]:
    place = SEVERITY.index(one.exit_code) if one.exit_code in SEVERITY else len(SEVERITY)
    return place, one.name


def _headline(one: CommentedRun | AbsentRun, limit: int = HEADLINE_CHARS) -> str:
    if isinstance(one, AbsentRun):
        return unlinked(shorten(f"MISSING, exit 6: {one.reason}", limit))
    return unlinked(shorten(one.verdict.headline, limit))


def _faults(run: CommentedRun) -> list[str]:
    return [] if run.verdict.run is None else run.verdict.run.injections


def _runs_table(every: Sequence[CommentedRun | AbsentRun]) -> list[str]:
    code_ = worst(one.exit_code for one in every)
    bad = sum(one.exit_code is not Exit.OK for one in every)
    lines = [
        f"{bad} of {counted(len(every), 'run')} not green, exit {int(code_)}.",
        "",
        "| run | exit | verdict |",
        "| --- | ---: | --- |",
    ]
    for one in every[:MAX_ROWS]:
        name = cell_code(shorten(one.name, NAME_CHARS))
        lines.append(f"| {name} | {int(one.exit_code)} | {_headline(one, REASON_CHARS)} |")
    if more := len(every) - MAX_ROWS:
        lines += [f"| and {more} more | | |"] if more > 0 else []
    return [*lines, ""]


@dataclass(frozen=True, slots=True)
class _CommentLine:
    """A line of the table; ``alike``: what other cells may say in the same words."""

    order: tuple[tuple[int, int], float, str, str]
    is_quiet: bool
    alike: tuple[str, Verdict | None] | None
    text: str


def _cells(runs: Sequence[CommentedRun], room: int, *, several: bool) -> Iterator[str]:
    """The table of cells, worst first: those that need a reader, then the others folded, as many as
    ``room`` bytes hold.
    """
    rows = [
        _row(run, cell, names, several)
        for run in runs
        for names in [short_ids(cell.axes for cell in run.verdict.cells)]
        for cell in run.verdict.cells
    ]
    rows.sort(key=lambda one: one.order)
    shown = list(_shown(rows))
    head = ["| verdict | cell | what |", "| --- | --- | --- |"]
    if not rows:
        return
    yield from (*head, *(row.text for row in shown))
    rest = [row.text for row in rows if row not in shown]
    if not rest:
        return
    # of the fold itself, 200
    room -= sum(len(text.encode()) + 1 for text in (*head, *head, *(one.text for one in shown)))
    kept = list(_within(rest, room - 200))
    left = len(rest) - len(kept)
    more = f", of which {left} have no room here" if left else ""
    fold = f"<details><summary>{counted(len(rest), 'more cell')}{more}</summary>"
    yield from ("", fold, "", *head, *kept, "", "</details>")


def _shown(rows: Sequence[_CommentLine]) -> Iterator[_CommentLine]:
    """What stands open: the cells that need a reader, where there are any; of those that tell no
    number of their own, two of a kind.
    """
    loud = [row for row in rows if not row.is_quiet]
    seen: Counter[object] = Counter()
    kept = []
    for row in loud or rows:
        seen[row.alike] += row.alike is not None
        if seen[row.alike] <= MOST_ALIKE:
            kept.append(row)
    yield from kept[:MAX_ROWS]


def _within(rows: Iterable[str], room: int) -> Iterator[str]:
    for row in rows:
        room -= len(row.encode()) + 1
        if room < 0:
            return
        yield row


def _cell_order(cell: CellLine) -> tuple[tuple[int, int], float, str]:
    """Sort key, worst first; without a verdict last."""
    rank = (len(SEVERITY) + 1, 0) if cell.verdict is None else severity(cell.verdict)
    return rank, cell.change_pct or 0.0, cell.cell_id


def _row(run: CommentedRun, cell: CellLine, names: dict[str, str], several: bool) -> _CommentLine:
    name = names.get(cell.cell_id, cell.cell_id)
    where = f"{cell_code(shorten(run.name, NAME_CHARS))} " if several else ""
    verdict = "MEASURED" if cell.verdict is None else cell.verdict.value
    shown = f"**{verdict}**" if _fails(cell) else verdict
    named = f"{where}{cell_code(shorten(name, NAME_CHARS))}"
    what = _number(cell)
    return _CommentLine(
        (*_cell_order(cell), run.name),
        cell.verdict in QUIET,
        None if what else (run.name, cell.verdict),
        f"| {shown} | {named} | {unlinked(shorten(what or cell.reason, REASON_CHARS))} |",
    )


def _number(cell: CellLine) -> str:
    """The change; of a cell that nothing was compared with, and where nothing is wrong, its speed;
    else ''.
    """
    if cell.change or cell.verdict not in (None, Verdict.NEW) or cell.cand_tok_per_s is None:
        return cell.change
    return f"{number(cell.cand_tok_per_s)} tok/s"


def _fails(cell: CellLine) -> bool:
    return cell.verdict is not None and EXIT_OF[cell.verdict] is not Exit.OK


def _how_to_see(every: Sequence[CommentedRun | AbsentRun], page: str) -> Iterator[str]:
    """Which code on which card, where the rest is, and what to type."""
    runs = [one for one in every if isinstance(one, CommentedRun)]
    link = f" [Report, pictures and data]({page})." if page else ""
    if len(runs) == 1 and runs[0].verdict.run is not None:
        yield f"{_about(runs[0], runs[0].verdict.run)}{link}"
    elif link:
        yield link.strip()
    if not runs:
        return
    first = runs[0]
    bad = sorted((cell for cell in first.verdict.cells if _fails(cell)), key=_cell_order)
    commands = [shlex.join(["perfbench", "report", first.folder])]
    if bad:
        commands = [shlex.join(["perfbench", "explain", first.folder, bad[0].cell_id])]
        commands += [bad[0].reproduce] if _is_one_command(bad[0].reproduce) else []
    # A prompt before each, so that no line begins with what a file says.
    shown = [f"$ {plain(one)}" for one in commands if len(one) <= COMMAND_CHARS]
    if shown:
        longest = max((len(run) for one in shown for run in re.findall("`+", one)), default=0)
        fence = "`" * max(3, longest + 1)
        yield from ("", f"{fence}text", *shown, fence)


def _is_one_command(text: str) -> bool:
    """Whether a reader who pastes it runs `perfbench run` and nothing else: a file wrote it."""
    try:
        words = shlex.split(text)
    except ValueError:
        return False
    return words[:2] == ["perfbench", "run"] and shlex.join(words) == text


def _about(one: CommentedRun, run: RunLine) -> str:
    commit = "code of unknown commit" if run.commit is None else f"commit {code(run.commit[:12])}"
    dirty = " with uncommitted changes" if run.dirty else ""
    base = one.verdict.baseline
    against = "" if base is None else f", against {code((base.commit or base.run_id)[:12])}"
    matrix, card = (code(shorten(text, NAME_CHARS)) for text in (run.matrix_name, run.gpu_slug))
    return f"{matrix} on {card}, {commit}{dirty}{against}."
