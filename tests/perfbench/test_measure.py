"""One replicate: proved, warmed up, timed and witnessed in that order; what its row says, and what
injections add to it.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsa.routing import BranchRoute
from perfbench import roofline
from perfbench.records.job import Injection, Job
from perfbench.records.rows import Replicate, Status
from perfbench.worker import autotuner, gemm, measure, profile
from perfbench.worker.processes import CPU_THREADS
from perfbench.worker.telemetry import NullSampler
from perfbench.worker.workloads import workload
from tests.perfbench import builders
from tests.perfbench.fakes import FakeClock, FakeSampler
from tests.perfbench.jobs import TINY, cell_of, job, route_of
from tests.perfbench.measure_cases import PROOF, STEP_S, TELEMETRY, run, stub

pytestmark = pytest.mark.usefixtures("one_thread", "light")
Units = Callable[[int, Job], Callable[[], None]]
REAL_GEMM: Units = gemm.gemm


# A row that is in order.


EVERY_PATH = [(path, "train") for path in ("masked", "dense")] + [
    (path, "forward") for path in ("v1", "v2", "auto", "dense")
]


@pytest.mark.parametrize(("path", "kind"), EVERY_PATH)
def test_an_ok_row_is_complete_and_consistent(path: str, kind: str) -> None:
    rng = random.Random(9)
    seconds = (STEP_S * rng.uniform(1, 3) for _ in itertools.count())
    planned_job = job(path, kind, 96, batch=2, profile=True, measure={"samples": 4})
    begin = time.monotonic()
    row = run(planned_job, FakeClock(seconds))
    assert (row.status, row.reason) == (Status.OK, "")
    assert (row.cell_id, row.replicate, row.axes, row.config_sha256) == (
        planned_job.cell_id,
        0,
        planned_job.axes,
        planned_job.config_sha256,
    )
    assert statistics.fmean(row.samples_s) != statistics.median(row.samples_s), (
        "or the next lines could not tell them apart"
    )
    assert len(row.samples_s) == 4 and row.tokens_per_step == 2 * 96 and row.steps_per_sample >= 1
    assert row.tok_per_s == pytest.approx(
        row.tokens_per_step * row.steps_per_sample / statistics.median(row.samples_s), rel=1e-12
    )
    assert row.route == planned_job.plan
    calls = TINY.num_layers * row.steps_per_sample * 4  # of the timed steps and no others
    assert row.engaged == dict.fromkeys(planned_job.plan.counters, calls)
    assert row.parity is not None and row.parity.ok and row.parity.proved_in is None
    assert ("dq" in row.parity.tensors) == (kind == "train")
    assert row.telemetry == TELEMETRY
    assert row.profile is not None and row.profile.witness_ok is True
    assert row.host_bound is None and row.peak_memory_bytes is None, "null on a CPU, never 0"
    assert (
        row.cold_start_s is not None
        and 0 < row.cold_start_s <= row.wall_s <= time.monotonic() - begin
    )
    assert Replicate.model_validate_json(row.model_dump_json()) == row


@pytest.mark.parametrize("path", ["masked", "dense"])
def test_the_rows_physics(path: str) -> None:
    row = run(job(path, "train", 64))
    shape: dict[str, Any] = {
        "workload": "train",
        "batch": 1,
        "tokens": 64,
        "dense": path == "dense",
    }
    found = row.physics
    assert found is not None and found.gemm_flops_per_s is not None and row.tok_per_s is not None
    assert found.flops == roofline.step_flops(TINY, **shape)
    assert found.min_bytes == roofline.step_min_bytes(TINY, dtype="fp32", **shape)
    step_s = row.tokens_per_step / row.tok_per_s
    assert step_s == pytest.approx(STEP_S) and found.flops_per_s == pytest.approx(
        found.flops / step_s
    )
    assert found.gemm_flops_per_s == pytest.approx(2 * 1024**3 / STEP_S), (
        "every call lasts one step on this clock"
    )
    assert found.floor_fraction == pytest.approx(found.flops / found.gemm_flops_per_s / step_s)
    assert found.datasheet_bytes_per_s is None and found.notes == [
        "CPU: datasheet ceilings are null"
    ]


def test_a_real_row_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the size of the GEMM is faked."""
    from perfbench.worker.clock import PerfCounterClock

    begin = time.monotonic()
    row = run(job("v2", "train", 64, profile=True), PerfCounterClock(), NullSampler("no GPU"))
    whole_s = time.monotonic() - begin
    assert row.status is Status.OK and row.tok_per_s is not None
    assert whole_s / 1000 < sum(row.samples_s) < whole_s, "seconds, of this run"
    assert row.tok_per_s == pytest.approx(
        64 * row.steps_per_sample / statistics.median(row.samples_s)
    )
    assert (
        row.telemetry is not None
        and row.telemetry.utilisation_pct is None
        and row.telemetry.absent["utilisation_pct"] == "no GPU"
    )
    assert torch.get_num_threads() == CPU_THREADS


def test_only_a_job_that_asks_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    row = run(job("masked", "forward", profile=False))
    assert row.status is Status.OK and row.profile is None and row.host_bound is None
    monkeypatch.setattr(profile, "profile", lambda *_: builders.profile(busy_fraction=0.5))
    assert run(job("masked", "forward", profile=True)).host_bound is True


# Injections, memory.


