"""Sentinels: frozen pieces of work that use nothing of `nsa`, so only the machine can change their
speed.

Nothing here may change, or the sentinels of old runs no longer compare: sizes, dtypes, seeds and
kernels are part of the name. Shapes: B batch, H heads, T tokens, D head dim.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from perfbench.records import Job, OtherClocks, Replicate, Status
from perfbench.worker.clock import CheckedClock, Clock
from perfbench.worker.processes import CPU_THREADS
from perfbench.worker.telemetry import Sampler
from perfbench.worker.turn import Turn

WARMUP_S = 0.3  # an idle H100 comes up to its clock within this
WINDOW_S = 0.3
SAMPLE_S = 0.05
MIN_SAMPLES = 3
SEED = 20_260_102  # power, and with it the clock, depends on the data
GEMM_SIZE = MappingProxyType({"cuda": 8192, "cpu": 2048})
COPY_BYTES = MappingProxyType({"cuda": 2**30, "cpu": 2**28})
REDUCED_BYTES = MappingProxyType({"cuda": 2**28, "cpu": 2**24})
SDPA_BHTD = MappingProxyType({"cuda": (2, 16, 8192, 128), "cpu": (1, 4, 1024, 64)})
# bf16 is 80 times slower on an older CPU.
DTYPE = MappingProxyType({"cuda": torch.bfloat16, "cpu": torch.float32})


@dataclass(frozen=True, slots=True)
class Work:
    """``amount`` is what one ``step`` does, in the sentinel's unit (`job.SENTINEL_UNITS`)."""

    step: Callable[[], None]
    amount: int


def gemm(device: str) -> Work:
    """A square product: bf16 8192 on a GPU, fp32 2048 on a CPU; a multiply-add is 2 FLOP."""
    n = GEMM_SIZE[device]
    a, b = _random(device, n, n), _random(device, n, n)
    out = torch.empty_like(a)
    return Work(lambda: _discard(torch.mm(a, b, out=out)), 2 * n**3)


def copy(device: str) -> Work:
    """1 GiB from device memory to device memory, 256 MiB on a CPU; each byte is read and
    written.
    """
    source = torch.arange(COPY_BYTES[device] // 4, dtype=torch.int32, device=device)
    target = torch.zeros_like(source)
    return Work(lambda: _discard(target.copy_(source)), 2 * COPY_BYTES[device])


def sdpa_frozen(device: str) -> Work:
    """Causal attention by PyTorch's flash kernel, which is demanded: no other may stand in.

    FLOP of the visible pairs.
    """
    B, H, T, D = SDPA_BHTD[device]
    q_BHTD, k_BHTD, v_BHTD = (_random(device, B, H, T, D) for _ in range(3))

    def step() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            # Mask, dropout, causal by position; T queries over the same T keys, so both alignments
            # are one.
            F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, None, 0.0, True)

    return Work(step, 4 * B * H * D * (T * (T + 1) // 2))


def all_reduce(device: str) -> Work:
    """The link between ranks: each has 256 MiB of bf16, 16 MiB of fp32 on CPUs, and gets the
    largest of all ranks at each place, which a second time changes nothing.

    Bytes by which nccl-tests define bus bandwidth (doc/PERFORMANCE.md): of n ranks 2 (n - 1) / n of
    what each has; an ideal link shows the same for every n. RuntimeError where this process is no
    rank.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "got the sentinel all_reduce in one process, wanted several ranks; measure cells of"
            " world_size >= 2 too, or leave the sentinel out"
        )
    n = dist.get_world_size()
    x = _random(device, REDUCED_BYTES[device] // DTYPE[device].itemsize)

    def step() -> None:
        dist.all_reduce(x, dist.ReduceOp.MAX)

    return Work(step, 2 * (n - 1) * REDUCED_BYTES[device] // n)


WORKS: Mapping[str, Callable[[str], Work]] = MappingProxyType(
    {"gemm": gemm, "copy": copy, "sdpa_frozen": sdpa_frozen, "all_reduce": all_reduce}
)


def measure(job: Job, clock: Clock, sampler: Sampler, turn: Turn) -> Replicate:
    """Time ``job.sentinel``.

    ``samples_s`` are seconds of one unit of work, ``tok_per_s`` is its rate in the sentinel's unit.
    They set the ceiling of what can be true, so they are held against the same other clocks.
    """
    begin, started_utc = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    if job.device == "cpu":
        torch.set_num_threads(CPU_THREADS)
    assert job.sentinel is not None
    work = WORKS[job.sentinel](job.device)
    clock.time_steps(work.step, 1)
    turn()
    step_s = _warm_up(work.step, clock)
    steps = max(1, -(-int(SAMPLE_S * 1e9) // max(1, int(step_s * 1e9))))
    samples_s: list[float] = []
    checked = CheckedClock(clock)
    with sampler.window() as window, turn.timing():
        opened, begin_cpu_s = clock.now(), time.process_time()
        while len(samples_s) < MIN_SAMPLES or clock.now() - opened < WINDOW_S:
            samples_s.append(checked.time_steps(work.step, steps) / steps)
        cpu_s = time.process_time() - begin_cpu_s
    return Replicate(
        cell_id=job.cell_id,
        replicate=job.replicate,
        axes=job.axes,
        config_sha256=job.config_sha256,
        status=Status.OK,
        started_utc=started_utc,
        wall_s=time.monotonic() - begin,
        steps_per_sample=steps,
        samples_s=samples_s,
        other_clocks=OtherClocks(
            raw_s=checked.raw_s,
            aside_s=checked.aside_s,
            cpu_s=cpu_s,
            threads=None if job.device == "cuda" else torch.get_num_threads(),
        ),
        tok_per_s=work.amount / statistics.median(samples_s),
        telemetry=window.result,
        waiting_peers=job.waiting_peers,
    )


def _warm_up(step: Callable[[], None], clock: Clock) -> float:
    """Seconds of the last step of the warm-up."""
    begin = clock.now()
    step_s = clock.time_steps(step, 1)
    while clock.now() - begin < WARMUP_S:
        step_s = clock.time_steps(step, 1)
    return step_s


def _random(device: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(SEED)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(
        DTYPE[device]
    )


def _discard(result: torch.Tensor) -> None:
    """A step returns nothing."""
