"""Where the file of a ``module:function`` lies, found without importing anything: a plan runs no
code of others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from nsa.config import nearest_name


@dataclass(frozen=True, slots=True)
class PluginFile:
    """``folder`` is the one of the search that holds it; None where it is installed."""

    target: str
    path: Path
    folder: Path | None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def find(target: str, search: Sequence[Path] = ()) -> PluginFile:
    """The file of ``target``'s module: in a folder of ``search``, the first first, else on Python's
    own path.

    ValueError where there is none, or it is no file of Python source.
    """
    module = target.partition(":")[0]
    for folder in (*search, None):
        found = _spec(module, None if folder is None else [str(folder)])
        if found is None or found.origin is None:
            continue
        path = Path(found.origin)
        if path.suffix != ".py" or not path.is_file():
            raise ValueError(
                f"got {target}, whose module is {found.origin}, wanted a file of Python source;"
                " name another module"
            )
        return PluginFile(target, path.resolve(), folder)
    places = ", ".join(str(folder) for folder in search)
    known = [file.stem for folder in search for file in sorted(folder.glob("*.py"))][:1000]
    raise ValueError(
        f"got {target}, and no module {module} lies in {places or 'any folder'} or is"
        f" installed{nearest_name(module, known) if known else '.'} Next: put {module}.py next to"
        " the matrix, or install it"
    )


def _spec(module: str, path: list[str] | None) -> ModuleSpec | None:
    """As importlib.util.find_spec, which imports the packages that hold a module; ``path`` None is
    Python's own.
    """
    name, *inside = module.split(".")
    found = PathFinder.find_spec(name, path) if path is not None else find_spec(name)
    for part in inside:
        if found is None:
            return None
        name = f"{name}.{part}"
        found = PathFinder.find_spec(name, list(found.submodule_search_locations or []))
    return found
