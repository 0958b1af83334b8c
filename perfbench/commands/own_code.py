"""A run or a bisect that lies somewhere names a matrix, and a user's own step or a declared peer in
it names code: only a matrix that the user typed, or one where they work, may have that run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import Matrix, cells_of, load_matrix, step_folder
from perfbench.records import BUILT_IN, Peer


def refuse_stored_code(matrix: Matrix, allowed: Sequence[Path]) -> None:
    """USAGE where ``matrix``, out of a stored file, names code of others that may not run.

    A user's own step may where the matrix lies in one of the ``allowed`` folders; a declared peer
    where its checkout does, or where the matrix's file, in such a folder, declares the same today.
    """
    folder = step_folder(matrix.path)
    at_work = _is_in(folder, allowed)
    if not at_work and any(cell.is_own_step for cell in cells_of(matrix)):
        raise _refusal(matrix, f"with a user's own step, whose code lies in {folder}", allowed)
    declared = {name: peer for name, peer in matrix.peers.items() if name not in BUILT_IN}
    if not declared:
        return
    today = _declared_today(matrix.path) if at_work else {}
    for name, peer in declared.items():
        if today.get(name) == peer or (peer.folder and _is_in(Path(peer.folder), allowed)):
            continue
        code = peer.function or f"entry point {peer.entry_point}"
        where = f" in {peer.folder}" if peer.folder else ""
        raise _refusal(matrix, f"with the peer {name}, {code}{where}", allowed)


def _is_in(folder: Path, allowed: Sequence[Path]) -> bool:
    return any(folder.resolve().is_relative_to(one.resolve()) for one in allowed)


def _declared_today(path: str) -> Mapping[str, Peer]:
    try:
        return load_matrix(path).peers
    except PerfbenchError:  # gone, or another matrix by now
        return {}


def _refusal(matrix: Matrix, what: str, allowed: Sequence[Path]) -> PerfbenchError:
    return PerfbenchError(
        Exit.USAGE,
        f"got a stored matrix {matrix.path} {what}, wanted it in"
        f" {' or '.join(map(str, allowed))}: a stored file chooses no code to run. Next: work in"
        " that folder, if you trust its code",
    )
