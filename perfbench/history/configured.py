"""Opens, makes and upgrades the history that a command or a caller means."""

from __future__ import annotations

from os import PathLike, fspath

from perfbench.errors import Exit, PerfbenchError
from perfbench.history.database import missing_folder, upgrade
from perfbench.history.store import History
from perfbench.machine import (
    HISTORY_FILE,
    NO_HISTORY,
    configured_history,
    environment_variable,
)
from perfbench.text import shown_address


def open_history(url: str | PathLike[str] | None = None) -> History:
    """The history at ``url``: a file, `sqlite:///FILE` or `postgresql://USER@HOST/DATABASE`; by
    default PERFBENCH_HISTORY, else reports/history.sqlite. Close it, or use it in a `with`.

    PerfbenchError(USAGE) where there is none, it is damaged, or of another version.
    """
    _check_wanted(url)
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
    PERFBENCH_HISTORY, else reports/history.sqlite, the only one whose folder is made.

    PerfbenchError(USAGE): the folder is not there, or as `open_history`.
    """
    _check_wanted(url)
    found = configured_history(url) or str(HISTORY_FILE)
    folder = missing_folder(found)
    if folder is not None and folder != HISTORY_FILE.parent.absolute():
        raise PerfbenchError(
            Exit.USAGE, f"the folder {shown_address(str(folder))} is not there. Next: make it first"
        )
    return History.open(found, create=True), found


def upgrade_history(url: str | PathLike[str] | None = None) -> tuple[str, str, str]:
    """The address, its revision before, and its revision now."""
    _check_wanted(url)
    found = configured_history(url) or str(HISTORY_FILE)
    return found, *upgrade(found)


def _check_wanted(url: str | PathLike[str] | None) -> None:
    """USAGE: `none` is written where a history is needed."""
    named = environment_variable("PERFBENCH_HISTORY") if url is None else fspath(url)
    if named == NO_HISTORY:
        what = "PERFBENCH_HISTORY is" if url is None else "got --history"
        raise PerfbenchError(
            Exit.USAGE, f"{what} none, wanted a history. Next: name one with --history URL"
        )
