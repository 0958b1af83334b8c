"""A file that is complete or absent: no reader ever meets half of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what becomes ``path`` when the block ends: next to it, named
    ``<name>.partial.<ending>``, since some writers choose the format by the ending.

    A block that raises leaves ``path`` as it was, and nothing next to it; a process that is killed
    leaves the partial file. Raises OSError.
    """
    ending = "".join(Path(path.stem).suffixes[-1:]) + ".gz" if path.suffix == ".gz" else path.suffix
    partial = path.with_name(f"{path.name.removesuffix(ending)}.partial{ending}")
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()
