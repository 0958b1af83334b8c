"""The tables of cells: every cell with its columns, and the fastest path of NSA at each length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from perfbench.records import NOT_APPLICABLE, Verdict, varying_axes
from perfbench.report.rows import Key, Row, is_twin, is_window, key_of_twin, unmarked
from perfbench.text import NULL, cell_code, code, escape, fixed, number, ratio, signed_pct

HOW = {"capture": "at the capture, x replays", "graph": "in the compiled graph, x runs"}
FINDING = "sign"
MAX_IDS = 6  # cells named for one reason; the table has all


@dataclass(frozen=True, slots=True)
class Column:
    """Shown where some cell has a value; ``compared``: where there is something to compare with,
    too. ``null``: what `Row.nulls` calls it.
    """

    name: str
    value: Callable[[Row], str]
    right: bool = True
    compared: bool = False
    null: str = ""


def _verdict(row: Row) -> str:
    bad = [f"{count} {name}" for name, count in row.statuses.items() if name != "ok"]
    word = row.verdict if row.cell.verdict in (None, Verdict.SAME) else f"**{row.verdict}**"
    return word + (f" ({', '.join(bad)})" if bad else "")


def half(pct: float | None) -> str:
    """Two digits; whole per cent from 100 on, where two digits would be a power of ten."""
    return NULL if pct is None else f"{pct:.2g} %" if pct < 99.5 else f"{pct:,.0f} %"


def _half(row: Row) -> str:
    return NULL if row.half_pct is None else f"{half(row.half_pct)} (n {row.cell.replicates})"


def mde(value: float | None) -> str:
    return NULL if value is None else f"{value:.1f} %"


COLUMNS = (
    Column("cell", lambda row: cell_code(row.name), right=False),
    Column("verdict", _verdict, right=False),
    Column("tok/s", lambda row: number(row.tok_per_s)),
    Column("± (95 %)", _half),
    Column("ms a step", lambda row: number(row.step_ms)),
    Column("change", lambda row: signed_pct(row.cell.change_pct), compared=True),
    Column("MDE", lambda row: mde(row.cell.mde_pct), compared=True),
    Column("device ms a step", lambda row: number(row.device_ms)),
    Column("host ms a step", lambda row: number(row.host_ms)),
    Column("launches a step", lambda row: number(row.launches, 6)),
    Column("x dense", lambda row: ratio(row.x_dense)),
    Column("% of floor", lambda row: fixed(row.floor_pct, 1)),
    Column("bound", lambda row: row.bound or NULL, right=False),
    Column(
        "utilisation",
        lambda row: NULL if row.utilisation_pct is None else f"{row.utilisation_pct:.0f} %",
    ),
    Column("memory, GiB", lambda row: fixed(row.memory_gib, 2), null="memory"),
    Column("mJ a token", lambda row: number(row.mj_per_token)),
    Column("cycles a token", lambda row: number(row.cycles_per_token)),
    Column("parity error / tolerance", lambda row: number(row.parity_ratio, 2), null="parity"),
    Column("step error / tolerance", lambda row: number(row.step_ratio, 2), null="step"),
    Column("counters (calls while timing)", lambda row: counters(row), right=False),
)


def columns(rows: list[Row], compared: bool) -> list[Column]:
    """Those that this report has: a column of dashes alone is left out."""
    shown = [one for one in COLUMNS if compared or not one.compared]
    return [one for one in shown if not rows or any(one.value(row) != NULL for row in rows)]


def null_names(shown: Iterable[Column]) -> set[str]:
    """What `Row.nulls` calls these columns."""
    return {one.null or one.name for one in shown}


def without_empty(
    head: Sequence[str], lines: Sequence[Sequence[str]], left: int
) -> tuple[list[str], list[list[str]]]:
    """A table without its columns of dashes alone; the first ``left`` stay, and signs, of which
    none is a finding.
    """
    kept = [
        place
        for place in range(len(head))
        if place < left or head[place] == FINDING or any(line[place] != NULL for line in lines)
    ]
    return [head[place] for place in kept], [[line[place] for place in kept] for line in lines]


def tables(rows: list[Row], shown: list[Column]) -> list[tuple[str, list[str]]]:
    """One table for each workload, its lines ready."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        line = f"| {' | '.join(one.value(row) for one in shown)} |"
        groups.setdefault(row.cell.axes.workload, []).append(line)
    return list(groups.items())


