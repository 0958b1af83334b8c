"""The same rows for a terminal: verdict first, every cell that is not green with its reason, then
the table.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from perfbench.errors import Exit
from perfbench.gate import Judgement, severity
from perfbench.records import FAIL_UNDER_STRICT, Run, Verdict, shared_axes
from perfbench.report.rows import Row, null_reasons, rows_of
from perfbench.report.tables import half, mde
from perfbench.text import NULL, fixed, number, plain, ratio, signed_pct

if TYPE_CHECKING:
    from rich.console import Console

QUIET = (None, Verdict.SAME)
_COLOUR = {"SAME": "green", "MEASURED": "green", "FASTER": "cyan", "NEW": "cyan"} | {
    v.value: "yellow" for v in FAIL_UNDER_STRICT
}
MIN_WIDTH = 60
WIDE = 110  # from here on utilisation and memory have room
WIDEST = 140  # and from here on host time and launches
MIN_CELL = 16  # columns of a cell's name, however narrow the terminal
VALUES: Mapping[str, Callable[[Row], str]] = {
    "tok/s": lambda row: number(row.tok_per_s),
    "change": lambda row: signed_pct(row.cell.change_pct),
    "MDE": lambda row: mde(row.cell.mde_pct),
    "± 95 %": lambda row: half(row.half_pct),
    "dev ms": lambda row: number(row.device_ms),
    "host ms": lambda row: number(row.host_ms),
    "launches": lambda row: number(row.launches, 6),
    "x dense": lambda row: ratio(row.x_dense),
    "% floor": lambda row: fixed(row.floor_pct, 1),
    "bound": lambda row: row.bound or NULL,
    "util": lambda row: number(row.utilisation_pct, 2),
    "GiB": lambda row: fixed(row.memory_gib, 1),
}
# what `Row.nulls` calls a column whose name is short here
NULLS = {
    "± 95 %": "± (95 %)",
    "dev ms": "device ms a step",
    "host ms": "host ms a step",
    "launches": "launches a step",
    "% floor": "% of floor",
    "util": "utilisation",
    "GiB": "memory",
}
MAX_OPEN = 5  # reasons printed of each kind of open cells; the report has all


def terminal_table(
    run: Run, judgement: Judgement, *, width: int = 120, colour: bool = False
) -> str:
    """Render for a terminal of ``width`` columns."""
    from rich.console import Console
    from rich.text import Text

    console = Console(
        file=io.StringIO(),
        width=max(width, MIN_WIDTH),
        force_terminal=colour,
        no_color=not colour,
        color_system="standard" if colour else None,
        highlight=False,
        legacy_windows=False,
        _environ={},
    )
    rows = rows_of(run, judgement)
    head = _columns(rows, compared=judgement.baseline is not None, width=width)
    shown = {NULLS.get(name, name) for name in head}
    with console.capture() as above:
        if run.manifest.injections:
            console.print(
                Text(
                    f"INJECTED FAULTS: {plain(', '.join(run.manifest.injections))}: a"
                    " demonstration",
                    style="bold magenta",
                )
            )
        console.print(Text(plain(judgement.headline), style=_style(judgement)))
        for finding in judgement.findings:
            if finding.reason in judgement.headline:
                continue  # said already
            console.print(Text(f"  {finding.verdict.value}: {plain(finding.reason)}", style="red"))
        for row, left in _to_print(rows):
            change = f"{row.cell.change}: " if row.cell.change else ""
            line = f"  {row.verdict} {plain(row.name)}: {change}{plain(row.cell.reason)}"
            console.print(Text(line, style=_style_of(row)))
            if left:
                console.print(
                    Text(
                        f"  and {left} more {row.verdict}, as the table shows", style=_style_of(row)
                    )
                )
        for row in rows:
            if row.cell.own is not None:
                proved, open_ = ("; ".join(words) or "nothing" for words in _words_of(row))
                text = f"  {plain(row.name)}: not proved: {plain(open_)}. Proved: {plain(proved)}"
                console.print(Text(text, style="yellow" if row.cell.own.not_proved else "dim"))
        if common := shared_axes(row.cell.axes for row in rows):
            console.print(Text(f"every cell: {plain(common)}", style="dim"))
    with console.capture() as below:
        for note in judgement.notes:
            console.print(Text(f"note: {plain(note)}", style="dim"))
        for column, reason, cells in null_reasons(rows, {*shown, "parity", "step"}):
            console.print(
                Text(f"{column} {NULL}: {plain(reason)} ({len(cells)} cells)", style="dim")
            )
    middle = _table(console, rows, head)
    lines = [*above.get().splitlines(), *middle, *below.get().splitlines()]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _words_of(row: Row) -> tuple[list[str], list[str]]:
    own = row.cell.own
    return ([], []) if own is None else (own.proved, own.not_proved)


def _to_print(rows: list[Row]) -> Iterator[tuple[Row, int]]:
    """Rows whose reason is printed, worst first; of open cells the first few, the last of them with
    how many are left.
    """
    loud = sorted((row for row in rows if row.cell.verdict not in QUIET), key=_worst_first)
    for verdict, members in groupby(loud, key=lambda row: row.cell.verdict):
        found = list(members)
        shown = MAX_OPEN if verdict in FAIL_UNDER_STRICT or verdict is Verdict.NEW else len(found)
        for place, row in enumerate(found[:shown], 1):
            yield row, len(found) - shown if place == shown else 0


def _worst_first(row: Row) -> tuple[int, int]:
    return severity(Verdict(row.verdict))


def _style_of(row: Row) -> str:
    return _COLOUR.get(row.verdict, "red")


def _style(judgement: Judgement) -> str:
    if judgement.exit_code is not Exit.OK:
        return "bold red"
    is_open = judgement.of(*FAIL_UNDER_STRICT) or judgement.is_too_noisy
    return "bold yellow" if is_open else "bold green"


def _columns(rows: list[Row], *, compared: bool, width: int) -> dict[str, Callable[[Row], str]]:
    """What stands between a cell's name and its verdict; no column of dashes alone."""
    speed = {"tok/s": VALUES["tok/s"]}
    names = ["change", "MDE"] if compared else ["± 95 %"]
    names += ["dev ms", *(("host ms", "launches") if width >= WIDEST else ())]
    names += ["x dense", "% floor", "bound", *(("util", "GiB") if width >= WIDE else ())]
    return speed | {
        name: VALUES[name] for name in names if any(VALUES[name](row) != NULL for row in rows)
    }


