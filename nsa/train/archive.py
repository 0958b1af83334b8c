"""The folder of a run: locked by one run at a time, and archived by the next, never overwritten."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from nsa.train.errors import TrainError, TrainExit

LOCK = "run.lock"


class RunFolder:
    """A run folder, ``path``, that this process holds until `release`; ``archived``: where the run
    is that was in it, None where none was.

    The lock is a flock of ``path``/run.lock, so it ends with the process, however that ends. A
    child that shall hold it, too, gets `fileno` (subprocess's ``pass_fds``).
    """

    def __init__(self, path: Path, descriptor: int, archived: Path | None = None) -> None:
        self.path, self.archived = path, archived
        self._descriptor: int | None = descriptor

    def fileno(self) -> int:
        """The locked file's descriptor; ValueError after `release`."""
        if self._descriptor is None:
            raise ValueError(f"the lock of {self.path} is released; wanted one that is held")
        return self._descriptor

    def release(self) -> None:
        """Let another run take the folder; again, it changes nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def prepare_run_folder(out: str | Path, *, resume: bool) -> RunFolder:
    """Make and lock the folder ``out``; a run that is in it is kept with ``resume``, and else its
    folder is renamed to ``out``.archived-YYYYmmddTHHMMSSZ (then -1, -2, ...).

    TrainError USAGE for a file, for a folder with files that no run made, for the folder of a run
    that lives, and for one that cannot be made, locked or renamed.
    """
    path = Path(out).resolve()
    try:
        return _prepare(path, resume=resume)
    except OSError as error:
        raise TrainError(
            TrainExit.USAGE,
            f"out={path} cannot be made or locked: {error.strerror}; wanted a folder that can be"
            " written to; give another --set out=FOLDER",
        ) from None


def _prepare(path: Path, *, resume: bool) -> RunFolder:
    _check_ours(path)
    path.mkdir(parents=True, exist_ok=True)
    held = RunFolder(path, _lock(path))
    if resume or {one.name for one in path.iterdir()} == {LOCK}:
        return held
    # The old lock is held until the new folder is locked: two reruns cannot both archive it.
    with held:
        archived = _rename_to_archive(path)
        try:
            path.mkdir()
        except FileExistsError:
            raise _in_use(path, "another run, which made it at the same time") from None
        return RunFolder(path, _lock(path), archived)


def _check_ours(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise TrainError(
            TrainExit.USAGE, f"out={path} is a file; wanted a folder; give another --set out=FOLDER"
        )
    if path.is_dir() and not (path / LOCK).is_file():
        names = sorted(one.name for one in path.iterdir())
        if names:
            raise TrainError(
                TrainExit.USAGE,
                f"out={path} holds {names[0]} and no {LOCK}, so no run made it; wanted an empty"
                " folder, a new one or one of a run; give another --set out=FOLDER",
            )


def _lock(path: Path) -> int:
    """The descriptor of the locked file, which holds this process's id."""
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and flock the folder may have been archived by another rerun.
        if not os.path.samestat(os.fstat(descriptor), os.stat(path / LOCK)):
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):
        pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise _in_use(path, f"process {pid}") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _in_use(path: Path, who: str) -> TrainError:
    return TrainError(
        TrainExit.USAGE,
        f"out={path} is in use by {who}; wanted one run a folder; wait until it ends, or give"
        " another --set out=FOLDER",
    )


def _rename_to_archive(path: Path) -> Path:
    stem = f"{path.name}.archived-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    target, number = path.with_name(stem), 0
    while target.exists():
        number += 1
        target = path.with_name(f"{stem}-{number}")
    path.rename(target)
    return target
