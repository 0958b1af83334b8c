"""The measuring server and its children: imports torch once, never touches CUDA, forks one child
per job.

It reads jobs as JSON lines on stdin and answers on stdout with {"event": "ready"}, then for
each job {"event": "started"}, {"event": "prepared"}, {"event": "timing"} and {"event": "timed"}
around what it times, and {"event": "ended", "status": S} (negative: a signal), each with its "pid".
A child that is prepared, and one that is about to time, waits for {"go": PID}; what ends early is
never prepared. End of stdin ends the server and its children.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from perfbench.machine import give, uuid_sha256, visible_gpu, without_users_table
from perfbench.records import Job, Replicate, Status, build_validators, failed, utc_now, whole_file
from perfbench.worker import nsa_version
from perfbench.worker.clock import Clock, clock_for
from perfbench.worker.processes import kill_group
from perfbench.worker.telemetry import Sampler, sampler_for
from perfbench.worker.turn import Turn

Measure = Callable[[Job, Clock, Sampler, Turn], Replicate]
# What a child says, and the event that the parent hears.
_PREPARED, _TIMING, _TIMED = b"p", b"b", b"e"
_EVENTS = {_PREPARED: "prepared", _TIMING: "timing", _TIMED: "timed"}
_PR_SET_PDEATHSIG = 1
_OOM_SIGNS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator",
)


def serve(measure: str, nsa_folder: Path | None) -> None:
    """Fork a child a job until stdin ends; ``measure`` is ``module:function``.

    stdout belongs to the protocol: whatever else prints goes to stderr.
    """
    module, _, function = measure.partition(":")
    protocol = os.dup(1)
    os.dup2(2, 1)
    called: Measure = getattr(importlib.import_module(module), function)
    _Server(called if nsa_folder is None else _of_one_side(called, nsa_folder), protocol).serve()


def _of_one_side(measure: Measure, folder: Path) -> Measure:
    """``measure``, whose rows record which `nsa` they are of.

    WrongSide where a later import brought another one.
    """

    def measured(job: Job, clock: Clock, sampler: Sampler, turn: Turn) -> Replicate:
        row = measure(job, clock, sampler, turn)
        nsa_version.verify(folder)
        return row.model_copy(update={nsa_version.NSA_WITNESS: str(folder)})

    return measured


class _Server:
    def __init__(self, measure: Measure, protocol: int) -> None:
        Job.model_rebuild()
        build_validators()  # once, not in each child
        self._measure, self._protocol = measure, protocol
        self._children: dict[int, _Pipes] = {}
        self._buffer = b""
        self._woken, wake = os.pipe()
        for fd in (self._woken, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        # a handler of our own, so that the wake-up byte is written
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)

    def serve(self) -> None:
        self._say(event="ready", pid=os.getpid())
        while True:
            saying = {pipes.said: pid for pid, pipes in self._children.items() if not pipes.closed}
            ready, _, _ = select.select([0, self._woken, *saying], [], [])
            for fd in saying.keys() & set(ready):
                self._hear(saying[fd])
            if self._woken in ready:
                with suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                self._reap()
            if 0 in ready and not self._read():
                self._end_children()
                return

    def _read(self) -> bool:
        """Take what the parent sent; False at the end of stdin."""
        chunk = os.read(0, 65536)
        self._buffer += chunk
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            message = json.loads(line)
            if "go" in message:
                self._go(message["go"])
            else:
                self._fork(message)
        return bool(chunk)

    def _fork(self, message: dict[str, Any]) -> None:
        _assert_cuda_untouched()
        server, (said, say), (wait, go) = os.getpid(), os.pipe(), os.pipe()
        os.set_blocking(said, False)  # whoever outlives the child may hold its end
        with warnings.catch_warnings():
            # Python 3.12 warns because importing numpy starts threads; no op has run, so none of
            # them holds a lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            for fd in (
                self._protocol,
                said,
                go,
                *(fd for pipes in self._children.values() for fd in (pipes.said, pipes.go)),
            ):
                os.close(fd)
            _child(self._measure, message, server, _Turn(say, wait))
        for fd in (say, wait):
            os.close(fd)
        self._children[pid] = _Pipes(said, go)
        self._say(event="started", pid=pid)

    def _hear(self, pid: int) -> None:
        """All that a child has said and nobody has passed on."""
        pipes = self._children[pid]
        with suppress(BlockingIOError):
            while not pipes.closed:
                word = os.read(pipes.said, 1)
                pipes.closed = not word
                if word:
                    self._say(event=_EVENTS[word], pid=pid)

    def _go(self, pid: int) -> None:
        if pid in self._children:
            with suppress(BrokenPipeError):  # it has just died, and its end is about to be reported
                os.write(self._children[pid].go, b"g")

    def _reap(self) -> None:
        for pid in list(self._children):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                continue
            # What the child left behind; the zombie keeps its number from being reused.
            kill_group(pid)
            self._hear(pid)  # it ended right after its last word
            _, status = os.waitpid(pid, 0)
            self._children.pop(pid).close()
            self._say(event="ended", pid=pid, status=os.waitstatus_to_exitcode(status))

    def _end_children(self) -> None:
        for pid in self._children:
            kill_group(pid)
        for pid in self._children:
            os.waitpid(pid, 0)

    def _say(self, **message: Any) -> None:
        try:
            os.write(self._protocol, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:  # the parent is gone
            self._end_children()
            sys.exit(1)


@dataclass(slots=True)
class _Pipes:
    """The server's ends of a child's two pipes: one byte arrives for each of its words, one is sent
    to resume it.
    """

    said: int
    go: int
    closed: bool = False

    def close(self) -> None:
        os.close(self.said)
        os.close(self.go)


@dataclass(frozen=True, slots=True)
class _Turn:
    """The child's ends: a `Turn`."""

    say: int
    wait: int

    def __call__(self) -> None:
        self._ask(_PREPARED)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """The parent's clock runs before it answers, and on until it hears the end: never less than
        what lies inside.
        """
        self._ask(_TIMING)
        try:
            yield
        finally:
            os.write(self.say, _TIMED)

    def _ask(self, word: bytes) -> None:
        os.write(self.say, word)
        if not os.read(self.wait, 1):  # the server has gone
            os._exit(1)


