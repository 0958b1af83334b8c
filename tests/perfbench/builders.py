"""Synthetic runs whose rows pass every hard gate; a test breaks the one thing that it is about.

run = make_run(h100_cells(), replicates=5)                 # 60 cells, plausible speeds
run = replace_rows(run, cell_id, tok_per_s=80.0)           # ... one cell slower, samples kept
consistent baseline = baseline_of(run)
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nsa.config import ModelConfig, NSAConfig
from nsa.routing import (
    DENSE_KINDS,
    BranchRoute,
    Capability,
    Problem,
    Request,
    Route,
    route,
    route_dense,
)
from perfbench.gate.comparable import sentinel_rates
from perfbench.gate.coverage import rows_by_cell, usable
from perfbench.records.baseline_file import Baseline, BaselineCell
from perfbench.records.cells import Cell, torch_dtype_name
from perfbench.records.rows import (
    BranchLine,
    Environment,
    Expect,
    LoadedPeer,
    Manifest,
    ParityLine,
    Physics,
    PlannedCell,
    Profile,
    Replicate,
    Resumed,
    RouteLine,
    Run,
    SentinelLine,
    Source,
    Status,
    Telemetry,
)

MODEL = ModelConfig(
    dim=768,
    num_layers=12,
    num_heads=12,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=50257,
    nsa=NSAConfig(),
)
LAYERS = MODEL.num_layers
H100 = Capability("cuda", "NVIDIA H100 80GB HBM3", (9, 0), "torch.varlen 2.13.0", "", "2.13.0")
CPU = Capability("cpu", "AMD EPYC", None, None, "no CUDA device", "2.13.0")
COMMIT = "4f1c2d3e" * 5
UTC = "2026-01-02T03:04:05Z"


def environment(gpu: bool = True, **overrides: Any) -> Environment:
    values: dict[str, Any] = {
        "gpu_slug": "h100-80gb-hbm3" if gpu else "cpu",
        "device_name": H100.device_name if gpu else "AMD EPYC 7B13",
        "gpu_uuid_sha256": "ab" * 32 if gpu else None,
        "driver": "570.86.10" if gpu else None,
        "cuda": "13.0" if gpu else None,
        "torch": "2.13.0",
        "triton": "3.7.1",
        "flash_provider": H100.fa2_provider if gpu else None,
        "python": "3.12.3",
        "platform": "Linux-6.8-x86_64",
        "cpu_name": "AMD EPYC 7B13",
        "cpu_count": 16 if gpu else 2,
        "clock_policy": "not locked",
    }
    return Environment(**{**values, **overrides})


def route_line(decided: Route) -> RouteLine:
    lines = [
        BranchLine(
            branch=b.branch,
            implementation=b.implementation,
            kernel=b.kernel,
            provider=b.provider,
            reason=b.reason,
            syncs=b.syncs,
            repeatable=b.repeatable,
        )
        for b in decided.branches
    ]
    rejected = [{"alternative": r.alternative, "reason": r.reason} for r in decided.rejected]
    return RouteLine(
        branches=lines,
        counters=list(decided.counters),
        rejected=rejected,
        notes=list(decided.notes),
    )


def planned_cell(cell: Cell, *, gpu: bool = True, expect: Expect | None = None) -> PlannedCell:
    capability = H100 if gpu else CPU
    problem = Problem.of(
        MODEL, batch=cell.batch, tokens=cell.seq_len, dtype=torch_dtype_name(cell.dtype)
    )
    dense = cell.path in DENSE_KINDS
    if cell.is_peer:
        decided = Route((BranchRoute("peer", cell.path, cell.path, "their 1.0", "by name"),))
    elif dense:
        decided = route_dense(cell.path, problem, capability)
    else:
        decided = route(Request(cell.path, cell.fa2), problem, capability)
    config = hashlib.sha256(f"{cell.cell_id}".encode()).hexdigest()
    return PlannedCell(
        cell_id=cell.cell_id,
        axes=cell,
        config_sha256=config,
        route=route_line(decided),
        expect=expect or Expect(),
        layers=LAYERS,
    )


def h100_cells() -> list[PlannedCell]:
    """60 cells: train and forward, 512 to 8192, v2 and masked and v1 (to 1024) with FA-2 on and
    off, and the dense twin.
    """
    cells = []
    for workload in ("train", "forward"):
        for seq_len in (512, 1024, 2048, 4096, 8192):
            cells += [
                Cell(workload, seq_len, path, fa2)
                for path in ("v2", "masked")
                for fa2 in ("on", "off")
            ]
            cells += [
                Cell(workload, seq_len, "v1", fa2) for fa2 in ("on", "off") if seq_len <= 1024
            ]
            cells.append(Cell(workload, seq_len, "dense"))
        cells += [Cell(workload, 128, "reference", "off")]
    return [planned_cell(cell) for cell in cells]


def cpu_cells() -> list[PlannedCell]:
    paths = ("v2", "masked", "dense")
    cells = [
        Cell(w, s, p, "off", dtype="fp32")
        for w in ("train", "forward")
        for s in (128, 256, 512)
        for p in paths
    ]
    return [planned_cell(cell, gpu=False) for cell in cells]


def speed_of(cell: PlannedCell) -> float:
    """A plausible tok/s: sublinear in length, a factor for the path, forward three times as fast as
    training.
    """
    axes = cell.axes
    length = float(axes.seq_len)
    factor = {"dense": 1.0, "v2": 0.32, "masked": 0.62, "v1": 0.006, "reference": 0.0004}.get(
        axes.path, 0.5
    )
    factor *= 1.0 if axes.fa2 in ("on", "n/a") or axes.path == "v1" else 0.78
    slope = {"dense": 5200.0, "v2": 30_000.0, "masked": 2600.0}.get(axes.path, 4000.0)
    launch = length / (length + 900.0)
    speed = 260_000.0 * factor * launch / (1 + length / slope)
    return (
        speed
        * (3.1 if axes.workload == "forward" else 1.0)
        * (1.0 if axes.dtype == "bf16" else 0.004)
    )


def parity(**overrides: Any) -> ParityLine:
    values: dict[str, Any] = {
        "ok": True,
        "tokens": 1281,
        "rows": 64,
        "max_error": 0.0011,
        "tolerance": 0.008,
        "worst": "o[0, 640, 3]",
    }
    return ParityLine(**{**values, "tensors": {"o": 0.14, "dq": 0.22}, **overrides})


def telemetry(gpu: bool = True, **overrides: Any) -> Telemetry:
    if not gpu:
        reasons = dict.fromkeys(
            ("utilisation_pct", "power_w", "sm_clock_mhz"), "no NVIDIA GPU: NVML was not asked"
        )
        return Telemetry(**{"absent": reasons, "window_s": 1.0, **overrides})
    values: dict[str, Any] = {
        "utilisation_pct": 93.0,
        "memory_utilisation_pct": 41.0,
        "sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 2619.0,
        "power_w": 512.0,
        "temperature_c": 58.0,
        "memory_used_bytes": 9 * 2**30,
        "energy_j": 512.0,
        "throttled": False,
        "num_samples": 20,
        "window_s": 1.0,
        "sampler_cost_pct": 0.04,
    }
    return Telemetry(**{**values, **overrides})


def profile(gpu: bool = True, **overrides: Any) -> Profile:
    if not gpu:
        blank: dict[str, Any] = {
            "kernel_count": 0,
            "device_time_s": 0.0,
            "wall_s": 0.022,
            "busy_fraction": None,
            "host_syncs": 0,
        }
        return Profile(
            **{
                **blank,
                "witness_ok": True,
                "witness": "operators agree with the Route",
                **overrides,
            }
        )
    values: dict[str, Any] = {
        "kernels": {"flash_fwd": 0.01},
        "kernel_count": 420,
        "device_time_s": 0.02,
        "wall_s": 0.022,
    }
    values |= {
        "busy_fraction": 0.91,
        "host_syncs": 0,
        "witness_ok": True,
        "witness": "flash_fwd seen",
    }
    return Profile(**{**values, **overrides})


def physics(tok_per_s: float, tokens: int, gpu: bool = True, **overrides: Any) -> Physics:
    step_s = tokens / tok_per_s
    gemm = 700e12 if gpu else 90e9
    flops, min_bytes = 0.08 * gemm * step_s, 0.05 * 3.35e12 * step_s
    values: dict[str, Any] = {
        "flops": flops,
        "min_bytes": min_bytes,
        "flops_per_s": 0.08 * gemm,
        "bytes_per_s": 0.05 * 3.35e12,
    }
    values |= {
        "gemm_flops_per_s": gemm,
        "datasheet_bytes_per_s": 3.35e12 if gpu else None,
        "l2_bytes": 50 * 2**20 if gpu else None,
    }
    values |= {"floor_s": 0.08 * step_s if gpu else None, "floor_fraction": 0.08 if gpu else None}
    notes = [] if gpu else ["no floor: the memory bandwidth of this processor is not in the table"]
    return Physics(**{**values, "notes": notes, **overrides})


def replicate(
    cell: PlannedCell,
    number: int = 0,
    *,
    tok_per_s: float | None = None,
    gpu: bool = True,
    **overrides: Any,
) -> Replicate:
    """A green row of ``cell``; samples, tokens and physics follow ``tok_per_s`` unless
    overridden.
    """
    speed = speed_of(cell) if tok_per_s is None else tok_per_s
    tokens = cell.axes.seq_len * cell.axes.batch
    values: dict[str, Any] = {
        "cell_id": cell.cell_id,
        "replicate": number,
        "axes": cell.axes,
        "config_sha256": cell.config_sha256,
        "status": Status.OK,
        "started_utc": UTC,
        "wall_s": 5.0,
        "steps_per_sample": 4,
        "tokens_per_step": tokens,
        "samples_s": [4 * tokens / speed] * 5,
        "tok_per_s": speed,
        "cold_start_s": 1.4,
        "peak_memory_bytes": int((1.1 + tokens / 1500) * 2**30) if gpu else 300 * 2**20,
        "host_bound": False if gpu else None,
        "route": cell.route,
        "engaged": dict.fromkeys(cell.route.counters, (cell.layers or LAYERS) * 4 * 5),
        "parity": parity(),
        "telemetry": telemetry(gpu),
        "profile": profile(gpu) if number == 0 else None,
        "physics": physics(speed, tokens, gpu),
        "device_uuid_sha256": "ab" * 32 if gpu else None,
        "peer": loaded_peer(cell.axes.path) if cell.axes.is_peer else None,
    }
    return Replicate(**{**values, **overrides})


def loaded_peer(name: str, **changes: Any) -> LoadedPeer:
    values = {"version": f"{name} 1.0", "file": "/x/a.py", "file_sha256": "0" * 64}
    return LoadedPeer(name=name, **{**values, **changes})


def failed(
    cell: PlannedCell, status: Status, number: int = 0, reason: str = "", **overrides: Any
) -> Replicate:
    """A row that ended without a speed."""
    values: dict[str, Any] = {
        "cell_id": cell.cell_id,
        "replicate": number,
        "axes": cell.axes,
        "config_sha256": cell.config_sha256,
    }
    values |= {"status": status, "reason": reason, "started_utc": UTC, "wall_s": 3.0}
    return Replicate(**{**values, **overrides})


def manifest(cells: Sequence[PlannedCell], *, gpu: bool = True, **overrides: Any) -> Manifest:
    name = "nsa-h100" if gpu else "nsa-cpu"
    path = "matrices/h100.yaml" if gpu else "matrices/cpu.yaml"
    text = f"version: 1\nname: {name}\n"
    values: dict[str, Any] = {
        "run_id": f"20260102T030405Z-{'h100-80gb-hbm3' if gpu else 'cpu'}-4f1c2d3e-a1b2",
        "created_utc": UTC,
        "argv": ["perfbench", "run", path],
        "seed": 7,
        "injections": [],
        "source": Source(commit=COMMIT, dirty_sha256=None, branch="main"),
        "matrix_name": name,
        "matrix_path": path,
        "matrix_text": text,
        "replicates": 3,
        "cells": list(cells),
        "environment": environment(gpu),
    }
    values |= overrides
    digest = hashlib.sha256(values["matrix_text"].encode()).hexdigest()
    return Manifest(**{"matrix_sha256": digest, **values})


def make_run(
    cells: Sequence[PlannedCell],
    *,
    replicates: int = 3,
    gpu: bool = True,
    noise: float = 0.0,
    **overrides: Any,
) -> Run:
    """A complete green run; ``noise`` is the relative sd between replicates, from a fixed seed."""
    rng = random.Random(11)
    rows = [
        replicate(cell, n, tok_per_s=speed_of(cell) * (1 + noise * rng.gauss(0, 1)), gpu=gpu)
        for cell in cells
        for n in range(replicates)
    ]
    return Run(
        manifest=manifest(cells, gpu=gpu, replicates=replicates, **overrides), replicates=rows
    )


def small_run(**overrides: Any) -> Run:
    """Four cells: train and forward of v2 (fa2 on) and dense at 2048."""
    cells = [
        Cell(w, 2048, p, f)
        for w in ("train", "forward")
        for p, f in (("v2", "on"), ("dense", "auto"))
    ]
    return make_run([planned_cell(cell) for cell in cells], **overrides)


def with_rows(run: Run, rows: Iterable[Replicate]) -> Run:
    return run.model_copy(update={"replicates": list(rows)})


def with_manifest(run: Run, **changes: Any) -> Run:
    return run.model_copy(update={"manifest": run.manifest.model_copy(update=changes)})


def change_rows(run: Run, cell_id: str, change: Callable[[Replicate], Replicate | None]) -> Run:
    """Apply ``change`` to every row of one cell; None drops the row."""
    changed = [(change(row) if row.cell_id == cell_id else row) for row in run.replicates]
    return with_rows(run, (row for row in changed if row is not None))


def replace_rows(
    run: Run, cell_id: str, *, tok_per_s: float | None = None, **overrides: Any
) -> Run:
    """Rebuild every row of one cell with another speed or other fields, everything else consistent
    and green.
    """
    cell = next(c for c in run.manifest.cells if c.cell_id == cell_id)
    gpu = run.manifest.environment.gpu_slug != "cpu"
    return change_rows(
        run,
        cell_id,
        lambda row: replicate(
            cell, row.replicate, tok_per_s=tok_per_s or row.tok_per_s, gpu=gpu, **overrides
        ),
    )


def scale_rows(run: Run, cell_id: str, factor: float) -> Run:
    """Make one cell faster or slower by ``factor``."""
    speed = next(row.tok_per_s for row in run.replicates if row.cell_id == cell_id)
    assert speed is not None
    return replace_rows(run, cell_id, tok_per_s=speed * factor)


def resumed(run: Run, **overrides: Any) -> Run:
    """The same run, resumed once."""
    values: dict[str, Any] = {
        "resumed_utc": UTC,
        "argv": ["perfbench", "run"],
        "environment": run.manifest.environment,
    }
    return run.model_copy(update={"resumed": [*run.resumed, Resumed(**{**values, **overrides})]})


def sentinel(
    name: str, block: int = 0, rate_per_s: float | None = 700e12, **overrides: Any
) -> SentinelLine:
    """A finished sentinel of one block."""
    values: dict[str, Any] = {
        "name": name,
        "block": block,
        "status": Status.OK,
        "started_utc": UTC,
        "samples_s": [0.1] * 3,
    }
    unit = "byte" if name == "copy" else "FLOP"
    return SentinelLine(
        **{**values, "rate_per_s": rate_per_s, "unit": unit, "telemetry": telemetry(), **overrides}
    )


def watched(run: Run, rates: dict[str, list[float]]) -> Run:
    """The run with sentinels, one rate a block, asked for in its manifest."""
    lines = [
        sentinel(name, block, rate)
        for name, values in rates.items()
        for block, rate in enumerate(values)
    ]
    return with_manifest(run, sentinels=list(rates)).model_copy(update={"sentinels": lines})


def baseline_of(run: Run, *, night_log_sd: float | None = 0.0, **overrides: Any) -> Baseline:
    """The baseline that this run would become, without promote's refusals, by default of a machine
    without between-session variance.
    """
    rows = rows_by_cell(run)
    cells = {}
    for planned in run.manifest.cells:
        if good := usable(rows.get(planned.cell_id, [])):
            profiles = [
                row.profile for row in good if row.profile is not None and row.profile.kernel_count
            ]
            cells[planned.cell_id] = BaselineCell(
                axes=planned.axes,
                config_sha256=planned.config_sha256,
                tok_per_s=[row.tok_per_s for row in good if row.tok_per_s is not None],
                host_bound=good[0].host_bound,
                counters=sorted(planned.route.counters),
                run_id="base-run",
                commit=COMMIT,
                night_log_sd=night_log_sd,
                device_time_s=[one.device_time_s for one in profiles],
                host_time_s=[one.host_time_s for one in profiles if one.host_time_s],
                kernel_count=max((one.kernel_count for one in profiles), default=None),
                host_syncs=max((one.host_syncs for one in profiles), default=None),
                kernels=sorted({name for one in profiles for name in one.kernels}),
                tuned=good[0].tuned,
            )
    values: dict[str, Any] = {
        "method_version": run.manifest.method_version,
        "matrix_name": run.manifest.matrix_name,
        "matrix_sha256": run.manifest.matrix_sha256,
        "run_id": "base-run",
        "promoted_utc": UTC,
        "source": Source(commit=COMMIT, dirty_sha256=None),
        "environment": run.manifest.environment.fingerprint(),
        "cells": cells,
        "sentinels": sentinel_rates(run),
    }
    return Baseline(**{**values, **overrides})
