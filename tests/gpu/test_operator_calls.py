"""On CUDA: a step calls the operators that are due, eager, compiled and captured; host time and the
other clocks are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from nsa import capability, settings
from nsa.config import ModelConfig
from perfbench.matrix import SDPA, OperatorCalls, route_line, route_of
from perfbench.records import (
    Cell,
    Expect,
    Job,
    MeasureOptions,
    PlannedCell,
    Replicate,
    Status,
    settings_of,
)
from perfbench.worker import measure, operators
from perfbench.worker.clock import Clock, CudaEventClock
from tests.perfbench.fakes import FakeSampler, WrongClock
from tests.perfbench.measure_cases import PROOF, TELEMETRY, clock_faults

MODEL = ModelConfig(dim=256, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64, vocab_size=512)
# Where other processes use the card, a sample waits some 5 ms for its turn, which the gate's clock
# rule does not know: few and long samples, of which that is a small part.
MEASURE = MeasureOptions(warmup_s=0.1, min_sample_ms=500, samples=2)
CELLS: list[dict[str, Any]] = [
    {"path": path, "workload": workload, "fa2": fa2}
    for workload in (
        "train",
        "train_loop",
        "forward",
        "attention",
        "selected",
        "decode",
        "chunked_prefill",
    )
    for path, fa2 in (("triton", "off"), ("v2", "off"), ("v2", "on"), ("masked", "off"))
]
CELLS += [
    {"path": path, "workload": workload, "compile": compiled, "cuda_graph": captured}
    for path in ("triton", "v2", "masked")
    for workload in ("train", "train_loop", "forward")
    for compiled, captured in (("on", "off"), ("off", "on"), ("on", "on"))
]
CELLS += [
    {"path": "triton", "workload": "decode", "cuda_graph": "on"},
    {"path": "triton", "workload": "attention", "l2": "cold"},
    {"path": "triton", "workload": "attention", "without": "join"},
    {"path": "dense", "workload": "train", "fa2": "auto"},
    {"path": "dense", "workload": "train_loop", "fa2": "auto", "cuda_graph": "on"},
    {"path": "dense_flash", "workload": "train", "fa2": "auto"},
    {"path": "auto", "workload": "train"},
    {"path": "auto", "workload": "train", "seq_len": 512},
]


@pytest.fixture(autouse=True)
def settings_of_the_environment() -> Iterator[None]:
    yield
    settings.current.cache_clear()


@dataclass(frozen=True)
class Measured:
    """A row, the cell that it is of, and the operators that are due by the cell's plan."""

    row: Replicate
    cell: PlannedCell
    due: OperatorCalls


def measured(
    axes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, clock: Clock | None = None
) -> Measured:
    cell = Cell(**{"seq_len": 2048, "fa2": "off", "batch": 2, "chunk": 1024, **axes})
    for name, value in settings_of(cell).items():
        monkeypatch.setenv(name, value)
        settings.current.cache_clear()
    route = route_of(cell, MODEL, settings.current(), capability.probe("cuda:0"))
    asked = Job(
        cell_id=cell.cell_id,
        replicate=0,
        axes=cell,
        config_sha256="c" * 64,
        model=MODEL.to_mapping(),
        measure=MEASURE,
        timeout_s=60.0,
        plan=route_line(route),
        expect=Expect(),
        device="cuda",
        seed=5,
        profile=True,
        proof=PROOF,
    )
    due = operators.due(asked, MODEL, route)
    assert due is not None
    planned = PlannedCell(
        cell_id=cell.cell_id,
        axes=cell,
        config_sha256=asked.config_sha256,
        route=asked.plan,
        expect=asked.expect,
        layers=MODEL.num_layers,
    )
    row = measure.measure(asked, clock or CudaEventClock(), FakeSampler(TELEMETRY))
    return Measured(row, planned, due)


@pytest.mark.parametrize("axes", CELLS, ids=lambda axes: "-".join(map(str, axes.values())))
def test_a_step_calls_what_is_due(axes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is due may be nothing by name: of a compiled formula the compiler makes its own."""
    made = measured(axes, monkeypatch)
    row, due = made.row, made.due
    assert row.status is Status.OK, row.reason
    assert row.profile is not None
    assert due.exact or due.in_graph
    wanted, got = dict(due.exact), dict(row.profile.operators)
    if made.cell.axes.compile == "on":  # the compiler's own SDPA; the graph before it was counted
        wanted.pop(SDPA, None), got.pop(SDPA, None)
    assert operators.differences(wanted, got, due.at_least) == ""
    assert row.profile.host_time_s is not None and row.profile.host_time_s > 0
    clocks = row.other_clocks
    assert clocks is not None and clocks.threads is None
    assert clock_faults(made.cell, row, gpu=True) == []
    assert (clocks.between_s > 0) == (axes.get("l2") == "cold")


@pytest.mark.parametrize("factor", [1.5, 0.5])
def test_a_wrong_clock_is_impossible(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {"path": "triton", "workload": "attention"}
    made = measured(axes, monkeypatch, WrongClock(CudaEventClock(), factor))
    assert made.row.status is Status.OK, made.row.reason
    reasons = clock_faults(made.cell, made.row, gpu=True)
    assert any("the samples add up to" in reason for reason in reasons)
