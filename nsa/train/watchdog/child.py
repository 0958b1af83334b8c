"""The trainer as a process: its start, its group's end, and what ended it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02
KILLED_S = 30.0  # a process that waits in the kernel outlives SIGKILL; its parent must not


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process with its parent, whose pid is ``parent`` if given; ends
    with SIGKILL where that one has ended already.

    Holds over exec, not over fork: a data worker calls it as well. Linux only; elsewhere nothing
    happens. The kernel counts the thread that forked as the parent.
    """
    _bind(_prctl(), parent)


def _prctl() -> Callable[..., int] | None:
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), "prctl", None)
    return found


def _bind(prctl: Callable[..., int] | None, parent: int | None) -> None:
    if prctl is None:
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1 if parent is None else os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class Child:
    """A process in a group of its own, which dies with this one. OSError where it cannot start.

    ``show`` is given each line of its stdout, by a thread: the terminal has one writer. Its stderr
    goes the same way where both are a terminal, and else is this process's.
    """

    def __init__(self, argv: Sequence[str], show: Callable[[str], None]) -> None:
        prctl, parent = _prctl(), os.getpid()
        self._kills_before = oom_kills()
        self._is_killed = False
        # Bound between fork and exec, there is no moment in which it would outlive its parent. The
        # library is opened before: a thread might hold the loader's lock at the fork.
        self._process = subprocess.Popen(
            argv,
            process_group=0,
            preexec_fn=lambda: _bind(prctl, parent),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if sys.stdout.isatty() and sys.stderr.isatty() else None,
            text=True,
            errors="replace",
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, args=(show,), daemon=True)
        self._reader.start()

    def _read(self, show: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            show(line.rstrip("\n"))

    def has_ended(self) -> bool:
        """Whether it has; it stays a zombie, so that nobody else gets its pid, until `reap`."""
        if self._process.returncode is not None:
            return True
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, how) is not None

    def wait(self, seconds: float) -> bool:
        """Whether it ends within ``seconds``."""
        end = time.monotonic() + seconds
        while not self.has_ended():
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
        return True

    def forward(self, number: int) -> None:
        """Send a signal to the process alone: workers end with it."""
        if not self.has_ended():
            os.kill(self.pid, number)

    def end(self, term_s: float) -> None:
        """SIGTERM to the group, then after ``term_s`` SIGKILL; a stopped process is woken."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            os.killpg(self.pid, number)
        if not self.wait(term_s):
            self.kill()

    def kill(self) -> None:
        """SIGKILL to the group; waits for the end, the first time."""
        os.killpg(self.pid, signal.SIGKILL)
        self.wait(0.0 if self._is_killed else KILLED_S)
        self._is_killed = True

    def reap(self, workers_s: float) -> int | None:
        """Its status as `subprocess` has it, negative for a signal; None where it has not ended.

        Members of its group that have not ended after ``workers_s`` are killed.
        """
        if not self.has_ended():
            return None
        end = time.monotonic() + workers_s
        while (left := _members(self.pid)) and time.monotonic() < end:
            time.sleep(_POLL_S)
        if left:
            os.killpg(self.pid, signal.SIGKILL)
        self._reader.join(workers_s)  # what is left of its last lines
        return self._process.wait()

    def ending(self, status: int) -> str:
        """What ended it, for the user."""
        if status >= 0:
            return f"the trainer ended with exit code {status}"
        name = signal.Signals(-status).name
        if status == -signal.SIGKILL and (killed := oom_kills() - self._kills_before) > 0:
            return (
                f"the trainer was killed by {name}, and the kernel killed {killed} for want of"
                " memory (oom_kill) meanwhile; lower train.batch or data.workers"
            )
        return f"the trainer was killed by {name}"


def oom_kills(root: Path = Path("/")) -> int:
    """Processes that the kernel killed for want of memory: in this cgroup, or on the machine where
    the cgroup does not count.
    """
    own = _text(root / "proc/self/cgroup").partition("0::/")[2].partition("\n")[0]
    cgroup = root / "sys/fs/cgroup"
    for path in (
        cgroup / own / "memory.events",
        cgroup / "memory.events",
        cgroup / "memory/memory.oom_control",
        root / "proc/vmstat",
    ):
        for line in _text(path).splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _members(group: int) -> list[int]:
    """Processes of ``group`` that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        after_name = _text(path / "stat").rpartition(")")[2].split()
        if len(after_name) > 2 and after_name[2] == str(group) and after_name[0] not in "ZX":
            found.append(int(path.name))
    return found


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
