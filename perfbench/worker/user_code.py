"""Code of the user's while it runs: what it raises ends the replicate with its own last line and
place, and never as a fault of the harness.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from perfbench.records import Status
from perfbench.worker.server import is_out_of_memory
from perfbench.worker.stop import Stop

REASON_CHARS = 300
_HARNESS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class UserCode:
    """A context in which ``target`` runs, ``doing`` something.

    Stop with status crash, and ``failing`` for an AssertionError. Out of memory, Ctrl-C and a Stop
    go through. ``folder`` is where the user's files lie; ``facts`` are what the row keeps.
    """

    target: str
    folder: Path
    doing: str
    facts: dict[str, Any]
    failing: Status = Status.CRASH

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, Stop | KeyboardInterrupt) or is_out_of_memory(error):
            return
        place = _place(error, trace, self.folder)
        if place is None and not isinstance(error, ValueError | SystemExit):
            return  # none of the user's
        traceback.print_exception(error)  # the row keeps the end of stderr
        said = " ".join(traceback.format_exception_only(error)[-1].split())[:REASON_CHARS]
        where = f" at {place}" if place else ""
        status = self.failing if isinstance(error, AssertionError) else Status.CRASH
        raise Stop(
            status, f"{self.target}, {self.doing}: {said}{where}; correct it there", self.facts
        ) from error


def _place(error: BaseException, trace: TracebackType | None, folder: Path) -> str | None:
    """'FILE:LINE in NAME' of the last frame that is the user's; None where no frame is."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    mine = [
        one
        for one in traceback.extract_tb(trace)
        if _is_users(Path(one.filename).resolve(), folder)
    ]
    return f"{mine[-1].filename}:{mine[-1].lineno} in {mine[-1].name}" if mine else None


def _is_users(file: Path, folder: Path) -> bool:
    return (
        file.is_relative_to(folder)
        and not file.is_relative_to(_HARNESS)
        and "site-packages" not in file.relative_to(folder).parts
    )
