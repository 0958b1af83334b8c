"""One process for each replicate: a freshly spawned server per block forks them, the parent here enforces the limits.

The server (``perfbench.forkserver``) has imported torch once and never touched CUDA, so a child costs milliseconds
instead of an import. A child that hangs, crashes or runs out of memory becomes a status; the sweep goes on.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import ValidationError

from perfbench.job import Job
from perfbench.result import Replicate, Status
from perfbench.verdict import Exit, PerfbenchError

START_TIMEOUT_S = 180.0  # importing torch from a cold disk
ANSWER_TIMEOUT_S = 30.0  # a fork, or the end of a killed child whose driver calls must finish first
MEMORY_BACK_S = 10.0
MEMORY_SLACK_BYTES = 64 * 2**20
TAIL_LINES, TAIL_BYTES = 20, 8192


class Executor(Protocol):
    def new_block(self) -> None:
        """Begin a block of replicates, independent of the last one."""
        ...

    def execute(self, job: Job) -> Replicate:
        """Measure ``job``; a failure is a status of the Replicate, never an exception."""
        ...

    def close(self) -> None:
        """End every process that was started."""
        ...


def failed(job: Job, status: Status, reason: str, *, wall_s: float = 0.0, started_utc: str | None = None) -> Replicate:
    """A replicate without a speed."""
    return Replicate(
        cell_id=job.cell_id,
        replicate=job.replicate,
        axes=job.axes,
        config_sha256=job.config_sha256,
        status=status,
        reason=reason,
        started_utc=started_utc or utc_now(),
        wall_s=wall_s,
        route=job.plan,
    )


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class _ServerDied(Exception):
    """The server's pipe closed; the message says how it ended."""


class _TimedOut(Exception):
    """No line came in time."""


class _Server:
    """The pipes to one server process; it and its child die when its stdin closes, so also when we are killed."""

    def __init__(self, command: list[str], folder: Path, cwd: Path | None) -> None:
        self.log = folder / f"server-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=cwd, start_new_session=True, bufsize=0
            )
        self._buffer = b""
        self.ready = False

    def send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise _ServerDied(self.how_it_ended()) from error

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next event; sleeps in select, so the parent costs nothing while its child measures."""
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self._process.stdout], [], [], remaining)[0]:
                raise _TimedOut
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                raise _ServerDied(self.how_it_ended())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        return event

    def answer(self) -> dict[str, Any]:
        """An event that is due at once."""
        try:
            return self.receive(time.monotonic() + ANSWER_TIMEOUT_S)
        except _TimedOut:
            raise _ServerDied(f"the measuring server did not answer within {ANSWER_TIMEOUT_S:.0f} s") from None

    def how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        return f"the measuring server ended: {describe_exit(self._process.returncode)}"

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


class ForkServerExecutor:
    """Runs each job in a child of its own. ``measure`` is ``module:function(job, clock, sampler) -> Replicate``.

    ``used_memory`` returns the bytes in use on the GPU, or None; the default of a CPU run is to know nothing.
    ``before_block`` runs before each server starts, when no child is alive, and may raise PerfbenchError.
    """

    def __init__(
        self,
        measure: str = "perfbench.measure:measure",
        *,
        used_memory: Callable[[], int | None] = lambda: None,
        before_block: Callable[[], None] = lambda: None,
        python: str = sys.executable,
        cwd: Path | None = None,
    ) -> None:
        self._command = [python, "-m", "perfbench.forkserver", "--measure", measure]
        self._used_memory, self._before_block, self._cwd = used_memory, before_block, cwd
        self._scratch = tempfile.TemporaryDirectory(prefix="perfbench-")
        self._folder = Path(self._scratch.name)
        self._server: _Server | None = None
        self._child: int | None = None

    def new_block(self) -> None:
        self._end_server()
        self._before_block()
        self._server = _Server(self._command, self._folder, self._cwd)  # imports while the parent goes on

    def execute(self, job: Job) -> Replicate:
        server = self._ready_server()
        result, stderr = self._folder / "result.json", self._folder / "stderr"
        result.unlink(missing_ok=True)
        stderr.unlink(missing_ok=True)
        before, started_utc, begin = self._used_memory(), utc_now(), time.monotonic()
        try:
            event = self._await_child(server, job, result, stderr)
            finished = _read_result(job, result, event, stderr)
        except _TimedOut:
            finished = failed(job, Status.TIMEOUT, f"no result after {job.timeout_s:g} s, so its process group was killed")
        except _ServerDied as error:
            self._end_server()
            finished = failed(job, Status.CRASH, str(error))
        finally:
            self._kill_child()
        if finished.status is not Status.OK:
            known = {"wall_s": time.monotonic() - begin, "started_utc": started_utc, "stderr_tail": tail(stderr)}
            finished = finished.model_copy(update=known)
        return self._await_memory(finished, before)

    def close(self) -> None:
        self._end_server()
        self._scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _ready_server(self) -> _Server:
        if self._server is None:
            self.new_block()
        assert self._server is not None
        if not self._server.ready:
            try:
                self._server.receive(time.monotonic() + START_TIMEOUT_S)
            except (_ServerDied, _TimedOut) as error:
                why, log = str(error) or f"it was not ready after {START_TIMEOUT_S:.0f} s", tail(self._server.log)
                self._end_server()
                raise PerfbenchError(
                    Exit.ENVIRONMENT, f"nothing can be measured: {why}. Its last words:\n{log}\nNext: `perfbench doctor`"
                ) from None
            self._server.ready = True
        return self._server

    def _await_child(self, server: _Server, job: Job, result: Path, stderr: Path) -> dict[str, Any]:
        """Fork the child, wait until it has ended; _TimedOut past the job's timeout."""
        server.send({"job": job.model_dump(), "result": str(result), "stderr": str(stderr)})
        self._child = int(server.answer()["pid"])
        try:
            event = server.receive(time.monotonic() + job.timeout_s)
        except _TimedOut:
            kill_group(self._child)
            server.answer()  # the child's end: without it the server would be out of step
            self._child = None
            raise
        self._child = None
        return event

    def _kill_child(self) -> None:
        """After Ctrl-C or the server's death there may still be a child."""
        if self._child is not None:
            kill_group(self._child)
            self._child = None
            self._end_server()

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _await_memory(self, finished: Replicate, before: int | None) -> Replicate:
        """Give the driver time to take the child's memory back, or say that it did not."""
        deadline, pause = time.monotonic() + MEMORY_BACK_S, 0.02
        while before is not None and (used := self._used_memory()) is not None and used > before + MEMORY_SLACK_BYTES:
            if time.monotonic() > deadline:
                kept = f"{(used - before) / 2**20:.0f} MiB more than before, {MEMORY_BACK_S:.0f} s after this process ended"
                return finished.model_copy(update={"reason": f"{finished.reason}; the GPU still held {kept}".removeprefix("; ")})
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        return finished


