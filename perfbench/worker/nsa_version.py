"""Which `nsa` this process holds: a process of one side of an A/B imports that side's, proves it,
or refuses.

Two sides that import the same package look like two equal commits, so nothing here is left to the
order of a search path. Nothing but the standard library is imported: `nsa` must not be loaded
before ``use``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

# The field of a row of an A/B that names the side's folder, whose nsa measured it.
NSA_WITNESS = "nsa_folder"


class WrongSide(Exception):
    """This process holds another `nsa` than its side's."""


def use(folder: Path) -> None:
    """Import ``folder``/nsa as `nsa`; WrongSide where that cannot be, e.g. because another one is
    loaded already.
    """
    if "nsa" in sys.modules:
        raise WrongSide(
            f"got {_origin('nsa')} imported first, wanted {folder / 'nsa'}. Next: import no nsa"
            " before its side is known"
        )
    sys.path.insert(0, str(folder))  # before the current folder and every installed copy
    importlib.invalidate_caches()
    importlib.import_module("nsa")
    verify(folder)


def verify(folder: Path) -> None:
    """Every loaded module of `nsa` comes from ``folder``/nsa, links followed; WrongSide names the
    first that does not.
    """
    home = (folder / "nsa").resolve()
    for name in sorted(sys.modules):
        if (name == "nsa" or name.startswith("nsa.")) and not _lies_in(name, home):
            raise WrongSide(
                f"got module {name} from {_origin(name)}, wanted it from {home}. Next: give that"
                " side a whole nsa package"
            )


def _lies_in(name: str, home: Path) -> bool:
    origin = _origin(name)
    return origin is not None and Path(origin).resolve().is_relative_to(home)


def _origin(name: str) -> str | None:
    return getattr(sys.modules[name], "__file__", None)
