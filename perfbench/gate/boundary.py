"""The memory boundary: of cells that differ in their batch alone, the largest that fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from perfbench.gate.coverage import usable
from perfbench.records import Cell, PlannedCell, Replicate, Status

_BEYOND = (Status.OOM, Status.SKIPPED)


@dataclass(frozen=True, slots=True)
class Boundary:
    """``fits``: the largest batch with a usable row, None where not even the smallest has one.
    ``beyond``: the cells of larger batches that ran out of memory, or were then not tried,
    smallest first; empty where the largest batch of the matrix fits.
    """

    like: Cell  # the family, with batch 1
    fits: PlannedCell | None
    beyond: tuple[PlannedCell, ...]


def boundaries(
    cells: Iterable[PlannedCell], rows: Mapping[str, Sequence[Replicate]]
) -> list[Boundary]:
    """One for each family of at least two batches that has rows, in the order of ``cells``."""
    families: dict[Cell, list[PlannedCell]] = {}
    for cell in cells:
        if rows.get(cell.cell_id):
            families.setdefault(replace(cell.axes, batch=1), []).append(cell)
    return [
        _boundary(family, sorted(same, key=lambda cell: cell.axes.batch), rows)
        for family, same in families.items()
        if len(same) > 1
    ]


def _boundary(
    family: Cell, ascending: Sequence[PlannedCell], rows: Mapping[str, Sequence[Replicate]]
) -> Boundary:
    fitting = [cell for cell in ascending if usable(rows[cell.cell_id])]
    fits = fitting[-1] if fitting else None
    beyond = [
        cell
        for cell in ascending
        if (fits is None or cell.axes.batch > fits.axes.batch)
        and any(row.status in _BEYOND for row in rows[cell.cell_id])
    ]
    return Boundary(family, fits, tuple(beyond))


def beyond_boundary(
    cells: Iterable[PlannedCell],
    rows: Mapping[str, Sequence[Replicate]],
    in_baseline: Iterable[str],
) -> frozenset[str]:
    """The cells that do not fit although a smaller batch does, and that did not fit when the
    baseline was made: no failure where a matrix looks for the boundary.
    """
    known = frozenset(in_baseline)
    return frozenset(
        cell.cell_id
        for one in boundaries(cells, rows)
        if one.fits is not None
        for cell in one.beyond
        if cell.cell_id not in known
    )
