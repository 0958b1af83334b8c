"""Measuring functions for real child processes: instant, and without torch.

The batch axis chooses what happens.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

from perfbench.records.job import Job
from perfbench.records.rows import Replicate, Status
from perfbench.worker.clock import Clock
from perfbench.worker.telemetry import Sampler
from perfbench.worker.turn import Turn


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


OOM, HANG, SEGV, RAISE, KILLED, SILENT, EXIT, LITTER, OTHER, CPU_OOM, NOISY, CROWDED = range(
    101, 113
)


def measure(job: Job, clock: Clock, sampler: Sampler, turn: Turn) -> Replicate:
    """Act out what ``batch`` asks for, then return a row whose reason holds this process's own
    facts.
    """
    _misbehave(job.axes.batch, job.waiting_peers)
    turn()
    begin = time.monotonic_ns()
    seconds = clock.time_steps(lambda: time.sleep(0.001), 2)
    with sampler.window() as window:
        pass
    return Replicate(
        cell_id="another" if job.axes.batch == OTHER else job.cell_id,
        replicate=job.replicate,
        axes=job.axes,
        config_sha256=job.config_sha256,
        status=Status.OK,
        reason=(
            f"pid={os.getpid()} server={os.getppid()} session={os.getsid(0)} began={begin}"
            f" ended={time.monotonic_ns()}"
        ),
        started_utc="2026-01-02T03:04:05Z",
        wall_s=seconds,
        steps_per_sample=2,
        tokens_per_step=100,
        samples_s=[seconds],
        tok_per_s=200 / seconds,
        telemetry=window.result,
    )


def _misbehave(batch: int, waiting_peers: int) -> None:
    if batch == OOM or (batch == CROWDED and waiting_peers):
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    if batch == CPU_OOM:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
        )
    if batch == HANG:
        print("about to hang")
        sys.stdout.flush()
        time.sleep(600)
    if batch == SEGV:
        os.kill(os.getpid(), 11)
    if batch == RAISE:
        raise LookupError("no such weight: layer 3\nlook at the checkpoint")
    if batch == KILLED:
        os.kill(os.getpid(), 9)
    if batch == SILENT:
        os._exit(0)
    if batch == EXIT:
        raise SystemExit(7)
    if batch == LITTER:
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path(f"/proc/{helper.pid}/cmdline").read_bytes()
        print(f"helper={helper.pid}", file=sys.stderr)
        sys.stderr.flush()
        raise LookupError("left a helper behind")
    if batch == NOISY:
        for number in range(100):
            print(f"line {number} \x1b[31m\x00 \xff")
        raise LookupError("after much noise")
