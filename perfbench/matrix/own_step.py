"""The files of the user's own steps that a matrix names: where they lie, and their digests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix.matrix import Matrix
from perfbench.matrix.plugin_file import PluginFile, find
from perfbench.matrix.shipped import MARK, shipped_file
from perfbench.records import Cell, OwnStepFile


def step_folder(matrix_path: str) -> Path:
    """Where a step's module is looked for first: the folder of the matrix, absolute."""
    file = shipped_file(matrix_path) if matrix_path.startswith(MARK) else Path(matrix_path)
    return file.absolute().parent


def own_folder_for(cell: Cell, matrix: Matrix, folder: Path | None = None) -> str | None:
    """The folder that the measuring process of ``cell`` is given; None where it is no own step."""
    return str(folder or step_folder(matrix.path)) if cell.is_own_step else None


def own_steps_of(matrix_path: str, cells: Iterable[Cell], folder: Path) -> tuple[OwnStepFile, ...]:
    """The file of each own step among ``cells``, looked for in ``folder`` first; imports nothing.

    PerfbenchError (USAGE) where one has none; ``matrix_path`` names the matrix.
    """
    found: dict[str, OwnStepFile] = {}
    for cell in cells:
        if not cell.is_own_step or cell.workload in found:
            continue
        try:
            found[cell.workload] = _stored(find(cell.workload, [folder]))
        except ValueError as error:
            raise PerfbenchError(Exit.USAGE, f"{matrix_path}: {error}") from None
    return tuple(found.values())


def _stored(one: PluginFile) -> OwnStepFile:
    home = one.folder.resolve() if one.folder is not None else None
    inside = home is not None and one.path.is_relative_to(home)
    file = one.path.relative_to(home) if inside and home is not None else one.path
    return OwnStepFile(workload=one.target, file=file.as_posix(), sha256=one.sha256)
