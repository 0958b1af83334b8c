"""The files that paths, folders and globs stand for."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa.train.data.corpora import data_error

MAGIC = ("*", "?", "[")
BINARY_BYTES = 8_000  # of a file's beginning, in which git looks for a NUL as well


@dataclass(frozen=True, slots=True)
class ListedFile:
    """``name``: the number of the pattern that found it, and its path below that pattern's root, so
    that it is the same wherever the corpus lies. ``size`` in bytes, more than 0.
    """

    path: Path
    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Listing:
    """``files`` sorted by name; ``binary``: files that were left out, where text was wanted."""

    files: list[ListedFile]
    binary: list[Path]


def list_files(patterns: Sequence[str], *, option: str, suffixes: tuple[str, ...]) -> Listing:
    """Files that ``patterns`` name; folders recursively, where hidden files are left out.

    ``suffixes`` filter what a folder holds. Without them text is wanted: of a folder or a glob,
    files with a NUL in their first 8,000 bytes are left out. TrainError DATA for a pattern that
    names nothing, for an empty or binary file that is named itself, where no file is left, and for
    a file that cannot be read.
    """
    found: dict[Path, ListedFile] = {}
    binary: dict[Path, Path] = {}
    for number, pattern in enumerate(patterns):
        for path, name in _matches(pattern, option, suffixes):
            size, real = path.stat().st_size, path.resolve()
            if not size or real in found or real in binary:
                continue
            if suffixes or not _is_binary(path):
                found[real] = ListedFile(path, f"{number}/{name}", size)
            else:
                binary[real] = path
    if not found:
        what = "empty or binary" if binary else "empty"
        raise data_error(
            f"{option}={list(patterns)}: every file is {what}; wanted at least one with text"
        )
    return Listing(sorted(found.values(), key=lambda one: one.name), sorted(binary.values()))


def _is_binary(path: Path) -> bool:
    """Whether a NUL is among its first 8,000 bytes, as in pictures, archives and UTF-16."""
    try:
        with path.open("rb") as file:
            return b"\0" in file.read(BINARY_BYTES)
    except OSError as error:
        raise data_error(f"cannot read {path}: {error.strerror}; check its permissions") from error


def _matches(pattern: str, option: str, suffixes: tuple[str, ...]) -> list[tuple[Path, str]]:
    path = Path(pattern).expanduser()
    if path.is_file():
        if not path.stat().st_size:
            raise data_error(f"{option}: {path} is empty (0 bytes); give a file with text")
        if not suffixes and _is_binary(path):
            raise data_error(
                f"{option}: {path} is binary: it has a NUL in its first {BINARY_BYTES:,} bytes;"
                " wanted text; convert it to UTF-8, or leave it out (parquet: data.kind=parquet)"
            )
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
