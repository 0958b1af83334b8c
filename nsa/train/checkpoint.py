"""Checkpoints of a run: written while it trains, whole or not at all, the last good one by name."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from nsa.train.collective import is_of_a_collective
from nsa.train.errors import TrainError, TrainExit
from nsa.train.manifest import CheckpointManifest, FileDigest, one_line, sync_folder, write_text
from nsa.train.run_folder import naming

T = TypeVar("T")
FOLDER, LAST_GOOD = "checkpoints", "last-good"
# Pinned memory would be pinned anew at each save.
_IN_PAGEABLE_MEMORY = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=False,
    use_async_staging=False,
    use_non_blocking_copy=False,
)
# A name that begins so is of a save or a deletion that has not ended.
_UNFINISHED = ".tmp-"
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_FULL_BYTES = 2**20  # a disk with less is full, since no checkpoint has less
# Of a checkpoint while another of the same step takes its place.
_REPLACED = ".replaced"


class CheckpointStore:
    """The checkpoints of the run folder ``out``, which all ranks see; every rank makes one store,
    at the same point, and calls the same methods in the same order.

    A save is written to checkpoints/.tmp-step-N by torch.distributed.checkpoint, read back for its
    manifest, renamed to checkpoints/step-N, and then named in checkpoints/last-good: a process that
    is killed at any moment leaves a last good one. Of finished saves the ``keep`` newest stay (0:
    all), the last good one always. One store of a folder may write, once it is prepared; others may
    read.

    ``config`` is the mapping of which ``config_sha256`` is the hash; it is stored, to name what
    differs. ``timeout_s``: after so long without the other ranks a save fails. ``option``: by which
    the user names a checkpoint to load, for errors.
    """

    def __init__(
        self,
        out: Path,
        *,
        keep: int,
        asynchronous: bool,
        config_sha256: str,
        rank: int,
        world_size: int,
        config: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        option: str = "--resume",
    ) -> None:
        self._option = option
        self._folder = Path(out).resolve() / FOLDER
        self._keep = keep
        self._config_sha256 = config_sha256
        self._config = dict(config or {})
        self._ranks = _Ranks(rank, world_size, timeout_s)
        self._writer = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._written: Future[None] | None = None

    def prepare(self) -> None:
        """Make the folder and remove what a dead save left in it; before the first save, and not
        where another store of the folder writes. TrainError CHECKPOINT where it cannot be written.
        """
        try:
            self._ranks.first(lambda: _clear(self._folder))
        except _RankError as error:
            raise TrainError(
                TrainExit.CHECKPOINT,
                f"{self._folder} cannot be written: {error}; wanted a folder to save in; give"
                " another --set out=FOLDER",
            ) from error

    def save(self, step: int, state: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Save nested dicts of tensors, and this rank's JSON data ``extra``; returns when the
        tensors may be overwritten.

        Plain tensors are taken to be the same in all ranks. TrainError CHECKPOINT for the failure
        of this save, or, asynchronous, of the one before, whose end it awaits, and PEER where
        another rank was gone; the last good one stays. ValueError for a leaf that is no tensor,
        and for an extra that JSON does not keep.
        """
        self.wait()
        tensors = dict(_flat(state))
        try:
            text = json.dumps(extra)
        except TypeError as error:
            raise ValueError(
                f"extra is no JSON data ({error}); wanted dicts, lists, text"
            ) from None
        if self._writer is None:
            self._write(step, tensors, text)
        else:
            # one a save: that of torch 2.11 closes itself after its first use
            staged: Any = DefaultStager(_IN_PAGEABLE_MEMORY).stage(tensors)
            self._written = self._writer.submit(self._write, step, staged, text)

    def wait(self) -> None:
        """Until no save is in flight; TrainError CHECKPOINT, at first call, where it failed."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def close(self) -> None:
        """`wait`, then end the writer's thread and the process group; again, it changes nothing."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
            self._ranks.close()

    def last_good(self) -> Path | None:
        """The newest whole checkpoint's folder, or None before the first."""
        return last_good(self._folder.parent)

    def load(self, state: Mapping[str, Any], path: Path | None = None) -> list[dict[str, Any]]:
        """Fill the tensors of ``state`` in place from the last good checkpoint, or ``path``; return
        each saved rank's extra.

        Another world size or sharding may load; ``state`` may be a part of what was saved. Every
        file is compared with the manifest first. TrainError CHECKPOINT for none, a damaged one
        (naming the file, and another checkpoint that is whole), one of another config, and tensors
        that were not saved or have another shape or dtype. A checkpoint's .metadata is a pickle, so
        load only what you trust.
        """
        self.wait()
        tensors = dict(_flat(state))
        try:
            chosen = self._ranks.first(lambda: self._chosen(path))
            manifest = self._ranks.each(lambda: self._checked(chosen))[0]
            self._ranks.each(lambda: _check_tensors(chosen, tensors))
        except _RankError as error:
            raise TrainError(TrainExit.CHECKPOINT, str(error)) from error
        try:
            dcp.load(
                tensors,
                storage_reader=dcp.FileSystemReader(chosen),
                process_group=self._ranks.group,
                no_dist=self._ranks.alone,
            )
            texts = [_extra(chosen, rank).read_text() for rank in range(manifest.world_size)]
        except (OSError, RuntimeError, CheckpointException) as error:
            if is_of_a_collective(error):
                raise _peer_error(f"{chosen} was read", error, "it stays as it is") from error
            raise TrainError(
                TrainExit.CHECKPOINT,
                f"{chosen} cannot be read: {one_line(error)}{self._other_than(chosen)}",
            ) from error
        return [json.loads(one) for one in texts]

    def _write(self, step: int, tensors: dict[str, Tensor], text: str) -> None:
        temporary = self._folder / f"{_UNFINISHED}step-{step:08d}"
        try:
            self._ranks.first(lambda: _fresh(temporary))
            self._ranks.each(lambda: write_text(_extra(temporary, self._ranks.rank), text))
            dcp.save(
                tensors,
                # 0: no copy stream; a CUDA call from here would break a capture of the trainer
                storage_writer=dcp.FileSystemWriter(temporary, per_thread_copy_ahead=0),
                process_group=self._ranks.group,
                no_dist=self._ranks.alone,
            )
            digests = self._ranks.each(lambda: self._digests(temporary))
            files = {name: one for of_rank in digests for name, one in of_rank.items()}
            self._ranks.first(lambda: self._publish(step, temporary, files))
        except (OSError, RuntimeError, CheckpointException) as error:
            reason = _reason(error, self._folder)  # before its files are gone, which fill the disk
            if self._ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            good = self.last_good()
            last = f"the last good checkpoint is {good.name if good else 'none'}"
            if is_of_a_collective(error):
                what = f"step {step} was saved in {self._folder}"
                raise _peer_error(what, error, last) from error
            raise TrainError(
                TrainExit.CHECKPOINT,
                f"step {step} is not saved in {self._folder}: {reason}; {last}; make room or mend"
                f" the disk, then {'resume' if good else 'start again'}",
            ) from error

    def _digests(self, folder: Path) -> dict[str, FileDigest]:
        """Of this rank's part of the files, as they are read back."""
        names = sorted(one.name for one in folder.iterdir())
        return {name: FileDigest.of(folder / name) for name in self._ranks.part(names)}

    def _publish(self, step: int, temporary: Path, files: dict[str, FileDigest]) -> None:
        config = temporary / "config.json"
        write_text(config, json.dumps(self._config))
        CheckpointManifest(
            step=step,
            config_sha256=self._config_sha256,
            world_size=self._ranks.world_size,
            torch=torch.__version__,
            time_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            files={**files, config.name: FileDigest.of(config)},
        ).write(temporary)
        sync_folder(temporary)
        final = self._folder / f"step-{step:08d}"
        if final.exists():
            final.rename(final.with_name(final.name + _REPLACED))
        temporary.rename(final)
        sync_folder(self._folder)
        pointer = self._folder / (_UNFINISHED + LAST_GOOD)
        write_text(pointer, final.name + "\n")
        os.replace(pointer, self._folder / LAST_GOOD)
        sync_folder(self._folder)
        _remove(self._folder / (final.name + _REPLACED))
        if self._keep:
            # by time: after a resume from an earlier step, later steps may be of the past
            for old in _checkpoints(self._folder)[self._keep :]:
                if old != final:
                    _remove(old)

    def _chosen(self, path: Path | None) -> Path:
        chosen = self.last_good() if path is None else Path(path).resolve()
        if chosen is None:
            raise TrainError(
                TrainExit.CHECKPOINT,
                f"{self._folder} has no checkpoint to resume from; wanted one that a run saved;"
                " start without --resume",
            )
        return chosen

    def _checked(self, chosen: Path) -> CheckpointManifest:
        """The manifest, after this rank has read its part of the files."""
        try:
            manifest = CheckpointManifest.read(chosen)
            manifest.check_sizes(chosen)
            manifest.check_contents(chosen, self._ranks.part(list(manifest.files)))
        except TrainError as error:
            raise TrainError(error.code, f"{error}{self._other_than(chosen)}") from error
        if manifest.config_sha256 != self._config_sha256:
            saved = json.loads((chosen / "config.json").read_text())
            step = (
                "resume with the config that it was saved with, or start anew without --resume"
                if self._option == "--resume"
                else f"name the folder of its own run, or give {naming(self._option)} one of this"
            )
            raise TrainError(
                TrainExit.CHECKPOINT,
                f"{chosen} is of config {manifest.config_sha256[:12]}, and this run's is"
                f" {self._config_sha256[:12]}: {_differences(saved, self._config)}; {step}",
            )
        return manifest

    def _other_than(self, damaged: Path) -> str:
        """What to load instead, as the end of a message."""
        resumes = self._option == "--resume"
        for other in _checkpoints(damaged.parent):
            if other != damaged:
                try:
                    CheckpointManifest.read(other).check_sizes(other)
                except TrainError:
                    continue
                what = "resume from" if resumes else "take"
                named = naming(self._option).replace("PATH", str(other))
                return f"; {what} {other.name} with {named}"
        what = "start anew without --resume" if resumes else "train until another is saved"
        return f"; {damaged.parent} has no other that is whole; {what}"


