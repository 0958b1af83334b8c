"""The run folder: `run.jsonl` is append-only, each line on the disk before the next replicate
starts.

A line that was cut off at the end (the process was killed) is dropped and flagged; any other damage
is an error with file:line: BASELINE (corrupt) where the file carries digests, USAGE in an older
file. Each line carries the digest of itself and of the lines before it, so that no line can be
edited, removed or moved unseen. One writer at a time holds the file. A finished run may be kept as
`run.jsonl.gz`, which every reader takes and no writer opens.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import io
import json
import os
import re
import secrets
import shlex
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Self

from pydantic import ValidationError

from perfbench.errors import Exit, PerfbenchError, unwritable
from perfbench.records.digests import chained, is_intact, unchained
from perfbench.records.regular_file import read_regular_file
from perfbench.records.rows import (
    DIGESTS_SINCE,
    SCHEMA_VERSION,
    Manifest,
    Replicate,
    Resumed,
    Run,
    SentinelLine,
)
from perfbench.text import plain

RUN_FILE = "run.jsonl"
COMPRESSED_RUN_FILE = "run.jsonl.gz"
MAX_BYTES = 2**30  # of a run once it is decompressed; the largest that is kept has 0.8 MB
MAX_LINE_BYTES = 2**28  # a manifest of 100,000 cells has less
_GZIP_MAGIC = b"\x1f\x8b"
MAX_VALUE = 1e100  # beyond any measured thing; sums and squares of such values stay finite
MAX_REPLICATES = 100_000  # of a cell; readers count up to the number that the manifest names
Record = Manifest | Resumed | Replicate | SentinelLine
_KINDS: Mapping[str, type[Record]] = MappingProxyType(
    {"manifest": Manifest, "resumed": Resumed, "replicate": Replicate, "sentinel": SentinelLine}
)


def new_run_id(now: datetime, gpu_slug: str, commit: str | None) -> str:
    """`<utc>-<gpu>-<commit8>-<random>`; ``now`` is in UTC."""
    code = re.sub(r"[^0-9A-Za-z]", "", commit or "")[:8] or "nocommit"
    return f"{now:%Y%m%dT%H%M%SZ}-{gpu_slug}-{code}-{secrets.token_hex(3)}"


class RunWriter:
    """Appends records to one run file, and holds its lock until closed.

    Get one from ``create`` or ``open_for_resume``. ``digest`` is that of the file's last line:
    empty for a new file, None for an older one, whose lines carry none.
    """

    def __init__(self, folder: Path, fd: int, digest: str | None = "") -> None:
        self.folder = folder
        self.digest = digest
        self._fd = fd
        self._one_at_a_time = threading.Lock()  # the cards of a fleet share one file
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise PerfbenchError(
                Exit.USAGE,
                f"another perfbench is writing to {self.path}. Next: wait for it, or start a new"
                " run without --resume",
            ) from None

    @property
    def path(self) -> Path:
        return self.folder / RUN_FILE

    def append(self, record: Record) -> None:
        """Write one line and wait until it is on the disk; what a full disk cut off is taken
        back.
        """
        with self._one_at_a_time:
            self._append(record)

    def _append(self, record: Record) -> None:
        line, digest = json.dumps(record.model_dump(), allow_nan=False).encode(), self.digest
        if digest is not None:
            line, digest = chained(line, digest)
        if len(line) > MAX_LINE_BYTES:
            raise PerfbenchError(
                Exit.USAGE,
                f"a {record.kind} line of {len(line)} bytes is more than {MAX_LINE_BYTES}, which"
                " nobody could read back. Next: split the matrix",
            )
        size = os.fstat(self._fd).st_size
        with _writing(self.path):
            try:
                rest = memoryview(line + b"\n")
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
                os.fsync(self._fd)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._fd, size)
                raise
        self.digest = digest

    def truncate(self, size: int) -> None:
        with _writing(self.path):
            os.ftruncate(self._fd, size)
            os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def create_run(runs_dir: Path, manifest: Manifest) -> RunWriter:
    """Make ``runs_dir/<run_id>/run.jsonl``, which must not exist, and write its first line."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", manifest.run_id):
        raise ValueError(
            f"run_id={manifest.run_id!r} must be a plain folder name; build it with new_run_id"
        )
    folder = runs_dir / manifest.run_id
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=False)
        fd = os.open(folder / RUN_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
    with ExitStack() as until_written:
        writer = until_written.enter_context(RunWriter(folder, fd))
        writer.append(manifest)
        _sync_folder(folder)
        until_written.pop_all()
    return writer


def open_for_resume(run_dir: Path) -> tuple[RunWriter, Run]:
    """Lock a run, read it, cut its torn last line off.

    Everything that ``read`` refuses is refused here, unchanged; so is a compressed run.
    """
    path = file_of(run_dir)
    if path.suffix == ".gz":
        raise PerfbenchError(
            Exit.USAGE,
            f"{path} is a compressed run, and only {RUN_FILE} can be appended to. Next: `gunzip"
            f" {shlex.quote(str(path))}`, or start a new run",
        )
    with _writing(path):
        fd = os.open(path, os.O_RDWR | os.O_APPEND)
    with ExitStack() as until_read:
        writer = until_read.enter_context(RunWriter(path.parent, fd))
        data = _bytes_of(path)  # read under the lock: nobody appends meanwhile
        run = parse(data, str(path))
        if run.torn:
            writer.truncate(data.rfind(b"\n") + 1)
        writer.digest = run.sha256
        until_read.pop_all()
    return writer, run


def read_run(path: Path) -> Run:
    """Read a run folder, its run.jsonl, or its run.jsonl.gz.

    PerfbenchError with file:line for whatever is wrong, as the module says.
    """
    file = file_of(path)
    return parse(_bytes_of(file), str(file))


def parse(data: bytes, name: str) -> Run:
    """The run in ``data``; ``name`` stands for it in messages."""
    *lines, rest = data.split(b"\n")
    if not lines:
        what = "a manifest line that was cut off" if rest else "an empty file"
        _fail(name, 1, f"got {what}, wanted a manifest; restore the file, or start a new run")
    _refuse_long_lines((*lines, rest), name)
    bodies = [unchained(line) for line in lines]
    manifest = _record(bodies[0][0], name, 1)
    if not isinstance(manifest, Manifest):
        _fail(
            name,
            1,
            f"got a {manifest.kind} line, wanted the manifest first; the beginning of the file is"
            " lost: restore it, or start a new run",
        )
    has_digests = manifest.schema_version >= DIGESTS_SINCE
    try:
        records = [
            _later_record(line, name, number)
            for number, (line, _) in enumerate(bodies[1:], start=2)
        ]
    except PerfbenchError as error:
        raise PerfbenchError(Exit.BASELINE if has_digests else Exit.USAGE, str(error)) from None
    sha256 = _check_digests(bodies, has_digests, name)
    _check_consistency(manifest, records, name)
    return Run(
        manifest=manifest,
        resumed=sorted(
            (record for record in records if isinstance(record, Resumed)),
            key=lambda record: record.resumed_utc,
        ),
        replicates=[record for record in records if isinstance(record, Replicate)],
        sentinels=[record for record in records if isinstance(record, SentinelLine)],
        torn=bool(rest),
        sha256=sha256,
    )


def _later_record(line: bytes, name: str, number: int) -> Record:
    found = _record(line, name, number)
    if isinstance(found, Manifest):
        _fail(name, number, "a second manifest: two runs were joined; split the file")
    return found


def _refuse_long_lines(lines: Sequence[bytes], name: str) -> None:
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE_BYTES:
            _corrupt(name, number, f"a line of {len(line)} bytes, more than any record has")


def _check_digests(
    lines: Sequence[tuple[bytes, str | None]], has_digests: bool, name: str
) -> str | None:
    """The digest of the last line; None for an older file, where every line is without one."""
    before = ""
    for number, (line, digest) in enumerate(lines, start=1):
        if not has_digests:
            if digest is not None:
                _corrupt(name, number, "a digest in a file of an older schema: it was edited")
            continue
        if digest is None:
            _corrupt(name, number, "the line has no digest, or more behind it: it was edited")
        if not is_intact(line, digest, before):
            _corrupt(
                name,
                number,
                "the line does not match its digest: it, or a line before it, was edited, removed"
                " or moved after it was written",
            )
        before = digest
    return before if has_digests else None


def _check_consistency(manifest: Manifest, records: Sequence[Record], name: str) -> None:
    """What holds in every file that this program wrote, with digests or without."""
    text = manifest.matrix_text.encode("utf-8", "surrogatepass")
    if hashlib.sha256(text).hexdigest() != manifest.matrix_sha256:
        _corrupt(name, 1, "the matrix's text is not that of its sha256")
    seen: dict[tuple[str, int, int], int] = {}
    for number, record in enumerate(records, start=2):
        if isinstance(record, Resumed):
            seen.clear()  # half of a pair is measured again, next to the other half
        if not isinstance(record, Replicate):
            continue
        key = (record.cell_id, record.replicate, record.attempt)
        if (first := seen.setdefault(key, number)) != number:
            _corrupt(
                name,
                number,
                f"{record.cell_id} #{record.replicate} attempt {record.attempt} is in line {first}"
                " already: a replicate was copied",
            )


def _corrupt(name: str, number: int, problem: str) -> NoReturn:
    raise PerfbenchError(
        Exit.BASELINE,
        f"{name}:{number}: CORRUPT: {plain(problem)}; restore the file, e.g. from git, or measure"
        " again",
    )


def _record(line: bytes, name: str, number: int) -> Record:
    data = _json_object(line, name, number)
    kind = data.get("kind")
    record = _KINDS.get(kind) if isinstance(kind, str) else None
    if record is None:
        _fail(
            name,
            number,
            f"kind={str(kind)[:40]!r} is not one of {', '.join(_KINDS)}; was it written by a newer"
            " perfbench?",
        )
    if record is Manifest:
        _check_schema(data.get("schema_version"), name, number)
    try:
        found = record.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or kind
        _fail(
            name,
            number,
            f"{place}: {first['msg']}; the line is damaged, restore the file or start a new run",
        )
    if problem := _implausible(found):
        _fail(name, number, f"{problem}; the line is damaged, restore the file or start a new run")
    return found


def _implausible(record: Record) -> str:
    """What no run can have written although its shape is right; empty where there is nothing."""
    if isinstance(record, Manifest):
        if not 0 <= record.replicates <= MAX_REPLICATES:
            return f"replicates is {str(record.replicates)[:40]}, wanted 0 to {MAX_REPLICATES}"
        return ""
    if not isinstance(record, Replicate):
        return ""
    speed = record.tok_per_s
    # beyond any machine; ratios of such overflow
    absurd = speed is not None and not 1e-12 < speed < 1e24
    return f"tok_per_s is {speed:g}, the speed of no machine" if absurd else ""


def _check_schema(schema: object, name: str, number: int) -> None:
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        _fail(
            name,
            number,
            f"schema_version={str(schema)[:40]!r}, wanted a whole number up to {SCHEMA_VERSION};"
            " the line is damaged",
        )
    if schema > SCHEMA_VERSION:
        _fail(
            name,
            number,
            f"schema_version={schema} is newer than {SCHEMA_VERSION}, the newest that this"
            " perfbench reads; upgrade it",
        )


def _json_object(line: bytes, name: str, number: int) -> dict[str, Any]:
    try:
        data = json.loads(
            line.decode("utf-8"), parse_constant=_not_finite, parse_float=_finite, parse_int=whole
        )
    except UnicodeDecodeError as error:
        _fail(
            name,
            number,
            f"not UTF-8 at byte {error.start} of the line; the file is damaged, restore it or start"
            " a new run",
        )
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        _fail(
            name,
            number,
            f"not a JSON record ({reason[:120]}); the file is damaged, restore it or start a"
            " new run",
        )
    if not isinstance(data, dict):
        _fail(
            name,
            number,
            f"got a JSON {type(data).__name__}, wanted an object; the file is damaged, restore it"
            " or start a new run",
        )
    return data


def whole(text: str) -> int:
    """A whole number of a JSON file; ValueError beyond 64 bits, which no float and no count
    holds.
    """
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**63:
        raise ValueError(f"{text[:40]} is beyond 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not abs(value) < MAX_VALUE:
        raise ValueError(f"{text[:40]} is beyond any measure")
    return value


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text} is not allowed")


def _fail(name: str, number: int, problem: str) -> NoReturn:
    raise PerfbenchError(Exit.USAGE, f"{name}:{number}: {plain(problem)}")


def file_of(path: Path) -> Path:
    """The run file in the folder ``path``, or ``path`` itself; USAGE where the folder holds both
    kinds.
    """
    if not path.is_dir():
        return path
    plain_file, compressed = path / RUN_FILE, path / COMPRESSED_RUN_FILE
    if not has_run(path) and has_run(path / "a") and has_run(path / "b"):
        raise PerfbenchError(
            Exit.USAGE,
            f"{path} holds both sides of an A/B, wanted one run. Next: name {path / 'a'} or"
            f" {path / 'b'}, or judge the pair with `perfbench compare {path}`",
        )
    if not compressed.exists():
        return plain_file
    if plain_file.exists():
        raise PerfbenchError(
            Exit.USAGE,
            f"{path} holds both {RUN_FILE} and {COMPRESSED_RUN_FILE}, wanted one of them."
            " Next: name one of the files, or remove the other",
        )
    return compressed


def has_run(folder: Path) -> bool:
    """Whether ``folder`` holds a run file, compressed or not."""
    return any((folder / name).is_file() for name in (RUN_FILE, COMPRESSED_RUN_FILE))


def is_compressed_run(path: Path) -> bool:
    """Whether ``path`` is named as a compressed run."""
    return path.name.endswith(".jsonl.gz")


def _bytes_of(path: Path) -> bytes:
    """The lines of a run file, decompressed where its name ends in .gz."""
    data = _read_bytes(path)
    if path.suffix == ".gz":
        return _decompressed(data, path)
    if data.startswith(_GZIP_MAGIC):
        raise PerfbenchError(
            Exit.USAGE,
            f"{path} holds gzip data, wanted lines of JSON."
            f" Next: rename it to {COMPRESSED_RUN_FILE}",
        )
    return data


def _decompressed(data: bytes, path: Path) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as opened:
            found = opened.read(MAX_BYTES + 1)
    except EOFError:
        problem = f"{len(data)} bytes of gzip data that was cut off"
    except (gzip.BadGzipFile, zlib.error) as error:
        what = "damaged gzip data" if data.startswith(_GZIP_MAGIC) else "no gzip data"
        problem = f"{what} ({plain(str(error))[:80]})"
    else:
        if len(found) <= MAX_BYTES:
            return found
        problem = f"more than {MAX_BYTES} bytes once decompressed, more than any run"
    raise PerfbenchError(
        Exit.USAGE,
        f"{path} holds {problem}, wanted a whole run file compressed by gzip. Next: restore the"
        " file, e.g. from git",
    )


def _read_bytes(path: Path) -> bytes:
    try:
        return read_regular_file(path, MAX_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise PerfbenchError(
            Exit.USAGE,
            f"{path} cannot be read ({reason}). Next: name a run folder, e.g. one under"
            " reports/runs",
        ) from None


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into USAGE errors with a next step."""
    try:
        yield
    except FileExistsError:
        raise PerfbenchError(
            Exit.USAGE,
            f"{path} exists already, and no two runs share a folder. Next: run again, or --out DIR",
        ) from None
    except FileNotFoundError:
        step = "name a run folder, e.g. one under reports/runs, or choose another --out DIR"
        raise PerfbenchError(Exit.USAGE, f"{path} does not exist. Next: {step}") from None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        step = (
            "free space, then resume with --resume"
            if full
            else "choose a folder that you may write to with --out DIR"
        )
        raise unwritable(path, error, step) from None