def counters(row: Row) -> str:
    """How often each was called; where no call can be counted, how it is known."""
    counted = ", ".join(f"{name} {count}" for name, count in sorted(row.engaged.items()))
    return (
        escape(counted + (f" ({HOW[row.engaged_by]})" if counted and row.engaged_by in HOW else ""))
        or NULL
    )


def ids(cells: list[str], total: int) -> str:
    """Cells as Markdown: the first few by name, all by number."""
    if len(cells) == total > 1:
        return f"every cell, {total} of them"
    named = ", ".join(code(cell) for cell in cells[:MAX_IDS])
    return named if len(cells) <= MAX_IDS else f"{len(cells)} cells: {named}, ..."


def listed(
    rows: Iterable[Row], verdicts: tuple[Verdict, ...], *, or_looks_faster: bool = False
) -> list[tuple[str, str, str]]:
    """(verdict, cells as Markdown, reason); cells with the same reason share a line."""
    rows = list(rows)
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.cell.verdict in verdicts or (or_looks_faster and row.cell.looks_faster):
            groups.setdefault((row.verdict, row.cell.reason), []).append(row.cell.cell_id)
    return [(verdict, ids(cells, len(rows)), reason) for (verdict, reason), cells in groups.items()]


FASTEST = (
    "workload and length",
    "path",
    "tok/s",
    "dense tok/s",
    "x dense",
    "device ms",
    "dense device ms",
    "x dense on the device",
    "% of floor",
    "bound",
)


def fastest(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """(header, lines), one for each workload and length (batch, dtype, ...): the fastest path that
    is not dense, and the fastest dense twin. An axis that all cells share is in no line.
    """
    groups: dict[tuple[tuple[str, str | int], ...], list[Row]] = {}
    for row in rows:
        if row.tok_per_s is not None and not row.cell.axes.is_own_step:
            key = tuple(
                (name, value)
                for name, value in row.cell.axes.to_mapping().items()
                if name not in ("path", "fa2")
            )
            groups.setdefault(key, []).append(row)
    twins: dict[Key, Row] = {}
    for row in sorted(rows, key=lambda row: row.tok_per_s or 0.0):
        if row.tok_per_s is not None and is_twin(row.cell.axes):
            twins[key_of_twin(row.cell.axes)] = row  # the fastest is the last
    several = {
        name
        for key in groups
        for name, value in key
        if any(dict(other).get(name) != value for other in groups)
    }
    fa2_varies = "fa2" in varying_axes(row.cell.axes for row in rows)
    found = []
    for key, members in groups.items():
        best = max(
            (row for row in members if not row.is_dense and not is_window(row.cell.axes)),
            key=lambda row: row.tok_per_s or 0.0,
            default=None,
        )
        dense = twins.get(key_of_twin(members[0].cell.axes))
        if best is None:
            continue
        shown = [
            (name, value)
            for name, value in key
            if name in several and not unmarked(members[0].cell.axes, name)
        ] or [("workload", best.cell.axes.workload)]
        where = ", ".join(_named(name, value) for name, value in shown)
        named = fa2_varies and best.cell.axes.fa2 != NOT_APPLICABLE
        which = best.cell.axes.path + (f", FA-2 {best.cell.axes.fa2}" if named else "")
        speeds = [
            number(best.tok_per_s),
            number(dense.tok_per_s if dense else None),
            ratio(best.x_dense),
        ]
        devices = [
            number(best.device_ms),
            number(dense.device_ms if dense else None),
            ratio(_on_device(best, dense)),
        ]
        found.append(
            [
                escape(where),
                escape(which),
                *speeds,
                *devices,
                fixed(best.floor_pct, 1),
                best.bound or NULL,
            ]
        )
    return without_empty(FASTEST, found, left=3)


def _named(name: str, value: str | int) -> str:
    if name == "seq_len" and isinstance(value, int):
        return f"{value:,}"
    return str(value) if name == "workload" else f"{name} {value}"


def _on_device(best: Row, dense: Row | None) -> float | None:
    if dense is None or not best.device_ms or not dense.device_ms:
        return None
    return dense.device_ms / best.device_ms
