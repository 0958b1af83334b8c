"""On CUDA: a step calls the operators that are due, eager, compiled and captured; host time and the
other clocks are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nsa import capability, settings
from nsa.config import ModelConfig
from perfbench.gate.hard_rules import CLOCK_SLACK_S, MAX_CLOCK_MISMATCH
from perfbench.matrix import route_line, route_of
from perfbench.records import (
    Cell,
    Expect,
    Job,
    MeasureOptions,
    Replicate,
    Status,
    settings_of,
)
from perfbench.worker import measure
from perfbench.worker.clock import CudaEventClock
from tests.perfbench.fakes import FakeSampler
from tests.perfbench.measure_cases import PROOF, TELEMETRY

MODEL = ModelConfig(dim=256, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64, vocab_size=512)
CELLS: list[dict[str, Any]] = [
    {"path": path, "workload": workload, "fa2": fa2}
    for workload in ("train", "forward", "attention", "selected", "decode", "chunked_prefill")
    for path, fa2 in (("triton", "off"), ("v2", "off"), ("v2", "on"), ("masked", "off"))
]
CELLS += [
    {"path": path, "workload": workload, "compile": compiled, "cuda_graph": captured}
    for path in ("triton", "v2", "masked")
    for workload in ("train", "forward")
    for compiled, captured in (("on", "off"), ("off", "on"), ("on", "on"))
]
CELLS += [
    {"path": "triton", "workload": "decode", "cuda_graph": "on"},
    {"path": "triton", "workload": "attention", "l2": "cold"},
    {"path": "triton", "workload": "attention", "without": "join"},
    {"path": "dense", "workload": "train", "fa2": "auto"},
    {"path": "dense_flash", "workload": "train", "fa2": "auto"},
    {"path": "auto", "workload": "train"},
    {"path": "auto", "workload": "train", "seq_len": 512},
]


@pytest.fixture(autouse=True)
def settings_of_the_environment() -> Iterator[None]:
    yield
    settings.current.cache_clear()


def row_of(axes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Replicate:
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
        measure=MeasureOptions(warmup_s=0.1, min_sample_ms=20, samples=5),
        timeout_s=60.0,
        plan=route_line(route),
        expect=Expect(),
        device="cuda",
        seed=5,
        profile=True,
        proof=PROOF,
    )
    return measure.measure(asked, CudaEventClock(), FakeSampler(TELEMETRY))


@pytest.mark.parametrize("axes", CELLS, ids=lambda axes: "-".join(map(str, axes.values())))
def test_a_step_calls_what_is_due(axes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(axes, monkeypatch)
    assert row.status is Status.OK, row.reason
    assert row.profile is not None and row.profile.operators
    assert row.profile.host_time_s is not None and row.profile.host_time_s > 0
    clocks = row.other_clocks
    assert clocks is not None and clocks.threads is None
    total, slack = sum(row.samples_s), CLOCK_SLACK_S * len(row.samples_s)
    assert total <= clocks.raw_s * (1 + MAX_CLOCK_MISMATCH) + slack
    assert (clocks.raw_s - 2 * clocks.between_s) * (1 - MAX_CLOCK_MISMATCH) - slack <= total
    assert (clocks.between_s > 0) == (axes.get("l2") == "cold")
