"""`perfbench gap`: how far each cell is from what it could be, and what each change buys.

Of a judged run: a cell that a hard gate refused has no number here either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from perfbench.gate import Judgement
from perfbench.records import EVERYTHING, Run
from perfbench.report import expectations
from perfbench.report.rows import PATH_ORDER, Row, rows_of, without
from perfbench.report.workloads import Table
from perfbench.text import NULL, cell_code, number, ratio

# What a link of a chain may change, in the order in which a user would.
LINKS = ("path", "fa2", "compile", "cuda_graph", "without")


@dataclass(frozen=True, slots=True)
class Gap:
    """One cell. ``floor_ms``: the least time that the hardware allows by closed form;
    ``dense_ms``: the fastest dense twin of the same shape in the run; ``expected_tok_per_s``: the
    middle of what is expected (claimed, where nothing is). None: not known.
    """

    cell_id: str
    step_ms: float | None
    tok_per_s: float | None
    floor_ms: float | None
    dense_ms: float | None
    expected_tok_per_s: float | None
    bound: str | None
    why: str = ""  # there is no speed

    @property
    def x_floor(self) -> float | None:
        return _over(self.step_ms, self.floor_ms)

    @property
    def x_dense(self) -> float | None:
        """Above 1 the cell is faster than dense."""
        return _over(self.dense_ms, self.step_ms)

    @property
    def of_expected(self) -> float | None:
        return _over(self.tok_per_s, self.expected_tok_per_s)


@dataclass(frozen=True, slots=True)
class Link:
    """A cell of a chain: ``change`` is what it does otherwise than the link before, ``x_before``
    and ``x_first`` its speed over that of the link before, and of the first, that have one.
    """

    cell_id: str
    change: str
    tok_per_s: float | None
    x_before: float | None
    x_first: float | None
    bound: str | None


@dataclass(frozen=True, slots=True)
class Gaps:
    """``chains``: by shape (the axes that no link changes), at least two links each."""

    cells: tuple[Gap, ...]
    chains: Mapping[str, tuple[Link, ...]]

    def to_json(self) -> str:
        cells = [
            {
                **asdict(one),
                "x_floor": one.x_floor,
                "x_dense": one.x_dense,
                "of_expected": one.of_expected,
            }
            for one in self.cells
        ]
        chains = {shape: [asdict(link) for link in links] for shape, links in self.chains.items()}
        return json.dumps({"cells": cells, "chains": chains}, indent=2)

    def tables(self) -> list[Table]:
        """For Markdown."""
        return [self._cells(), *(_chain(shape, links) for shape, links in self.chains.items())]

    def _cells(self) -> Table:
        head = ["cell", "ms a step", "floor ms", "x floor", "dense ms", "x dense"]
        head += ["expected tok/s", "measured tok/s", "measured / expected", "bound"]
        lines = [
            [
                cell_code(one.cell_id),
                number(one.step_ms),
                number(one.floor_ms),
                number(one.x_floor),
                number(one.dense_ms),
                ratio(one.x_dense),
                number(one.expected_tok_per_s),
                number(one.tok_per_s),
                ratio(one.of_expected),
                one.bound or one.why or NULL,
            ]
            for one in self.cells
        ]
        note = (
            "x floor: the time over the least that FLOPs and bytes allow; 1 is the hardware's"
            " limit. x dense: above 1 is faster than the fastest dense twin of the same shape in"
            " this run. expected: the middle of what the data file expects of this card."
        )
        return Table("Gaps", head, lines, note)


def gaps(run: Run, judgement: Judgement) -> Gaps:
    """Of every cell, in the report's order."""
    rows = rows_of(run, judgement)
    wanted: dict[str, float] = {}
    for one in expectations.met(run, rows):
        source = one.expectation.expected or one.expectation.claimed
        assert source is not None  # checked when the file was read
        for row in one.rows:
            wanted.setdefault(row.cell.cell_id, sum(source.tok_per_s) / 2)
    return Gaps(tuple(_gap(row, wanted.get(row.cell.cell_id)) for row in rows), _chains(rows))


def _gap(row: Row, expected: float | None) -> Gap:
    floor_ms = dense_ms = None
    if row.step_ms is not None and row.floor_pct:
        floor_ms = row.step_ms * row.floor_pct / 100
    if row.step_ms is not None and row.x_dense is not None:
        dense_ms = row.step_ms * row.x_dense
    why = "" if row.tok_per_s is not None else row.verdict
    return Gap(
        row.cell.cell_id, row.step_ms, row.tok_per_s, floor_ms, dense_ms, expected, row.bound, why
    )


def _chains(rows: Sequence[Row]) -> dict[str, tuple[Link, ...]]:
    shapes: dict[object, list[Row]] = {}
    for row in rows:
        if not row.is_dense and not row.cell.axes.is_peer:
            shapes.setdefault(without(row.cell.axes, *LINKS), []).append(row)
    found = {}
    for same in shapes.values():
        if len(same) > 1:
            parts = same[0].cell.cell_id.split(",")
            shape = [part for part in parts if part.partition("=")[0] not in LINKS]
            found[", ".join(shape)] = _links(sorted(same, key=_order))
    return found


def _order(row: Row) -> tuple[int, ...]:
    """Slow paths first, and what is switched on after what is not; without a step before with."""
    cell = row.cell.axes
    path = PATH_ORDER.index(cell.path) if cell.path in PATH_ORDER else len(PATH_ORDER)
    return (
        path,
        cell.fa2 == "on",
        cell.compile == "on",
        cell.cuda_graph == "on",
        cell.without == EVERYTHING,
    )


def _links(rows: Sequence[Row]) -> tuple[Link, ...]:
    links, before, first = list[Link](), None, None
    previous: Row | None = None
    for row in rows:
        change = row.cell.axes.path if previous is None else _change(previous, row)
        speed = row.tok_per_s
        links.append(
            Link(
                row.cell.cell_id,
                change,
                speed,
                _over(speed, before),
                _over(speed, first),
                row.bound,
            )
        )
        previous = row
        before, first = speed or before, first or speed
    return tuple(links)


def _change(before: Row, after: Row) -> str:
    one, two = before.cell.axes, after.cell.axes
    changed = [name for name in LINKS if one.value(name) != two.value(name)]
    return ", ".join(f"{name}={two.value(name)}" for name in changed)


def _chain(shape: str, links: Sequence[Link]) -> Table:
    lines = [
        [
            link.change,
            number(link.tok_per_s),
            ratio(link.x_before),
            ratio(link.x_first),
            link.bound or NULL,
        ]
        for link in links
    ]
    head = ["change", "tok/s", "x the link before", "x the first", "bound"]
    note = "Each link against the nearest above it, and the first of the chain, that has a speed."
    return Table(f"Chain of {shape}", head, lines, note)


def _over(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def gap_text(found: Gaps) -> str:
    """Markdown, which a terminal shows as it is."""
    parts = []
    for table in found.tables():
        parts += [f"## {table.title}", "", f"| {' | '.join(table.head)} |"]
        rule = ["---" if place < table.left else "---:" for place in range(len(table.head))]
        parts += [f"| {' | '.join(rule)} |"]
        parts += [f"| {' | '.join(line)} |" for line in table.lines]
        parts += ["", table.note, ""]
    return "\n".join(parts)
