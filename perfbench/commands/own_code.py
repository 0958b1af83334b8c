"""A run or a bisect that lies somewhere names a matrix, and with a user's own step the code next to
it: only a matrix that the user typed, or one where they work, may have that code run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import Matrix, cells_of, step_folder


def refuse_stored_step(matrix: Matrix, allowed: Sequence[Path]) -> None:
    """USAGE where ``matrix``, out of a stored file, has a user's own step and lies in none of the
    ``allowed`` folders.
    """
    if not any(cell.is_own_step for cell in cells_of(matrix)):
        return
    folder = step_folder(matrix.path).resolve()
    if not any(folder.is_relative_to(one.resolve()) for one in allowed):
        raise PerfbenchError(
            Exit.USAGE,
            f"got a stored matrix {matrix.path} with a user's own step, whose code lies in"
            f" {folder}, wanted it in {' or '.join(map(str, allowed))}: a stored file"
            " chooses no code to run. Next: work in that folder, if you trust its code",
        )
