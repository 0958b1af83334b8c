"""The object that a ``module:function`` names, imported: only a measuring process does so."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from perfbench.matrix import find


def resolve(target: str, search: Sequence[Path] = ()) -> object:
    """What ``target`` names, out of a folder of ``search`` or as it is installed.

    The module's folder comes first on the search path from here on, as that of a script, so that it
    can import its neighbours. ValueError where there is no such module or no such function in it,
    or another module has its name; whatever its own code raises goes through.
    """
    module, _, name = target.partition(":")
    found = find(target, search)
    if found.folder is not None and str(found.folder) not in sys.path[:1]:
        sys.path.insert(0, str(found.folder))
        importlib.invalidate_caches()
    loaded = importlib.import_module(module)
    if file_of(target) != found.path:
        raise ValueError(
            f"got {target}, and {module} is {file_of(target)} in this process, wanted {found.path};"
            " give the module another name"
        )
    if not hasattr(loaded, name):
        raise ValueError(
            f"got {target}, and {found.path} has no {name}; define it there, or name another"
        )
    named: object = getattr(loaded, name)
    if not callable(named):
        raise ValueError(
            f"got {target}, and {name} of {found.path} is of type {type(named).__name__}, wanted a"
            " function; define it there, or name another"
        )
    return named


def file_of(target: str) -> Path | None:
    """The file of the loaded module of ``target``, links followed; None where it has none."""
    file = getattr(sys.modules[target.partition(":")[0]], "__file__", None)
    return None if file is None else Path(file).resolve()
