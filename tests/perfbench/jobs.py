"""Jobs for the real measuring function: the tiny model on the CPU, short sequences, fp32."""

from __future__ import annotations

from typing import Any

from nsa import capability
from nsa.config import ModelConfig, preset
from nsa.routing import DENSE_KINDS, Problem, Request, Route, plan, route_dense
from perfbench.records.cells import Cell, torch_dtype_name
from perfbench.records.job import Job, MeasureOptions
from perfbench.records.rows import Expect
from tests.perfbench import builders

TINY = preset("tiny")


def cell_of(path: str, workload: str = "train", seq_len: int = 64, **axes: Any) -> Cell:
    return Cell(workload, seq_len, path, **{"fa2": "off", "dtype": "fp32", **axes})


def route_of(cell: Cell, model: ModelConfig = TINY) -> Route:
    """What the planner decides for ``cell`` on this CPU, with no NSA_* variable set."""
    here, dtype = capability.probe("cpu"), torch_dtype_name(cell.dtype)
    if cell.path in DENSE_KINDS:
        return route_dense(
            cell.path, Problem.of(model, batch=cell.batch, tokens=cell.seq_len, dtype=dtype), here
        )
    return plan(
        Request(cell.path, cell.fa2),
        model,
        batch=cell.batch,
        tokens=cell.seq_len,
        dtype=dtype,
        capability=here,
    )


def job(
    path: str = "v2", workload: str = "train", seq_len: int = 64, *, batch: int = 1, **changes: Any
) -> Job:
    """A job whose plan is true; ``changes`` replace any field, ``measure`` being a mapping."""
    cell = cell_of(path, workload, seq_len, batch=batch)
    values: dict[str, Any] = {
        "cell_id": cell.cell_id,
        "replicate": 0,
        "axes": cell,
        "config_sha256": "c" * 64,
        "model": TINY.to_mapping(),
        "timeout_s": 60.0,
        "plan": builders.route_line(route_of(cell)),
        "expect": Expect(),
        "device": "cpu",
        "seed": 5,
        "profile": False,
    }
    options = {"warmup_s": 0.02, "min_sample_ms": 20, "samples": 3, **changes.pop("measure", {})}
    return Job(**{**values, **changes}, measure=MeasureOptions(**options))