def last_good(out: Path) -> Path | None:
    """The folder that ``out``/checkpoints/last-good names, or None; needs no store. TrainError
    CHECKPOINT where it names one that is gone.
    """
    folder = Path(out).resolve() / FOLDER
    pointer = folder / LAST_GOOD
    if not pointer.is_file():
        return None
    name = pointer.read_text().strip()
    # killed between the two renames of a replacement: the old one is still whole
    for path in (folder / name, folder / (name + _REPLACED)):
        if name and path.is_dir():
            return path
    whole = [one.name for one in _checkpoints(folder)]
    raise TrainError(
        TrainExit.CHECKPOINT,
        f"{pointer} names {name!r}, which is gone; wanted one of"
        f" {', '.join(whole) or 'which none is left'}; give it as --resume PATH",
    )


class _RankError(RuntimeError):
    """What one rank failed with, as every rank sees it."""


class _Ranks:
    """Does something in each rank and lets all see every outcome. On a gloo group of its own, since
    the writer's thread talks while the trainer's collectives run.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.alone = not (distributed.is_available() and distributed.is_initialized())
        self.group: Any = None
        if self.alone and world_size > 1:
            raise ValueError(
                f"world_size={world_size} without a process group; call"
                " torch.distributed.init_process_group first"
            )
        if self.alone:
            # dcp warns at each save of a single process, which is what is meant here
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        else:
            timeout = timedelta(seconds=timeout_s)
            self.group = distributed.new_group(backend="gloo", timeout=timeout)

    def each(self, function: Callable[[], T]) -> list[T]:
        """The results of all ranks; _RankError in all where one fails."""
        outcome: tuple[Any, str | None]
        try:
            outcome = function(), None
        except (OSError, RuntimeError, TrainError) as error:
            disk = _disk_error(error)
            outcome = None, one_line(error) if disk is None else str(disk.strerror)
        outcomes: list[Any] = [outcome]
        if not self.alone:
            outcomes = [None] * self.world_size
            distributed.all_gather_object(outcomes, outcome, group=self.group)
        for _, failure in outcomes:
            if failure is not None:
                raise _RankError(failure)
        return [result for result, _ in outcomes]

    def first(self, function: Callable[[], T]) -> T:
        """What rank 0 returns, in all ranks."""
        result: Any = self.each(lambda: function() if self.rank == 0 else None)[0]
        return result  # type: ignore[no-any-return]

    def part(self, names: list[str]) -> list[str]:
        """This rank's of ``names``; the ranks' parts are all of them."""
        return names[self.rank :: self.world_size]

    def close(self) -> None:
        if self.group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self.group)
        self.group = None


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{name}", value.detach()
        else:
            raise ValueError(
                f"state has {prefix}{name} of type {type(value).__name__}; wanted tensors; put"
                " other data into extra"
            )


def _check_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, one in tensors.items():
        there = saved.get(name)
        if not isinstance(there, TensorStorageMetadata):
            raise TrainError(
                TrainExit.CHECKPOINT,
                f"{folder} has no tensor {name}; wanted one a name of the model and the optimizer;"
                " resume with the model that it was saved with",
            )
        if there.size != one.shape or there.properties.dtype != one.dtype:
            raise TrainError(
                TrainExit.CHECKPOINT,
                f"{folder} has {name} as {there.properties.dtype} {list(there.size)}; wanted"
                f" {one.dtype} {list(one.shape)}; resume with the model that it was saved with",
            )


def _reason(error: BaseException, folder: Path) -> str:
    """Why a save to ``folder`` failed, in the disk's words where it was the disk."""
    if (disk := _disk_error(error)) is not None:
        return str(disk.strerror)
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return one_line(error)
    # what another rank raised comes without the errors below it
    return one_line(error) + (f" ({free:,} bytes are free there)" if free < _FULL_BYTES else "")


