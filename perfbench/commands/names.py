"""What people type instead of whole names: some axes of a cell, `latest` for a run; and what a
shell completes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from perfbench.errors import Exit, PerfbenchError

if TYPE_CHECKING:
    from perfbench.matrix import Matrix
    from perfbench.records import Cell

RUNS = Path("reports/runs")
LATEST = "latest"
FAULTS = ("slowdown", "oom", "hang", "segv")
UTC_CHARS = len("20260102T030405Z")


def newest_run(path: Path | None) -> Path | None:
    """``path``; where it is `latest`, or DIR/latest, and no such file exists, the newest run or
    `ab` folder of reports/runs, or of DIR. USAGE where there is none.
    """
    if path is None or path.name != LATEST or path.exists():
        return path
    home = RUNS if path == Path(LATEST) else path.parent
    if found := runs_in(home):
        return found[-1]
    raise PerfbenchError(
        Exit.USAGE, f"got {path}, and {home} holds no run. Next: name a run's folder"
    )


def runs_in(home: Path) -> list[Path]:
    """Run and `ab` folders, the newest last."""
    from perfbench.records import has_run
    from perfbench.runner import is_pair

    found = [one for one in home.glob("*") if one.is_dir() and (has_run(one) or is_pair(one))]
    return sorted(found, key=lambda one: (one.name[:UTC_CHARS], one.stat().st_mtime_ns, one.name))


def named_cell(text: str, cells: Iterable[Cell], where: str) -> str:
    """The id of the cell that ``text`` names by any axes in any order; USAGE where ``where`` has
    none or several such cells.
    """
    from perfbench.records import find_cell

    try:
        return find_cell(text, cells).cell_id
    except ValueError as error:
        raise PerfbenchError(
            Exit.USAGE, f"{where}: {error}. Next: `perfbench plan` and the report list the cells"
        ) from None


def named_cells(matrix: Matrix, terms: Sequence[str] | None, before: str) -> list[str]:
    """Terms of --only (``before`` 'cell=') or --inject ('@') with the ids of the cells that they
    name; the others as they are.
    """
    from perfbench.matrix import cells_of

    found = []
    for term in terms or ():
        head, mark, name = term.partition(before)
        known = head.partition("=")[0] in FAULTS if before == "@" else not head.strip()
        if not (mark and known):
            found.append(term)
            continue
        option = "--inject" if before == "@" else "--only"
        cell_id = named_cell(name.strip(), cells_of(matrix), f"{option} {term[:200]}")
        found.append(f"{head}{mark}{cell_id}")
    return found


def complete_run(incomplete: str) -> list[str]:
    """`latest` and the runs of reports/runs."""
    names = [LATEST, *(str(one) for one in reversed(runs_in(RUNS)))]
    return [name for name in names if name.startswith(incomplete)]


def complete_shipped(incomplete: str) -> list[str]:
    """Matrices that perfbench ships."""
    from perfbench.matrix import shipped_names

    return [name for name in shipped_names() if name.startswith(incomplete)]


def complete_cell(ctx: typer.Context, incomplete: str) -> list[str]:
    """Cells of the RUN that stands before."""
    from perfbench.records import short_ids

    found = _cells_of_run(ctx.params.get("run"))
    return [name for name in short_ids(found).values() if name.startswith(incomplete)]


def complete_cell_of_matrix(ctx: typer.Context, incomplete: str) -> list[str]:
    """Cells of the MATRIX that was typed before."""
    from perfbench.records import short_ids

    found = short_ids(_cells_of_matrix(ctx))
    return [name for name in found.values() if name.startswith(incomplete)]


def complete_only(ctx: typer.Context, incomplete: str) -> list[str]:
    """Axes, and once one is typed its values in the MATRIX that stands before."""
    from perfbench.records import AXES, short_ids

    cells = _cells_of_matrix(ctx)
    name, equals, _ = incomplete.partition("=")
    if not equals:
        return [f"{axis}=" for axis in (*AXES, "cell") if axis.startswith(incomplete)]
    if name == "cell":
        values = list(short_ids(cells).values())
    else:
        values = [str(cell.value(name)) for cell in cells]
    return [
        one for value in dict.fromkeys(values) if (one := f"{name}={value}").startswith(incomplete)
    ]


def complete_fault(ctx: typer.Context, incomplete: str) -> list[str]:
    """Faults, and once one is typed the cells of the MATRIX that stands before."""
    from perfbench.records import short_ids

    fault, at, _ = incomplete.partition("@")
    faults = [fault] if at else ["slowdown=10%", *FAULTS[1:]]
    cells = _cells_of_matrix(ctx) if at else []
    names = [f"{one}@{name}" for one in faults for name in short_ids(cells).values() or [""]]
    return [name for name in names if name.startswith(incomplete)]


def _cells_of_matrix(ctx: typer.Context) -> list[Cell]:
    """Of the MATRIX, which click leaves among the arguments where an option has no value yet; a
    shell completes nothing where there is none.
    """
    from perfbench.matrix import MARK, cells_of, load_matrix

    typed = [str(ctx.params.get("matrix") or ""), *ctx.args]
    for path in (Path(one) for one in typed if one):
        if path.is_file() or path.name.startswith(MARK):
            try:
                return cells_of(load_matrix(path))
            except PerfbenchError:
                return []
    return []


def _cells_of_run(path: object) -> list[Cell]:
    from perfbench.records import has_run, read_run

    try:
        home = newest_run(Path(str(path)))
        sides = [one for one in (home, home / "a", home / "b") if has_run(one)] if home else []
        found = [cell.axes for one in sides for cell in read_run(one).manifest.cells]
    except PerfbenchError:
        return []
    return list(dict.fromkeys(found))
