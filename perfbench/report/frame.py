"""Runs as a pandas DataFrame: `perfbench.load`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from perfbench.errors import Exit, PerfbenchError
from perfbench.records import AXES, MEASURED, Manifest, Replicate, Run, Status, read_run

if TYPE_CHECKING:
    import pandas as pd

Sides = list[tuple[str | None, Run]]

# Column -> (dtype, value), in the frame's order: of the whole run, then of each replicate. The
# side, the cell and its axes come between the two.
_OF_RUN: Mapping[str, tuple[str, Callable[[Manifest], object]]] = MappingProxyType(
    {
        "run_id": ("category", lambda run: run.run_id),
        "matrix": ("category", lambda run: run.matrix_name),
        "commit": ("category", lambda run: run.source.commit),
        "dirty": ("boolean", lambda run: run.source.dirty_sha256 is not None),
        "gpu": ("category", lambda run: run.environment.gpu_slug),
        "device": ("category", lambda run: run.environment.device_name),
        "driver": ("category", lambda run: run.environment.driver),
        "cuda": ("category", lambda run: run.environment.cuda),
        "torch": ("category", lambda run: run.environment.torch),
        "triton": ("category", lambda run: run.environment.triton),
    }
)
_OF_REPLICATE: Mapping[str, tuple[str, Callable[[Replicate], object]]] = MappingProxyType(
    {
        "replicate": ("Int64", lambda row: row.replicate),
        "attempt": ("Int64", lambda row: row.attempt),
        "started_utc": ("datetime64[us, UTC]", lambda row: _moment(row.started_utc)),
        "status": ("status", lambda row: row.status.value),
        "reason": ("string", lambda row: row.reason),
        "tok_per_s": ("float64", MEASURED["tok_per_s"]),
        "step_ms": ("float64", MEASURED["step_ms"]),
        "device_ms": ("float64", MEASURED["device_ms"]),
        "host_ms": ("float64", MEASURED["host_ms"]),
        "launches": ("Int64", MEASURED["launches"]),
        "tokens_per_step": ("Int64", lambda row: row.tokens_per_step or None),
        "steps_per_sample": ("Int64", lambda row: row.steps_per_sample or None),
        "num_samples": ("Int64", lambda row: len(row.samples_s)),
        "samples_s": ("object", lambda row: tuple(row.samples_s)),
        "steady": ("boolean", lambda row: row.steady),
        "host_bound": ("boolean", lambda row: row.host_bound),
        "throttled": ("boolean", lambda row: row.telemetry and row.telemetry.throttled),
        "route": ("string", lambda row: _route(row)),
        "parity_ok": ("boolean", lambda row: row.parity and row.parity.ok),
        "parity_max_error": ("float64", lambda row: row.parity and row.parity.max_error),
        "parity_tolerance": ("float64", lambda row: row.parity and row.parity.tolerance),
        "peak_memory_bytes": ("Int64", MEASURED["peak_memory_bytes"]),
        "utilisation_pct": ("float64", MEASURED["utilisation_pct"]),
        "sm_clock_mhz": ("float64", MEASURED["sm_clock_mhz"]),
        "power_w": ("float64", lambda row: row.telemetry and row.telemetry.power_w),
        "temperature_c": ("float64", lambda row: row.telemetry and row.telemetry.temperature_c),
        "energy_j_per_token": ("float64", MEASURED["energy_j_per_token"]),
        "cycles_per_step": ("float64", lambda row: row.cycles_per_step),
        "floor_fraction": ("float64", MEASURED["floor_fraction"]),
        "cold_start_s": ("float64", MEASURED["cold_start_s"]),
        "wall_s": ("float64", MEASURED["wall_s"]),
    }
)


def load(*paths: str | os.PathLike[str]) -> pd.DataFrame:
    """One row for each replicate of the runs at ``paths``, in the order of the files.

    ``paths``: run folders, their run.jsonl or run.jsonl.gz, and folders of a `perfbench ab`, whose
    column ``side`` is 'a' (the base) or 'b'; it is NA in every other run.

    ======================  =====================================================================
    of the run              run_id, matrix, commit, dirty, gpu (as in reports/baselines), device,
                            driver, cuda, torch, triton, side: categories; dirty is boolean
    of the cell             cell_id, and each axis of the matrix file: text as a category, whole
                            numbers (seq_len, batch, chunk) as Int64, defaults filled in
    of the replicate        replicate, attempt (above 0: measured again), started_utc, status
                            ('ok', 'oom', ...), reason
    its speed               tok_per_s, step_ms (wall time), device_ms (under the profiler), host_ms
                            (to enqueue a step), launches (kernels of a step), tokens_per_step,
                            steps_per_sample, num_samples, and the raw samples_s: a tuple of
                            seconds, each of steps_per_sample steps
    its proof               route (the counters that were planned), parity_ok, parity_max_error,
                            parity_tolerance
    what else was measured  peak_memory_bytes, utilisation_pct, sm_clock_mhz, power_w,
                            temperature_c, throttled, host_bound, steady, energy_j_per_token,
                            cycles_per_step, floor_fraction (1 is the hardware's limit),
                            cold_start_s, wall_s (of the whole process)
    ======================  =====================================================================

    What is null in the file is NaN or NA here; a replicate that failed is a row without a speed,
    with its status and reason. Of a replicate that was measured again the last row counts, as in
    every report; one that was never begun has no row. Nothing is judged: verdicts are
    `perfbench gate`'s.

    PerfbenchError(USAGE) with the file and line of what cannot be read, and for one run named
    twice; TypeError without a path.

    >>> import perfbench
    >>> rows = perfbench.load("reports/evidence/train-h200")
    >>> ok = rows[rows.status == "ok"]
    >>> ok.groupby(["seq_len", "path"], observed=True).tok_per_s.median().unstack()
    >>> ok.explode("samples_s")  # one row a sample
    """
    if not paths:
        raise TypeError("load() got no path, wanted run folders or files: load('reports/runs/RUN')")
    rows, seen = [], dict[str, Path]()
    for path in map(Path, paths):
        for side, run in _runs(path):
            run_id = run.manifest.run_id
            if run_id in seen:
                raise PerfbenchError(
                    Exit.USAGE,
                    f"{path} is run {run_id}, as is {seen[run_id]}: its replicates would count"
                    " twice. Next: name each run once",
                )
            seen[run_id] = path
            rows += list(_rows(run, side, path))
    return _typed(rows)


def _runs(path: Path) -> Sides:
    from perfbench.runner import is_pair, read_pair

    if path.is_dir() and is_pair(path):
        found = read_pair(path)
        return [("a", found.base), ("b", found.candidate)]
    return [(None, read_run(path))]


def _rows(run: Run, side: str | None, path: Path) -> Iterator[dict[str, object]]:
    of_run = {name: value(run.manifest) for name, (_, value) in _OF_RUN.items()}
    for row in _counting(run.replicates):
        known = row.axes.to_mapping()
        axes = {name: known.get(name, axis.default) for name, axis in AXES.items()}
        try:
            of_row = {name: value(row) for name, (_, value) in _OF_REPLICATE.items()}
        except ValueError as error:
            raise PerfbenchError(
                Exit.USAGE,
                f"{path}: {row.cell_id} #{row.replicate}: {error}; the file is damaged, restore it",
            ) from None
        yield {**of_run, "side": side, "cell_id": row.cell_id, **axes, **of_row}


def _counting(rows: Iterable[Replicate]) -> list[Replicate]:
    """The last row of each replicate of a cell, in the order of the file."""
    last = {(row.cell_id, row.replicate): row for row in rows}
    kept = {id(row) for row in last.values()}
    return [row for row in rows if id(row) in kept]


def _typed(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    dtypes: dict[str, Any] = {name: dtype for name, (dtype, _) in _OF_RUN.items()}
    dtypes |= {"side": pd.CategoricalDtype(["a", "b"]), "cell_id": "category"}
    for name, axis in AXES.items():
        known = dict.fromkeys((*axis.choices, *axis.recorded, *(row[name] for row in rows)))
        dtypes[name] = pd.CategoricalDtype(list(known)) if axis.kind is str else "Int64"
    dtypes |= {name: dtype for name, (dtype, _) in _OF_REPLICATE.items()}
    dtypes["status"] = pd.CategoricalDtype([one.value for one in Status])
    return pd.DataFrame(
        {
            name: pd.Series([row[name] for row in rows], dtype=dtype)
            for name, dtype in dtypes.items()
        }
    )


def _moment(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError(f"started_utc is {text[:40]!r}, wanted a time with its zone")
    return found


def _route(row: Replicate) -> str | None:
    return None if row.route is None else " ".join(row.route.counters)
