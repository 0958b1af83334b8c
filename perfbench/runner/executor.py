"""One process for each replicate: a freshly spawned server per block forks them, the parent here
enforces the limits.

The server (``python -m perfbench.worker``) has imported torch once and never touched CUDA, so a
child costs milliseconds instead of an import. A child that hangs, crashes or runs out of memory
becomes a status; the run continues.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import ValidationError

from perfbench.errors import Exit, PerfbenchError
from perfbench.machine import (
    NVML_LAG_S,
    GpuHandle,
    TargetFit,
    gpu_lock,
    nvml_session,
    refuse_busy,
    used_memory,
)
from perfbench.records import Job, Replicate, Status, failed, utc_now
from perfbench.runner.server_client import Server, ServerDied, TimedOut, describe_exit, tail
from perfbench.worker import MEASURE, SERVER

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 180.0  # importing torch from a cold disk
MEMORY_BACK_S = 10.0
FRAME = '  File "'  # of a traceback
MEMORY_SLACK_BYTES = 64 * 2**20


class CardLost(Exception):
    """The card of a fleet can measure no more; the message says which, and why."""


class Executor(Protocol):
    def new_block(self) -> None:
        """Begin a block of replicates, independent of the last one."""
        ...

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Let all of ``jobs`` prepare side by side; `execute` then times each alone.

        Optional: an executor may ignore it.
        """
        ...

    def execute(self, job: Job) -> Replicate:
        """Measure ``job``; a failure is a status of the Replicate, never an exception but
        CardLost.
        """
        ...

    def close(self) -> None:
        """End every process that was started."""
        ...


@dataclass(slots=True)
class _Child:
    """A process that prepares or is prepared, and where its output goes."""

    pid: int
    result: Path
    stderr: Path
    begin: float
    started_utc: str


