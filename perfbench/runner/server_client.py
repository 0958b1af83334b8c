"""The parent's end of the measuring server (``perfbench.worker``): its pipe, its children.

A child has two phases. It prepares (proof, model, first step) and waits; on a signal it times,
and ends with a result. So several can prepare side by side, and each still has the machine to
itself while it is timed. What it times it announces, so that this process's clock runs as well.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from perfbench.worker import kill_group

ANSWER_TIMEOUT_S = 30.0  # a fork, or the end of a killed child whose driver calls must finish first
TAIL_LINES, TAIL_BYTES = 20, 8192


class ServerDied(Exception):
    """The server's pipe closed; the message says how it ended."""


class TimedOut(Exception):
    """No line came in time."""


class Server:
    """One server process; it and its children die when its stdin closes, so also when we are
    killed.
    """

    def __init__(self, command: list[str], folder: Path, cwd: Path | None) -> None:
        self.log = folder / f"server-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=cwd,
                start_new_session=True,
                bufsize=0,
            )
        self._buffer = b""
        self._waiting: set[int] = set()  # children that are prepared
        self._ended: dict[int, int] = {}  # pid -> status, until `await_end` takes it
        self._timing: dict[int, float] = {}  # pid -> since when, by our clock
        self._timed_s: dict[int, float] = {}  # pid -> how long, until `timed_s` takes it
        self.alive: set[int] = set()
        self.ready = False

    def await_ready(self, timeout_s: float) -> None:
        """Its imports are done; ServerDied or TimedOut."""
        self._receive(time.monotonic() + timeout_s)
        self.ready = True

    def fork(self, message: Mapping[str, Any]) -> int:
        """A child that begins to prepare what ``message`` holds; its pid."""
        self._send(message)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while (event := self._answer(deadline))["event"] != "started":
            self._note(event)
        pid = int(event["pid"])
        self.alive.add(pid)
        for of_another in (self._timing, self._timed_s):  # whose number this child has now
            of_another.pop(pid, None)
        return pid

    def await_prepared(self, pid: int, deadline: float) -> bool:
        """True once the child waits for `go`, False where it has ended instead; TimedOut."""
        while pid not in self._waiting and pid not in self._ended:
            self._note(self._receive(deadline))
        return pid in self._waiting

    def go(self, pid: int) -> None:
        """Let a prepared child time."""
        self._waiting.discard(pid)
        self._send({"go": pid})

    def await_end(self, pid: int, deadline: float) -> int:
        """The child's exit status, negative for a signal; TimedOut."""
        while pid not in self._ended:
            self._note(self._receive(deadline))
        self._waiting.discard(pid)
        self.alive.discard(pid)
        return self._ended.pop(pid)

    def timed_s(self, pid: int) -> float | None:
        """Seconds from our word that the child may time until its word that it has, by our clock;
        None where it did not say so.
        """
        return self._timed_s.pop(pid, None)

    def kill(self, pid: int) -> None:
        """End a child with all that it started, and wait for its end, without which the server
        would be out of step.
        """
        kill_group(pid)
        try:
            self.await_end(pid, time.monotonic() + ANSWER_TIMEOUT_S)
        except TimedOut:
            raise ServerDied(
                f"the measuring server did not answer within {ANSWER_TIMEOUT_S:.0f} s"
            ) from None

    def close(self) -> None:
        """Closing its stdin ends it; after two seconds it is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            kill_group(self._process.pid)
            self._process.wait()
        self._process.stdout.close()

    def _note(self, event: Mapping[str, Any]) -> None:
        pid = int(event.get("pid", 0))
        if event["event"] == "prepared":
            self._waiting.add(pid)
        elif event["event"] == "timing":
            self._timing[pid] = time.monotonic()
            self._send({"go": pid})
        elif event["event"] == "timed" and pid in self._timing:
            self._timed_s[pid] = time.monotonic() - self._timing.pop(pid)
        elif event["event"] == "ended":
            self._ended[pid] = int(event["status"])

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ServerDied(self._how_it_ended()) from error

    def _receive(self, deadline: float) -> dict[str, Any]:
        """The next event; sleeps in select, so the parent costs nothing while a child measures."""
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self._process.stdout], [], [], remaining)[0]:
                raise TimedOut
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                raise ServerDied(self._how_it_ended())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        return event

    def _answer(self, deadline: float) -> dict[str, Any]:
        try:
            return self._receive(deadline)
        except TimedOut:
            raise ServerDied(
                f"the measuring server did not answer within {ANSWER_TIMEOUT_S:.0f} s"
            ) from None

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        return f"the measuring server ended: {describe_exit(self._process.returncode)}"


def describe_exit(status: int | None) -> str:
    """'exit status 1', or the signal's name for a negative status as ``subprocess`` has it."""
    if status is None:
        return "it does not answer"
    if status >= 0:
        return f"exit status {status}"
    name = next((known.name for known in signal.Signals if known == -status), f"signal {-status}")
    return (
        f"killed by {name}, perhaps out of host memory (`dmesg` says)"
        if name == "SIGKILL"
        else f"killed by {name}"
    )


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a file that may be huge or missing, without control characters."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    kept = [
        line.rsplit("\r", 1)[-1] for line in text.replace("\r\n", "\n").split("\n") if line.strip()
    ][-lines:]
    return "\n".join("".join(c for c in line if c.isprintable() or c == "\t") for line in kept)
