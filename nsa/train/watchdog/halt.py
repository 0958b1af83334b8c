"""Files through which the processes of a run end one another: halt.json, heartbeat/rankR.exit.

Files of an earlier run in the same folder must not end this one. A parent removes its own exit, and
rank 0's parent moves halt.json away, before it starts its child; so once the process group is made,
which takes every rank's child, whatever lies there is of this run. Before that a parent obeys only
files that are younger than its own mark, by the file system's clock: a run that starts is never
ended by the one before, and a halt of ranks that were faster holds once the group is made.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from uuid import uuid4

from nsa.train.log import utc_now
from nsa.train.watchdog.detect import AlarmKind

_UNREADABLE = "halt.json holds no kind and rank; somebody asked the run to end"


@dataclass(frozen=True, slots=True)
class Halt:
    """Why a run ends. ``rank``: where the reason was found; -1: outside of every rank."""

    kind: str
    detail: str
    rank: int
    step: int
    phase: str
    time_utc: str


def halt_path(out: Path) -> Path:
    return out / "halt.json"


def exit_path(out: Path, rank: int) -> Path:
    return out / "heartbeat" / f"rank{rank}.exit"


def heartbeat_path(out: Path, rank: int) -> Path:
    return out / "heartbeat" / f"rank{rank}.bin"


def mark_path(out: Path, rank: int) -> Path:
    """Holds the pid of the process that began ``rank``'s newest run."""
    return out / "heartbeat" / f"rank{rank}.parent"


def write_halt(out: Path, halt: Halt) -> bool:
    """Publish ``halt`` whole, unless there is one; whether it was the first.

    OSError where nothing can be written.
    """
    # hosts that share the folder may have equal pids
    whole = out / f".halt.json.{uuid4().hex}"
    whole.write_text(json.dumps(asdict(halt), indent=1) + "\n", encoding="utf-8")
    try:
        os.link(whole, halt_path(out))
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links: the first still wins, and is whole later
        return _create(halt_path(out), whole.read_bytes())
    finally:
        whole.unlink()
    return True


def _create(path: Path, content: bytes) -> bool:
    """Whether ``path`` did not exist; then it has ``content``."""
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def read_halt(out: Path) -> Halt | None:
    """What ``out``/halt.json asks for; None where there is none.

    For the trainer, after its process group was made, and for whoever looks from outside. A file
    that somebody made by hand halts as well, whatever it holds.
    """
    try:
        text = halt_path(out).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    by_hand = {"kind": AlarmKind.REQUEST, "detail": _UNREADABLE, "rank": -1, "step": -1}
    found = _mapping(text)
    names = {one.name for one in fields(Halt)}
    known = {"phase": "", "time_utc": "", **{k: v for k, v in found.items() if k in names}}
    if not isinstance(known.get("rank"), int) or not isinstance(known.get("kind"), str):
        known |= by_hand
    return Halt(**{"detail": "", "step": -1, **known})


def write_exit(out: Path, rank: int, code: int) -> None:
    """Leave the code with which ``rank`` ended for the other ranks' parents."""
    whole = exit_path(out, rank).with_suffix(".exit.new")
    whole.write_text(json.dumps({"code": code, "time_utc": utc_now()}) + "\n", encoding="utf-8")
    whole.replace(exit_path(out, rank))


def read_exit(out: Path, rank: int) -> int | None:
    """The code with which ``rank`` ended; None while it runs."""
    with suppress(FileNotFoundError):
        code = _mapping(exit_path(out, rank).read_text(encoding="utf-8")).get("code")
        return code if isinstance(code, int) else None
    return None


def begin(out: Path, rank: int) -> int:
    """Remove what an earlier run of ``rank`` left; the time of this run's mark, in the file
    system's own nanoseconds.

    A halt.json is kept as halt.last.json.
    """
    (out / "heartbeat").mkdir(parents=True, exist_ok=True)
    if rank == 0:
        with suppress(FileNotFoundError):
            halt_path(out).replace(out / "halt.last.json")
    for path in (exit_path(out, rank), heartbeat_path(out, rank)):
        path.unlink(missing_ok=True)
    mark = mark_path(out, rank)
    mark.unlink(missing_ok=True)
    mark.write_text(f"{os.getpid()}\n", encoding="utf-8")
    return mark.stat().st_mtime_ns


def begin_alone(out: Path, rank: int) -> bool:
    """`begin` for a trainer that no parent supervises, before its heartbeat and its process group;
    whether it is one.
    """
    with suppress(FileNotFoundError):
        if mark_path(out, rank).read_text(encoding="utf-8").strip() == str(os.getppid()):
            return False
    begin(out, rank)
    return True


def is_younger(path: Path, than_ns: int) -> bool:
    """Whether ``path`` exists and was written after ``than_ns``."""
    try:
        return path.stat().st_mtime_ns > than_ns
    except FileNotFoundError:
        return False


def _mapping(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