class ForkServerExecutor:
    """Runs each job in a child of its own.

    ``measure`` is ``module:function(job, clock, sampler, prepared) -> Replicate``.

    ``used_memory`` returns the bytes in use on the GPU, or None where nobody knows, as on a CPU.
    ``before_block`` runs before each server starts, when no child is alive, and may raise
    PerfbenchError. ``arguments`` are passed to the server as well.
    """

    def __init__(
        self,
        measure: str = MEASURE,
        *,
        used_memory: Callable[[], int | None] = lambda: None,
        before_block: Callable[[], None] = lambda: None,
        python: str = sys.executable,
        cwd: Path | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self._command = [python, "-m", SERVER, "--measure", measure, *arguments]
        # `python -m` imports from its working folder first: that is this perfbench's own root,
        # never the user's.
        self._used_memory, self._before_block, self._cwd = used_memory, before_block, cwd or ROOT
        self._scratch = tempfile.TemporaryDirectory(prefix="perfbench-")
        self._folder = Path(self._scratch.name)
        self._server: Server | None = None
        self._prepared: dict[tuple[str, int], _Child] = {}
        self._memory_before: int | None = None

    def new_block(self) -> None:
        self._end_server()
        self._before_block()
        # It imports while the parent continues.
        self._server = Server(self._command, self._folder, self._cwd)

    def prepare(self, jobs: Sequence[Job]) -> None:
        server = self._ready_server()
        # After ServerDied `execute` starts another server, and each job alone.
        with ExitStack() as cleanup, suppress(ServerDied):
            cleanup.callback(self._end_server)
            for job in jobs:
                self._prepared[_key(job)] = self._fork(server, job)
            for job in jobs:
                child = self._prepared[_key(job)]
                try:
                    server.await_prepared(child.pid, child.begin + job.timeout_s)
                except TimedOut:
                    server.kill(child.pid)  # before it disturbs the timing of the others
                    del self._prepared[_key(job)]  # `execute` tries it again, alone
            cleanup.pop_all()  # nothing went wrong, Ctrl-C included

    def execute(self, job: Job) -> Replicate:
        row = self._run(job)
        if row.status is Status.OOM and job.waiting_peers:
            # The others held memory too, so this proves nothing about the cell: it is measured
            # again without them.
            self._end_server()
            row = self._run(job.model_copy(update={"waiting_peers": 0}))
        return row

    def close(self) -> None:
        self._end_server()
        self._scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _run(self, job: Job) -> Replicate:
        server = self._ready_server()
        child, begin, started_utc = self._prepared.pop(_key(job), None), time.monotonic(), utc_now()
        with ExitStack() as cleanup:
            cleanup.callback(self._end_server)
            try:
                child = child or self._fork(server, job)
                finished = _read_result(job, child, self._status_of(server, child, job))
                finished = _by_our_clock(job, finished, server.timed_s(child.pid))
                cleanup.pop_all()  # the server is in step; it is not after Ctrl-C
            except TimedOut:
                finished = failed(
                    job,
                    Status.TIMEOUT,
                    f"no result after {job.timeout_s:g} s, so its process group was killed",
                )
                cleanup.pop_all()
            except ServerDied as error:
                finished = failed(job, Status.CRASH, str(error))
        if finished.status is not Status.OK:
            known = {
                "wall_s": time.monotonic() - begin,
                "started_utc": started_utc,
                "stderr_tail": tail(child.stderr) if child else "",
            }
            finished = finished.model_copy(update=known)
        return self._await_memory(finished)

    def _fork(self, server: Server, job: Job) -> _Child:
        if not server.alive:
            self._memory_before = self._used_memory()
        name = f"{time.monotonic_ns()}"
        result, stderr = self._folder / f"result-{name}.json", self._folder / f"stderr-{name}"
        begin, started_utc = time.monotonic(), utc_now()
        pid = server.fork({"job": job.model_dump(), "result": str(result), "stderr": str(stderr)})
        return _Child(pid, result, stderr, begin, started_utc)

    def _status_of(self, server: Server, child: _Child, job: Job) -> int:
        """The child's exit status once it has prepared and timed; TimedOut past the job's timeout
        for either.
        """
        try:
            if server.await_prepared(child.pid, child.begin + job.timeout_s):
                server.go(child.pid)
            return server.await_end(child.pid, time.monotonic() + job.timeout_s)
        except TimedOut:
            server.kill(child.pid)
            raise

    def _ready_server(self) -> Server:
        if self._server is None:
            self.new_block()
        assert self._server is not None
        if not self._server.ready:
            try:
                self._server.await_ready(START_TIMEOUT_S)
            except (ServerDied, TimedOut) as error:
                why, log = (
                    str(error) or f"it was not ready after {START_TIMEOUT_S:.0f} s",
                    tail(self._server.log),
                )
                self._end_server()
                raise PerfbenchError(
                    Exit.ENVIRONMENT,
                    f"nothing can be measured: {why}. Its last lines:\n{log}\nNext: `perfbench"
                    " doctor`",
                ) from None
        return self._server

    def _end_server(self) -> None:
        """With every child, prepared or not."""
        self._prepared.clear()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _await_memory(self, finished: Replicate) -> Replicate:
        """Give the driver time to take the children's memory back, or record that it did not.

        Only once no child is alive.
        """
        if self._server is not None and self._server.alive:
            return finished
        before, deadline, pause = self._memory_before, time.monotonic() + MEMORY_BACK_S, 0.02
        while (
            before is not None
            and (used := self._used_memory()) is not None
            and used > before + MEMORY_SLACK_BYTES
        ):
            if time.monotonic() > deadline:
                kept = (
                    f"{(used - before) / 2**20:.0f} MiB more than before, {MEMORY_BACK_S:.0f} s"
                    " after this process ended"
                )
                return finished.model_copy(
                    update={
                        "reason": f"{finished.reason}; the GPU still held {kept}".removeprefix("; ")
                    }
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        return finished


@contextmanager
def held_cards(fit: TargetFit) -> Iterator[TargetFit]:
    """Hold the locks of all cards of ``fit`` over several measurements, between which no other
    perfbench then comes; ``fit`` as they take it. Nothing on a CPU, nor where they are held.
    """
    with ExitStack() as stack:
        for gpu in () if fit.held else fit.gpus:
            stack.enter_context(gpu_lock(gpu.uuid))
        yield replace(fit, held=True)


@contextmanager
def prepared_executors(
    fit: TargetFit,
    makers: Sequence[Callable[..., ForkServerExecutor]] = (ForkServerExecutor,),
    *,
    module: Any | None = None,
) -> Iterator[tuple[Executor, ...]]:
    """One executor of each maker, for a machine that ``check_target`` accepted: on a GPU, with the
    locks of all its cards held, by `held_cards` or here, and no other process on them.

    Other GPU processes are looked for before each block too, since a run takes hours; the first
    executor does it, whose block begins first. ``module`` stands in for pynvml.
    """
    with ExitStack() as stack:
        seams: dict[str, Any] = {}
        first_only: dict[str, Any] = {}
        if fit.gpu is not None:
            stack.enter_context(held_cards(fit))
            for gpu in fit.gpus:
                refuse_busy(gpu, module)
            # Held open: without persistence mode each opening wakes the driver anew.
            stack.enter_context(nvml_session(module))
            seams["used_memory"] = partial(used_memory, fit.gpu.uuid, module)
            first_only["before_block"] = partial(_refuse_each, fit.gpus, module)
        executors: list[Executor] = []
        for make in makers:
            executors.append(stack.enter_context(make(**seams, **first_only)))
            first_only = {}
        yield tuple(executors)


def _refuse_each(gpus: Sequence[GpuHandle], module: Any | None) -> None:
    for gpu in gpus:
        refuse_busy(gpu, module, patience_s=NVML_LAG_S)


def _key(job: Job) -> tuple[str, int]:
    return job.cell_id, job.replicate


def _read_result(job: Job, child: _Child, status: int) -> Replicate:
    if status != 0:
        return failed(
            job,
            Status.CRASH,
            describe_exit(status) + (_last_line(child.stderr) if status > 0 else ""),
        )
    try:
        replicate = Replicate.model_validate_json(child.result.read_bytes())
    except FileNotFoundError:
        return failed(job, Status.CRASH, "the child ended with exit status 0 and without a result")
    except ValidationError as error:
        return failed(
            job,
            Status.CRASH,
            f"the child's result is damaged: {error.errors(include_url=False)[0]['msg']}",
        )
    if (replicate.cell_id, replicate.replicate, replicate.config_sha256) != (
        job.cell_id,
        job.replicate,
        job.config_sha256,
    ):
        return failed(
            job,
            Status.CRASH,
            f"the child measured {replicate.cell_id} #{replicate.replicate} instead",
        )
    return replicate


def _by_our_clock(job: Job, row: Replicate, timed_s: float | None) -> Replicate:
    """``row`` with what this process's clock saw of its timing, whatever the child wrote there.

    A row whose clocks nobody outside could check is a crash.
    """
    if row.other_clocks is None:
        return row
    if timed_s is None:
        return failed(
            job,
            Status.CRASH,
            "the child never said when its timing began and ended, so no clock outside of it was"
            " running",
        )
    clocks = row.other_clocks.model_copy(update={"parent_s": timed_s})
    return row.model_copy(update={"other_clocks": clocks})


def _last_line(stderr: Path) -> str:
    """The exception's own text, which names the failure better than 'exit status 1': from its type
    on, since the last of several lines may name nothing.
    """
    lines = tail(stderr).splitlines()
    plain = [line for line in lines if not line.startswith(" ")]
    frames = [at for at, line in enumerate(lines) if line.startswith(FRAME)]
    if frames:  # the traceback's head may be before the tail
        after = [at for at in range(frames[-1], len(lines)) if not lines[at].startswith(" ")]
        if after:
            return f": {' '.join(' '.join(lines[after[0] :]).split())[:300]}"
    return f": {plain[-1][:300]}" if plain else ""
