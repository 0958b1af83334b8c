"""The files that paths, folders and globs stand for."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa.train.data.corpora import data_error

MAGIC = ("*", "?", "[")


@dataclass(frozen=True, slots=True)
class ListedFile:
    """``name``: the number of the pattern that found it, and its path below that pattern's root, so
    that it is the same wherever the corpus lies. ``size`` in bytes, more than 0.
    """

    path: Path
    name: str
    size: int


def list_files(
    patterns: Sequence[str], *, option: str, suffixes: tuple[str, ...]
) -> list[ListedFile]:
    """Files that ``patterns`` name, sorted; folders recursively, where ``suffixes`` (all if none)
    filter and hidden files are left out. TrainError DATA for a pattern that names nothing, an empty
    file that is named, and where every file is empty.
    """
    found: dict[Path, ListedFile] = {}
    for number, pattern in enumerate(patterns):
        for path, name in _matches(pattern, option, suffixes):
            size = path.stat().st_size
            if path.resolve() not in found and size:
                found[path.resolve()] = ListedFile(path, f"{number}/{name}", size)
    if not found:
        raise data_error(
            f"{option}={list(patterns)}: every file is empty; wanted at least one with text"
        )
    return sorted(found.values(), key=lambda one: one.name)


def _matches(pattern: str, option: str, suffixes: tuple[str, ...]) -> list[tuple[Path, str]]:
    path = Path(pattern).expanduser()
    if path.is_file():
        if not path.stat().st_size:
            raise data_error(f"{option}: {path} is empty (0 bytes); give a file with text")
        return [(path, path.name)]
    if path.is_dir():
        inside = [(one, one.relative_to(path).as_posix()) for one in path.rglob("*")]
        seen = [(one, name) for one, name in inside if one.is_file() and not _hidden(name)]
        taken = [(one, name) for one, name in seen if not suffixes or name.endswith(suffixes)]
        if not taken:
            what = f"no file of {', '.join(suffixes)}" if seen else "no file"
            raise data_error(f"{option}: the folder {path} holds {what}; give one that does")
        return taken
    if any(sign in pattern for sign in MAGIC):
        files = [Path(one) for one in glob.glob(str(path), recursive=True)]
        files = [one for one in files if one.is_file()]
        if not files:
            raise data_error(f"{option}: no file matches {pattern!r} from {Path.cwd()}")
        fixed = path.parts[: next(i for i, part in enumerate(path.parts) if _is_magic(part))]
        root = Path(*fixed)
        return [(one, one.relative_to(root).as_posix()) for one in files]
    raise data_error(
        f"{option}: {pattern} does not exist (looked from {Path.cwd()}); check the path"
    )


def _is_magic(part: str) -> bool:
    return any(sign in part for sign in MAGIC)


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