def _table(
    console: Console, rows: list[Row], shown: Mapping[str, Callable[[Row], str]]
) -> Iterator[str]:
    """The table's lines, each column as wide as its widest value.

    Only ``cell`` is folded where the terminal is too narrow, to ``MIN_CELL`` at least: rich's own
    Table measures and wraps every value, which took longer than judging 300 cells.
    """
    from rich.text import Text

    header = ["cell", *shown, "verdict"]
    table = [
        [plain(row.name), *(value(row) for value in shown.values()), row.verdict] for row in rows
    ]
    widths = [max(map(_columns_of, column)) for column in zip(header, *table, strict=True)]
    over = sum(widths) + len(widths) - 1 - console.width
    widths[0] = min(widths[0], max(MIN_CELL, widths[0] - over))
    head, heading = _styled(console, "bold"), _aligned(header, widths)
    yield head(" ").join(map(head, heading))
    paint = {row.verdict: _styled(console, _style_of(row)) for row in rows}
    for row, (cell_id, *values) in zip(rows, table, strict=True):
        first, *folded = [cell_id]
        if _columns_of(cell_id) > widths[0]:
            first, *folded = (line.plain for line in Text(cell_id).wrap(console, widths[0]))
        *texts, verdict = _aligned([first, *values], widths)
        yield " ".join([*texts, paint[row.verdict](verdict)])
        yield from folded


def _aligned(texts: list[str], widths: list[int]) -> list[str]:
    """Padded to ``widths``: the first and the last to the left, numbers to the right."""
    pads = [" " * (width - _columns_of(text)) for text, width in zip(texts, widths, strict=True)]
    numbers = [pad + text for text, pad in zip(texts[1:-1], pads[1:-1], strict=True)]
    return [texts[0] + pads[0], *numbers, texts[-1] + pads[-1]]


def _columns_of(text: str) -> int:
    """Of the terminal; a wide character takes two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _styled(console: Console, style: str) -> Callable[[str], str]:
    """What wraps a text in the terminal's codes of ``style``; nothing without colours."""
    from rich.color import ColorSystem
    from rich.style import Style

    parsed = Style.parse(style)
    system = ColorSystem.STANDARD if console.color_system else None
    return lambda text: parsed.render(text, color_system=system)
