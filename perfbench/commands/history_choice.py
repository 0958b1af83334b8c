"""Which cell and metric of a history the words of a command mean."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfbench.errors import Exit, PerfbenchError
from perfbench.records import cell_of_id, find_cell

if TYPE_CHECKING:
    from perfbench.history import History

USUAL = "tok_per_s"  # shown where no metric is named


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a cell is looked for; null is everything."""

    suite: str | None
    card: str | None
    demonstrations: bool = False


def cell_and_metric(
    history: History, cell: str, metric: str | None, scope: Scope
) -> tuple[str, str]:
    """The cell's id, and ``metric``; without one USUAL, or the only one that the cell has.

    USAGE where ``cell`` names none or several, or lacks the metric.
    """
    if exact := _metrics(history, cell, scope):
        return cell, the_metric(exact, metric, cell)
    usual = _cells(history, scope, metric or USUAL)
    try:
        if usual:
            return named_cell(cell, usual), metric or USUAL
    except PerfbenchError:
        if metric is not None:
            raise
    cell_id = named_cell(cell, _cells(history, scope, None))
    return cell_id, the_metric(_metrics(history, cell_id, scope), metric, cell_id)


def _metrics(history: History, cell_id: str, scope: Scope) -> set[str]:
    keys = history.keys(
        suite=scope.suite,
        card=scope.card,
        cell_id=cell_id,
        demonstrations=scope.demonstrations,
    )
    return {key.metric for key in keys}


def the_metric(there: Iterable[str], metric: str | None, where: str) -> str:
    """``metric``, USUAL or the only one of those that are there; USAGE where that is none."""
    known, wanted = sorted(there), metric or USUAL
    if wanted in known:
        return wanted
    if metric is None and len(known) == 1:
        return known[0]
    shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    raise PerfbenchError(
        Exit.USAGE, f"{where} has no {wanted}; metrics: {shown}. Next: --metric {known[0]}"
    )


def _cells(history: History, scope: Scope, metric: str | None) -> set[str]:
    keys = history.keys(
        suite=scope.suite,
        card=scope.card,
        metric=metric,
        demonstrations=scope.demonstrations,
    )
    return {key.cell_id for key in keys}


def named_cell(text: str, cell_ids: Collection[str]) -> str:
    """The id that ``text`` names: of perfbench by its axes, of another tool by a part of its name.

    USAGE where there is none, or where there are several.
    """
    if text in cell_ids:
        return text
    cells = {cell: cell_id for cell_id in sorted(cell_ids) if (cell := cell_of_id(cell_id))}
    others = sorted(set(cell_ids) - set(cells.values()))
    found = [cell_id for cell_id in others if text.lower() in cell_id.lower()]
    if len(found) == 1:
        return found[0]
    try:
        if found:
            some = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
            raise ValueError(f"{text[:200]!r} names {len(found)} cells: {some}")
        if not cells:
            raise ValueError(f"no cell {text[:200]!r}")
        if others and "=" not in text:
            raise ValueError(f"no cell {text[:200]!r}")
        return cells[find_cell(text, cells)]
    except ValueError as error:
        problem = str(error).removesuffix("?")
        raise PerfbenchError(
            Exit.USAGE,
            f"{problem}. Next: add axes, or --suite and --card; `perfbench history --since 30d`"
            " lists cells",
        ) from None
