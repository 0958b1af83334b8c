"""Opens, makes and upgrades the history that a command or a caller means."""

from __future__ import annotations

from os import PathLike

from perfbench.errors import Exit, PerfbenchError
from perfbench.history.database import upgrade
from perfbench.history.store import History
from perfbench.machine import HISTORY_FILE, configured_history


def open_history(url: str | PathLike[str] | None = None) -> History:
    """The history at ``url``: a file, `sqlite:///FILE` or `postgresql://USER@HOST/DATABASE`; by
    default PERFBENCH_HISTORY, else reports/history.sqlite. Close it, or use it in a `with`.

    PerfbenchError(USAGE) where there is none, it is damaged, or of another version.
    """
    found = configured_history(url)
    if found is None:
        raise PerfbenchError(
            Exit.USAGE,
            f"got no history: none is named, PERFBENCH_HISTORY is not set, and {HISTORY_FILE} does"
            " not exist. Next: `perfbench history init`, or name one with --history URL",
        )
    return History.open(found)


def make_history(url: str | PathLike[str] | None = None) -> tuple[History, str]:
    """The history at ``url``, and its address: made where there is none; by default
    PERFBENCH_HISTORY, else reports/history.sqlite.
    """
    found = configured_history(url) or str(HISTORY_FILE)
    return History.open(found, create=True), found


def upgrade_history(url: str | PathLike[str] | None = None) -> tuple[str, str, str]:
    """The address, its revision before, and its revision now."""
    found = configured_history(url) or str(HISTORY_FILE)
    return found, *upgrade(found)
