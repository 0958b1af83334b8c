"""The axis `l2`: it renames nothing, needs a GPU, and empties the L2 before each timed step and
outside of its time.
"""

from __future__ import annotations

import json
import pathlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfbench.matrix import matrix as matrices
from perfbench.records.cells import Cell, why_not_here
from perfbench.records.job import Job
from perfbench.records.rows import METHOD_VERSION, Status
from perfbench.worker import profile
from perfbench.worker.timing import NUM_FLUSHES
from perfbench.worker.workloads import workload
from tests.perfbench import builders
from tests.perfbench.fakes import FakeClock
from tests.perfbench.jobs import TINY, cell_of, job, route_of
from tests.perfbench.measure_cases import PROOF, STEP_S, Watch, run, stub

ROOT = pathlib.Path(__file__).parents[2]
BASELINES = sorted((ROOT / "reports" / "baselines" / "h100-80gb-hbm3").glob("*.json"))


def cold(path: str = "v2", **changes: Any) -> Job:
    asked = job(path, proof=PROOF, **changes)
    return asked.model_copy(update={"axes": replace(asked.axes, l2="cold")})


@pytest.mark.parametrize("file", BASELINES, ids=lambda file: file.stem)
def test_no_cell_of_a_baseline_is_renamed_and_no_configuration_hashed_anew(
    file: pathlib.Path,
) -> None:
    matrix = matrices.load_matrix(ROOT / "matrices" / file.name.replace(".json", ".yaml"))
    baseline = json.loads(file.read_text())
    hashes = {one.cell.cell_id: one.config_sha256 for one in matrices.cells(matrix)[0]}
    cells, same_method = baseline["cells"], baseline["method_version"] == METHOD_VERSION
    for cell_id, stored in cells.items():
        cell = Cell.from_mapping(stored["axes"])
        assert cell.cell_id == cell_id and "l2" not in cell_id
        assert not same_method or hashes[cell_id] == stored["config_sha256"]
    assert len(BASELINES) >= 2 and cells


def test_a_cold_cell_has_a_name_of_its_own() -> None:
    warm, chill = Cell("train", 128, "v2"), Cell("train", 128, "v2", l2="cold")
    assert warm.l2 == "warm" and warm.cell_id == "path=v2,seq_len=128,workload=train"
    assert chill.cell_id == "l2=cold,path=v2,seq_len=128,workload=train"


def test_a_cpu_refuses_cold_with_a_reason() -> None:
    chill = Cell("train", 128, "v2", l2="cold")
    assert (
        "needs a GPU" in str(why_not_here(chill, on_gpu=False))
        and why_not_here(chill, on_gpu=True) is None
    )
    assert why_not_here(Cell("train", 128, "v2"), on_gpu=False) is None
    with pytest.raises(ValueError, match="use l2=warm"):
        workload.l2_flush(cold())


def test_a_warm_cell_flushes_nothing() -> None:
    asked = job("v2")
    assert workload.l2_flush(asked) is None
    stored = asked.model_dump()
    del stored["axes"]["l2"]  # planned before the axis was there
    assert workload.l2_flush(Job.model_validate(stored)) is None


def test_the_flush_writes_twice_the_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    empty = torch.empty

    def on_cpu(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert device == "cuda"
        made.append(empty(*shape, dtype=dtype).fill_(1))
        return made[0]

    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=1000)
    )
    monkeypatch.setattr(torch, "empty", on_cpu)
    flush = workload.l2_flush(cold().model_copy(update={"device": "cuda"}))
    assert flush is not None and made[0].nbytes == 2000 and int(made[0].sum()) == 2000
    flush()
    assert not made[0].any(), "every byte is written"


def test_a_cold_row_counts_steps_and_not_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = stub(monkeypatch)
    clock, flushes = FakeClock(STEP_S), [0]

    def flush() -> None:
        flushes[0] += 1
        clock.advance(1.0)

    monkeypatch.setattr(
        workload, "l2_flush", lambda asked: flush if asked.axes.l2 == "cold" else None
    )
    monkeypatch.setattr("perfbench.worker.measure._physics", lambda *_: None)
    watch = Watch(clock, counted)
    row = run(cold(measure={"samples": 3, "min_sample_ms": 4 * STEP_S * 1e3}), clock, watch)
    assert row.status is Status.OK and row.tok_per_s == pytest.approx(64 / STEP_S)
    assert row.samples_s == [pytest.approx(4 * STEP_S)] * 3 and row.steps_per_sample == 4
    assert set(row.engaged.values()) == {TINY.num_layers * 12}
    assert flushes[0] == counted.steps - 1 + NUM_FLUSHES, (
        "before every warm-up and timed step; the first step is neither; and some timed alone"
    )
    assert watch.closed_s - watch.opened_s == pytest.approx(12 * (1.0 + STEP_S))


def test_the_profiled_step_of_a_cold_cell_is_cold_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch)
    clock, given = FakeClock(STEP_S), []

    def flush() -> None: ...

    monkeypatch.setattr(workload, "l2_flush", lambda asked: flush)
    monkeypatch.setattr(
        profile, "profile", lambda *args: given.append(args[5]) or builders.profile()
    )
    run(cold(profile=True), clock)
    assert given == [flush]


def test_what_runs_before_the_profiled_step_is_not_in_its_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))

    def before() -> None:
        done.append("before")
        torch.ones(3).cumsum(0)

    monkeypatch.setattr(
        profile, "testify", lambda route, kernels, operators, *_: (None, ",".join(operators))
    )
    found = profile.profile(
        lambda: done.append("step"), route_of(cell_of("v2")), "cpu", 0.01, 1, before
    )
    assert done == ["before", "waited", "step"] and "cumsum" not in found.witness
