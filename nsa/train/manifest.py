"""What a checkpoint's folder holds, so that a truncated or edited file is known by its name."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from nsa.train.errors import TrainError, TrainExit

MANIFEST = "manifest.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Of one file: its ``size_bytes`` and the ``sha256`` of its bytes, in hex."""

    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """Reads the file; OSError where it cannot be read."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """The content of manifest.json, which is written last. ``world_size`` ranks saved ``step``;
    ``torch`` is its version; ``files`` are all others in the folder, by name.
    """

    step: int
    config_sha256: str
    world_size: int
    torch: str
    time_utc: str
    files: Mapping[str, FileDigest]
    schema: int = SCHEMA

    @classmethod
    def read(cls, folder: Path) -> Self:
        """TrainError CHECKPOINT where it is missing, unreadable or of another schema."""
        path = folder / MANIFEST
        try:
            plain: dict[str, Any] = json.loads(path.read_text())
            schema = plain["schema"]
            if schema == SCHEMA:
                files = {name: FileDigest(**one) for name, one in plain.pop("files").items()}
                return cls(files=files, **plain)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TrainError(
                TrainExit.CHECKPOINT,
                f"{path} cannot be read ({type(error).__name__}: {one_line(error)}); wanted the"
                " manifest of a whole checkpoint",
            ) from error
        raise TrainError(
            TrainExit.CHECKPOINT,
            f"{path} has schema {schema!r}; wanted {SCHEMA}; read it with the version of nsa that"
            " wrote it",
        )

    def write(self, folder: Path) -> None:
        """Write and fsync ``folder``/manifest.json; OSError where the disk refuses."""
        write_text(folder / MANIFEST, json.dumps(asdict(self), indent=1) + "\n")

    def check_sizes(self, folder: Path) -> None:
        """TrainError CHECKPOINT for a file that is missing or of another size."""
        for name, wanted in self.files.items():
            path = folder / name
            if not path.is_file():
                raise _damaged(path, "is missing")
            size = path.stat().st_size
            if size != wanted.size_bytes:
                raise _damaged(path, f"has {size} bytes, and {wanted.size_bytes} were saved")

    def check_contents(self, folder: Path, names: Iterable[str]) -> None:
        """TrainError CHECKPOINT for one of the files ``names`` whose bytes are others."""
        for name in names:
            if FileDigest.of(folder / name) != self.files[name]:
                raise _damaged(folder / name, "has other bytes than were saved")


def write_text(path: Path, text: str) -> None:
    """Write and fsync; OSError where the disk refuses."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def one_line(error: BaseException) -> str:
    """The last line of an error's text that is not blank: torch's begin with a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _damaged(path: Path, what: str) -> TrainError:
    return TrainError(
        TrainExit.CHECKPOINT,
        f"{path} {what}: the checkpoint {path.parent.name} is damaged",
    )
