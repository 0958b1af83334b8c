"""The cells of a suite on a card, next to one another: short names, dense twins and peers."""

from __future__ import annotations

from collections.abc import Mapping

from perfbench.records import ATTENTION, is_own_step, kind_of

Axes = Mapping[str, str | int]
DENSE = ("dense", "dense_flash", "dense_cudnn")  # first; then what peers call dense, by name
ROUTE = ("path", "fa2")  # how a cell is computed; the other axes are what


def short_names(cells: Mapping[str, Axes]) -> dict[str, str]:
    """Cell id -> the axes in which these cells differ; the id where that names no single cell, or
    where one of those axes is empty.
    """
    names = dict.fromkeys(name for axes in cells.values() for name in axes)
    varying = [name for name in names if len({str(axes.get(name)) for axes in cells.values()}) > 1]
    short = {
        cell_id: ", ".join(f"{name}={axes[name]}" for name in varying if name in axes)
        for cell_id, axes in cells.items()
    }
    if "" in short.values() or len({*short.values()}) < len(short):
        return {cell_id: cell_id for cell_id in cells}
    for cell_id, axes in cells.items():
        if any(axes.get(name) == "" for name in varying):
            short[cell_id] = cell_id
    return short


def families(cells: Mapping[str, Axes]) -> dict[str, list[str]]:
    """Cell id -> the cells that compute the same, itself among them: those that `peers_of` and
    `dense_twins` look at. One pass over a suite, of which each is one pass a cell.
    """
    found: dict[frozenset[tuple[str, str | int]], list[str]] = {}
    of_cell = {}
    for cell_id, axes in cells.items():
        if "path" in axes:
            mine = found.setdefault(frozenset(_without_route(axes).items()), [])
            mine.append(cell_id)
        else:
            mine = [cell_id]
        of_cell[cell_id] = mine
    return of_cell


def peers_of(cell_id: str, cells: Mapping[str, Axes]) -> list[str]:
    """The cells that compute the same another way, dense first; none where axes name no path."""
    mine = cells[cell_id]
    if "path" not in mine:
        return []
    wanted = _without_route(mine)
    found = [
        other
        for other, axes in cells.items()
        if other != cell_id and "path" in axes and _without_route(axes) == wanted
    ]
    return sorted(found, key=lambda one: (_dense_rank(cells[one]), one))


def dense_twins(cell_id: str, cells: Mapping[str, Axes]) -> list[str]:
    """The dense cells with the same other axes, of which the best is what the cell is held against;
    of a step of a model path dense alone, where there is one. None for a dense cell, and for one
    that computes the window alone, nor for a user's own step, whose path is a parameter.
    """
    mine = cells[cell_id]
    if is_own_step(str(mine.get("workload", ""))) or kind_of(str(mine.get("path", ""))) != "nsa":
        return []
    found = [one for one in peers_of(cell_id, cells) if is_dense(cells[one])]
    plain = [one for one in found if cells[one]["path"] == DENSE[0]]
    return plain if plain and mine.get("workload") not in ATTENTION else found


def is_dense(axes: Axes) -> bool:
    """Whether a cell is full causal attention, nsa's or a peer's."""
    return kind_of(str(axes.get("path", ""))) == "dense"


def _without_route(axes: Axes) -> dict[str, str | int]:
    return {name: value for name, value in axes.items() if name not in ROUTE}


def _dense_rank(axes: Axes) -> int:
    path = str(axes["path"])
    if path in DENSE:
        return DENSE.index(path)
    return len(DENSE) + (kind_of(path) != "dense")
