"""The bytes of a regular file of bounded size: no device, pipe, socket or folder is read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """The content of ``path``; OSError, whose ``strerror`` says why, for anything but a regular
    file of at most ``max_bytes``. Never waits for a writer.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without it a pipe waits for its other end
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        mode = found.st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for check, name in _KINDS if check(mode)), "no regular file")
            raise OSError(errno.EINVAL, f"it is {kind}, wanted a regular file", str(path))
        # A file may grow while it is read, and some of /proc say that they are empty.
        data = file.read(max_bytes + 1) if found.st_size <= max_bytes else None
    if data is None or len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes} bytes", str(path))
    return data