def _read_result(job: Job, result: Path, event: Mapping[str, Any], stderr: Path) -> Replicate:
    status = event["status"]
    if status != 0:
        return failed(job, Status.CRASH, describe_exit(status) + (_last_words(stderr) if status > 0 else ""))
    try:
        replicate = Replicate.model_validate_json(result.read_bytes())
    except FileNotFoundError:
        return failed(job, Status.CRASH, "the child ended with exit status 0 and without a result")
    except ValidationError as error:
        return failed(job, Status.CRASH, f"the child's result is damaged: {error.errors(include_url=False)[0]['msg']}")
    if (replicate.cell_id, replicate.replicate, replicate.config_sha256) != (job.cell_id, job.replicate, job.config_sha256):
        return failed(job, Status.CRASH, f"the child measured {replicate.cell_id} #{replicate.replicate} instead")
    return replicate


def _last_words(stderr: Path) -> str:
    """The exception's own line, which names the failure better than 'exit status 1'."""
    lines = [line for line in tail(stderr).splitlines() if not line.startswith(" ")]
    return f": {lines[-1][:300]}" if lines else ""


def describe_exit(status: int | None) -> str:
    """'exit status 1', or the signal's name for a negative status as ``subprocess`` has it."""
    if status is None:
        return "it does not answer"
    if status >= 0:
        return f"exit status {status}"
    name = next((known.name for known in signal.Signals if known == -status), f"signal {-status}")
    return f"killed by {name}, perhaps out of host memory (`dmesg` says)" if name == "SIGKILL" else f"killed by {name}"


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a file that may be huge or missing, without control characters."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    kept = [line.rsplit("\r", 1)[-1] for line in text.replace("\r\n", "\n").split("\n") if line.strip()][-lines:]
    return "\n".join("".join(c for c in line if c.isprintable() or c == "\t") for line in kept)


def kill_group(pid: int) -> None:
    """SIGKILL the process group; the process alone where it has not called setsid yet."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
