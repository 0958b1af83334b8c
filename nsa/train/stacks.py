"""Python stacks of a process that does not answer, asked for from outside.

The trainer and its data workers `install` a handler that Python's faulthandler runs inside the
signal: it needs no GIL, so it answers in the middle of a C call. Of a stopped process the kernel
knows its state and where it waits.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

# LLVM takes SIGUSR1 over at the first kernel that Triton compiles, and drops it (SIGINT, SIGTERM,
# SIGHUP and SIGUSR2 it passes on to the handler that was there before). It leaves the real-time
# signals. SIGUSR1 stays for who asks by hand, and where something else takes the first one.
SIGNALS = (signal.SIGRTMIN + 7, int(signal.SIGUSR1))
_POLL_S = 0.01
_QUIET_S = 0.1  # a dump of 100 threads writes in bursts below 10 ms apart
_STOPPED = {"T": "stopped by a signal", "t": "stopped by a tracer"}
_ANSWER = b"(most recent call first)"  # faulthandler's, over the frames of each thread
_MASKS = {"SigCgt": "catches", "SigIgn": "ignores", "ShdPnd": "has not taken yet"}


def stacks_path(out: Path, rank: int, worker: int | None = None) -> Path:
    """Where the trainer of ``rank``, or its data worker, has its stacks written."""
    name = f"rank{rank}" if worker is None else f"rank{rank}-worker{worker}"
    return out / "stacks" / f"{name}.txt"


def install(path: Path) -> None:
    """Have each of SIGNALS append the stacks of all threads of this process to ``path``.

    A fork keeps its parent's file until it installs its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # unbuffered, since the handler writes to the descriptor; faulthandler keeps the file open
    file = path.open("ab", buffering=0)
    for number in SIGNALS:
        faulthandler.register(number, file=file, all_threads=True, chain=False)


def dump(pid: int, path: Path, wait_s: float) -> bool:
    """Have ``pid`` append its stacks to ``path``; whether it answered within ``wait_s`` seconds.

    Its descendants that installed a handler write to files of their own. Where ``pid`` installed
    none, is stopped or does not answer, ``path`` gets what was asked, and what /proc knows of its
    signals and threads.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.parent
    workers = {one: _accepted(one, folder) for one in descendants(pid)}
    _append(path, f"\n--- pid {pid}, asked for stacks at {time.strftime('%FT%TZ', time.gmtime())}")
    why = _STOPPED.get(state(pid)) or _ask(pid, path, wait_s)
    if why:
        _append(path, f"no Python stacks ({why}); what /proc knows of pid {pid}:\n{_kernel(pid)}")
    if [one for one, accepted in workers.items() if accepted and _send(one, accepted[0])]:
        _settle(folder, wait_s)
    return not why


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


def _ask(pid: int, path: Path, wait_s: float) -> str:
    """Why ``pid`` wrote no stacks into ``path``; "" where it did. The signals share ``wait_s``."""
    accepted = _accepted(pid, path.parent)
    if not accepted:
        return "no handler is installed"
    before = path.stat().st_size
    for number in accepted:
        if not _send(pid, number):
            return "it has ended"
        if _answers(path, before, wait_s / len(accepted)):
            return ""
    why = "something else may have taken its handler over"
    if state(pid) == "D":
        why = "the main thread waits in the kernel"
    return f"no answer in {wait_s:g} s to {', '.join(map(_name, accepted))}: {why}"


def _accepted(pid: int, folder: Path) -> list[int]:
    """The signals of SIGNALS that ``pid`` can be sent: one that is not caught would end it.

    gVisor's /proc has no SigCgt; there a process that keeps a file of ``folder`` open installed a
    handler, as only `install` does that.
    """
    caught = _mask(Path(f"/proc/{pid}"), "SigCgt")
    if caught is None:
        return list(SIGNALS) if _keeps_open(pid, folder) else []
    return [number for number in SIGNALS if caught >> (number - 1) & 1]


def _keeps_open(pid: int, folder: Path) -> bool:
    for file in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            target = file.readlink()
            if target.parent == folder.resolve() and target.suffix == ".txt":
                return True
    return False


def _send(pid: int, number: int) -> bool:
    """Signal ``pid``; whether there is one. Its main thread takes it, or, where that one waits in
    the kernel, another one: any dumps all. The kernel by itself leaves it with a main thread that
    waits.
    """
    able = (int(task.name) for task in _tasks(pid) if _can_run_a_handler(task, number))
    thread, tgkill = next(able, None), getattr(ctypes.CDLL(None), "tgkill", None)
    if thread is not None and tgkill is not None and tgkill(pid, thread, number) == 0:
        return True
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _can_run_a_handler(task: Path, number: int) -> bool:
    if _read(task / "stat").rpartition(")")[2].strip()[:1] not in ("R", "S"):
        return False
    return not (_mask(task, "SigBlk") or 0) >> (number - 1) & 1


def _answers(path: Path, before: int, wait_s: float) -> bool:
    """Whether stacks come after the first ``before`` bytes of ``path``; waits until all came."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if path.stat().st_size > before:
            with path.open("rb") as file:
                file.seek(before)
                has_come = _ANSWER in file.read()
            if has_come:
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
    """What becomes of each of SIGNALS; state, place in the kernel and, where this user may read
    it, kernel stack of each thread.
    """
    lines = [_signals(Path(f"/proc/{pid}"), number) for number in SIGNALS if _tasks(pid)]
    for task in _tasks(pid):
        fields = _status(task)
        where = _read(task / "wchan").strip() or "unknown"
        name, its_state = (fields.get(key, "unknown") for key in ("Name", "State"))
        blocked = [_name(one) for one in SIGNALS if (_mask(task, "SigBlk") or 0) >> (one - 1) & 1]
        blocks = f", blocks {', '.join(blocked)}" if blocked else ""
        lines.append(f"thread {task.name} {name}: state {its_state}, waits in {where}{blocks}")
        lines += [f"  {frame}" for frame in _read(task / "stack").splitlines()]
    return "\n".join(lines) or "nothing: the process has ended"


def _signals(process: Path, number: int) -> str:
    masks = {words: _mask(process, key) for key, words in _MASKS.items()}
    if all(mask is None for mask in masks.values()):
        return f"{_name(number)}: this kernel's /proc has no masks of signals"
    found = [words for words, mask in masks.items() if (mask or 0) >> (number - 1) & 1]
    return f"{_name(number)}: the process {', '.join(found) or 'neither catches nor ignores it'}"


def _name(number: int) -> str:
    known = {signal.SIGUSR1: "SIGUSR1", signal.SIGRTMIN + 7: "SIGRTMIN+7"}
    return f"{known[number]} ({number})"


def _tasks(pid: int) -> list[Path]:
    """Folders of the threads, the main one's first."""
    return sorted(
        Path(f"/proc/{pid}/task").glob("*"), key=lambda one: (one.name != str(pid), int(one.name))
    )


def _mask(place: Path, key: str) -> int | None:
    """A set of signals of ``place``/status; None where it has none of that name."""
    found = _status(place).get(key)
    return None if found is None else int(found, 16)


def _status(place: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in _read(place / "status").splitlines())
    return {key: value.strip() for key, _, value in lines}


def _append(path: Path, text: str) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(f"{text}\n".encode())


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