def _disk_error(error: BaseException) -> OSError | None:
    """The disk's own among ``error`` and what lies below it: torch's archives hide it."""
    due, seen = [error], set[int]()
    while due:
        one = due.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, OSError) and one.errno in _OF_THE_DISK:
            return one
        below = [one.__cause__, one.__context__]
        if isinstance(one, CheckpointException):
            below += [failure[0] for failure in one.failures.values()]
        due += [each for each in below if each is not None]
    return None


def _peer_error(what: str, error: BaseException, left: str) -> TrainError:
    """Of an exchange between the ranks that failed while ``what``: no fault of the disk."""
    return TrainError(
        TrainExit.PEER,
        f"another rank ended or hung while {what}, which aborted the exchange between the ranks"
        f" ({one_line(error)}); {left}; read the other ranks' output and stacks, then resume",
    )


def _extra(folder: Path, rank: int) -> Path:
    return folder / f"extra-rank{rank}.json"


def _checkpoints(folder: Path) -> list[Path]:
    """The finished ones, newest first."""
    found = [one for one in folder.glob("step-*") if one.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda one: (one.stat().st_mtime_ns, one.name), reverse=True)


def _fresh(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()


def _clear(folder: Path) -> None:
    """Remove what a dead save left, and end a replacement that it began."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("*" + _REPLACED):
        final = left.with_name(left.name.removesuffix(_REPLACED))
        if final.exists():
            _remove(left)
        else:
            left.rename(final)
    for left in folder.glob(_UNFINISHED + "*"):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def _remove(folder: Path) -> None:
    """Delete a checkpoint, if it is there, such that no half of one has its name."""
    if folder.exists():
        doomed = folder.with_name(f"{_UNFINISHED}removed-{folder.name}")
        folder.rename(doomed)
        # what a disk keeps of it (NFS, an open file) is removed at the next start
        shutil.rmtree(doomed, ignore_errors=True)


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    if not saved or not own:
        return "what differs is not stored"
    there, here = dict(_leaves(saved)), dict(_leaves(own))
    differing = [
        f"{name} {json.dumps(there.get(name))} there and {json.dumps(here.get(name))} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    more = f" and {len(differing) - 6} more" if len(differing) > 6 else ""
    return (", ".join(differing[:6]) + more) or "what differs is not stored"


def _leaves(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value
