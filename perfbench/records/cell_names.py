"""Names of cells as people type and read them: any axes that tell a cell from the others, in any
order, without what all cells share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import unquote

from nsa.config import nearest_name
from perfbench.records.cells import AXES, NOT_APPLICABLE, Cell

NUM_SHOWN = 3  # cells that a message names


def find_cell(text: str, cells: Iterable[Cell]) -> Cell:
    """The one cell that ``text`` names: its id, or AXIS=V of some axes in any order.

    ValueError where none or several are meant.
    """
    known = list(dict.fromkeys(cells))
    if exact := [cell for cell in known if cell.cell_id == text]:
        return exact[0]
    parts = frozenset(filter(None, (part.strip() for part in text.split(","))))
    short = short_ids(known)
    for names in ({cell_id: cell_id for cell_id in short}, short):
        for cell in known:
            if parts == frozenset(names[cell.cell_id].split(",")):
                return cell
    wanted = [_axis_and_value(part) for part in parts]
    found = [
        cell for cell in known if parts and all(_has(cell, name, value) for name, value in wanted)
    ]
    if len(found) == 1:
        return found[0]
    if not found:
        near = nearest_name(text[:200], [*short][:1000])
        hint = near if "did you mean" in near else f"; cells: {_shown(known, short)}"
        raise ValueError(f"no cell {text[:200]!r}{hint}")
    typed = {name for name, _ in wanted}
    apart = [name for name in varying_axes(found) if name not in typed]
    raise ValueError(
        f"{text[:200]!r} names {len(found)} cells: {_shown(found, short)}; add"
        f" {' or '.join(f'{name}=' for name in apart)}"
    )


def cell_of_id(cell_id: str) -> Cell | None:
    """The cell of such an id, with the axes of a newer perfbench among them; None where it is no
    such id, as of another tool's benchmark.
    """
    axes: dict[str, str | int] = {}
    for part in cell_id.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            return None
        known = AXES.get(name)
        is_whole = known is not None and known.kind is int and value.isdecimal()
        axes[name] = int(value) if is_whole else unquote(value)
    try:
        return Cell.from_mapping(axes)
    except ValueError:
        return None


def varying_axes(cells: Iterable[Cell]) -> list[str]:
    """Axes in which cells that have them differ, in the order of the axes; those of a newer
    perfbench last.
    """
    known = list(cells)
    names = dict.fromkeys([*AXES, *(name for cell in known for name, _ in cell.unknown)])
    values = {name: {cell.value(name) for cell in known} for name in names}
    return [name for name in names if len(values[name] - {NOT_APPLICABLE}) > 1]


def short_ids(cells: Iterable[Cell]) -> dict[str, str]:
    """Cell id -> the id without the axes that all of these cells share; the whole id of a cell
    that is alone, or whose short one would be empty or another's.
    """
    known = list(dict.fromkeys(cells))
    kept = set(varying_axes(known))
    short = {
        cell.cell_id: ",".join(
            part for part in cell.cell_id.split(",") if part.partition("=")[0] in kept
        )
        for cell in known
    }
    names = list(short.values())
    if "" in names or len(set(names)) < len(names):
        return {cell_id: cell_id for cell_id in short}
    return short


def shared_axes(cells: Iterable[Cell]) -> str:
    """'dtype=fp32,fa2=off': what `short_ids` leaves out; empty where it leaves out nothing."""
    short = short_ids(cells).items()
    out = {part for cell_id, name in short for part in {*cell_id.split(",")} - {*name.split(",")}}
    return ",".join(sorted(out))


def _axis_and_value(part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not equals:
        raise ValueError(f"{part[:100]!r} is not AXIS=VALUE; axes: {', '.join(AXES)}")
    return name.strip(), unquote(value.strip())


def _has(cell: Cell, name: str, value: str) -> bool:
    mine = cell.value(name)
    return mine is not None and str(mine) == value


def _shown(cells: Sequence[Cell], short: Mapping[str, str]) -> str:
    more = f" and {len(cells) - NUM_SHOWN} more" if len(cells) > NUM_SHOWN else ""
    return "; ".join(short[cell.cell_id] for cell in cells[:NUM_SHOWN]) + more
