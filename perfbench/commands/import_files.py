"""The files of other tools that an import reads: those named, what belongs to them, and what a
folder holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from perfbench.errors import Exit, PerfbenchError

if TYPE_CHECKING:
    from perfbench.history.exchange import SourceFile

MAX_BYTES = 64 * 2**20  # of a file; a data.js of ten years is smaller
MAX_FILES = 20_000
_CRITERION = ("benchmark.json", "estimates.json")


def sources_of(paths: Iterable[Path]) -> list[SourceFile]:
    """Each file once, in the order in which they are named, of a folder by name.

    USAGE: a folder without such files, too many, a file that is too large or no file.
    """
    found: dict[Path, None] = {}
    for path in paths:
        here = _below(path) if path.is_dir() else [path, *_companions(path)]
        if not here:
            raise PerfbenchError(
                Exit.USAGE,
                f"{path} holds no file that ends with .json or .jsonl. Next: name the files",
            )
        found |= dict.fromkeys(here)
    if len(found) > MAX_FILES:
        raise PerfbenchError(
            Exit.USAGE,
            f"got {len(found)} files, wanted at most {MAX_FILES}. Next: import some of them at a"
            " time",
        )
    return [_read(path) for path in found]


def _below(folder: Path) -> list[Path]:
    """Of a folder of criterion the newest estimates alone: `base` and `change` hold those of
    before. USAGE where files of something else lie there, too.
    """
    every = [path for ending in ("*.json", "*.jsonl") for path in folder.rglob(ending)]
    every = sorted(path for path in (*every, folder / "data.js") if path.is_file())
    newest = [path for path in every if path.parent.name == "new" and path.name in _CRITERION]
    if not newest:
        return every
    benchmarks = {path.parent.parent for path in newest}
    others = [path for path in every if path.parent.parent not in benchmarks]
    if others:
        names = [path.relative_to(folder).as_posix() for path in others[:4]]
        shown = ", ".join(names) + (", ..." if len(others) > len(names) else "")
        raise PerfbenchError(
            Exit.USAGE,
            f"{folder} holds files of criterion and {len(others)} of something else: {shown}."
            " Next: import one format at a time, and name its files or its folder",
        )
    return newest


def _companions(path: Path) -> Iterator[Path]:
    """What names the benchmarks of a file: of asv the benchmarks.json above, of criterion the file
    next to it.
    """
    if path.name in _CRITERION:
        others = [path.with_name(name) for name in _CRITERION if name != path.name]
    else:
        others = [path.parent.parent / "benchmarks.json"]
        if not path.with_name("machine.json").is_file():
            return
    yield from (other for other in others if other.is_file())


def _read(path: Path) -> SourceFile:
    from perfbench.history.exchange import SourceFile
    from perfbench.records import read_regular_file

    try:
        data = read_regular_file(path, MAX_BYTES)
        modified = datetime.fromtimestamp(int(path.stat().st_mtime), UTC)
    except OSError as error:
        raise PerfbenchError(
            Exit.USAGE, f"{path} cannot be read: {error.strerror or error}. Next: name a file"
        ) from None
    return SourceFile(path.as_posix(), data, modified)
