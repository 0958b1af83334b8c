"""The matrices that come with perfbench: `@cpu` names one, from a checkout and from a wheel."""

from __future__ import annotations

from pathlib import Path

from nsa.config import nearest_name
from perfbench.errors import Exit, PerfbenchError

MARK = "@"
_PACKAGE = Path(__file__).parents[1]
# The build puts the checkout's matrices/ into the wheel as perfbench/matrices (setup.py).
_HOMES = (_PACKAGE / "matrices", _PACKAGE.parent / "matrices")


def shipped_names() -> list[str]:
    """Names of the shipped matrices, sorted; empty where they were not installed."""
    return sorted(file.stem for file in _home().glob("*.yaml"))


def shipped_name(text: str) -> str:
    """The shipped matrix that ``text`` names: `cpu` or `@cpu`; a card without a matrix of its name,
    as `h200`, is its gate, `h200-gate`.

    PerfbenchError (USAGE) names the nearest one where there is none.
    """
    wanted, known = text.removeprefix(MARK), shipped_names()
    for name in (wanted, f"{wanted}-gate"):
        if name in known:
            return name
    near = nearest_name(wanted[:100], known)
    near += "" if near.endswith("?") else "."
    raise PerfbenchError(
        Exit.USAGE,
        f"got {wanted[:100]!r}, wanted the name of a matrix that perfbench ships{near} Next: name"
        f" one of them, or write the path of a file without {MARK}",
    )


def shipped_file(text: str) -> Path:
    """The file of the matrix that ``text`` names, as `shipped_name` reads it."""
    return _home() / f"{shipped_name(text)}.yaml"


def _home() -> Path:
    return next((home for home in _HOMES if home.is_dir()), _HOMES[0])
