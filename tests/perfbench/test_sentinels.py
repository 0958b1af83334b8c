"""Frozen work: its amounts by hand, its samples, its independence of the measured code, and one
real child.
"""

from __future__ import annotations

import ast
import pathlib
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType

import pytest
import torch

from perfbench.gate.clocks import clock_faults
from perfbench.records import Cell
from perfbench.records.job import SENTINEL_UNITS, Job, MeasureOptions
from perfbench.records.rows import Expect, Replicate, RouteLine, Status
from perfbench.runner.executor import ForkServerExecutor
from perfbench.worker import measure as measures
from perfbench.worker import sentinels
from perfbench.worker.clock import PerfCounterClock
from tests.perfbench import builders
from tests.perfbench.fakes import FakeClock, FakeSampler, WrongClock

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")


def job(name: str, device: str = "cpu") -> Job:
    return Job(
        cell_id=f"sentinel {name}",
        replicate=2,
        axes=Cell("sentinel", 1, name),
        config_sha256="",
        model={},
        measure=MeasureOptions(),
        timeout_s=3600.0,
        plan=RouteLine(branches=[], counters=[]),
        expect=Expect(),
        device=device,
        seed=0,
        profile=False,
        sentinel=name,
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code on little work."""
    monkeypatch.setattr(sentinels, "GEMM_SIZE", MappingProxyType({"cpu": 8}))
    monkeypatch.setattr(sentinels, "COPY_BYTES", MappingProxyType({"cpu": 4096}))
    monkeypatch.setattr(sentinels, "SDPA_BHTD", MappingProxyType({"cpu": (1, 2, 5, 8)}))


def test_every_sentinel_has_a_unit_and_work() -> None:
    assert (
        list(SENTINEL_UNITS)
        == list(sentinels.WORKS)
        == [
            "gemm",
            "copy",
            "sdpa_frozen",
            "all_reduce",
        ]
    )


@pytest.mark.usefixtures("small")
def test_the_amounts_by_hand() -> None:
    assert sentinels.gemm("cpu").amount == 1024  # 8 x 8 dot products of 8 multiply-adds
    assert sentinels.copy("cpu").amount == 8192
    # 2 heads x 15 pairs x 8 dims x 2 products x 2
    assert sentinels.sdpa_frozen("cpu").amount == 960


def test_the_sizes_are_frozen() -> None:
    """A change here makes every old sentinel incomparable: rename the sentinel instead."""
    assert dict(sentinels.GEMM_SIZE) == {"cuda": 8192, "cpu": 2048}
    assert dict(sentinels.COPY_BYTES) == {"cuda": 2**30, "cpu": 2**28}
    assert dict(sentinels.REDUCED_BYTES) == {"cuda": 2**28, "cpu": 2**24}
    assert dict(sentinels.SDPA_BHTD) == {"cuda": (2, 16, 8192, 128), "cpu": (1, 4, 1024, 64)}
    assert dict(sentinels.DTYPE) == {"cuda": torch.bfloat16, "cpu": torch.float32}


def test_no_commit_of_the_measured_code_can_change_them() -> None:
    tree = ast.parse((ROOT / "perfbench" / "worker" / "sentinels.py").read_text())
    named = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    named |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in named if name.partition(".")[0] == "nsa"]
    assert {name for name in named if name.startswith("perfbench")} <= {
        f"perfbench.{m}"
        for m in ("records", "worker.clock", "worker.telemetry", "worker.processes", "worker.turn")
    }


@pytest.mark.usefixtures("small")
def test_the_attention_is_causal_and_of_the_flash_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watch(*args: object) -> torch.Tensor:
        assert (
            torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled()
        )
        seen.extend([*args[:3], attend(*args)])  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", watch)
    sentinels.sdpa_frozen("cpu").step()
    q, k, v, o = seen
    weights = (
        (q @ k.transpose(-1, -2) / 8**0.5)
        .masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        .softmax(-1)
    )
    assert torch.allclose(o, weights @ v, atol=1e-5)


class Watched:
    """A turn that notes at which step it was taken, and when the timing began and ended."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.at: list[float] = []

    def __call__(self) -> None:
        self.at.append(self._clock.now() * 256)

    @contextmanager
    def timing(self) -> Iterator[None]:
        self()
        yield
        self()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("name", "amount"), [("gemm", 1024), ("copy", 8192), ("sdpa_frozen", 960)])
def test_a_row(name: str, amount: int) -> None:
    """On a clock that counts: 13 steps of 1/256 s are the first 50 ms, six samples the first
    0.3 s.
    """
    telemetry = builders.telemetry()
    clock = FakeClock(1 / 256)
    turn = Watched(clock)
    row = measures.measure(job(name), clock, FakeSampler(telemetry), turn)
    assert row.status is Status.OK and row.telemetry == telemetry
    assert turn.at == [1, 78, 156], "prepared, and then timed alone"
    assert row.steps_per_sample == 13 and row.samples_s == [1 / 256] * 6
    assert row.tok_per_s == amount * 256 and clock.now() * 256 == 1 + 77 + 6 * 13
    assert (row.cell_id, row.replicate, row.parity, row.route) == (
        f"sentinel {name}",
        2,
        None,
        None,
    )


def test_the_link_needs_ranks() -> None:
    with pytest.raises(RuntimeError, match="in one process, wanted several ranks"):
        sentinels.all_reduce("cpu")


@pytest.mark.usefixtures("small")
def test_a_slow_step_has_three_samples() -> None:
    row = measures.measure(job("gemm"), FakeClock(2.0), FakeSampler(builders.telemetry()))
    assert row.steps_per_sample == 1 and row.samples_s == [2.0] * 3 and row.tok_per_s == 512


@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_a_wrong_clock_of_theirs_is_in_the_row(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They set the ceiling, and had no clock beside the one that times the cells."""
    monkeypatch.setattr(sentinels, "GEMM_SIZE", MappingProxyType({"cpu": 512}))
    monkeypatch.setattr(sentinels, "SAMPLE_S", 1e-3)
    row = measures.measure(
        job("gemm"),
        WrongClock(PerfCounterClock(), factor),
        FakeSampler(builders.telemetry(gpu=False)),
    )
    assert row.other_clocks is not None and row.other_clocks.threads == 1
    faults = clock_faults([one * row.steps_per_sample for one in row.samples_s], row.other_clocks)
    assert bool(faults) == (factor != 1) and all("the samples add up" in one for one in faults)


def test_in_a_child_of_its_own() -> None:
    with ForkServerExecutor(cwd=ROOT) as executor:
        row: Replicate = executor.execute(job("sdpa_frozen"))
    assert row.status is Status.OK, row
    assert row.tok_per_s == pytest.approx(4 * 4 * 64 * 524_800 / statistics.median(row.samples_s))
    assert row.wall_s / 1000 < row.steps_per_sample * sum(row.samples_s) < row.wall_s
    assert row.telemetry is not None and "no GPU" in row.telemetry.absent["power_w"]
