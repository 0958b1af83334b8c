"""Which history a command or a caller means. The database's packages are imported once one is
opened.
"""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING

from perfbench.errors import Exit, PerfbenchError
from perfbench.machine import history_url

if TYPE_CHECKING:
    from perfbench.history.store import History

DEFAULT = Path("reports/history.sqlite")
NONE = "none"  # instead of a URL: no history, whatever else is configured


def configured_history(url: str | PathLike[str] | None = None) -> str | None:
    """``url``, else PERFBENCH_HISTORY, else reports/history.sqlite where that file exists; None
    where there is none, or where `none` is written.
    """
    here = str(DEFAULT) if DEFAULT.is_file() else None
    found = (history_url() or here) if url is None else fspath(url)
    return None if found == NONE else found


def open_history(url: str | PathLike[str] | None = None) -> History:
    """The history at ``url``: a file, `sqlite:///FILE` or `postgresql://USER@HOST/DATABASE`; by
    default PERFBENCH_HISTORY, else reports/history.sqlite. Close it, or use it in a `with`.

    PerfbenchError(USAGE) where there is none, it is damaged, or of another version.
    """
    found = configured_history(url)
    if found is None:
        raise PerfbenchError(
            Exit.USAGE,
            f"got no history: none is named, PERFBENCH_HISTORY is not set, and {DEFAULT} does not"
            " exist. Next: `perfbench history init`, or name one with --history URL",
        )
    from perfbench.history.store import History

    return History.open(found)


def make_history(url: str | PathLike[str] | None = None) -> tuple[History, str]:
    """The history at ``url``, and its address: made where there is none; by default
    PERFBENCH_HISTORY, else reports/history.sqlite.
    """
    from perfbench.history.store import History

    found = configured_history(url) or str(DEFAULT)
    if found == str(DEFAULT):
        DEFAULT.parent.mkdir(parents=True, exist_ok=True)
    return History.open(found, create=True), found


def upgrade_history(url: str | PathLike[str] | None = None) -> tuple[str, str, str]:
    """The address, its revision before, and its revision now."""
    from perfbench.history.database import upgrade

    found = configured_history(url) or str(DEFAULT)
    return found, *upgrade(found)