def _assert_cuda_untouched() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(
            "the measuring server has initialised CUDA, so no child could use it; find the import"
            " that does"
        )


def _child(measure: Measure, message: dict[str, Any], server: int, turn: _Turn) -> NoReturn:
    """Never returns into the server's loop: ends with 0 after a result, with 1 and a traceback
    otherwise.
    """
    status = 1
    try:
        _detach(server, message["stderr"])
        job = Job.model_validate(message["job"])
        from perfbench.records import settings_of  # imports nsa, whose side is known by now

        give({**without_users_table(), **settings_of(job.axes)})
        _write(Path(message["result"]), _measured(measure, job, turn))
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _detach(server: int, stderr: str) -> None:
    """A session of its own (so that the whole group can be killed), output in a file, death with
    the server.
    """
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it died before the line above
        os._exit(1)
    output = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    faulthandler.enable()  # a segfault leaves its Python stack


def _measured(measure: Measure, job: Job, turn: Turn) -> Replicate:
    """On one rank, or on several, each of which is a process of its own."""
    if job.axes.world_size == 1:
        return _on_one(measure, job, turn, clock_for(job.device))
    from perfbench.worker.ranks.launch import launch

    return launch(functools.partial(_of_rank, measure), job, turn)


def _of_rank(measure: Measure, job: Job, turn: Turn) -> Replicate:
    """A rank's row, with its own line of `Replicate.ranks`; a planted fault is the last rank's."""
    from perfbench.worker.ranks.clock import CommonTurn, SlowestClock
    from perfbench.worker.ranks.launch import with_rank
    from perfbench.worker.ranks.world import current

    ranks = current()
    assert ranks is not None
    if job.injection is not None and job.injection.kind != "slowdown":
        job = job if ranks.rank == ranks.size - 1 else job.model_copy(update={"injection": None})
    clock = SlowestClock(clock_for(job.device), ranks)
    row = _on_one(measure, job, CommonTurn(turn, ranks, clock), clock)
    return with_rank(row, ranks.rank, clock.own_s, job)


def _on_one(measure: Measure, job: Job, turn: Turn, clock: Clock) -> Replicate:
    """Measure; out of memory is a status of its own, everything else that is raised is a crash."""
    begin, started_utc = time.monotonic(), utc_now()
    try:
        if job.injection is not None:
            _inject(job)
        uuid, reason = _gpu_uuid(job)
        replicate = measure(job, clock, sampler_for(job.device, uuid, reason), turn)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        words = (str(error).strip().splitlines() or [type(error).__name__])[0][:500]
        return failed(
            job, Status.OOM, words, wall_s=time.monotonic() - begin, started_utc=started_utc
        )
    if uuid and replicate.device_uuid_sha256 is None:
        replicate = replicate.model_copy(update={"device_uuid_sha256": uuid_sha256(uuid)})
    return replicate


def _gpu_uuid(job: Job) -> tuple[str | None, str]:
    """The UUID of the GPU in use, in NVML's spelling; by NVML's enumeration only where torch
    does not report it.
    """
    if not job.device.startswith("cuda"):
        return None, ""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    gpu, reason = visible_gpu()
    if uuid is None:
        return (gpu.uuid, "") if gpu else (None, reason)
    if gpu is not None and gpu.uuid.endswith(str(uuid)):
        return gpu.uuid, ""  # keeps the MIG- spelling
    return f"GPU-{uuid}", ""


def is_out_of_memory(error: BaseException) -> bool:
    """By name, because the allocators of CUDA, of the CPU and of cuBLAS each raise their own
    kind.
    """
    if isinstance(error, MemoryError) or any(
        kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__
    ):
        return True
    return any(sign in str(error) for sign in _OOM_SIGNS)


def _inject(job: Job) -> None:
    """Planted faults; a slowdown is the measuring function's own business."""
    assert job.injection is not None
    if job.injection.kind == "oom":
        _exhaust_memory(job.device)
    elif job.injection.kind == "hang":
        while True:
            signal.pause()
    elif job.injection.kind == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)


def _exhaust_memory(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.empty(2 * total, dtype=torch.uint8, device=device)
    raise torch.OutOfMemoryError("injected: out of memory")


def _write(path: Path, replicate: Replicate) -> None:
    """Complete or not at all."""
    with whole_file(path) as partial:
        partial.write_text(json.dumps(replicate.model_dump(), allow_nan=False), encoding="utf-8")