@pytest.mark.parametrize(
    ("percent", "slower"), [(10.0, 1.10), (50.0, 1.5), (200.0, 3.0), (0.01, 1.001)]
)
def test_an_injected_slowdown_is_work_of_that_share(
    monkeypatch: pytest.MonkeyPatch, percent: float, slower: float
) -> None:
    """On a clock that counts: a step is 8 ms, a unit of extra work a thousandth of it, and at least
    one is done.
    """
    clock = FakeClock(0.0)
    stub(monkeypatch, clock=clock, step_s=STEP_S)
    monkeypatch.setattr(
        gemm, "gemm", lambda size, planned_job: lambda: clock.advance(STEP_S / 1000)
    )
    plain = run(job(proof=PROOF), clock)
    planned_job = job(proof=PROOF)
    slowed = run(
        planned_job.model_copy(
            update={
                "injection": Injection(
                    kind="slowdown", percent=percent, cell_id=planned_job.cell_id
                )
            }
        ),
        clock,
    )
    assert plain.tok_per_s is not None and slowed.tok_per_s is not None
    assert plain.tok_per_s == pytest.approx(64 / STEP_S)
    assert plain.tok_per_s / slowed.tok_per_s == pytest.approx(slower, rel=1e-6)
    assert slowed.status is Status.OK and slowed.engaged == plain.engaged


class CpuTimeClock:
    """Seconds of this process's own CPU time: another process on the machine does not slow it."""

    is_of_host = True

    def now(self) -> float:
        return time.process_time()

    def time_steps(
        self, step: Callable[[], None], steps: int, between: Callable[[], None] | None = None
    ) -> float:
        assert between is None
        begin = time.process_time()
        for _ in range(steps):
            step()
        return time.process_time() - begin


def test_an_injected_slowdown_costs_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "gemm", REAL_GEMM)
    monkeypatch.setattr(measure, "_physics", lambda *_: None)
    planned_job = job("masked", "forward", proof=PROOF, measure={"samples": 5, "warmup_s": 0.1})
    plain = run(planned_job, CpuTimeClock())
    slowed = run(
        planned_job.model_copy(
            update={
                "injection": Injection(kind="slowdown", percent=200, cell_id=planned_job.cell_id)
            }
        ),
        CpuTimeClock(),
    )
    assert plain.tok_per_s is not None and slowed.tok_per_s is not None
    assert 1.8 < plain.tok_per_s / slowed.tok_per_s < 6.0


def test_other_injections_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forkserver acts them out; here they must not look like a slowdown."""
    stub(monkeypatch)
    planned_job = job(proof=PROOF)
    assert (
        run(
            planned_job.model_copy(
                update={"injection": Injection(kind="hang", cell_id=planned_job.cell_id)}
            )
        ).tok_per_s
        == 64 / STEP_S
    )


@pytest.mark.parametrize("at", ["build", "first step", "timed step"])
def test_out_of_memory_passes_through(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    def fails() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    planned = route_of(cell_of("v2")).branches

    def engages(number: int) -> tuple[BranchRoute, ...]:
        if number >= {"first step": 0, "timed step": 20}.get(at, 10**9):
            fails()
        return planned

    stub(monkeypatch, engages=engages)
    if at == "build":
        monkeypatch.setattr(workload, "build", lambda planned_job: fails())
    with pytest.raises(torch.OutOfMemoryError, match="20.00 GiB"):
        run(job(proof=PROOF, measure={"samples": 100}))


# What a row says of itself.


def test_every_null_of_an_ok_row_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for profiled in (True, False):
        stub(monkeypatch)
        monkeypatch.setattr(profile, "profile", lambda *_: builders.profile(gpu=False))
        row = run(job(proof=PROOF, profile=profiled, measure={"warmup_s": 0.01}))
        nulls = {name for name in Replicate.model_fields if getattr(row, name) is None}
        of_profile = set() if profiled else {"host_time_s"}
        assert ("host_time_s" in row.absent) is not profiled, row.absent
        assert row.status is Status.OK and nulls == set(row.absent) - of_profile, row.absent
        assert {"cycles_per_step", "energy_j_per_token", "host_bound", "steady"} <= nulls and (
            "profile" in nulls
        ) is not profiled
        assert (
            "no NVIDIA GPU" in row.absent["cycles_per_step"]
            and "shorter" not in row.absent["energy_j_per_token"]
        )


@pytest.mark.parametrize(("rising", "steady"), [(0.0, True), (0.01, False)])
def test_whether_the_warm_up_ended_level_is_stored(
    monkeypatch: pytest.MonkeyPatch, rising: float, steady: bool
) -> None:
    stub(monkeypatch)
    seconds = (STEP_S * (1 + rising * i) for i in itertools.count())
    row = run(job(proof=PROOF, measure={"warmup_s": 0.25}), FakeClock(seconds))
    assert row.steady is steady and "steady" not in row.absent


def test_cycles_energy_and_choices_reach_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch)
    monkeypatch.setattr(autotuner, "choices", lambda: {"nsa.ops.kernels.k[64]": "BLOCK: 64"})
    seen = builders.telemetry(sm_clock_mhz=1280.0, energy_j=96.0, window_s=2.5)
    row = run(
        job(proof=PROOF, measure={"samples": 3, "min_sample_ms": STEP_S * 1e3}),
        sampler=FakeSampler(seen),
    )
    assert row.cycles_per_step == 1280e6 / 128 and row.energy_j_per_token == 96 / (3 * 64)
    assert row.tuned == {"nsa.ops.kernels.k[64]": "BLOCK: 64"}


def test_a_row_without_a_speed_has_no_cycles_or_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, other = route_of(cell_of("v2")).branches, route_of(cell_of("v1")).branches
    stub(monkeypatch, engages=lambda number: planned if number < 5 else other)
    row = run(job(proof=PROOF), sampler=FakeSampler(builders.telemetry(window_s=3.0)))
    assert (
        row.status is Status.WRONG_PATH
        and row.cycles_per_step is None
        and row.energy_j_per_token is None
    )
