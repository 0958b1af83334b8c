"""A file that is complete or absent: no reader ever meets half of one."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what becomes ``path`` when the block ends: next to it, named
    ``<name>.partial.<ending>``, since some writers choose the format by the ending.

    A block that raises leaves ``path`` as it was, and nothing next to it; a process that is killed
    leaves the partial file. Raises OSError, also where ``path`` is a device, a pipe or a folder.
    """
    check_replaceable(path)
    ending = "".join(Path(path.stem).suffixes[-1:]) + ".gz" if path.suffix == ".gz" else path.suffix
    partial = path.with_name(f"{path.name.removesuffix(ending)}.partial{ending}")
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()


def check_replaceable(path: Path) -> None:
    """OSError where a file would take the place of what is no file: root could replace /dev/full,
    and the link /dev/stdout even where it leads to a file.
    """
    is_of_system = path.is_symlink() and path.absolute().is_relative_to("/dev")
    if is_of_system or (path.exists() and not path.is_file()):
        raise OSError(errno.EINVAL, "it is there and is no regular file", str(path))
