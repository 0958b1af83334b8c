"""The GEMM that bounds what a step can have computed, and that an injected slowdown adds to it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from perfbench.records import Job, torch_dtype_name
from perfbench.worker.clock import Clock


def gemm(size: int, job: Job) -> Callable[[], None]:
    """A square product in the cell's dtype, on fresh random values."""
    dtype = getattr(torch, torch_dtype_name(job.axes.dtype))
    a, b = (
        torch.randn(size, size, device=job.device, dtype=torch.float32).to(dtype) for _ in range(2)
    )
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    return multiply


def gemm_flops_per_s(job: Job, clock: Clock) -> float:
    """The rate of a large GEMM in this process and the cell's dtype, the best of three."""
    on_gpu = job.device == "cuda"
    size, repeats = (8192, 20) if on_gpu else (1024, 5)
    unit = gemm(size, job)
    clock.time_steps(unit, 5)
    gemm_s = min(clock.time_steps(unit, repeats) for _ in range(3)) / repeats
    return 2 * size**3 / gemm_s


def slowed(step: Callable[[], None], step_s: float, job: Job, clock: Clock) -> Callable[[], None]:
    """The step itself; with an injected slowdown, followed by real extra work of that share of its
    time.
    """
    if job.injection is None or job.injection.kind != "slowdown":
        return step
    assert job.injection.percent is not None
    # Large enough on a GPU that its time is the device's and not the launch's: 512 lost three
    # quarters of the slowdown.
    unit = gemm(4096 if job.device == "cuda" else 128, job)
    clock.time_steps(unit, 10)
    unit_s = clock.time_steps(unit, 50) / 50
    count = max(1, round(job.injection.percent / 100 * step_s / unit_s))

    def longer() -> None:
        step()
        for _ in range(count):
            unit()

    return longer
