"""Python stacks of a process that does not answer, asked for from outside.

The trainer and its data workers `install` a handler that Python's faulthandler runs inside the
signal: it needs no GIL, so it answers in the middle of a C call. Of a stopped process the kernel
knows its state and where it waits.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

SIGNAL = signal.SIGUSR1
_POLL_S = 0.01
_QUIET_S = 0.1  # a dump of 100 threads writes in bursts below 10 ms apart
_STUCK = {"T": "stopped by a signal", "t": "stopped by a tracer", "D": "waits in the kernel"}


def stacks_path(out: Path, rank: int, worker: int | None = None) -> Path:
    """Where the trainer of ``rank``, or its data worker, has its stacks written."""
    name = f"rank{rank}" if worker is None else f"rank{rank}-worker{worker}"
    return out / "stacks" / f"{name}.txt"


def install(path: Path) -> None:
    """Have SIGUSR1 append the stacks of all threads of this process to ``path``.

    A fork keeps its parent's file until it installs its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # unbuffered, since the handler writes to the descriptor; faulthandler keeps the file open
    file = path.open("ab", buffering=0)
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def dump(pid: int, path: Path, wait_s: float) -> bool:
    """Have ``pid`` append its stacks to ``path``; whether it answered within ``wait_s`` seconds.

    Its descendants that installed a handler write to files of their own. Where ``pid`` installed
    none, is stopped or does not answer, ``path`` gets what /proc knows of its threads.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.parent
    workers = [one for one in descendants(pid) if has_handler(one)]
    _append(path, f"\n--- pid {pid}, asked for stacks at {time.strftime('%FT%TZ', time.gmtime())}")
    before = _sizes(folder)
    stuck = _STUCK.get(state(pid), "")
    answered = has_handler(pid) and not stuck and _send(pid) and _grew(path, before, wait_s)
    if not answered:
        why = stuck or ("no answer" if has_handler(pid) else "no handler is installed")
        _append(path, f"no Python stacks ({why}); what /proc knows of pid {pid}:\n{_kernel(pid)}")
    if [worker for worker in workers if _send(worker)]:
        _settle(folder, wait_s)
    return answered


def has_handler(pid: int) -> bool:
    """Whether ``pid`` catches SIGUSR1, which would end it otherwise."""
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def state(pid: int) -> str:
    """The letter of /proc: R, S, D, T, Z, ...; "" where there is no such process."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].strip()[:1]


def descendants(pid: int) -> list[int]:
    """Children of ``pid``, their children, and so on."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _read(tasks).split()):
            found += [child, *descendants(child)]
    return found


def _send(pid: int) -> bool:
    try:
        os.kill(pid, SIGNAL)
    except ProcessLookupError:
        return False
    return True


def _grew(path: Path, before: dict[Path, int], wait_s: float) -> bool:
    """Whether ``path`` is longer than ``before``; waits until it is, and until it stays."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if path.stat().st_size > before.get(path, 0):
            _settle(path.parent, end - time.monotonic())
            return True
        time.sleep(_POLL_S)
    return False


def _settle(folder: Path, wait_s: float) -> None:
    """Wait until no file of ``folder`` has grown for _QUIET_S, ``wait_s`` at most."""
    end = time.monotonic() + wait_s
    sizes, since = _sizes(folder), time.monotonic()
    while time.monotonic() < end and time.monotonic() - since < _QUIET_S:
        time.sleep(_POLL_S)
        if (now := _sizes(folder)) != sizes:
            sizes, since = now, time.monotonic()


def _sizes(folder: Path) -> dict[Path, int]:
    return {one: one.stat().st_size for one in folder.glob("*.txt")}


def _kernel(pid: int) -> str:
    """State, place in the kernel and, where this user may read it, kernel stack of each thread."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        status = dict(
            line.split(":", 1) for line in _read(task / "status").splitlines() if ":" in line
        )
        where = _read(task / "wchan").strip() or "unknown"
        name, its_state = (status.get(key, "unknown").strip() for key in ("Name", "State"))
        lines.append(f"thread {task.name} {name}: state {its_state}, waits in {where}")
        lines += [f"  {frame}" for frame in _read(task / "stack").splitlines()]
    return "\n".join(lines) or "nothing: the process has ended"


def _append(path: Path, text: str) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(f"{text}\n".encode())


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
