"""The measuring process's own torch: its threads, its device's queue and memory."""

from __future__ import annotations

import torch

from perfbench.records import Job
from perfbench.worker.processes import CPU_THREADS


def set_threads(job: Job) -> None:
    """Those of a CPU's cell, or of one of several processes that prepare together."""
    torch.set_num_threads(
        CPU_THREADS
        if job.device == "cpu"
        else max(1, torch.get_num_threads() // (job.waiting_peers + 1))
    )


def allocation_retries(job: Job) -> int:
    """How often the allocator had to give everything back to the driver and ask once more: a slow
    step, not a step's speed.
    """
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if job.device == "cuda" else 0


def synchronize() -> None:
    """Wait for the device, where this process has one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
