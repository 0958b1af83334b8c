"""A transport that needs a folder that both ends see, and nothing else: requests and replies are
files, each whole before it has its name.

Both ends count in a file of their own, so that each sees the other's end, whatever the clocks of
their nodes say: an agent whose lead has gone leaves its node.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from perfbench.runner.executor import CardLost

POLL_S = 0.1
BEAT_S = 1.0
# A file system of a network shows another node's file after up to a minute.
SILENT_S = 180.0
LEAVE_S = 3.0  # an agent that measures hears that it is to stop, and its children have ended
LEAD, AGENT, STOP, HOST, LEFT = "lead", "agent", "stop", "host", "left"


class MailboxBeat:
    """Counts in ``file`` until it is stopped."""

    def __init__(self, file: Path) -> None:
        self._file, self._stop = file, threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        _put(file, "0")
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _count(self) -> None:
        number = 0
        while not self._stop.wait(BEAT_S):
            number += 1
            with suppress(OSError):  # a full disk, or the folder is gone: the other end notices
                _put(self._file, str(number))


class Pulse:
    """How long the other end's count has stood still, by this end's clock."""

    def __init__(self, file: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._file, self._now = file, now
        self._last, self._since = "", now()

    def silent_s(self) -> float:
        with suppress(OSError):
            if (found := self._file.read_text(encoding="ascii")) != self._last:
                self._last, self._since = found, self._now()
        return self._now() - self._since


class MailboxClient:
    """The lead's end: one request at a time. ``ended`` says why the agent is no more, '' while it
    may still be there.
    """

    def __init__(
        self, folder: Path, ended: Callable[[], str], *, silent_s: float = SILENT_S
    ) -> None:
        self.folder, self._ended, self._silent_s = folder, ended, silent_s
        self._number = 0
        self._closed = threading.Event()
        self._pulse: Pulse | None = None
        self._beat = MailboxBeat(folder / LEAD)

    def ask(self, text: str, timeout_s: float) -> str:
        """As `CardLink.ask`."""
        number, deadline = self._number, time.monotonic() + timeout_s
        self._number += 1
        _put(self.folder / f"request-{number}", text)
        reply = self.folder / f"reply-{number}"
        while not reply.exists():
            if self._closed.wait(POLL_S):
                raise CardLost("it was told to stop")
            if why := self._ended():
                raise CardLost(why)
            if time.monotonic() > deadline:
                raise CardLost(f"no answer within {timeout_s:.0f} s")
            if self._silence_s() > self._silent_s:
                raise CardLost(f"its process has been silent for {self._silent_s:.0f} s")
        return reply.read_text(encoding="utf-8")

    def stop(self) -> None:
        """Ask the agent to leave; `ask` ends at once."""
        self._closed.set()
        with suppress(OSError):
            _put(self.folder / STOP, "")
        self._beat.stop()

    def has_left(self, patience_s: float) -> bool:
        """Whether the agent has let go of its card, after ``patience_s`` at most."""
        deadline = time.monotonic() + patience_s
        while not (self.folder / LEFT).exists():
            if time.monotonic() > deadline or self._ended():
                return False
            time.sleep(POLL_S)
        return True

    def _silence_s(self) -> float:
        """0 before the agent's first beat: it may wait in a queue."""
        if self._pulse is None:
            if not (self.folder / AGENT).exists():
                return 0.0
            self._pulse = Pulse(self.folder / AGENT)
        return self._pulse.silent_s()


def serve(folder: str, silent_s: float = SILENT_S) -> None:
    """The agent's end, in a process of its own: answer until it is told to stop, or its lead has
    gone.
    """
    from perfbench.runner.fleet.agent import CardAgent

    box, number, agent = Path(folder), 0, CardAgent()
    _put(box / HOST, f"{socket.gethostname()} {os.getpid()}")
    beat, lead = MailboxBeat(box / AGENT), Pulse(box / LEAD)
    watch = threading.Thread(target=_leave_with, args=(box, lead, silent_s))
    watch.daemon = True
    watch.start()
    try:
        while not _is_over(box):
            request = box / f"request-{number}"
            if not request.exists():
                time.sleep(POLL_S)
                continue
            _put(box / f"reply-{number}", agent.handle(request.read_text(encoding="utf-8")))
            number += 1
    finally:
        agent.close()
        beat.stop()
        _say_goodbye(box)


def _leave_with(box: Path, lead: Pulse, silent_s: float) -> None:
    """End this process where the lead stops or has gone while it measures; the measuring server
    ends with the pipe to it.
    """
    while not _is_over(box) and lead.silent_s() < silent_s:
        time.sleep(BEAT_S)
    time.sleep(BEAT_S)  # for an agent that is idle, to leave by itself
    _say_goodbye(box)
    os._exit(1)


def _say_goodbye(box: Path) -> None:
    with suppress(OSError):  # the lead has removed the folder
        _put(box / LEFT, "")


def _is_over(box: Path) -> bool:
    return (box / STOP).exists() or not box.is_dir()


def _put(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)
